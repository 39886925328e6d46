"""One shim over CPU and accelerators, so that no other file asks which of them it runs on.

`torch.accelerator` raises on a machine without one, hence the guards here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist


def current_device(local_rank: int = 0, wanted: str | None = None) -> torch.device:
    """The device of this rank: ``wanted`` if given, else the accelerator if there is one, else the CPU."""
    if wanted == "cpu" or device_kind()[0] == "cpu":
        return torch.device("cpu")
    device = torch.device(wanted or torch.accelerator.current_accelerator().type, local_rank)  # type: ignore[union-attr]
    torch.accelerator.set_device_index(device.index or 0)
    return device


def device_kind() -> tuple[str, int]:
    """The accelerator's type and how many this machine has, or ("cpu", 0). An accelerator without float64 (Apple's
    MPS) does not count: norms are summed in it."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":  # type: ignore[union-attr]
        return "cpu", 0
    return torch.accelerator.current_accelerator().type, torch.accelerator.device_count()  # type: ignore[union-attr]


def backend_for(device: torch.device) -> str:
    """The process group backend of a device: gloo on CPU; both on an accelerator, so that CPU tensors travel too."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the default generators of the CPU and of ``device``.

    Not `torch.manual_seed`: that seeds every kind of accelerator torch knows, and records a stack trace for each that
    is not in use, which costs more than the rest of a small step's bookkeeping.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that `seed_generators` seeds; see `restore_generators`."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def restore_generators(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextlib.contextmanager
def same_generators(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves the generators that `seed_generators` seeds as they were."""
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(device, states)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: on the accelerator, or resident on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
