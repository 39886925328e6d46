"""Mistakes that splitting layers can make, to plant in a running engine on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import engine


def _of_kind(model_engine: engine.Engine, suffixes: tuple[str, ...]) -> list[nn.Module]:
    found = [m for name, m in model_engine.module.named_modules() if name.endswith(suffixes)]
    assert found
    return found


def _leaving_out(collective: str) -> Callable[[engine.Engine], None]:
    """Sums whose name has ``collective`` in it are not taken: every rank keeps its own part."""

    def plant(model_engine: engine.Engine) -> None:
        region = _region_of(model_engine)
        all_reduce = region.group.all_reduce

        class AtOnce:
            def wait(self) -> None:
                pass

        def reduce(flat: Tensor, what: str = "") -> Any:
            return AtOnce() if what.startswith(collective) else all_reduce(flat, what)

        region.group.all_reduce = reduce

    return plant


def _region_of(model_engine: engine.Engine) -> Any:
    """What the replaced forward of the model closes over."""
    forward: Any = model_engine.module.forward
    return next(cell.cell_contents for cell in forward.__closure__ if hasattr(cell.cell_contents, "group"))


def bias_on_every_rank(model_engine: engine.Engine) -> None:
    size = model_engine.mesh.degrees["tp"]
    for module in _of_kind(model_engine, ("attention_out", "mlp_out")):
        inner = module.forward
        module.forward = lambda x, inner=inner, module=module: inner(x) + module.bias * (size - 1)


def copies_counted_often(model_engine: engine.Engine) -> None:
    reduction: Any = model_engine.roles.reduction
    for bucket in getattr(reduction, "buckets", ()):
        for member in bucket.members:
            member.info = replace(member.info, num_copies=1)
    if not hasattr(reduction, "buckets"):
        for index, shard in enumerate(reduction.shards):
            reduction.shards[index] = replace(shard, info=replace(shard.info, num_copies=1))


def cuts_not_summed_in_the_norm(model_engine: engine.Engine) -> None:
    reduction, rank = model_engine.roles.reduction, model_engine.mesh.coordinates["tp"]
    share = reduction.sum_of_squares

    def of_first(exact: bool = False) -> Tensor:
        return share(exact) * (rank == 0)

    reduction.sum_of_squares = of_first  # type: ignore[method-assign]


def tied_gradient_of_one_use(model_engine: engine.Engine) -> None:
    head: Any = model_engine.module.head
    inner = head.forward

    def forward(x: Tensor) -> Tensor:
        weight = head.weight
        del head.weight
        head.weight = weight.detach()
        try:
            logits: Tensor = inner(x)
        finally:
            del head.weight
            head.weight = weight
        return logits

    head.forward = forward


def heads_of_another_rank(model_engine: engine.Engine) -> None:
    """Every rank takes the query rows of its neighbour: a fused matrix cut as if it were one piece."""
    with torch.no_grad():
        for module in _of_kind(model_engine, ("attention_in",)):
            rolled = module.weight.roll(module.weight.shape[0] // 3, 0)  # type: ignore[union-attr, operator]
            module.weight.copy_(rolled)  # type: ignore[union-attr, operator]
    model_engine.roles.reduction.adopt_values()


def vocabulary_off_by_one(model_engine: engine.Engine) -> None:
    module: Any = model_engine.module.token_embedding
    inner = module.forward
    module.forward = lambda tokens: inner((tokens + 1) % 256)


def loss_of_own_columns(model_engine: engine.Engine) -> None:
    region = _region_of(model_engine)
    all_gather = region.group.all_gather

    class AtOnce:
        def wait(self) -> None:
            pass

    def gather(flat: Tensor, bounds: Any, what: str = "") -> Any:
        if not what.startswith("summing the vocabulary"):
            return all_gather(flat, bounds, what)
        own = flat[bounds[region.group.rank] : bounds[region.group.rank + 1]].clone()
        flat.zero_()
        flat[: own.numel()] = own
        flat.view(region.group.size, -1)[1:, : own.numel() // 3] = -torch.inf
        return AtOnce()

    region.group.all_gather = gather


STAGES = {"heads_of_another_rank": (0, 1, 2)}
"""Where a fault can be planted; not named: everywhere."""

FAULTS: dict[str, Callable[[engine.Engine], None]] = {
    "missing_sum_in_forward": _leaving_out("summing the output"),
    "missing_sum_in_backward": _leaving_out("summing gradients"),
    "bias_on_every_rank": bias_on_every_rank,
    "copies_counted_often": copies_counted_often,
    "cuts_not_summed_in_the_norm": cuts_not_summed_in_the_norm,
    "tied_gradient_of_one_use": tied_gradient_of_one_use,
    "heads_of_another_rank": heads_of_another_rank,
    "vocabulary_off_by_one": vocabulary_off_by_one,
    "loss_of_own_columns": loss_of_own_columns,
}
