"""When a run counts as equal to the reference, and how far it is off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.runs import Pieces, assemble
from tests.parity.toy import Result
from tests.result_file import Deviation

PARAMETERS = 1e-5
LOSSES = 1e-5
NORMS = 1e-6


def note(deviation: Deviation) -> None:
    """What becomes of a deviation, before it is judged: see tests/parity/conftest.py."""


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
    whole = assemble([pieces for _, pieces, _ in by_rank])
    assert_close(reference, replace(first, parameters=whole), losses=losses, parameters=parameters, norms=norms)


def assert_close(
    expected: Result,
    found: Result,
    *,
    losses: float = LOSSES,
    parameters: float = PARAMETERS,
    norms: float = NORMS,
) -> None:
    """Losses and whole parameters absolute, norms relative."""
    assert found.parameters.keys() == expected.parameters.keys()
    differences = {n: (found.parameters[n] - value).abs().max().item() for n, value in expected.parameters.items()}
    steps = list(zip(expected.norms, found.norms, strict=True))
    note(
        Deviation(
            losses=max((abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True)), default=0.0),
            norms=max((abs(a - b) / max(abs(a), 1e-12) for a, b in steps), default=0.0),
            parameters=max(differences.values()),
        )
    )
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=losses), (
        f"losses {found.losses}, not {expected.losses}"
    )
    assert found.norms == pytest.approx(expected.norms, rel=norms), f"norms {found.norms}, not {expected.norms}"
    for name, difference in differences.items():
        assert difference <= parameters, f"{name} is off by {difference:.2e}"
