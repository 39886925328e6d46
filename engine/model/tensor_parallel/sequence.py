"""Norms and dropouts on shards of the sequence: what lies between split layers is shared out too.

From the first block's input to the last block's output the hidden state (batch, sequence, width) is cut along the
sequence. A norm that the plan calls "sequence" works on its shard and its output is joined for the split layers after
it; the layer cut by inputs that ends them leaves a shard of the sum. Instead of one all-reduce there are an all-gather
and a reduce-scatter, which move the same bytes, and every rank keeps only its part of the activations in between
(Korthikanti et al., https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from engine.collectives.activations import joined, joined_for_parts, parted
from engine.config.messages import EngineError
from engine.cut import Cut
from engine.model.hidden_state import hidden_argument, hidden_of, output_hidden, with_hidden, with_output_hidden
from engine.model.tensor_parallel.region import Region
from engine.model.tensor_parallel.split import TensorPlan

DIMENSION = 1
"""Of (batch, sequence, width)."""


def check_sequence(model: nn.Module, blocks: Sequence[nn.Module], plan: TensorPlan) -> Iterator[str]:
    """Why the plan's "sequence" cannot be: every parameter of a block must be known to work on a shard or a part."""
    if not plan.sequence:
        return
    names = {module: name for name, module in model.named_modules()}
    inside = {name for block in blocks for name in (names[module] for module in block.modules())}
    outside = [name for name in plan.sequence if name not in inside]
    if outside:
        yield f'{", ".join(outside)} is called "sequence" and lies in no repeated block'
    for name, split in plan.splits.items():
        if name in inside and (split.gather_output or split.split_input):
            yield f'{name} takes or gives whole activations, which beside "sequence" are shards'
    known = {*plan.splits, *plan.sequence, *plan.summed}
    for name in sorted(inside - known):
        own = [key for key, _ in model.get_submodule(name).named_parameters(recurse=False)]
        if own:
            yield f'{name}.{own[0]} would see shards of the sequence; call {name} "sequence" too'


def shard_sequence(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: TensorPlan,
    region: Region,
    with_summed_gradients: Callable[[nn.Module, str, Region], Callable[..., Any]],
) -> None:
    """Replace the forwards of the norms and of the blocks."""
    for name in plan.sequence:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Dropout):
            module.forward = _norm(with_summed_gradients(module, name, region), name, region)
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        is_first, is_last = block is blocks[0], block is blocks[-1]
        block.forward = _block(block, names[block], region, is_first, is_last)


def _norm(inner: Callable[..., Tensor], name: str, region: Region) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        y = inner(*args, **kwargs)
        assert region.sequence is not None
        region.joined = joined_for_parts(y, region.sequence, region.group, name, DIMENSION)
        return region.joined

    return forward


def _block(block: nn.Module, name: str, region: Region, is_first: bool, is_last: bool) -> Callable[..., Any]:
    inner = block.forward
    lengths: list[int] = region.lengths

    def forward(*args: Any, **kwargs: Any) -> Any:
        key = hidden_argument(args, kwargs, name)
        hidden = hidden_of(args, kwargs, key)
        if hidden.ndim != 3:
            raise EngineError(
                f'tensor_parallel: {name} gets a hidden state of shape {tuple(hidden.shape)}; "sequence" cuts '
                "(batch, sequence, width)"
            )
        if is_first:
            lengths[:] = [hidden.shape[DIMENSION]]
        cut = Cut((lengths[0],), 0, (lengths[0],), region.group.size, region.group.rank)
        if is_first:
            args, kwargs = with_hidden(args, kwargs, key, parted(hidden, cut, region.group, name, DIMENSION))
        with region.along_sequence(cut, block.training):
            output = inner(*args, **kwargs)
        if is_last:
            whole = joined(output_hidden(output, name), cut, region.group, name, DIMENSION)
            output = with_output_hidden(output, whole)
        return output

    return forward
