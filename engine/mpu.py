"""Megatron-style ``mpu`` objects in `initialize`: who is with whom, by the caller's own process groups.

Two readings. Where the JSON gives degrees, the mesh is the engine's and the object is only compared with it. Where it
gives none, the caller has split the model already (Megatron's own layers): the ranks outside mpu's data-parallel group
hold other parts of the same layers, and the engine does what is left, data parallelism and one gradient norm over all
parts (engine/model/tensor_parallel/by_caller.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch.distributed as dist

from engine.collectives.objects import ObjectGroup
from engine.config import Config, EngineError, Note
from engine.plan import Degrees, Plan, World
from engine.plan.placement import axes_in_order, coordinates, groups
from engine.plan.world import MODEL_AXES, model_degrees

Members = tuple[int, ...]

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data-parallel": (("data_parallel",), ("dp_replicate", "dp_shard")),
    "tensor-parallel": (("tensor_model_parallel", "slice_parallel"), ("tp",)),
    "pipeline-parallel": (("pipeline_model_parallel", "pipe_parallel"), ("pp",)),
    "model-parallel": (("model_parallel",), ("pp", "tp")),
    "sequence-parallel": (("sequence_parallel",), ("sp",)),
}
"""Kind of group -> what stands in the object's ``get_..._group``, and the mesh axes along which its ranks differ."""


class ModelParallelUnit:
    """What an ``mpu`` says of this rank: ``members`` by kind, as ranks of the whole world, in the groups' own order.

    Raises EngineError for an object without ``get_data_parallel_group`` or ``get_sequence_parallel_group``.
    """

    def __init__(self, mpu: Any, rank: int) -> None:
        self.rank = rank
        self._mpu = mpu
        found = {kind: self._group(mpu, names) for kind, (names, _) in KINDS.items()}
        self.members: dict[str, Members] = {kind: ranks for kind, ranks in found.items() if ranks is not None}
        if not {"data-parallel", "sequence-parallel"} & self.members.keys():
            raise EngineError(
                f"mpu= is a {type(mpu).__name__} without get_data_parallel_group(); give an object like Megatron's "
                "parallel_state, with get_data_parallel_group() and get_model_parallel_group()"
            )

    def _group(self, mpu: Any, names: tuple[str, ...]) -> Members | None:
        for name in names:
            get: Callable[[], Any] | None = getattr(mpu, f"get_{name}_group", None)
            if get is None:
                continue
            try:
                group = get()
            except (AssertionError, RuntimeError, ValueError) as error:
                raise EngineError(f"mpu.get_{name}_group() raises {type(error).__name__}: {error}") from error
            return tuple(dist.get_process_group_ranks(group)) if group is not None else (self.rank,)
        return None

    def world(self, config: Config, world: World) -> World:
        """``world``, with what the caller has split where ``config`` itself splits nothing.

        Raises EngineError for splits that cannot be taken over: of the pipeline, of sequences, or uneven ones.
        """
        asked = {axis for axis, degree in model_degrees(config).items() if degree > 1}
        data = self.members.get("data-parallel")
        if asked:
            return world
        for kind, axis in (("pipeline-parallel", "pp"), ("sequence-parallel", "sp")):
            if len(self.members.get(kind, ())) > 1:
                raise EngineError(
                    f"mpu's {kind} group is {list(self.members[kind])}, and the config has no {MODEL_AXES[axis]}: "
                    "only layers that are split already are taken as they are; set the degree in the config"
                )
        if data is None or len(data) == world.size:
            return world
        if world.size % len(data):
            raise EngineError(f"mpu's data-parallel group has {len(data)} ranks, which do not divide {world.size}")
        inner = len(data) > 1 and data[1] - data[0] == 1
        return replace(world, split_by_caller=world.size // len(data), placement_of_caller="TPD" if inner else "PDT")

    def check(self, plan: Plan) -> Plan:
        """Compare with the plan's mesh; all ranks call it. Returns the plan with a note of what was found.

        Raises EngineError, on all ranks alike, where the members of a group differ, with both lists.
        """
        ours = own_groups(plan.degrees, self.rank)
        differences = [
            f"rank {self.rank}: mpu's {kind} group is {list(ranks)}, the mesh has {list(ours[kind])}"
            for kind, ranks in self.members.items()
            if sorted(ranks) != list(ours[kind])
        ]
        get_rank = getattr(self._mpu, "get_data_parallel_rank", None)
        sizes, order = plan.degrees.by_axis, axes_in_order(plan.degrees.placement)
        at = coordinates(self.rank, sizes, order)
        dp_rank = at["dp_replicate"] * sizes["dp_shard"] + at["dp_shard"]
        if get_rank is not None and not differences and get_rank() != dp_rank:
            differences = [f"rank {self.rank}: mpu's data-parallel rank is {get_rank()}, the mesh has {dp_rank}"]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everybody = ObjectGroup(None)
            gathered = everybody.gather(differences)
            differences = everybody.broadcast([line for lines in gathered or () for line in lines][:2])
        if differences:
            raise EngineError(f"{'; '.join(differences)} ({describe(plan.degrees)}). {self._repair(plan.degrees)}")
        if plan.degrees.split_by_caller:
            text = (
                f"the model is taken as split over {plan.degrees.tp} ranks already, as mpu says: parameters marked "
                "tensor_model_parallel are parts, all others whole; checkpoints are the caller's affair"
            )
        else:
            text = f"its groups have the same members as the mesh ({', '.join(self.members)})"
        return replace(plan, notes=(*plan.notes, Note("mpu", text)))

    def _repair(self, degrees: Degrees) -> str:
        if degrees.split_by_caller:
            return "Let neighbouring ranks differ in the model-parallel rank alone, or in the data-parallel rank alone"
        for placement in map("".join, permutations("PDT")):
            ours = own_groups(replace(degrees, placement=placement), self.rank)
            if all(sorted(ranks) == list(ours[kind]) for kind, ranks in self.members.items()):
                return f'Set parallel.placement to "{placement}", or make the groups as the mesh has them'
        return "Make the groups as the mesh has them, or give the degrees to mpu alone"


def own_groups(degrees: Degrees, rank: int) -> dict[str, Members]:
    """The members, ascending, of each kind of group that ``rank`` is in."""
    sizes, order = degrees.by_axis, axes_in_order(degrees.placement)
    return {
        kind: next(group for group in groups(sizes, axes, order) if rank in group) for kind, (_, axes) in KINDS.items()
    }


def describe(degrees: Degrees) -> str:
    used = [f"{axis} {size}" for axis, size in degrees.by_axis.items() if size > 1] or ["one rank"]
    return f"{' x '.join(used)}, placement {degrees.placement}"
