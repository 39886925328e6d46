"""How a launched rank tells its launcher why it failed, and which rank's word counts."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.contracts import RunFailed

FAILURE_DIRECTORY = "PTRAIN_FAILURE_DIRECTORY"
"""Set by the launcher for its ranks: a rank leaves its message there, so that the launcher prints one and not N."""

CONSEQUENCE = ".consequence"
STOPPED = (130, 143)
USER_MISTAKE = 2
STOPPED_EARLY = "stopped by {} before training began; nothing was saved"


class PeerLost(RunFailed):
    """This rank cannot go on because another one has gone."""


def leave_message(rank: int, message: str, is_consequence: bool = False) -> bool:
    """Leave the message of this rank for the launcher. Returns False where no launcher of ours waits for it.

    `is_consequence`: this rank failed because another one had.
    """
    directory = os.environ.get(FAILURE_DIRECTORY)
    if not directory:
        return False
    try:
        (Path(directory) / f"rank{rank}").write_text(message, encoding="utf-8")
        if is_consequence:
            (Path(directory) / f"rank{rank}{CONSEQUENCE}").touch()
    except OSError:
        return False
    return True


def read_messages(directory: Path, num_ranks: int) -> dict[int, str]:
    paths = {rank: directory / f"rank{rank}" for rank in range(num_ranks)}
    return {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.exists()}


def read_consequences(directory: Path, num_ranks: int) -> set[int]:
    """The ranks that say that they failed because another one had."""
    return {rank for rank in range(num_ranks) if (directory / f"rank{rank}{CONSEQUENCE}").exists()}


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code and what it prints."""

    exit_code: int
    lines: tuple[str, ...] = ()


def judge(
    num_ranks: int,
    exit_codes: Mapping[int, int],
    messages: Mapping[int, str],
    stop: signal.Signals | None,
    consequences: Collection[int] = (),
) -> Outcome:
    """Find the cause among the ranks' ends.

    `exit_codes`: by rank in the order in which they ended, without ranks that the launcher killed; negative is the
    signal that killed the rank, as in `subprocess`. `stop`: the signal that the user had sent.

    The first rank that failed is the cause, and what others say after it is a consequence and is not printed,
    except for user's mistakes (code 2), which never are one. `consequences`: ranks that know themselves to be one; they
    may end before their cause does, because connections close before a process has ended.
    """
    in_order = sorted(exit_codes, key=lambda rank: rank in consequences)
    failed = {rank: code for rank in in_order if (code := exit_codes[rank]) != 0 and code not in STOPPED}
    if stop is not None:
        # Ranks that were still starting had no handler yet.
        failed = {rank: code for rank, code in failed.items() if code != -stop}
        if not failed:
            if all(code == 0 for code in exit_codes.values()):
                return Outcome(0)
            # A rank that saved has said so itself; one that was still starting has left a message, or was just ended.
            saved = any(code in STOPPED and rank not in messages for rank, code in exit_codes.items())
            return Outcome(128 + stop, () if saved else (STOPPED_EARLY.format(stop.name),))
    elif not failed:
        return Outcome(next((code for code in exit_codes.values() if code != 0), 0))
    cause = next(iter(failed))
    code = failed[cause]
    if code < 0:
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return Outcome(1, (f"rank {cause} died (signal {-code}){hint}; go on from the last save with --resume auto",))
    if cause not in messages:
        return Outcome(code, (f"rank {cause} exited with code {code} and left no message",))
    if len(exit_codes) == num_ranks and {messages.get(rank) for rank in exit_codes} == {messages[cause]}:
        return Outcome(code, (messages[cause],))
    mistakes = [rank for rank in failed if code == failed[rank] == USER_MISTAKE and rank in messages]
    told: dict[str, int] = {}
    for rank in sorted(mistakes or [cause]):
        told.setdefault(messages[rank], rank)
    return Outcome(code, tuple(f"rank {rank}: {text}" for text, rank in told.items()))
