"""`wandb`: scalars to Weights & Biases; without an account the run is kept offline under the output directory."""

from __future__ import annotations

import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.watch.scalars import Event, ScalarMonitor

if TYPE_CHECKING:
    from engine.plan import Plan


class WandbMonitor(ScalarMonitor):
    """`group`, `team` (wandb's entity) and `project` as in the JSON. Never asks for a key: no key means offline."""

    def __init__(self, directory: Path, project: str | None, group: str | None, team: str | None) -> None:
        super().__init__()
        self._directory = directory
        self._project, self._group, self._team = project, group, team
        self._run: Any = None
        self._config: dict[str, Any] = {}

    def on_start(self, plan: Plan) -> None:
        super().on_start(plan)
        self._config = {value.path: value.value for value in plan.values}

    def write_events(self, events: Sequence[Event]) -> None:
        run = self._open()
        for name, value, samples in events:
            run.log({name: value}, step=samples)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _open(self) -> Any:
        if self._run is None:
            import wandb

            self._directory.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                dir=str(self._directory),
                project=self._project,
                group=self._group,
                entity=self._team,
                config=self._config,
                mode=wandb_mode(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        return self._run


def wandb_mode() -> Any:
    """`WANDB_MODE` where it is set; else online only if a key lies in the environment or in the netrc file."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return "online" if netrc.netrc(os.environ.get("NETRC")).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"
