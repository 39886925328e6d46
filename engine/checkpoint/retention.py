"""Delete old checkpoints, keeping the last ones, regular ones, the best ones and the one that `latest` names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import folder
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.manifest_reader import parse_manifest

_OWN_TAG = re.compile(re.escape(folder.default_tag(0)[:-1]) + r"(?P<steps>[0-9]+)")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: those that any rule wants. Without a rule all of them do.

    ``keep_last``: that many of most steps. ``keep_every``: at multiples of so many steps. ``keep_best``: that many of
    the lowest metric (the validation loss). Counts are from 1 up, else `CheckpointError`.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None

    def __post_init__(self) -> None:
        if any(count is not None and count < 1 for count in (self.keep_last, self.keep_every, self.keep_best)):
            raise CheckpointError(f"{self}: all are counts from 1 up.")

    def __bool__(self) -> bool:
        return (self.keep_last, self.keep_every, self.keep_best) != (None, None, None)


def prune(directory: str | os.PathLike[str], retention: Retention, *, keep: Collection[str] = ()) -> list[str]:
    """Delete what ``retention`` does not keep, except ``keep`` and `latest`'s. Returns the deleted tags.

    Only tags of the form ``global_stepN`` are deleted: one that somebody chose is theirs. So is a folder whose manifest
    cannot be read. Call it on one rank, after a save. Each deletion begins with a rename, so that a crash leaves no
    half of a checkpoint.
    """
    directory = Path(directory)
    if not retention:
        return []
    steps_of_tag: dict[str, int] = {}
    metric_of_tag: dict[str, float] = {}
    for tag in folder.list_tags(directory):
        match = _OWN_TAG.fullmatch(tag)
        if match is None:
            continue
        try:
            metric = parse_manifest(directory / tag / folder.MANIFEST).metric
        except CheckpointError:
            continue
        steps_of_tag[tag] = int(match["steps"])
        if metric is not None:
            metric_of_tag[tag] = metric
    by_age = sorted(steps_of_tag, key=lambda tag: steps_of_tag[tag])
    kept = {*keep, folder.read_latest(directory)}
    if retention.keep_last is not None:
        kept |= {*by_age[-retention.keep_last :]}
    if retention.keep_every is not None:
        kept |= {tag for tag, steps in steps_of_tag.items() if steps % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= {
            *sorted(metric_of_tag, key=lambda tag: (metric_of_tag[tag], -steps_of_tag[tag]))[: retention.keep_best]
        }
    deleted = [tag for tag in by_age if tag not in kept]
    for tag in deleted:
        aside = folder.work_path(directory, tag, "pruned")
        os.rename(directory / tag, aside)
        folder.delete(aside)
    return deleted
