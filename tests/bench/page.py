"""What the pages of benchmarks have in common: where figures come from, bars, and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def written_by(target: str, module: str, facts: Mapping[str, Any]) -> str:
    """The first paragraph. ``module`` says how it measures; ``facts``: see `machine_facts`."""
    known = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"Written by `make {target}` ({module.replace('.', '/')}.py says how it measures). {known}."


def bar_table(bars: Iterable[tuple[str, str, str, bool]]) -> list[str]:
    """``bars``: what, what was found, the bar, whether it holds."""
    rows = [f"| {what} | {found} | {bar} | {'yes' if holds else '**no**'} |" for what, found, bar, holds in bars]
    return ["| what | found | bar | holds |", "|" + " --- |" * 4, *rows]


def pyplot() -> Any:
    """matplotlib.pyplot, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def keep(figure: Any, path: Path) -> None:
    """Write a picture and let go of it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
