"""When a run counts as equal to the reference."""

from __future__ import annotations

import pytest

from tests.parity.runs import Pieces, assemble
from tests.parity.toy import Result

PARAMETERS = 1e-5
LOSSES = 1e-5
NORMS = 1e-6


def assert_equal_to(
    reference: Result,
    by_rank: list[tuple[Result, Pieces, dict]],
    *,
    losses: float = LOSSES,
    parameters: float = PARAMETERS,
    norms: float = NORMS,
) -> None:
    """Losses and parameters absolute, norms relative; every rank must report the same numbers to the bit."""
    first = by_rank[0][0]
    for result, _, _ in by_rank[1:]:
        assert result.losses == first.losses
        assert result.norms == first.norms
    assert first.losses == pytest.approx(reference.losses, rel=0, abs=losses), (
        f"losses {first.losses}, not {reference.losses}"
    )
    assert first.norms == pytest.approx(reference.norms, rel=norms), f"norms {first.norms}, not {reference.norms}"
    whole = assemble([pieces for _, pieces, _ in by_rank])
    assert whole.keys() == reference.parameters.keys()
    for name, expected in reference.parameters.items():
        difference = (whole[name] - expected).abs().max().item()
        assert difference <= parameters, f"{name} is off by {difference:.2e}"
