"""The reference page of the config, made from the sections.

``python -m engine.config.docs [FILE]`` writes it; without a file it goes to ``docs/config.md`` of a checkout.
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config.aliases import CURRENT, OUTDATED
from engine.config.auto import DERIVED, RESOLVED_BY_DEFAULT
from engine.config.built import NOT_BUILT
from engine.config.config import Config
from engine.config.dialect import MEANINGLESS
from engine.config.fields import allowed, section_of
from engine.config.messages import show
from engine.config.places import Path, join_path
from engine.config.sections.arguments import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, TORCH_SCHEDULERS

FILE = pathlib.Path(__file__).parents[2] / "docs" / "config.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m engine.config.docs` from the sections in engine/config. Change it there. -->

One JSON file describes a run. The keys are DeepSpeed's; `model`, `data`, `training`, `parallel`, `seed`, `device`
and `strict` are this engine's own. The file is JSON plus what people really write: comments (`//`, `/* */`, `#`),
trailing commas, CRLF, BOM. Keys that begin with `_` or `//`, and `$schema`, are comments.

Every problem of a file is reported at once, with file, line and column, what was found, what is allowed and the repair.
An unknown key is an error with the nearest known spelling; `"strict": false` or `--lenient` makes it a note.
`ptrain validate` checks a file for `--world N` ranks, or for the fewest that its sizes fit.
`--set path=value` changes any key from the command line. `schemas/ptrain.schema.json` gives completion in editors:

```json
{"$schema": "../schemas/ptrain.schema.json"}
```
"""

DIFFERENCES = (
    ("unknown keys", "an error, or a note when lenient", "ignored outside the sections that pydantic reads"),
    ("`zero_optimization.stage: true`", "an error", "read as stage 1"),
    ("`gradient_clipping: null` or negative", "an error", "a TypeError at the first step, or no clipping"),
    ("`steps_per_print: 0`", "an error", "a ZeroDivisionError at the first step"),
    (
        "`optimizer.type`, `scheduler.type`",
        "any capitalisation",
        "only DeepSpeed's own optimizers in any capitalisation",
    ),
    ("`warmup_type` other than log, linear", "an error", "a warning, and log"),
    ("`cpu_offload` beside `offload_optimizer`", "taken together unless they contradict", "an AssertionError"),
    ("`cpu_offload_use_pin_memory`", "read as `offload_optimizer.pin_memory`", "the value is dropped"),
    ("`bfloat16` beside `bf16`", "an error when they differ", "`bfloat16` is dropped"),
    ("loss-scale keys in `bf16`", "ignored with a note", "an error"),
    ("`fp16.min_loss_scale` with a fraction", "accepted", "an error"),
    ("`data_types.grad_accum_dtype: null`", "fp32", "the dtype of the model"),
    ("`comms_logger`", "on when `enabled` is true", "on as soon as the section exists"),
    ("`progressive_layer_drop` without theta, gamma", "0.5 and 0.001", "a KeyError"),
    ("`pipeline.stages`", "the number of stages", "not read"),
    (
        '`"auto"`',
        "resolved as listed above, or listed as needing a value",
        "dropped without a word, or a TypeError",
    ),
    ("no batch size at all", "needs a value", "an AssertionError"),
    ("a section with settings and without `enabled`", "off, with a note", "off, or a KeyError"),
    ("`zero_optimization.offload_param`, `zero_quantized_*` below stage 3", "a note", "ignored"),
    ("`zero_optimization.mics_shard_size`, `zero_hpz_partition_size` below stage 3", "an error", "ignored"),
    ("`tensorboard.output_path: null`", "the default, with a note", "documented, and an error"),
    ("`warmup_num_steps: 0`", "no warm-up", "an error"),
    ("`optimizer.params` that the type does not have", "an error", "a TypeError; dropped for Muon"),
    ("`amp` beside ZeRO, fp16 or bf16", "an error of the config", "an AssertionError when the engine is built"),
    ("duplicate keys", "an error that names both lines", "an error for files, not for base64"),
    ("a dict passed as config", "never changed", "changed in place"),
)


