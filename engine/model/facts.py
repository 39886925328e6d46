"""`read_facts`: the names, shapes, dtypes, blocks and ties of a model, as a record that needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from engine.model.tensor_parallel.sizes import split_sizes
from engine.parameters import ParameterRegistry
from engine.plan.facts import BufferFacts, ModelFacts, ParameterFacts

DTYPE_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def read_facts(model: nn.Module, blocks: Sequence[nn.Module]) -> ModelFacts:
    """``blocks``: from `find_blocks`."""
    registry = ParameterRegistry(model, None, blocks)
    names = {module: name for name, module in model.named_modules()}
    block_names = tuple(names[block] for block in blocks)
    parameters = []
    for info in registry.infos:
        prefix = f"{block_names[info.block]}." if info.block is not None else ""
        parameters.append(
            ParameterFacts(
                name=info.name,
                shape=info.shape,
                dtype=DTYPE_NAMES.get(info.dtype, str(info.dtype).removeprefix("torch.")),
                trainable=info.trainable,
                block=info.block,
                shared=any(not name.startswith(prefix) for name in (info.name, *info.aliases)),
            )
        )
    ties = tuple((info.name, *info.aliases) for info in registry.infos if info.aliases)
    buffers = [
        BufferFacts(name, buffer.numel(), buffer.element_size(), buffer.is_floating_point())
        for name, buffer in model.named_buffers()
    ]
    return replace(ModelFacts.of(parameters, block_names, ties, buffers), split_sizes=split_sizes(model, blocks))


def with_cuts(facts: ModelFacts, cuts: Mapping[str, int]) -> ModelFacts:
    """``cuts``: parameter name (any of a tied one's) -> the dimension that tensor parallelism cuts."""
    names = {group[0]: group for group in facts.ties}

    def cut_of(parameter: ParameterFacts) -> int | None:
        return next((cuts[name] for name in names.get(parameter.name, (parameter.name,)) if name in cuts), None)

    return replace(facts, parameters=tuple(replace(p, cut=cut_of(p)) for p in facts.parameters))
