"""Watchers: they see a frozen `StepReport` after each step and cannot alter the result.

`build_watchers` reads the plan and returns the `WatcherList` of one rank. Nothing here imports torch, tensorboard or
wandb before the first scalar is written.
"""

from engine.watch.build import build_watchers
from engine.watch.summary import Summary
from engine.watch.watcher_list import WatcherList

__all__ = ["Summary", "WatcherList", "build_watchers"]
