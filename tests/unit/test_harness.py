"""The rank harness itself: what it returns, how it fails, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import REPOSITORY, RankFailed, Ranks, launch_script


class Misspelt(Exception):
    """An exception that cannot be pickled back: its constructor wants two arguments."""

    def __init__(self, key: str, line: int) -> None:
        super().__init__(f"{key} in line {line}")


def sum_of_ranks(offset: float) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def flattened_mesh_sum() -> float:
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["replicate", "shard"]._flatten("batch").get_group())
    return total.item()


def fail_on(rank: int, kind: str) -> int:
    """One rank fails while its peers wait for it in a collective."""
    if dist.get_rank() == rank:
        if kind == "exit":
            os._exit(7)
        if kind == "sleep":
            time.sleep(60)
        if kind == "misspelt":
            raise Misspelt("zero_optimisation", 3)
        raise ValueError("no such parameter")
    dist.barrier()
    return dist.get_rank()


def draw() -> float:
    return torch.rand(()).item()


def environment() -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


@pytest.mark.parametrize(("world_size", "total"), [(1, 1.0), (2, 3.0), (3, 6.0)])
def test_results_come_back_in_rank_order(ranks: Ranks, world_size: int, total: float) -> None:
    assert ranks(world_size).run(sum_of_ranks, offset=1.0) == [torch.tensor([total])] * world_size
    assert ranks(world_size).run(environment) == [(str(rank), str(world_size), 1) for rank in range(world_size)]


def test_processes_are_shared_and_groups_are_not(ranks: Ranks) -> None:
    pids = ranks(3).pids
    for _ in range(2):
        assert ranks(2).run(flattened_mesh_sum) == [2.0, 2.0]
        assert ranks(3).run(flattened_mesh_sum) == [3.0, 3.0, 3.0]
    assert ranks(3).pids == pids
    assert ranks(2).pids == pids[:2]


def test_every_run_starts_from_the_same_seed(ranks: Ranks) -> None:
    first, second = ranks(2).run(draw), ranks(2).run(draw)
    assert first == second
    assert first[0] == first[1]


def test_exception_names_its_rank_and_keeps_the_processes(ranks: Ranks) -> None:
    pids = ranks(2).pids
    with pytest.raises(ValueError, match="no such parameter") as caught:
        ranks(2).run(fail_on, 1, "raise")
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]
    assert ranks(2).pids == pids
    assert ranks(2).run(sum_of_ranks, 0.0) == [torch.tensor([1.0])] * 2


def test_exception_that_cannot_be_pickled(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 raised Misspelt: zero_optimisation in line 3"):
        ranks(2).run(fail_on, 0, "misspelt")


def test_dead_rank_is_found_within_seconds(ranks: Ranks) -> None:
    before = ranks(2).pids
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 died with exit code 7"):
        ranks(2).run(fail_on, 1, "exit")
    assert time.monotonic() - start < 10
    assert not set(before) & set(ranks(2).pids)
    assert ranks(2).run(sum_of_ranks, 0.0) == [torch.tensor([1.0])] * 2


def test_silent_rank_is_named_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 gave no answer within 1 s.*in fail_on"):
        ranks(1).run(fail_on, 0, "sleep", timeout=1.0)


def test_only_functions_with_a_name_can_be_sent(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        ranks(1).run(lambda: None)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal
            from tests.harness import Ranks
            print(*Ranks()(1).pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    finished = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    pid = int(finished.stdout)
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """False for a process that has ended, also where nobody has collected its exit code."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_launch_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "if int(os.environ['RANK']) == int(sys.argv[1]): sys.exit(3)\n"
        "open(f\"{os.environ['OUTPUT']}/{os.environ['RANK']}\", 'w').close()\n"
    )
    assert launch_script(2, [script, "-1"], env={"OUTPUT": str(tmp_path)}).returncode == 0
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
    assert launch_script(1, [script, "0"], env={"OUTPUT": str(tmp_path)}).returncode != 0
