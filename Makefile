# What a user and CI call. Everything lives in $(VENV); a stamp file there says what is installed, so that a second call
# installs nothing. `make PYTHON=python3.12 train` picks another interpreter.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= examples/gpt_text/config.json
TRAIN_ARGUMENTS ?=
TEST_ARGUMENTS ?=
TEST_WORKERS ?= 2
BENCH_ARGUMENTS ?=
COMPOSITION_ARGUMENTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Each worker keeps its ranks from test to test, and takes from the other when it has nothing left: the long jobs of
# tests/jobs would else be the last, with one core idle.
PARALLEL = --numprocesses $(TEST_WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help train test test-slow check format bench bench-onebit bench-network bench-learning matrix composition docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.installed ## install, then train the example GPT (under 3 minutes on 2 cores)
	@PATH="$(abspath $(BIN)):$$PATH" bin/ptrain --config $(CONFIG) $(TRAIN_ARGUMENTS)

test: $(VENV)/.installed-test ## install what tests need, then run the quick suite
	@$(PYTEST) $(PARALLEL) -m "not slow and not matrix" $(TEST_ARGUMENTS)

test-slow: $(VENV)/.installed-test ## run the slow tests
	@$(PYTEST) $(PARALLEL) -m slow $(TEST_ARGUMENTS)

check: $(VENV)/.installed-dev ## lint, formatting, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.installed-dev ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.installed ## measure this engine beside its peers, and what dropping saves; writes docs/benchmarks/
	@$(BIN)/python -m tests.bench.run --size tiny --size medium --output docs/benchmarks/engines.md $(BENCH_ARGUMENTS)
	@$(BIN)/python -m tests.bench.paired --rows ddp,engine-s0,hand-s0,engine-s1,hand-s1,engine-s2,hand-s2,engine-s3,hand-s3 --output docs/benchmarks/in_turn.md
	@$(BIN)/python -m tests.bench.startup --output docs/benchmarks/startup.md
	@$(BIN)/python -m tests.bench.checkpoints --output docs/benchmarks/checkpoints.md
	@$(BIN)/python -m tests.bench.plan_against_real --output docs/benchmarks/plan.md
	@$(BIN)/python -m tests.bench.token_drop --output docs/benchmarks/token_drop.md
	@$(BIN)/python -m tests.bench.layer_drop --output docs/benchmarks/layer_drop.md
	@$(BIN)/python -m tests.bench.analysis --output docs/benchmarks/analysis.md

bench-onebit: $(VENV)/.installed-plot ## do the 1-bit optimizers learn what AdamW learns? goes on where it stopped
	@$(BIN)/python -m tests.bench.convergence --output docs/benchmarks/one_bit.md $(BENCH_ARGUMENTS)

bench-network: $(VENV)/.installed ## 1-bit optimizers and pipelines on a slow network (Linux, root, iproute2)
	@$(BIN)/python -m tests.bench.slow_network --output docs/benchmarks/slow_network.md $(BENCH_ARGUMENTS)
	@$(BIN)/python -m tests.bench.pipeline_network --output docs/benchmarks/pipeline_network.md

bench-learning: $(VENV)/.installed-plot ## do curricula, random-LTD and layer drop learn as much in less time? goes on where it stopped
	@$(BIN)/python -m tests.bench.learning --output docs/benchmarks/learning.md $(BENCH_ARGUMENTS)

matrix: $(VENV)/.installed-test ## every cell of the parity table, slow ones too; fills docs/benchmarks/matrix.md
	@$(PYTEST) tests/parity --result-file docs/benchmarks/matrix.md $(TEST_ARGUMENTS)
	@$(PYTEST) tests/jobs tests/unit tests/plan tests/reports -m matrix

composition: $(VENV)/.installed-test ## every pair of features, equal or refused; writes docs/composition.md, goes on where it stopped
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity.composition.page $(COMPOSITION_ARGUMENTS)

docs: $(VENV)/.installed ## generate the schema and the config reference
	@$(BIN)/python -m engine.config.schema
	@$(BIN)/python -m engine.config.docs

wheel: $(VENV)/.installed ## build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean: ## remove the environment, caches and build results
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Torch goes first and alone: its release is the one choice that must not be made by a resolver.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV)"
	@$(PIP) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing ptrain-engine"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-plot: $(VENV)/.installed
	@echo "installing what pictures need"
	@$(PIP) --editable '.[plot]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	@echo "installing what the checks need"
	@$(PIP) --editable '.[dev]'
	@touch $@
