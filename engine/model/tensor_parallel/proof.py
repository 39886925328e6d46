"""Whether a module that is cut gives what it gives whole: outputs and gradients, on the real mesh.

The module is one real block of the model with the inputs that a small forward gave it (`capture`), or an embedding or
output layer alone. All ranks of the mesh take part, and all come to the same verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.objects import ObjectGroup
from engine.collectives.shards import ShardGroup
from engine.config.messages import EngineError
from engine.mesh import Mesh
from engine.model.tensor_parallel.apply import apply
from engine.model.tensor_parallel.capture import Call
from engine.model.tensor_parallel.logits import CutLogits
from engine.model.tensor_parallel.matrices import describe_size
from engine.model.tensor_parallel.sketch import PURPOSE, SEED
from engine.model.tensor_parallel.split import TensorPlan
from engine.parameters import ParameterRegistry
from engine.random import generator
from engine.torch_compat import tree_leaves

TOLERANCE = 1e-3
"""Relative to the largest value. Rounding stays far below it; a wrong cut is of the order of 1."""


@dataclass
class Run:
    """What one forward and backward of a module gave. Names are relative to it."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    """Gradients of the inputs that require one."""
    parameters: dict[str, Tensor]
    """Gradients by name."""
    within: dict[str, Tensor] = field(default_factory=dict)
    """The first output tensor of each module below, in the order in which they ended."""


@dataclass(frozen=True)
class Verdict:
    """``faults``: one sentence each, the first place in the order of computation first; empty: proved.

    ``summed``: modules whose parameters are whole and whose gradients come out in parts, one on each tp rank.
    """

    faults: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()


class Proof:
    """Judges plans for one module that has values. ``name`` is the module's own, for messages."""

    def __init__(self, module: nn.Module, call: Call, mesh: Mesh, name: str) -> None:
        self._module, self._call, self._mesh, self._name = module, call, mesh, name
        self._plain = _run(copy.deepcopy(module), call)

    def __call__(self, plan: TensorPlan) -> Verdict:
        """Try ``plan``, whose names are relative to the module. Collective: all ranks call it with the same plan."""
        place: list[str] = []
        module = copy.deepcopy(self._module)
        registry = ParameterRegistry(module)
        cut: Run | None = None
        faults: list[str] = []
        try:
            apply(module, registry, (), plan, self._mesh, Ledger())
            for info, parameter in registry.parameters():
                parameter.data = info.part(parameter.data)
            cut = _run(module, self._call, place)
        except EngineError as error:
            faults = [str(error)]
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            faults = [f"{self._told(place[-1] if place else '', plan)} fails: {type(error).__name__}: {reason}"]
        if agreed := self._agree(faults):
            return Verdict(tuple(agreed))
        assert cut is not None
        faults = self._agree(self._forward_faults(cut, plan))
        partial = self._agree([] if faults else self._different_parameters(cut, registry))
        for name in partial:
            faults += self._sum_fault(name, cut, registry)
        faults = self._agree(faults)
        summed = dict.fromkeys(name.rpartition(".")[0] for name in partial)
        return Verdict(tuple(faults), () if faults else tuple(summed))

    def _forward_faults(self, cut: Run, plan: TensorPlan) -> list[str]:
        """Outputs and gradients of inputs; the first module whose own output is wrong is named."""
        faults = []
        for index, (whole, output) in enumerate(zip(self._plain.outputs, cut.outputs, strict=False)):
            if not _close(output, whole) and (index == 0 or output.shape == whole.shape):
                faults.append(f"output {index} of {self._whole('')} differs{_by_how_much(output, whole)}")
        if len(self._plain.outputs) != len(cut.outputs):
            faults.append(f"{self._whole('')} gives {len(cut.outputs)} tensors in place of {len(self._plain.outputs)}")
        if not faults and not all(map(_close, cut.inputs, self._plain.inputs)):
            faults.append(f"the gradient of what enters {self._whole('')} differs")
        if faults:
            for name, output in cut.within.items():
                plain = self._plain.within.get(name)
                if plain is not None and plain.shape == output.shape and not _close(output, plain):
                    return [f"{self._told(name, plan)}: its output differs{_by_how_much(output, plain)}"]
        return faults

    def _different_parameters(self, cut: Run, registry: ParameterRegistry) -> list[str]:
        """Those whose gradient is not this rank's part of the plain one."""
        found = []
        for name, whole in self._plain.parameters.items():
            gradient = cut.parameters.get(name)
            if gradient is None or not _close(gradient, registry.by_name[name].part(whole), self._largest):
                found.append(name)
        return found

    def _sum_fault(self, name: str, cut: Run, registry: ParameterRegistry) -> list[str]:
        """Why the gradients of a parameter are not the parts of a sum; [] where they are."""
        whole = self._plain.parameters[name]
        gradient = cut.parameters.get(name)
        if registry.by_name[name].cut is not None:
            return [f"the gradient of {self._whole(name)} differs"]
        total = torch.zeros_like(whole) if gradient is None else gradient.clone()
        ShardGroup.of(self._mesh, "tp", Ledger()).all_reduce(total, f"adding up gradients of {name}").wait()
        if _close(total, whole, self._largest):
            return []
        return [f"the gradient of {self._whole(name)} differs, and it is not what the ranks have together"]

    @property
    def _largest(self) -> float:
        return max(
            (float(gradient.abs().max()) for gradient in self._plain.parameters.values() if gradient.numel()),
            default=0.0,
        )

    def _told(self, name: str, plan: TensorPlan) -> str:
        """``h.0.attn.c_proj (Conv1D 32 -> 32, row)``."""
        module = self._module.get_submodule(name)
        split = plan.splits.get(name)
        return f"{self._whole(name)} ({describe_size(module)}{f', {split.style}' if split else ''})"

    def _whole(self, name: str) -> str:
        return ".".join(part for part in (self._name, name) if part) or "the model"

    def _agree(self, found: Sequence[str]) -> list[str]:
        """What any rank found, in rank order, once each."""
        everyone = ObjectGroup(self._mesh.control_group).gather_everywhere(list(found))
        return list(dict.fromkeys(line for lines in everyone for line in lines))


