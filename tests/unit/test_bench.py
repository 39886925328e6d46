"""The benchmark measures what it says: a workload in which clipping acts, and ratios of one and the same round."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.bench.paired import table
from tests.bench.table import loss_gap, markdown, ratios
from tests.bench.workload import WORKLOADS, Workload, batches, build_model


def run(step_seconds: float, losses: tuple[float, ...] = (2.0, 1.0)) -> dict[str, Any]:
    keys = ("step_cpu_seconds", "memory_over_imports_mib", "startup_seconds", "tokens_per_second", "cores_of_others")
    return {"step_seconds": step_seconds, "losses": list(losses), **dict.fromkeys(keys, 1.0)}


def test_clipping_acts() -> None:
    """Where it does not, neither its cost nor a wrong norm would show."""
    workload = WORKLOADS["tiny"].override(num_steps=10)
    model = build_model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **workload.adamw_arguments)
    for ((tokens, targets),) in batches(workload, rank=0):
        model(tokens, targets).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), workload.clip) > workload.clip
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_see_different_tokens_and_runs_the_same() -> None:
    workload = WORKLOADS["tiny"].override(num_steps=1)
    first, again, other = (batches(workload, rank)[0][0][0] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_workload_survives_the_command_line() -> None:
    workload = WORKLOADS["medium"].override(micro_batch_size=1, num_steps=None)
    assert Workload.from_json(workload.to_json()) == workload


def test_ratios_pair_runs_of_one_round() -> None:
    runs = {"ddp": [run(1.0), {"error": "lost"}, run(4.0)], "engine-s1": [run(2.0), run(9.0), run(4.0)]}
    assert ratios(runs, "engine-s1", "step_seconds") == [2.0, 1.0]


def test_the_loss_gap_is_over_all_steps() -> None:
    assert loss_gap({"ddp": [run(1.0)], "engine-s1": [run(1.0, (2.5, 1.0))]}, "engine-s1") == 0.5


def test_a_row_that_fails_says_why() -> None:
    tables = [
        {
            "workload": {**vars(WORKLOADS["tiny"])},
            "ranks": 2,
            "runs": {"ddp": [run(0.5)], "engine-s0": [{"error": "OSError: a | b"}]},
        }
    ]
    lines = markdown({"commit": "abc"}, tables).splitlines()
    assert any(line.startswith("| engine-s0 | fails: OSError: a / b |") for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_rows_in_turn_are_compared_turn_by_turn() -> None:
    """A slow spell that meets both rows leaves the ratio alone; the slowest rank counts; the first turns do not."""
    quick, slow = (
        {"ddp": [9.0, 1.0, 4.0], "engine-s0": [1.0, 2.0, 8.0]},
        {"ddp": [9.0, 0.5, 2.0], "engine-s0": [1.0] * 3},
    )
    rows = table(
        ["ddp", "engine-s0"], "ddp", [{"wall": quick, "cpu": quick}, {"wall": slow, "cpu": quick}], num_warmup=1
    )
    assert "| engine-s0 | 5000.0 | 2.000 (2.000..2.000) | 5000.0 | 2.000 (2.000..2.000) |" in rows.splitlines()
