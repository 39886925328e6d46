"""Ranks read from environments as torchrun, DeepSpeed's launcher and SLURM leave them."""

from __future__ import annotations

import pytest

from engine.contracts import EngineError
from engine.launch.environment import RankEnvironment, first_host

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "10042",
}


def test_nobody_told() -> None:
    assert RankEnvironment.read({}) == RankEnvironment()
    assert RankEnvironment.read({"WORLD_SIZE": "1", "MASTER_ADDR": "x"}).launcher == "single"


def test_torchrun() -> None:
    assert RankEnvironment.read(TORCHRUN) == RankEnvironment(3, 1, 4, 2, "10.0.0.1", 29500, "torchrun")


def test_torchrun_wins_over_slurm() -> None:
    assert RankEnvironment.read(TORCHRUN | SLURM).launcher == "torchrun"


def test_deepspeeds_launcher_says_local_size() -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"} | {"LOCAL_SIZE": "2"}
    assert RankEnvironment.read(environ).local_world_size == 2


def test_slurm() -> None:
    assert RankEnvironment.read(SLURM) == RankEnvironment(4, 0, 5, 1, "gpu07", 20042, "slurm")


def test_slurm_without_a_step_is_one_process() -> None:
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert RankEnvironment.read(batch_script) == RankEnvironment()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-07,12],cpu1", "gpu03"),
        ("a[1,3]-ib", "a1-ib"),
        ("n[5]", "n5"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4; expected 0 to 3"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8, more than WORLD_SIZE, which is 4"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is 0"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE missing beside RANK=3"),
        ({"RANK": None}, "RANK missing beside WORLD_SIZE=4"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR, MASTER_PORT missing"),
    ],
)
def test_contradictions_name_the_variables(changes: dict[str, str | None], words: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(EngineError) as caught:
        RankEnvironment.read(environ)
    assert words in str(caught.value)


def test_slurm_contradictions() -> None:
    with pytest.raises(EngineError, match="SLURM_PROCID is 5, but SLURM_NTASKS is 5"):
        RankEnvironment.read(SLURM | {"SLURM_PROCID": "5"})
    with pytest.raises(EngineError, match="SLURM_LOCALID missing"):
        RankEnvironment.read({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"})


def test_export_gives_what_torch_reads() -> None:
    environ: dict[str, str] = {}
    RankEnvironment.read(SLURM).export(environ)
    assert environ == {
        "RANK": "4",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "20042",
    }
    alone: dict[str, str] = {}
    RankEnvironment().export(alone)
    assert alone == {}
