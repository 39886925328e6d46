"""What comparisons with the reference run find goes into the result file (`make matrix`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity import compare
from tests.result_file import DEVIATION, ROW, Deviation


@pytest.fixture(autouse=True)
def _deviations(record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def note(deviation: Deviation) -> None:
        record_property(DEVIATION, deviation.to_json())

    monkeypatch.setattr(compare, "note", note)


@pytest.fixture
def row(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``row(split, stage, precision)``: the row of the parity table that the test belongs to."""
    return lambda *names: record_property(ROW, ", ".join(map(str, names)))
