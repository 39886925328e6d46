"""The benchmark of curricula, random-LTD and layer drop: its arithmetic by hand, its page, a tiny run (slow)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.bench import learning
from tests.bench.learning import bars, largest_spike, measured, page, results, spike, time_ratios
from tests.bench.learning_rows import LARGE, LESS, ROWS, Row, random_ltd

PLAIN, HALF = Row("plain", 100), Row("half", 120)


def test_ratios_of_time_leave_out_the_turns_of_a_busy_machine() -> None:
    turns = [[1.0, 0.5], [3.0, 1.5], [2.0, 1.0], [40.0, 1.0]]
    assert time_ratios([PLAIN, HALF], turns, PLAIN) == pytest.approx({"plain": 1.0, "half": 0.5 * 1.2})


def test_a_spike_is_the_rise_above_the_lowest_so_far() -> None:
    assert largest_spike([5.0, 4.0, 3.0, 3.5, 2.0, 3.25], 0) == 1.25
    assert largest_spike([1.0, 9.0, 3.0, 3.5], 2) == 0.5
    assert largest_spike([3.0, 2.0], 0) == 0.0
    assert spike({"ended": "", "losses": [3.0, 4.5]}) == 1.5
    assert spike({"ended": "the loss is nan", "losses": [3.0]}) == math.inf


def test_every_row_warms_up_and_decays_over_its_own_steps() -> None:
    for row in (*ROWS, *LESS):
        params = row.run(seed=1)["config"]["scheduler"]["params"]
        assert params["total_num_steps"] == row.num_steps
        assert params["warmup_num_steps"] == row.num_steps // 12


def trained(loss: float | None, losses: tuple[float, ...] = (3.0, 2.0)) -> dict[str, Any]:
    curve = [(1, 10, 3.0), (2, 20, 2.5)]
    ended = "" if loss is not None else "the loss is not finite"
    tokens = {"tokens_seen": 20, "tokens_computed": 15}
    return {"validation_loss": loss, "curve": curve, "losses": list(losses), "ended": ended, **tokens}


def found() -> dict[str, list[dict[str, Any]]]:
    plain, curriculum, ltd, _ = ROWS
    unstable, stable, *_ = LARGE
    return {
        plain.name: [trained(2.1), trained(2.3)],
        curriculum.name: [trained(2.0), trained(2.2)],
        ltd.name: [trained(2.4), trained(2.2)],
        unstable.name: [trained(None), trained(4.0, (3.0, 5.0))],
        stable.name: [trained(2.0), trained(2.0, (3.0, 3.5))],
    }


def test_bars() -> None:
    times = {ROWS[1].name: 0.59, ROWS[2].name: 0.76}
    assert [holds for *_, holds in bars(found(), times)] == [True, True, False, False, True, True]
    calm = found() | {LARGE[0].name: [trained(2.0)] * 2}
    assert [holds for *_, holds in bars(calm, times)][-2:] == [False, True]


def test_the_page_and_its_numbers(tmp_path: Path) -> None:
    times = {ROWS[0].name: 1.0, ROWS[1].name: 0.59}
    text = page((1, 2), found(), times, times, {"cpu": "any"}, ["a.png"])
    assert "| plain | 360 | 16 | 0.004 | 1.000 | 1.000 | 1.00 | 1.00 | 2.2000 | 2.1000, 2.3000 | 0.2000 |" in text
    assert "| did not end | -, 4.0000 |  |" in text
    assert "![a](a.png)" in text
    numbers = json.loads(results((1, 2), found(), times))
    assert numbers["curriculum"]["wall_time"] == 0.59
    assert [run["seed"] for run in numbers["curriculum"]["runs"]] == [1, 2]
    pytest.importorskip("matplotlib")
    learning.draw(found(), times, tmp_path / "a.png")
    learning.draw_large(found(), tmp_path / "b.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


@pytest.mark.slow
def test_a_run_and_its_times(tmp_path: Path) -> None:
    small = {"vocabulary_size": 256, "num_blocks": 4, "width": 32, "num_heads": 2, "sequence_length": 32}
    row = Row("dropped", 3, changes=random_ltd(16, 2))
    row.changes["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_schedule"]["max_value"] = 32
    run = row.run(1, num_turns=2) | {"model": small, "num_final_samples": 32, "num_curve_samples": 16}
    trained = measured("train", run, tmp_path, 120)
    assert [step for step, *_ in trained["curve"]] == [1, 2, 3]
    assert len(trained["losses"]) == 3
    assert 4 < trained["validation_loss"] < 6
    assert trained["tokens_computed"] < trained["tokens_seen"] == 3 * 16 * 32
    seconds = measured("time", [run, run], tmp_path, 120)
    assert [len(turn) for turn in (*seconds["wall"], *seconds["cpu"])] == [2] * 4
