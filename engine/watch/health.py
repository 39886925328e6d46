"""Is the run still training? Skipped steps are told, and hopeless runs ended, by one rule on all ranks."""

from __future__ import annotations

import logging
import math

from engine.contracts import Precision, RunFailed, StepReport

log = logging.getLogger("engine")

MAX_CONSECUTIVE_SKIPS = 20


class Health:
    """Every rank has one and sees the same reports, so that all end together. Only rank 0 logs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._consecutive_skips = self._num_warnings = 0

    def check(self, report: StepReport, precision: Precision) -> None:
        """Warn of a skipped step (the first five in a row, then every fifth).

        Raises RunFailed for a loss that is not finite at the first step, an overflow at the smallest loss scale, and
        20 skipped steps in a row that did not lower a loss scale.
        """
        where = ""
        if report.first_nonfinite is not None:
            rank, parameter = report.first_nonfinite
            where = f" (first in {parameter} on rank {rank})"
        if report.step == 1 and report.loss is not None and not math.isfinite(report.loss):
            raise RunFailed(
                f"step 1: the loss is {report.loss}{where}, so nothing can be learned from it; check the data and the "
                "initial weights"
            )
        if report.applied:
            self._consecutive_skips = self._num_warnings = 0
            return
        is_searching = precision.scale < report.loss_scale  # for a loss scale that fits, as fp16 does at the start
        self._consecutive_skips += not is_searching
        self._num_warnings += 1
        if self._rank == 0 and (self._num_warnings <= 5 or self._num_warnings % 5 == 0):
            scaling = ""
            if report.loss_scale != 1.0:
                moved = f"{report.loss_scale:g} -> {precision.scale:g}"
                scaling = f"; loss scale {moved if is_searching else f'stays {precision.scale:g}'}"
            kind = report.nonfinite_kind or "not finite"
            log.warning("step %d skipped: a gradient is %s%s%s", report.step, kind, where, scaling)
        if precision.exhausted:
            raise RunFailed(
                f"step {report.step}: a gradient is not finite{where} at the smallest loss scale, "
                f"{report.loss_scale:g} (fp16.min_loss_scale); the model diverges, or needs bf16"
            )
        if self._consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            raise RunFailed(
                f"step {report.step}: {MAX_CONSECUTIVE_SKIPS} steps in a row were skipped, each for a gradient that is "
                f"not finite{where}; the model diverges"
            )
