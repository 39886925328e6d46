"""Ranks, coordinates and process groups: the only place that builds groups.

Axes: ``pp, dp_replicate, dp_shard, cp, sp, tp``, laid out as the placement says (engine/plan/placement.py; by default
in this order, outermost first: ranks that differ only in tp are neighbours). Axes of degree 1 cost nothing. Data
shards come from coordinates, never from a group rank.

ZeRO's axes reach over the slices of sequences: where parameters are sharded, `dp_shard` as a group is dp_shard x cp x
sp, else `dp_replicate` is dp_replicate x cp x sp. Every rank of such a group adds its part of the gradients.
"""

from __future__ import annotations

import datetime
import math
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine.config.messages import EngineError
from engine.device import backend_for
from engine.plan import Degrees
from engine.plan.placement import AXES, axes_in_order, coordinates

__all__ = ["AXES", "Mesh", "coordinates", "is_gloo_alone", "join_process_group"]
_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_device_meshes: dict[tuple[dist.ProcessGroup, Any], DeviceMesh] = {}
SLICE_AXES = ("cp", "sp")
"""Their ranks share the samples and split the sequences."""


class Mesh:
    """This rank's place among all. With one rank and no process group, every group is None."""

    def __init__(self, degrees: Degrees, device: torch.device, shards: bool = True) -> None:
        """``shards``: whether parameters, gradients or their state are sharded, so at any stage but 0."""
        self.device = device
        self.degrees: Mapping[str, int] = degrees.by_axis
        self.split_by_caller = degrees.split_by_caller
        self.order = axes_in_order(degrees.placement)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if math.prod(self.degrees.values()) != self.world_size:
            arithmetic = " x ".join(f"{axis} {size}" for axis, size in self.degrees.items() if size > 1) or "1"
            raise EngineError(f"the mesh {arithmetic} does not cover the {self.world_size} ranks of this process group")
        self.coordinates = coordinates(self.rank, self.degrees, self.order)
        widened = "dp_shard" if shards else "dp_replicate"
        self._sizes = {axis: self.degrees[axis] for axis in self.order if axis not in SLICE_AXES}
        self._sizes[widened] *= self.num_slices
        self._split = [axis for axis, size in self._sizes.items() if size > 1]
        self._device_mesh: DeviceMesh | None = None
        self._slice_mesh: DeviceMesh | None = None

    @property
    def dp_size(self) -> int:
        return self.degrees["dp_replicate"] * self.degrees["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """The data shard of this rank: equal for all ranks that must see the same samples."""
        return self.coordinates["dp_replicate"] * self.degrees["dp_shard"] + self.coordinates["dp_shard"]

    @property
    def num_slices(self) -> int:
        """Into how many slices a sequence is cut: cp x sp."""
        return self.degrees["cp"] * self.degrees["sp"]

    @property
    def token_rank(self) -> int:
        """Equal for all ranks that must see the same tokens: the data shard and the slice."""
        slice_index = self.coordinates["cp"] * self.degrees["sp"] + self.coordinates["sp"]
        return self.dp_rank * self.num_slices + slice_index

    @property
    def token_size(self) -> int:
        """Ranks that see different tokens: dp x cp x sp."""
        return self.dp_size * self.num_slices

    @property
    def place_in_stage(self) -> tuple[int, int]:
        """This rank's number among those of its pipeline stage, and how many they are."""
        number = 0
        for axis, coordinate in self.coordinates.items():
            if axis != "pp":
                number = number * self.degrees[axis] + coordinate
        return number, self.world_size // self.degrees["pp"]

    @property
    def shard_size(self) -> int:
        """Among how many ranks ZeRO cuts."""
        return self._sizes["dp_shard"]

    @property
    def shard_rank(self) -> int:
        """Which of the `shard_size` parts is this rank's."""
        if self._sizes["dp_shard"] == self.degrees["dp_shard"]:
            return self.coordinates["dp_shard"]
        return self.token_rank % self.shard_size

    def check_parts_known(self, what: str) -> None:
        """Raises EngineError where this rank's parts are of a split that its caller has made."""
        if self.split_by_caller:
            raise EngineError(
                f"{what}: the model is split by its caller (mpu), so how its parts make up whole parameters is not "
                "known here; save and load engine.module.state_dict() on each model-parallel rank, under its rank in "
                "the name"
            )

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh over ``axes`` (none of the slices') of more than one rank, in mesh order."""
        if self._device_mesh is None:
            self._device_mesh = _mesh_over({axis: self._sizes[axis] for axis in self._split}, self.device)
        wanted = tuple(axis for axis in self._split if axis in axes)
        return self._device_mesh if wanted == tuple(self._split) else self._device_mesh[wanted]

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """All ranks, for agreements. On gloo a group of its own: of two ranks in different collectives of one group,
        each would take the other's data for its own."""
        if self.world_size == 1 or not is_gloo_alone(dist.group.WORLD):
            return self.group("world")
        world = dist.group.WORLD
        assert world is not None
        if world not in _control_groups:
            _control_groups[world] = dist.new_group(range(self.world_size))
        return _control_groups[world]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in ``axis`` only ("world": all); None where this rank is alone."""
        if axis == "world":
            return dist.group.WORLD if self.world_size > 1 else None
        if axis in SLICE_AXES:
            return self._slice_group(axis) if self.degrees[axis] > 1 else None
        return self.device_mesh(axis).get_group() if self._sizes[axis] > 1 else None

    def _slice_group(self, axis: str) -> dist.ProcessGroup:
        if self._slice_mesh is None:
            split = {axis: self.degrees[axis] for axis in self.order if self.degrees[axis] > 1}
            self._slice_mesh = _mesh_over(split, self.device)
        return self._slice_mesh[axis].get_group() if self._slice_mesh.ndim > 1 else self._slice_mesh.get_group()

    def background_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks of its own, for a thread that must not meet the training's collectives. All ranks
        call it; None where this rank is alone."""
        return dist.new_group(backend="gloo") if self.world_size > 1 else None


def _mesh_over(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """One mesh for all engines that lay the same ranks out alike: torch ends groups with the process group alone, and
    each has sockets and a thread (gloo), or a communicator with buffers (NCCL)."""
    world = dist.group.WORLD
    assert world is not None
    for known in [known for known in _device_meshes if known[0] is not world]:
        del _device_meshes[known]  # of a process group that has ended; a mesh keeps it alive, so no weak key would do
    layout = (device.type, tuple(sizes.items()))
    if (world, layout) not in _device_meshes:
        _device_meshes[world, layout] = init_device_mesh(
            device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
    return _device_meshes[world, layout]


def leave_process_group() -> None:
    """End the default process group, and every group that meshes share on it: those live as long as somebody knows
    them, each with its sockets and threads."""
    dist.destroy_process_group()
    _device_meshes.clear()
    _control_groups.clear()


def is_gloo_alone(group: dist.ProcessGroup | None) -> bool:
    """Whether every device's collectives of ``group`` (None: all ranks) run on gloo."""
    return {pair.rpartition(":")[2] for pair in dist.get_backend_config(group).split(",")} == {"gloo"}


def join_process_group(
    rank: int, world_size: int, init_method: str, device: torch.device, timeout_seconds: float | None = None
) -> bool:
    """Make this process part of the default process group; a group that exists is reused.

    Returns whether a group was made (its maker must end it). Raises EngineError when the existing group cannot serve
    the device, or when the ranks do not find each other.
    """
    if dist.is_initialized():
        if device.type != "cpu" and dist.get_backend() == "gloo":
            raise EngineError(
                f"the existing process group uses gloo but the run uses {device.type}; initialise it with backend "
                f"{backend_for(device)!r} or let engine.initialize() do it"
            )
        return False
    if world_size == 1:
        return False
    options = {} if timeout_seconds is None else {"timeout": datetime.timedelta(seconds=timeout_seconds)}
    try:
        dist.init_process_group(
            backend_for(device),
            store=_fresh_store(init_method, rank, world_size),
            rank=rank,
            world_size=world_size,
            **options,  # type: ignore[arg-type]
        )
    except dist.DistError as error:
        raise EngineError(_why_not_joined(error, rank, world_size, init_method)) from error
    return True


_stores: dict[str, tuple[dist.Store, int]] = {}


def _fresh_store(init_method: str, rank: int, world_size: int) -> dist.Store:
    """The meeting point, under a prefix of its own for every group that this process makes.

    A second group in one process (initialize, destroy, initialize), or one of a restarted attempt under torchrun, would
    else meet the keys that the first left behind, and hang. The underlying store is kept: rank 0 may be serving it.
    """
    if init_method not in _stores:
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size))
        _stores[init_method] = (store, 0)
    store, num_groups = _stores[init_method]
    _stores[init_method] = (store, num_groups + 1)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt{attempt}/group{num_groups}", store)


def _why_not_joined(error: dist.DistError, rank: int, world_size: int, init_method: str) -> str:
    place = init_method
    if init_method == "env://":
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error):
        return f"another process listens at {place}, where the ranks were to meet; set MASTER_PORT to a free port"
    first_line = str(error).partition("\n")[0]
    return (
        f"rank {rank} of {world_size} could not meet the others at {place}: {first_line}; is rank 0 running there, "
        f"and are MASTER_ADDR and MASTER_PORT right?"
    )
