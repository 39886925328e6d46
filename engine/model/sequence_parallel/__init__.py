"""Long sequences, cut over ranks: `sequence_parallel_size` (Ulysses) and `parallel.context_parallel` (a ring).

`apply` makes a model work on slices and returns the `Slices` role. First file to read: slices.py, then attention.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError
from engine.mesh import Mesh
from engine.model.sequence_parallel.attention import SWITCH_OFF, SlicedAttention
from engine.model.sequence_parallel.distributed_attention import DistributedAttention
from engine.model.sequence_parallel.hugging_face import HuggingFace
from engine.model.sequence_parallel.interception import Interception
from engine.model.sequence_parallel.layout import Layout
from engine.model.sequence_parallel.slices import KEYS, SequenceSlices
from engine.model.tensor_parallel.sizes import split_sizes
from engine.plan import Plan
from engine.plan.sequence_parallel import SP, heads_problem

__all__ = ["apply", "check"]


def apply(model: nn.Module, blocks: Sequence[nn.Module], plan: Plan, mesh: Mesh, ledger: Ledger) -> SequenceSlices:
    """Divert the attention of ``model`` and of its ``blocks``. Raises EngineError, on all ranks alike, for a model
    whose attention cannot be replaced."""
    degrees, place = mesh.degrees, mesh.coordinates
    layout = Layout(degrees["cp"], degrees["sp"], place["cp"], place["sp"])
    cp, sp = ShardGroup.of(mesh, "cp", ledger), ShardGroup.of(mesh, "sp", ledger)
    interception = Interception(model, blocks, SlicedAttention(layout, cp, sp))
    hugging_face = HuggingFace(model, interception)
    dtypes = {plan.precision.compute, plan.precision.autocast or "fp32"}
    is_16_bit = dtypes != {"fp32"} or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    keys = plan.config.sequence_keys
    return SequenceSlices(model, layout, (cp, sp), interception, hugging_face, keys, ledger, mesh.device, is_16_bit)


def check(model: nn.Module, blocks: Sequence[nn.Module], plan: Plan) -> None:
    """Before tensor parallelism changes the model. Raises EngineError, on all ranks alike, for one that takes no
    positions, looks along the sequence by other means than attention, or has heads that sp ranks cannot share."""
    degrees = plan.degrees
    if wrong := heads_problem(split_sizes(model, blocks).num_heads, degrees.sp, degrees.tp):
        raise EngineError(f"{SP}: {'; '.join(wrong)}")
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters and not takes_any:
        raise EngineError(
            f"{KEYS}: forward of {type(model).__name__} takes no position_ids, so each rank would count the positions "
            "of its slice from 0. Let it take position_ids (batch or 1, tokens) and use them where it has positions"
        )
    along = (nn.Conv1d, nn.RNNBase)
    for name, module in model.named_modules():
        if isinstance(module, DistributedAttention):
            raise EngineError(
                f"{KEYS}: {name} (DistributedAttention) exchanges heads by itself, and with {KEYS} the engine does; "
                f"call the attention inside it, or {SWITCH_OFF} and cut the sequences of the batch as its user must"
            )
        if isinstance(module, along) and (not isinstance(module, nn.Conv1d) or module.kernel_size[0] > 1):
            raise EngineError(
                f"{KEYS}: {name} ({type(module).__name__}) looks along the sequence, and would not see beyond the "
                f"border of a slice; {SWITCH_OFF}"
            )
