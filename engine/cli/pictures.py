"""Pictures, where matplotlib is installed: a histogram, curves over steps, a learning-rate range test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.contracts import EngineError

MISSING = "matplotlib, which draws pictures, is not installed: pip install 'ptrain-engine[plot]'"
INK, GRID, LINE, MARK = "#333333", "#dddddd", "#1f5fa8", "#c0392b"
DPI = 150
MAX_BINS = 80


def have_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def require_matplotlib() -> None:
    """Raises EngineError, saying what to install."""
    if not have_matplotlib():
        raise EngineError(MISSING)


def check_picture(path: Path) -> None:
    """Raises EngineError for a kind of file that cannot be drawn."""
    allowed = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in allowed:
        raise EngineError(f"--output: {path} is no picture; name a file that ends in {', '.join(allowed)}")


def draw_histogram(path: Path, name: str, values: NDArray[np.int64]) -> None:
    """How often each value of a metric occurs, one bar a value where there are few."""
    figure, axes = _figure(1, 3.6)
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // MAX_BINS)  # a whole number: bins of unequally many values would draw a comb
    axes[0].hist(values, bins=np.arange(low - 0.5, high + width + 0.5, width), color=LINE)
    axes[0].set_xlabel(name)
    axes[0].set_ylabel("samples")
    median = float(np.median(values))
    axes[0].axvline(median, color=MARK, linewidth=1)
    axes[0].set_title(f"{name} of {len(values):,} samples: {low:,} to {high:,}, median {median:,.0f}", color=INK)
    _save(figure, path)


def draw_curves(path: Path, title: str, steps: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """One plot under the other, one for each curve, over the same steps."""
    figure, axes = _figure(len(curves), 1.2 + 1.7 * len(curves))
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot(
            steps, values, color=LINE, linewidth=1.6, drawstyle="default" if len(set(values)) > 64 else "steps-post"
        )
        axis.set_ylabel(name, color=INK)
        axis.margins(x=0.01, y=0.12)
        if max(values) == min(values):
            axis.set_ylim(*sorted((0.0, 2.0 * values[0])) if values[0] else (-1.0, 1.0))
        axis.label_outer()
    axes[-1].set_xlabel("optimizer step")
    axes[0].set_title(title, color=INK)
    figure.align_ylabels(axes)
    _save(figure, path)


def draw_range(
    path: Path,
    title: str,
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    suggested: tuple[float, float] | None,
    is_log: bool,
) -> None:
    """Loss against learning rate, raw and smoothed; the suggested range is shaded."""
    figure, (axis,) = _figure(1, 4.2)
    axis.plot(lrs, losses, color="#9db8d6", linewidth=0.9, label="loss")
    axis.plot(lrs, smoothed, color=LINE, linewidth=1.8, label="smoothed")
    if suggested is not None:
        low, high = suggested
        axis.axvspan(low, high, color=MARK, alpha=0.13, label=f"suggested: {low:.2g} to {high:.2g}")
        for lr in suggested:
            axis.axvline(lr, color=MARK, linewidth=1)
    if is_log:
        axis.set_xscale("log")
    finite = [loss for loss in losses if np.isfinite(loss)]
    start, low_loss = finite[0], min(*smoothed, *finite)
    # A loss that explodes would press everything else flat.
    axis.set_ylim(low_loss - 0.1 * (start - low_loss + 0.1), start + 0.6 * (start - low_loss + 0.1))
    axis.set_xlabel("learning rate")
    axis.set_ylabel("training loss")
    axis.set_title(title, color=INK)
    axis.legend(frameon=False, loc="lower left")
    _save(figure, path)


def _figure(num_rows: int, height: float) -> tuple[Any, list[Any]]:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(num_rows, 1, sharex=True)))
    for axis in axes:
        axis.grid(visible=True, color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise EngineError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error
