"""The benchmarks of the 1-bit optimizers: closed forms, bars, and a small run of each (slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.plan.one_bit import Rounds, rounds
from engine.plan.plan import OptimizerPlan
from tests.bench import convergence, hosts, kept, slow_network
from tests.bench.hosts import why_not_possible
from tests.bench.slow_network import fp32_all_reduce_bytes, one_bit_bytes, zero_one_rounds
from tests.harness import REPOSITORY

# --- slow networks -------------------------------------------------------------------------------------------


def test_rounds_of_zero_one_adam() -> None:
    """With kappa 16: gap 1 up to 16, then sixteen refreshes at each gap."""
    never = {"var_update_scaler": 16, "var_freeze_step": 10**6, "local_step_scaler": 1, "local_step_clipper": 1}
    full, one_bit = zero_one_rounds(never, 1000)
    assert full[:16] == list(range(1, 17))
    assert full[16:32] == list(range(18, 49, 2))
    assert full[32:48] == list(range(52, 113, 4))
    assert len(full) == 96
    assert sorted(full + one_bit) == list(range(1, 1001))


def test_local_steps_of_zero_one_adam() -> None:
    local = {"var_update_scaler": 16, "var_freeze_step": 1000, "local_step_scaler": 1000, "local_step_clipper": 16}
    _, one_bit = zero_one_rounds(local, 11_000)
    assert sum(step > 1000 for step in one_bit) == 1000 + 500 + 250 + 125 + 6000 // 16


def test_the_benchmark_and_the_plan_count_alike() -> None:
    params = {"var_freeze_step": 12, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
    optimizer = OptimizerPlan("ZeroOneAdam", params)
    full, one_bit = zero_one_rounds(params, 24)
    assert (len(full), len(one_bit)) == (6, 13)
    assert rounds(optimizer, 24) == Rounds(6, 13, 5)


def test_one_bit_is_a_32nd() -> None:
    assert fp32_all_reduce_bytes(1 << 20, 2) == 4194304
    assert fp32_all_reduce_bytes(1 << 20, 4) == 6291456
    assert one_bit_bytes(1 << 20, 2) == 131080
    assert one_bit_bytes(1 << 20, 4) == 196632


def test_without_namespaces_the_benchmark_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(hosts, "why_not_possible", lambda: "ip not found")
    assert slow_network.main([]) == 0
    assert capsys.readouterr().out == "skipped: ip not found\n"


@pytest.mark.slow
def test_slow_network(tmp_path) -> None:
    """Where hosts cannot be made the benchmark says why."""
    output = tmp_path / "slow_network.md"
    command = [sys.executable, "-m", "tests.bench.slow_network", "--size", "tiny", "--steps", "3", "--rates", "100"]
    command += ["--no-bars", "--output", str(output)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr
    if reason := why_not_possible():
        assert finished.stdout == f"skipped: {reason}\n"
        return
    rows = [line.split(" | ") for line in output.read_text().splitlines()]
    bars = {cells[0]: cells for cells in rows if cells[0].endswith(("a 1-bit step", "1-bit rounds"))}
    assert len(bars) == 3
    # the kernel's own count; at 0.9 M parameters what gloo says to arrange a transfer still shows
    assert all(float(cells[1]) > 25 for name, cells in bars.items() if "a 1-bit step" in name)
    assert all(1.0 < float(cells[1]) < 1.15 for name, cells in bars.items() if "rounds" in name)


# --- convergence ---------------------------------------------------------------------------------------------


def outcome(loss: float) -> dict[str, Any]:
    return {"validation_loss": loss, "sent_bytes": 10, "curve": [[1, loss + 1], [2, loss]], "seconds": 1.0}


def test_convergence_is_judged_on_the_mean_over_seeds() -> None:
    found = {
        "AdamW": [outcome(2.0), outcome(2.2)],
        "OneBitAdam": [outcome(2.1), outcome(2.12)],
        "OneBitLamb": [outcome(2.3), outcome(2.1)],
        convergence.WITHOUT_FEEDBACK: [outcome(2.15), outcome(2.2)],
    }
    holds = {what: good for what, _, _, good in convergence.bars(found)}
    assert holds == {
        "OneBitAdam: validation loss against AdamW's": True,
        "OneBitLamb: validation loss against AdamW's": False,
        "OneBitAdam without error feedback, against OneBitAdam's": True,
    }


def test_a_run_that_is_there_is_not_repeated(tmp_path, monkeypatch) -> None:
    started = []

    def launch(num_ranks: int, command: list[str], timeout: float) -> None:
        started.append(command[2])
        Path(command[3]).write_text(json.dumps(outcome(2.0)))

    monkeypatch.setattr(kept, "launch_script", launch)
    setting = convergence.Setting(num_steps=50)
    for _ in range(2):
        found = convergence.measure(setting, ["AdamW", "OneBitAdam"], range(2), tmp_path, 1.0)
    assert len(started) == 4
    assert found["AdamW"] == [outcome(2.0)] * 2
    convergence.measure(convergence.Setting(num_steps=60), ["AdamW"], range(1), tmp_path, 1.0)
    assert len(started) == 5, "another setting is another run"


def test_the_convergence_page_and_picture(tmp_path) -> None:
    setting = convergence.Setting(num_steps=2)
    found = {"AdamW": [outcome(2.0)], "OneBitAdam": [outcome(2.01)]}
    text = convergence.page(setting, range(1), found, {"commit": "abc"}, "one_bit.png")
    assert "| OneBitAdam | 0.002 | 2.0100 | 2.0100 | +0.50% | 1/1.00 |" in text
    assert "![Validation loss over steps](one_bit.png)" in text
    convergence.draw(setting, found, tmp_path / "one_bit.png")
    assert (tmp_path / "one_bit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_one_bit_adam_learns_what_adamw_learns(tmp_path) -> None:
    """200 steps of a smaller model. Without error feedback it does not, so the comparison can fail."""
    setting = convergence.Setting(num_steps=200, num_blocks=4, width=64)
    found = convergence.measure(setting, convergence.NAMES, range(1), tmp_path, 200.0)
    loss = {name: convergence.mean_loss(runs) for name, runs in found.items()}
    worse = {name: value / loss["AdamW"] - 1 for name, value in loss.items()}
    assert all(worse[name] < 0.03 for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")), worse
    assert loss[convergence.WITHOUT_FEEDBACK] > 1.02 * loss["OneBitAdam"], worse
