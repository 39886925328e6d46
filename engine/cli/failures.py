"""What to say when training ends with an exception that is no `EngineError`."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from engine.cli.user_code import describe, user_frame
from engine.contracts import RunFailed
from engine.launch.outcome import PeerLost

log = logging.getLogger("engine")

LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
"""How gloo, which raises a plain RuntimeError, says that another rank is gone."""


def explain(error: Exception, step: int) -> RunFailed | None:
    """One message for what went wrong in `step`, or None for a fault of this package, which needs its traceback.

    With `log_level` "debug" the traceback is logged in every case.
    """
    log.debug("step %d failed", step, exc_info=error)
    text = str(error)
    if isinstance(error, dist.DistError) or any(sign in text for sign in LOST_CONNECTION):
        first_line = text.strip().partition("\n")[0]
        return PeerLost(f"step {step}: the connection to another rank is lost, its own message says why ({first_line})")
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            f"step {step}: out of memory: {text}; lower train_micro_batch_size_per_gpu or raise zero_optimization.stage"
        )
    if isinstance(error, OSError) and user_frame(error) is None:
        return RunFailed(f"step {step}: {error}; log_level debug shows the traceback")
    if user_frame(error) is not None:
        return RunFailed(f"step {step}: {describe(error)}; log_level debug shows the traceback")
    return None
