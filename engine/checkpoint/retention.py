"""Delete old checkpoints, keeping the last ones, regular ones and the one that `latest` names."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from engine.checkpoint import folder
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.manifest_reader import parse_manifest


def prune(
    directory: str | os.PathLike[str], keep_last: int, keep_every: int | None = None, *, keep: Collection[str] = ()
) -> list[str]:
    """Delete all tags but the ``keep_last`` (1 or more) of most steps, those at multiples of ``keep_every`` steps,
    those in ``keep`` and `latest`'s. Returns the deleted tags. Call it on one rank, after a save.

    A folder whose manifest cannot be read is left alone. Each deletion begins with a rename, so that a crash leaves no
    half of a checkpoint. Raises `CheckpointError` for counts below 1.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise CheckpointError(f"keep_last={keep_last}, keep_every={keep_every}: both are counts from 1 up.")
    directory = Path(directory)
    steps_of_tag: dict[str, int] = {}
    for tag in folder.list_tags(directory):
        try:
            steps = parse_manifest(directory / tag / folder.MANIFEST).counters.get("global_steps")
        except CheckpointError:
            continue
        if isinstance(steps, int):
            steps_of_tag[tag] = steps
    by_age = sorted(steps_of_tag, key=lambda tag: steps_of_tag[tag])
    kept = {*by_age[-keep_last:], *keep, folder.read_latest(directory)}
    if keep_every is not None:
        kept |= {tag for tag, steps in steps_of_tag.items() if steps % keep_every == 0}
    deleted = [tag for tag in by_age if tag not in kept]
    for tag in deleted:
        aside = folder.work_path(directory, tag, "pruned")
        os.rename(directory / tag, aside)
        folder.delete(aside)
    return deleted
