"""`config.resolved.json`: a config that repeats the run from any folder and on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.plan import Plan


def resolved_config(plan: Plan, base: Path) -> dict[str, Any]:
    """Every key with its value: the global batch and what "auto" came to as planned, files by absolute paths.

    `base`: the config's folder, from which its paths count.
    """
    resolved = plan.config.resolved()
    for value in plan.values:
        if value.path in plan.config.autos:
            _put(resolved, value.path, value.value)
    resolved["train_batch_size"] = plan.batch.global_batch_size
    if resolved["model"] is not None and resolved["model"]["target"] is not None:
        resolved["model"]["target"] = absolute_target(resolved["model"]["target"], base)
    if (path := data_path(resolved["data"]["path"], base)) is not None:
        resolved["data"]["path"] = str(Path(path).expanduser().absolute())
    return resolved


def data_path(path: str | None, base: Path) -> str | None:
    """A relative path is looked for beside the config first, then in the working directory."""
    if path is None:
        return None
    beside = base / Path(path).expanduser()
    return str(beside) if beside.exists() else path


def absolute_target(target: str, base: Path) -> str:
    """A target in a file beside the config, by its absolute path; one in a module stays as it is."""
    name, _, attribute = target.rpartition(":")
    return f"{(base / name).absolute()}:{attribute}" if name.endswith(".py") else target


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    for parent in parents:
        tree = tree[parent]
    tree[key] = value
