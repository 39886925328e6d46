"""Which rank this process is, told by whoever started it: torchrun, SLURM, or nobody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from engine.contracts import EngineError

Launcher = Literal["single", "torchrun", "slurm"]

SLURM_PORTS = range(20000, 30000)
"""A job's port is picked here by its job id, so that all its ranks agree without talking."""


@dataclass(frozen=True)
class RankEnvironment:
    """This process among the others. `launcher` says whose variables told it; "single" means that none did."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    launcher: Launcher = "single"

    @staticmethod
    def read(environ: Mapping[str, str] | None = None) -> RankEnvironment:
        """torchrun's variables win over SLURM's: `srun torchrun ...` sets both.

        Raises EngineError, naming the variables, where they are incomplete or contradict each other.
        """
        environ = os.environ if environ is None else environ
        if "RANK" in environ or _integer(environ, "WORLD_SIZE", 1) != 1:
            return _from_torchrun(environ)
        # Without a step there is one process, whatever SLURM_NTASKS says: a batch script, or a shell of salloc.
        if "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
            return _from_slurm(environ)
        return RankEnvironment()

    def export(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set the variables that `torch.distributed.init_process_group` and models read."""
        environ = os.environ if environ is None else environ
        if self.launcher == "single":
            return
        environ["RANK"] = str(self.rank)
        environ["LOCAL_RANK"] = str(self.local_rank)
        environ["WORLD_SIZE"] = str(self.world_size)
        environ["LOCAL_WORLD_SIZE"] = str(self.local_world_size)
        environ["MASTER_ADDR"] = self.master_addr
        environ["MASTER_PORT"] = str(self.master_port)


def _from_torchrun(environ: Mapping[str, str]) -> RankEnvironment:
    _require(environ, ("RANK", "WORLD_SIZE"), "torchrun")
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if world_size > 1:
        _require(environ, ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "torchrun")
    local_rank = _integer(environ, "LOCAL_RANK", 0)
    # LOCAL_SIZE is how DeepSpeed's launcher spells it.
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", _integer(environ, "LOCAL_SIZE", world_size))
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    found = RankEnvironment(
        rank, local_rank, world_size, local_world_size, environ.get("MASTER_ADDR", "127.0.0.1"), port, "torchrun"
    )
    return _checked(found, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    _require(environ, ("SLURM_LOCALID", size_name), "SLURM")
    world_size = _integer(environ, size_name)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT")
    else:
        port = SLURM_PORTS[_integer(environ, "SLURM_JOB_ID", 0) % len(SLURM_PORTS)]
    found = RankEnvironment(
        _integer(environ, "SLURM_PROCID"),
        _integer(environ, "SLURM_LOCALID"),
        world_size,
        _slurm_local_size(environ, world_size),
        environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        port,
        "slurm",
    )
    return _checked(found, ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"))


def _slurm_local_size(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks of this node, from `2(x3),1`: three nodes of two tasks, one of one."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return world_size
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise EngineError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected counts such as '2(x3),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID", 0)
    if node >= len(counts):
        raise EngineError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE ({text!r}) knows {len(counts)} nodes."
        )
    return counts[node]


def first_host(nodelist: str) -> str:
    """The first host of SLURM's list: `gpu[03-07,12],cpu1` gives `gpu03`. Raises EngineError."""
    match = re.match(r"([^,\[\]]+)(?:\[([^\]]*)\]([^,\[\]]*))?", nodelist)
    if match is None:
        raise EngineError(
            f"SLURM_STEP_NODELIST is {nodelist!r}; expected host names such as 'node[01-04]'. Set MASTER_ADDR."
        )
    prefix, ranges, suffix = match[1], match[2], match[3]
    return prefix if ranges is None else prefix + re.split("[,-]", ranges)[0] + suffix


def _require(environ: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    missing = [name for name in names if name not in environ]
    if missing:
        given = [name for name in names if name in environ]
        raise EngineError(
            f"The environment describes ranks of {source} only in part: {', '.join(missing)} missing"
            f"{' beside ' + ', '.join(f'{name}={environ[name]}' for name in given) if given else ''}. "
            f"Start through the launcher, or unset what is left of it."
        )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\s*\d+\s*", text):
        raise EngineError(f"The environment variable {name} is {text!r}; expected a whole number of at least 0.")
    return int(text)


def _checked(found: RankEnvironment, names: tuple[str, str, str, str]) -> RankEnvironment:
    rank, world_size, local_rank, local_world_size = names
    if found.world_size < 1:
        raise EngineError(f"{world_size} is {found.world_size}; expected at least 1.")
    for index_name, index, size_name, size in (
        (rank, found.rank, world_size, found.world_size),
        (local_rank, found.local_rank, local_world_size, found.local_world_size),
    ):
        if index >= size:
            raise EngineError(f"{index_name} is {index}, but {size_name} is {size}; expected 0 to {size - 1}.")
    if found.local_world_size > found.world_size:
        raise EngineError(
            f"{local_world_size} is {found.local_world_size}, more than {world_size}, which is {found.world_size}."
        )
    return found
