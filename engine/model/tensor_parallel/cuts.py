"""From a `TensorPlan` to the parameters: which elements of each this tp rank holds. All that does not fit is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from engine.config.messages import EngineError
from engine.cut import Cut
from engine.model.tensor_parallel.sequence import check_sequence
from engine.model.tensor_parallel.split import Split, TensorPlan
from engine.parameters import ParameterRegistry


def parameter_cuts(
    model: nn.Module,
    registry: ParameterRegistry,
    plan: TensorPlan,
    size: int,
    rank: int,
    blocks: Sequence[nn.Module] = (),
) -> dict[str, Cut]:
    """The cut of every parameter that ``plan`` splits over ``size`` ranks, by the registry's name.

    Raises EngineError with everything that does not fit: names that are no modules, layers of a kind that cannot be
    split, sizes that ``size`` does not divide, one tensor split in two ways or used by a layer that is not split.
    """
    problems: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts: dict[str, Cut] = {}
    owner: dict[str, str] = {}
    for name, split in plan.splits.items():
        module = modules.get(name)
        if module is None:
            problems.append(f"the model has no module {name!r}")
            continue
        fault = _unfit(module, split)
        if fault is not None:
            problems.append(f"{name} ({type(module).__name__}) cannot be split as {split.style}: {fault}")
            continue
        for key, dimension in _dimensions(module, split):
            parameter = getattr(module, key, None)
            if parameter is None:
                continue
            info = registry.info(parameter)
            assert info is not None
            extent = info.shape[dimension]
            segments = split.segments or (extent,)
            cut = Cut(info.shape, dimension, segments, size, rank)
            fault = _misfit(cut, split)
            if fault is not None:
                problems.append(f"{name}.{key}: {fault}")
            elif cuts.setdefault(info.name, cut) != cut:
                problems.append(
                    f"{name} shares {info.name} with {owner[info.name]}, and the two are to be split differently"
                )
            owner.setdefault(info.name, name)
    problems += _whole_users(model, registry, plan, cuts, owner)
    for name in (*plan.summed, *plan.sequence):
        if name not in modules:
            problems.append(f"the model has no module {name!r}")
    for path in plan.attributes:
        name, _, attribute = path.rpartition(".")
        if name not in modules or not isinstance(getattr(modules[name], attribute, None), int):
            problems.append(f"the model has no whole number {path}")
    problems += check_sequence(model, blocks, plan)
    if not cuts and not problems:
        problems.append("the tensor plan splits nothing")
    if problems:
        raise EngineError(f"tensor_parallel over {size} ranks: {'; '.join(problems)}")
    return cuts


def _unfit(module: nn.Module, split: Split) -> str | None:
    """Why a module of this kind cannot be split so."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return "it has no matrix called weight"
    if split.style == "vocabulary":
        if not isinstance(module, nn.Embedding):
            return "only an embedding can"
        if module.max_norm is not None or module.scale_grad_by_freq:
            return "max_norm and scale_grad_by_freq need the whole vocabulary on one rank"
        return None
    if split.transposed:
        return None if hasattr(module, "nf") else "it stores its weight as (inputs, outputs) and is no Conv1D"
    if type(module).forward is not nn.Linear.forward and not (
        isinstance(module, nn.Linear) and split.style in ("column", "head")
    ):
        return "its forward is not that of torch.nn.Linear"
    return None


def _dimensions(module: nn.Module, split: Split) -> Iterator[tuple[str, int]]:
    """The parameters that are cut, and along which dimension."""
    if split.style == "row":
        yield "weight", 0 if split.transposed else 1
        return
    yield "weight", 1 if split.transposed else 0
    if split.style != "vocabulary":
        yield "bias", 0


def _misfit(cut: Cut, split: Split) -> str | None:
    extent = cut.global_shape[cut.dimension]
    if sum(cut.segments) != extent:
        return f"its segments {list(cut.segments)} add up to {sum(cut.segments)}, not to {extent}"
    if split.style in ("vocabulary", "head"):
        if cut.extent(cut.size - 1) == 0:
            return f"{extent} rows in parts of {-(-extent // cut.size)} leave the last of {cut.size} ranks without any"
        return None
    for segment in cut.segments:
        if segment % cut.size:
            return f"{segment} = {cut.size} x {segment // cut.size} + {segment % cut.size} cannot be shared evenly"
    return None


def _whole_users(
    model: nn.Module, registry: ParameterRegistry, plan: TensorPlan, cuts: Mapping[str, Cut], owner: Mapping[str, str]
) -> Iterator[str]:
    """Modules that hold a parameter that is cut and would use it as if it were whole.

    A module around the one that is split may hold it too, as transformers' prediction heads hold their decoder's bias.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        inside = [split for split in plan.splits if split.startswith(f"{name}." if name else "")]
        if name in plan.splits or inside:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            info = registry.info(parameter)
            if info is not None and info.name in cuts:
                yield f"{name}.{key} is {info.name}, which {owner[info.name]} splits; split {name} too"


@torch.no_grad()
def set_attributes(model: nn.Module, plan: TensorPlan) -> None:
    """Numbers of heads and widths that the model's code reads become what one tp rank has."""
    for path, value in plan.attributes.items():
        name, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(name), attribute, value)