def _run(module: nn.Module, call: Call, place: list[str] | None = None) -> Run:
    """Forward, and backward from the first output. ``place`` gets the names of the modules that are being computed,
    innermost last."""
    within: dict[str, Tensor] = {}
    place = place if place is not None else []
    for name, part in module.named_modules():

        def before(_: nn.Module, args: Any, name: str = name) -> None:
            place.append(name)

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            place.pop()
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if first is not None and name:
                within.setdefault(name, first.detach())

        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
    args, kwargs = copy.deepcopy(call.args), copy.deepcopy(dict(call.kwargs))
    inputs = [t for t in tree_leaves([args, kwargs]) if isinstance(t, Tensor) and t.requires_grad]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        leaves = tree_leaves(module(*args, **kwargs))
        outputs = [leaf.join() if isinstance(leaf, CutLogits) else leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for output in outputs[:1]:
            (output * _weights(output)).sum().backward()
    gradients: Mapping[str, Tensor] = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Run(
        [output.detach() for output in outputs],
        [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs],
        dict(gradients),
        within,
    )


def _weights(output: Tensor) -> Tensor:
    """What the output is multiplied with before the backward: different everywhere, equal on all ranks."""
    return torch.randn(output.shape, generator=generator(SEED, PURPOSE, "weights")).to(output)


def _close(one: Tensor, other: Tensor, scale: float = 0.0) -> bool:
    """``scale``: what values of this kind are at most; a tensor that is zero but for rounding is measured by it."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    largest = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= TOLERANCE * max(largest, 1e-2 * scale)).all())


def _by_how_much(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f" in shape: {tuple(one.shape)} in place of {tuple(other.shape)}"
    if not one.is_floating_point() or not one.numel():
        return ""
    return f" by {float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)):.2g} of its largest value"
