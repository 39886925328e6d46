"""The environment that shares the cores among ranks. It must be set before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping


def thread_environment(nproc: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What `nproc` ranks of this machine should have and the user has not set.

    Threads wait asleep (OMP_WAIT_POLICY): by default GNU OpenMP's threads spin for milliseconds at the end of every
    parallel region, and on cores that anything else uses as well, each of them waits for one that is not running. There
    a step on two threads then takes several times as long and as much CPU time as on one.
    """
    environ = os.environ if environ is None else environ
    wanted = {"OMP_WAIT_POLICY": "PASSIVE"}
    if nproc > 1:
        wanted["OMP_NUM_THREADS"] = str(max(1, num_cores() // nproc))
    if "GOMP_SPINCOUNT" in environ:
        del wanted["OMP_WAIT_POLICY"]
    return {name: value for name, value in wanted.items() if name not in environ}


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
