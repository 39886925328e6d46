"""Whether a module that is cut gives what it gives whole: outputs and gradients, on the real mesh.

The module is one real block of the model with the inputs that a small forward gave it (`capture`), or an embedding or
output layer alone. All ranks of the mesh take part, and all come to the same verdict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.mesh import Mesh
from engine.model.tensor_parallel.capture import Call
from engine.model.tensor_parallel.matrices import describe_size
from engine.model.tensor_parallel.shares import cut_in_place, local_part
from engine.model.tensor_parallel.sketch import PURPOSE, SEED
from engine.model.tensor_parallel.split import TensorPlan
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
        cut: Run | None = None
        faults: list[str] = []
        try:
            module = copy.deepcopy(self._module)
            cut_in_place(module, plan, self._mesh)
            shape = self._plain.outputs[0].shape
            cut = _run(module, self._call, place, shape, lambda whole, output: self._expected(whole, output, plan))
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            faults = [f"{self._told(place[-1] if place else '', plan)} fails: {type(error).__name__}: {reason}"]
        if agreed := self._agree(faults):
            return Verdict(tuple(agreed))
        assert cut is not None
        faults = self._forward_faults(cut, plan)
        partial = self._agree(self._different_parameters(cut, plan))
        faults = self._agree(faults)
        if faults:
            return Verdict(tuple(faults))
        summed = dict.fromkeys(name.rpartition(".")[0] for name in partial)
        for name in partial:
            total = cut.parameters[name].clone() if name in cut.parameters else None
            if (
                total is None
                or total.shape != self._plain.parameters[name].shape
                or name in _cut_names(plan, self._plain)
            ):
                faults.append(f"the gradient of {self._whole(name)} differs")
                continue
            dist.all_reduce(total, group=self._mesh.group("tp"))
            if not _close(total, self._plain.parameters[name]):
                faults.append(f"the gradient of {self._whole(name)} differs on the ranks, and so does their sum")
        faults = self._agree(faults)
        return Verdict(tuple(faults), () if faults else tuple(summed))

    def _forward_faults(self, cut: Run, plan: TensorPlan) -> list[str]:
        """Outputs and gradients of inputs; the first module whose own output is wrong is named."""
        faults = []
        for index, (whole, output) in enumerate(zip(self._plain.outputs, cut.outputs, strict=False)):
            same = _close(output, self._expected(whole, output, plan))
            if not same and (index == 0 or output.shape == whole.shape):
                faults.append(f"output {index} of {self._name} differs{_by_how_much(output, whole)}")
        if len(self._plain.outputs) != len(cut.outputs):
            faults.append(f"{self._name} gives {len(cut.outputs)} tensors in place of {len(self._plain.outputs)}")
        if not faults and not all(map(_close, cut.inputs, self._plain.inputs)):
            faults.append(f"the gradient of what enters {self._name} differs")
        if faults:
            for name, output in cut.within.items():
                whole = self._plain.within.get(name)
                if whole is not None and whole.shape == output.shape and not _close(output, whole):
                    return [f"{self._told(name, plan)}: its output differs{_by_how_much(output, whole)}"]
        return faults

    def _different_parameters(self, cut: Run, plan: TensorPlan) -> list[str]:
        size, rank = self._mesh.degrees["tp"], self._mesh.coordinates["tp"]
        found = []
        for name, whole in self._plain.parameters.items():
            expected, gradient = local_part(name, whole, plan, size, rank), cut.parameters.get(name)
            if gradient is None or not _close(gradient, expected):
                found.append(name)
        return found

    def _expected(self, whole: Tensor, output: Tensor, plan: TensorPlan) -> Tensor:
        """What ``output`` should be: ``whole``, or this rank's part of it where the module is itself a layer whose
        output stays cut."""
        split = plan.splits.get("")
        if split is None or output.shape == whole.shape or output.shape[:-1] != whole.shape[:-1]:
            return whole
        size, rank = self._mesh.degrees["tp"], self._mesh.coordinates["tp"]
        return local_part("bias", whole.movedim(-1, 0), plan, size, rank).movedim(0, -1)

    def _told(self, name: str, plan: TensorPlan) -> str:
        """``h.0.attn.c_proj (Conv1D 32 -> 32, row)``."""
        module = self._module.get_submodule(name)
        split = plan.splits.get(name)
        return f"{self._whole(name)} ({describe_size(module)}{f', {split.style}' if split else ''})"

    def _whole(self, name: str) -> str:
        return ".".join(part for part in (self._name, name) if part) or "the model"

    def _agree(self, found: Sequence[str]) -> list[str]:
        """What any rank found, in rank order, once each."""
        group = self._mesh.control_group
        everyone: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(everyone, list(found), group=group)
        return list(dict.fromkeys(line for lines in everyone for line in lines))


def _cut_names(plan: TensorPlan, plain: Run) -> set[str]:
    return {
        name
        for name in plain.parameters
        if (split := plan.splits.get(name.rpartition(".")[0])) is not None
        and not (split.style == "row" and name.endswith("bias"))
    }


def _run(
    module: nn.Module,
    call: Call,
    place: list[str] | None = None,
    shape: torch.Size | None = None,
    expected: Callable[[Tensor, Tensor], Tensor] = lambda whole, output: whole,
) -> Run:
    """Forward, and backward from the first output. ``place`` gets the names of the modules that are being computed,
    innermost last; ``shape`` is that of the whole output, and ``expected`` cuts such a tensor to the size of this one."""
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
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for output in outputs[:1]:
            (output * expected(_weights(shape or output.shape), output).to(output)).sum().backward()
    gradients: Mapping[str, Tensor] = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Run(
        [output.detach() for output in outputs],
        [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs],
        dict(gradients),
        within,
    )


def _weights(shape: torch.Size) -> Tensor:
    """What the output is multiplied with before the backward: different everywhere, equal on all ranks."""
    return torch.randn(shape, generator=generator(SEED, PURPOSE, "weights"))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= TOLERANCE * scale + 1e-6).all())


def _by_how_much(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f" in shape: {tuple(one.shape)} in place of {tuple(other.shape)}"
    if not one.is_floating_point() or not one.numel():
        return ""
    return f" by {float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)):.2g} of its largest value"
