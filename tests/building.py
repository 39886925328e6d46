"""Configs with a feature that the engine lacks: what the features under construction are tested through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.config.built import NOT_BUILT
from engine.plan.pipeline import SPLIT_FURTHER


@contextlib.contextmanager
def building(*paths: str) -> Iterator[None]:
    """Within it the plan does not refuse the features at ``paths``, keys of NOT_BUILT; absent ones are ignored."""
    kept, apart = dict(NOT_BUILT), dict(SPLIT_FURTHER)
    if "pipeline.stages" in paths:
        SPLIT_FURTHER.clear()
    for path in paths:
        NOT_BUILT.pop(path, None)
    try:
        yield
    finally:
        NOT_BUILT.clear()
        NOT_BUILT.update(kept)
        SPLIT_FURTHER.update(apart)