def render() -> str:
    """The page as Markdown."""
    lines = [INTRODUCTION, "## Top level", ""]
    lines += _table(Config, ())
    for path, section in _sections(Config, ()):
        lines += ["", f"{'#' * min(2 + len(path), 5)} `{join_path(path)}`", "", _sentence(section), ""]
        lines += _table(section, path)
    lines += ["", "## Arguments of the optimizers", ""]
    lines += _rows(
        ("`optimizer.type`", "arguments"), ((f"`{name}`", _names(keys)) for name, keys in OPTIMIZER_PARAMS.items())
    )
    lines += ["", "## Arguments of the schedules", ""]
    lines += _rows(
        ("`scheduler.type`", "arguments"), ((f"`{name}`", _names(keys)) for name, keys in SCHEDULER_PARAMS.items())
    )
    lines += ["", f"Torch's schedulers by name: {_names(TORCH_SCHEDULERS)}."]
    lines += [
        "",
        '## What `"auto"` resolves to',
        "",
        "Where `auto=` or `--set` gives no value. Any other key needs one.",
        "",
    ]
    resolved = [(f"`{path}`", what) for path, what in RESOLVED_BY_DEFAULT.items()]
    derived = [(f"`{path}`", what + _given(sources)) for path, (sources, what) in DERIVED.items()]
    lines += _rows(("key", "becomes"), [*derived, *resolved])
    lines += ["", "## Older and stray spellings", ""]
    lines += _rows(("written", "read as"), _spellings())
    lines += ["", "## Known, not built here", "", "Such a config is valid; training refuses it by name.", ""]
    lines += [f"- `{path}`" for path in NOT_BUILT]
    lines += ["", "## Where this differs from DeepSpeed", ""]
    lines += _rows(("what", "here", "DeepSpeed"), DIFFERENCES)
    return "\n".join(lines) + "\n"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _given(sources: tuple[str, ...]) -> str:
    return f" (where {_names(sources)} is given)" if sources else ""


def _spellings() -> Iterator[tuple[str, str]]:
    for old, new in CURRENT.items():
        yield f"`{join_path(old)}`", f"`{join_path(new)}` (both are current)"
    for old, (new, why) in OUTDATED.items():
        yield f"`{join_path(old)}`", f"`{join_path(new)}` ({why})"
    yield "`zero_optimization: true` or `false`", "`zero_optimization.stage` 1 or 0"
    yield "`zero_optimization.cpu_offload`", '`zero_optimization.offload_optimizer.device` "cpu"'
    yield "`zero_optimization.cpu_offload_param`", '`zero_optimization.offload_param.device` "cpu"'
    yield "`zero_optimization.cpu_offload_use_pin_memory`", "`zero_optimization.offload_optimizer.pin_memory`"
    for path, why in MEANINGLESS.items():
        yield f"`{join_path(path)}`", why
    yield '`"8"`, `"5e8"`, `"true"`, `5e8`, `2.0`', "the number, truth value or integer that is meant"
    yield '`fp16.loss_scale: "dynamic"`', "0"
    yield "`fp32_allreduce: true`", '`communication_data_type` "fp32"'
    yield "`tensorboard.output_path: null`, `csv_monitor.output_path: null`", "the default"
    yield '`"CPU"`, `"float16"`, `"adamw"`', 'the canonical spelling: `"cpu"`, `"fp16"`, `"AdamW"`'


def _sections(model: type[BaseModel], above: Path) -> Iterator[tuple[Path, type[BaseModel]]]:
    for key, info in model.model_fields.items():
        section = section_of(info.annotation)
        if section is not None:
            mark = "" if _holds_one(info) else "*"
            path = (*above, key, *([mark] if mark else []))
            yield path, section
            yield from _sections(section, path)


def _holds_one(info: FieldInfo) -> bool:
    text = str(info.annotation)
    return "dict[" not in text and "list[" not in text


def _sentence(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").split())


def _table(model: type[BaseModel], path: Path) -> list[str]:
    return _rows(
        ("key", "type", "default", "what it does"), (_row(key, info) for key, info in model.model_fields.items())
    )


def _row(key: str, info: FieldInfo) -> tuple[str, ...]:
    section = section_of(info.annotation)
    default = "see below" if info.default_factory is not None else f"`{show(info.default)}`"
    kind = (
        allowed(info).removesuffix(" or null").removesuffix(", or null")
        if section is None
        else "object"
        if _holds_one(info)
        else "objects"
    )
    return f"`{key}`", kind, default, info.description or ""


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m engine.config.docs", description="Write the config's reference page."
    )
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=FILE)
    file: pathlib.Path = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
