"""What the plan may know of a model, without torch. engine/model/facts.py fills it from a model without memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from engine.plan.tensor_parallel import SplitSizes

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element, by the dtypes that parameters are trained in."""


@dataclass(frozen=True)
class ParameterFacts:
    """One tensor of the model, tied ones once under their first name. ``shape`` is global.

    ``block``: the index of its repeated block; ``shared``: it has a name outside that block as well.
    ``cut``: the dimension that tensor parallelism cuts, None for one that every rank of the axis keeps whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    trainable: bool = True
    block: int | None = None
    shared: bool = False
    cut: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype in ITEM_BYTES


@dataclass(frozen=True)
class BufferFacts:
    """One buffer of the model; ``item_bytes`` of its own dtype."""

    name: str
    numel: int
    item_bytes: int
    is_floating: bool


@dataclass(frozen=True)
class Kept:
    """Bytes that a part of the model keeps from forward to backward for one micro-batch.

    ``whole_bytes`` are the same on every rank of a tensor-parallel group, ``cut_bytes`` are divided among them.
    ``mask_bytes``: what of both are dropout's masks beyond one byte an element, the least that a kernel keeps.
    """

    whole_bytes: int = 0
    cut_bytes: int = 0
    mask_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.whole_bytes + self.cut_bytes

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.whole_bytes + other.whole_bytes,
            self.cut_bytes + other.cut_bytes,
            self.mask_bytes + other.mask_bytes,
        )


@dataclass(frozen=True)
class Crossings:
    """What a part of the model hands over for one micro-batch where an axis cuts it: calls, and bytes of whole tensors.

    ``attention``: calls of attention, with the bytes of queries, keys and values, of keys and values alone (and their
    number), and of outputs. ``closing``: layers whose outputs tensor parallelism sums (``row``, ``vocabulary``).
    ``opening``: tensors that layers cut by outputs read (``column``, ``head``), whose gradients it sums.
    """

    attention_calls: int = 0
    query_key_value_bytes: int = 0
    key_value_bytes: int = 0
    key_value_elements: int = 0
    output_bytes: int = 0
    closing_calls: int = 0
    closing_bytes: int = 0
    opening_calls: int = 0
    opening_bytes: int = 0

    def __add__(self, other: Crossings) -> Crossings:
        return Crossings(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Boundary:
    """What one layer returns for one micro-batch, which travels where the model is cut behind it.

    ``tensors`` and their bytes; those of them that want a gradient, which travels back. ``spare_bytes``: what autograd
    does not keep for this layer's own backward, and a stage that ends here keeps nevertheless.
    """

    tensors: int = 0
    tensor_bytes: int = 0
    gradients: int = 0
    gradient_bytes: int = 0
    spare_bytes: int = 0


@dataclass(frozen=True)
class ForwardFacts:
    """One micro-batch of ``samples`` x ``sequence_length`` tokens through the model, as eager PyTorch computes it.

    ``before``, ``blocks`` and ``after``: what stays for backward, of the parts of the model in that order.
    ``entering_bytes``: the activation that goes from block to block; its gradient is as large.
    ``working_bytes``: what forward and backward hold at their peak beyond all that is kept.
    FLOPs count a multiplication and an addition as two, in matrix products and attention alone.
    """

    samples: int
    sequence_length: int
    before: Kept
    blocks: tuple[Kept, ...]
    after: Kept
    entering_bytes: int
    working_bytes: int
    forward_flops: int
    backward_flops: int
    block_forward_flops: int = 0
    """Of all blocks together: what activation checkpointing computes a second time."""
    crossings: tuple[Crossings, ...] = ()
    """Of ``before``, each block and ``after``."""
    cuts_logits: bool = False
    """Tensor parallelism leaves each rank a part of the vocabulary's logits."""
    block_flops: tuple[int, ...] = ()
    """Of one forward through each block; `before_flops` and `after_flops` of the rest."""
    before_flops: int = 0
    after_flops: int = 0
    boundaries: tuple[Boundary, ...] = ()
    """Behind each block."""

    @property
    def kept_bytes(self) -> int:
        return sum((self.before, *self.blocks, self.after), Kept()).total_bytes


@dataclass(frozen=True)
class ModelFacts:
    """Counts are of elements, tied parameters once. ``blocks`` are the names of the repeated blocks, in order;
    ``ties`` the groups of parameter names that share one tensor. None means not known.

    ``parameters`` and ``buffers`` one by one, empty where only the size is known. ``forward``: measured, or None and
    ``why_not_measured``.
    """

    num_parameters: int
    num_trainable_parameters: int
    blocks: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    num_block_parameters: int | None = None
    """Elements in the largest block."""
    split_sizes: SplitSizes | None = None
    parameters: tuple[ParameterFacts, ...] = ()
    buffers: tuple[BufferFacts, ...] = ()
    forward: ForwardFacts | None = None
    why_not_measured: str = ""
    layer_kinds: tuple[str, ...] = ()
    """Of a model that is cut into pipeline stages, whose layers stand in ``blocks``: their classes."""
    ends: tuple[tuple[str, str], ...] = ()
    """And (name, "first" | "last" | "both") of every parameter name around them: the stages that need it."""
    uncuttable: tuple[tuple[int, str], ...] = ()
    """Behind how many layers such a model cannot be cut, and what of the layers in front is read behind the cut."""
    layer_times: tuple[int, ...] = ()
    """Of what is in front of the layers, of each layer, and of what is behind them, measured; in any unit."""

    @classmethod
    def of(
        cls,
        parameters: Sequence[ParameterFacts],
        blocks: Sequence[str] = (),
        ties: Sequence[tuple[str, ...]] = (),
        buffers: Sequence[BufferFacts] = (),
    ) -> ModelFacts:
        """The record of a model whose tensors are known one by one."""
        by_block = [sum(p.numel for p in parameters if p.block == index) for index in range(len(blocks))]
        return cls(
            num_parameters=sum(p.numel for p in parameters),
            num_trainable_parameters=sum(p.numel for p in parameters if p.trainable),
            blocks=tuple(blocks),
            ties=tuple(ties),
            num_block_parameters=max(by_block, default=None),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
        )
