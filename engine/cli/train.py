"""`ptrain --config run.json`: plan, start or join the ranks, build the model, open the data, train."""

from __future__ import annotations

import argparse
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import (
    Parser,
    add_config_options,
    positive,
    read_config,
    real_world,
    terminal_columns,
)
from engine.cli.resolved import data_path, resolved_config
from engine.contracts import EngineError, RunFailed
from engine.launch import RankEnvironment, StopRequest
from engine.launch.threads import thread_environment

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan import Plan

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunOptions:
    """What the command line says about a run, beside the config. `resume`: None, "auto" or a path."""

    config: Config
    output: Path
    resume: str | None
    override_batch: bool = False


def run(argv: Sequence[str]) -> int:
    """Returns the exit code; raises EngineError for the user's mistakes and RunFailed when training cannot go on."""
    arguments = _parse(argv)
    environment = RankEnvironment.read()
    size = arguments.nproc or (environment.world_size if environment.launcher != "single" else None)
    config = read_config(arguments.config, arguments.overrides, arguments.lenient, size)
    from engine.plan import imagined_world, plan

    if arguments.dry_run:
        size = arguments.nproc or environment.world_size
        imagined = imagined_world(config, size, "--nproc" if arguments.nproc else "one process")
        print(plan(config, imagined).render(terminal_columns()))
        return 0
    check_can_train(config)
    os.environ.update(thread_environment(arguments.nproc or environment.local_world_size))
    output = arguments.output or Path("output") / Path(arguments.config).stem
    options = RunOptions(config, output, arguments.resume, arguments.override_batch)
    resolved = plan(config, real_world(config, environment, arguments.nproc))
    check_output(output)
    if arguments.resume not in (None, "auto"):
        named_checkpoint(Path(arguments.resume))
    if environment.launcher == "single" and resolved.world.size > 1:
        from engine.launch.elastic import launch

        return launch(resolved.world.size, ["train", *argv])
    environment.export()
    return _work(options, resolved, environment)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("ptrain train", "Train a model as a config says.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the config, JSON in DeepSpeed's format")
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks on this machine (default: all accelerators, else 1)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where everything is written (default: output/CONFIG)"
    )
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on from the latest checkpoint of the output, or from PATH"
    )
    parser.add_argument(
        "--override-batch", action="store_true", help="with --resume: go on under another global batch than was saved"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    add_config_options(parser)
    return parser.parse_args(argv)


def check_can_train(config: Config) -> None:
    """What `initialize()` from Python does not need and a run from the command line does."""
    where = config.source or "the config"
    if config.model is None or config.model.target is None:
        raise EngineError(f'{where}: model.target is missing; it says what to build, e.g. "model.py:GPT"')
    if config.training.steps is None and config.training.num_epochs is None:
        raise EngineError(f"{where}: training.steps is missing; set it, or training.num_epochs")


def check_output(output: Path) -> None:
    """Try to write where the output will be, before any rank is started, and leave nothing there.

    Raises EngineError where nothing can be written.
    """
    existing = next((folder for folder in (output, *output.absolute().parents) if folder.exists()), output)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EngineError(
            f"--output: {output} cannot be written ({existing}: {reason}); name another folder"
        ) from error


def _work(options: RunOptions, plan: Plan, environment: RankEnvironment) -> int:
    """One rank, from here to the end of the run."""
    from engine.launch.signals import end_with_launcher

    end_with_launcher()
    level = options.config.log_level or "warning"
    logging.basicConfig(format="ptrain: %(message)s")
    logging.getLogger("engine").setLevel(level.upper())
    with StopRequest() as stop:
        if environment.rank == 0:
            print(plan.render(terminal_columns()), flush=True)
        return _train(options, environment, stop)


def _train(options: RunOptions, environment: RankEnvironment, stop: StopRequest) -> int:
    from engine.cli.failures import explain
    from engine.cli.finish import finish
    from engine.cli.training_loop import TrainingLoop
    from engine.entry import initialize
    from engine.watch.summary import Summary, write_json

    config, first = options.config, environment.rank == 0
    base = base_of(config)
    model, corpus = model_and_data(config)
    model_engine, *_ = initialize(model=model, config=config, training_data=corpus.train, output=options.output)
    summary = Summary()
    summary.on_start(model_engine.plan)
    model_engine.watchers.append(summary)
    try:
        resume(model_engine, options, say=first)
        if first:
            write_json(options.output / "config.resolved.json", resolved_config(model_engine.plan, base))
        loop = TrainingLoop(model_engine, corpus, options.output / CHECKPOINTS, stop)
        code = loop.run()
        model_engine.watchers.close()
        if code == 0:
            finish(model_engine, corpus, summary, options.output)
            loop.check_saved()
            report = model_engine.last_report
            if report is not None and report.loss is not None and not math.isfinite(report.loss):
                raise RunFailed(f"the run ended with a loss of {report.loss}: it diverged; lower the learning rate")
    except EngineError:
        with suppress(EngineError):  # raised on all ranks alike: a save in the background can still be finished
            model_engine.wait_for_checkpoint()
        raise
    except Exception as error:
        if (failure := explain(error, step=model_engine.global_steps + 1)) is None:
            raise
        raise failure from error
    finally:
        model_engine.watchers.close()
    # Not after a failure: peers may be gone, and leaving the process group would wait for them.
    model_engine.destroy()
    return code


def base_of(config: Config) -> Path:
    """The folder from which a config's paths count."""
    return Path(config.source).resolve().parent if config.source else Path.cwd()


def model_and_data(config: Config) -> tuple[Any, Any]:
    """The model that `model` describes, the same on every rank, and the text that `data` names."""
    import torch

    from engine.cli.target import bind_arguments, build_model, load_target
    from engine.data.sources import open_text

    base = base_of(config)
    assert config.model is not None
    target = load_target(str(config.model.target), base)
    arguments = bind_arguments(target, config.model.args)
    corpus = open_text(
        data_path(config.data.path, base),
        config.data.sequence_length,
        config.data.validation_fraction,
        vocabulary_size(config, arguments),
    )
    torch.manual_seed(config.seed)
    return build_model(target, config.model.args), corpus


def resume(model_engine: Any, options: RunOptions, say: bool) -> None:
    """Load what `--resume` names. Raises EngineError where a named path holds no checkpoint."""
    checkpoints = options.output / CHECKPOINTS
    if options.resume is None:
        if say and _has_checkpoints(checkpoints):
            print(f"note: {checkpoints} holds an earlier run; this one starts anew (--resume auto goes on with it)")
        return
    if options.resume == "auto":
        if not _has_checkpoints(checkpoints):
            if say:
                print(f"note: --resume auto: no checkpoint under {checkpoints}; the run starts from the beginning")
            return
        folder, tag = checkpoints, None
    else:
        folder, tag = named_checkpoint(Path(options.resume))
    loaded, _ = model_engine.load_checkpoint(str(folder), tag, override_batch=options.override_batch)
    if loaded is None:
        raise EngineError(f"--resume: there is no checkpoint in {folder}")
    if say:
        print(f"resumed {loaded} at step {model_engine.global_steps}", flush=True)


def named_checkpoint(path: Path) -> tuple[Path, str | None]:
    """Folder and tag for a path to a checkpoint, to a folder of checkpoints, or to a run's output."""
    if not path.is_dir():
        raise EngineError(
            f"--resume: there is no folder {path}; expected 'auto', a checkpoint or a folder of checkpoints"
        )
    if (path / "manifest.json").exists():
        return path.resolve().parent, path.resolve().name
    return (path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path), None


def _has_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def vocabulary_size(config: Config, arguments: dict[str, Any]) -> int | None:
    """The vocabulary that token ids are checked against: the model's argument of that name, else the config's."""
    for name in ("vocabulary_size", "vocab_size"):
        if isinstance(arguments.get(name), int):
            return int(arguments[name])
    return config.vocabulary_size
