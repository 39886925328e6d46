"""How a model's modules are cut over the tp axis: the record that finding a plan writes and applying one reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Style = Literal["column", "row", "vocabulary", "head"]
Origin = Literal["json", "model", "inferred"]


@dataclass(frozen=True)
class Split:
    """How one module's parameters lie over the tp axis.

    ``column`` cuts a linear layer's outputs (weight and bias), ``row`` its inputs (the weight; the bias stays whole),
    ``vocabulary`` an embedding by its rows, and ``head`` the output projection over the vocabulary, whose logits stay
    cut where the loss can be computed on them.
    """

    style: Style
    #: Global sizes of the pieces of a fused output (q, k, v; gate, up) along the cut dimension; each is cut by itself.
    #: Empty: one piece.
    segments: tuple[int, ...] = ()
    #: The weight is stored as (inputs, outputs), as transformers' ``Conv1D`` has it.
    transposed: bool = False
    #: The output is made whole again on every tp rank.
    gather_output: bool = False
    #: The input of a ``row`` layer arrives whole, and each tp rank takes its part of it.
    split_input: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """How a whole model is cut over the tp axis."""

    #: Module name -> how it is cut.
    splits: Mapping[str, Split]
    #: ``"h.0.attn.split_size"`` -> the value it has on one tp rank: numbers of heads and widths that code reads.
    attributes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    #: Norms and dropouts that work on a shard of the sequence.
    sequence: tuple[str, ...] = ()
    #: Modules kept whole that see only this rank's part of an activation (a norm over single heads): the gradients of
    #: their parameters are summed over the tp axis.
    summed: tuple[str, ...] = ()
    origin: Origin = "json"
