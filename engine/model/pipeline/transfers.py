"""What travels between stages: the output of a stage's last layer forward, its gradients back.

An output is a tensor, or tensors in tuples, lists and dicts with plain values between them. Its form, the shapes and
which tensors want gradients follow from the shapes of the micro-batch, which both sides have. So they are announced
once for each kind of micro-batch; from then on receives can be posted before anything has been sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.collectives.shards import ShardGroup, Transfer
from engine.contracts import EngineError
from engine.data.batch import describe


@dataclass(frozen=True)
class Form:
    """``structure``: JSON in which ``{"tensor": n}`` stands for the n-th tensor. ``wants_gradient``: of each."""

    structure: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    wants_gradient: tuple[bool, ...]

    def encode(self, checksum: int) -> bytes:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return json.dumps([self.structure, self.shapes, dtypes, self.wants_gradient, checksum]).encode()

    @classmethod
    def decode(cls, data: bytes) -> tuple[Form, int]:
        structure, shapes, dtypes, wants, checksum = json.loads(data)
        kinds = tuple(getattr(torch, dtype) for dtype in dtypes)
        return cls(structure, tuple(map(tuple, shapes)), kinds, tuple(wants)), checksum

    def empty(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(s, dtype=d, device=device) for s, d in zip(self.shapes, self.dtypes, strict=True)]

    def assemble(self, tensors: list[Tensor]) -> Any:
        return _decode(json.loads(self.structure), tensors)


def take_apart(output: Any, where: str) -> tuple[Form, list[Tensor]]:
    """The form of a stage's output and its tensors. Raises EngineError for what cannot travel."""
    tensors: list[Tensor] = []
    structure = json.dumps(_encode(output, tensors, where))
    return (
        Form(
            structure,
            tuple(tuple(t.shape) for t in tensors),
            tuple(t.dtype for t in tensors),
            tuple(t.requires_grad for t in tensors),
        ),
        tensors,
    )


def _encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encode(item, tensors, where) for item in value]}
    if isinstance(value, Mapping) and type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, tensors, where) for key, item in value.items()}}
    raise EngineError(
        f"{where} returns {describe(value)}, which cannot travel to the next stage: tensors, and tuples, lists and "
        "dicts of tensors and plain values, can"
    )


def _decode(structure: Any, tensors: list[Tensor]) -> Any:
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content.items()}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


class Transfers:
    """Sends and receives of one rank. ``rank_of``: stage -> rank in ``group``."""

    def __init__(self, group: ShardGroup, rank_of: Callable[[int], int], device: torch.device) -> None:
        self._group, self._rank_of, self._device = group, rank_of, device
        self._forms: dict[tuple[int, Any], Form] = {}
        self._sent: list[tuple[Transfer, Tensor]] = []

    def is_local(self, stage: int) -> bool:
        return self._rank_of(stage) == self._group.rank

    def is_known(self, stage: int, kind: Any) -> bool:
        """Whether the form of what ``stage`` returns for micro-batches of ``kind`` was announced already."""
        return (stage, kind) in self._forms

    def form(self, stage: int, kind: Any) -> Form:
        return self._forms[stage, kind]

    def announce(self, stage: int, kind: Any, form: Form) -> bool:
        """Note what ``stage`` returns for micro-batches of ``kind``. Returns whether that is news.

        Raises EngineError where it is not what it was.
        """
        known = self._forms.setdefault((stage, kind), form)
        if known != form:
            raise EngineError(
                f"pipeline stage {stage} returned {form.shapes} of {form.dtypes} for a micro-batch of a kind for which "
                f"it had returned {known.shapes} of {known.dtypes}: what travels must follow from the shapes of the "
                "batch. Keep hidden states rectangular, or pad them to one length"
            )
        return known is form

    def send_output(
        self, stage: int, micro_batch: int, kind: Any, form: Form, tensors: list[Tensor], sum_: int
    ) -> None:
        """What ``stage`` returned, to the next stage. Raises EngineError where it is not as it was announced."""
        peer, name = self._rank_of(stage + 1), _name("hidden states", micro_batch, stage, stage + 1)
        if self.announce(stage, kind, form):
            header = torch.frombuffer(bytearray(form.encode(sum_)), dtype=torch.uint8).to(self._device)
            length = torch.tensor([header.numel()], device=self._device)
            self._keep(self._group.send(length, peer, f"the size of the announcement of {name}"), length)
            self._keep(self._group.send(header, peer, f"the announcement of {name}"), header)
        for index, tensor in enumerate(tensors):
            data = tensor.detach().contiguous()
            self._keep(self._group.send(data, peer, f"{name}, tensor {index}"), data)

    def receive_form(self, stage: int, micro_batch: int, kind: Any, sum_: int) -> None:
        """The announcement of what ``stage - 1`` returns. Raises EngineError where the peer has another micro-batch."""
        peer, name = self._rank_of(stage - 1), _name("hidden states", micro_batch, stage - 1, stage)
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._group.receive(length, peer, f"the size of the announcement of {name}").wait()
        header = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
        self._group.receive(header, peer, f"the announcement of {name}").wait()
        form, theirs = Form.decode(bytes(header.tolist()))
        if theirs != sum_:
            raise EngineError(
                f"micro-batch {micro_batch} is not the same on pipeline stages {stage - 1} and {stage}: every pipeline "
                "rank of a data-parallel shard must load the same batches (engine.mesh.dp_rank of mesh.dp_size tells "
                "the shard; the engine's own loader does it)"
            )
        self._forms[stage - 1, kind] = form

    def post_output(self, stage: int, micro_batch: int, kind: Any) -> tuple[list[Tensor], list[Transfer]]:
        """Receive what ``stage - 1`` returned; its form is known."""
        peer, name = self._rank_of(stage - 1), _name("hidden states", micro_batch, stage - 1, stage)
        tensors = self._forms[stage - 1, kind].empty(self._device)
        return tensors, [self._group.receive(t, peer, f"{name}, tensor {i}") for i, t in enumerate(tensors)]

    def send_gradients(self, stage: int, micro_batch: int, gradients: list[Tensor]) -> None:
        """Those of what ``stage`` received, to the stage before."""
        peer, name = self._rank_of(stage - 1), _name("gradients", micro_batch, stage, stage - 1)
        for index, gradient in enumerate(gradients):
            data = gradient.contiguous()
            self._keep(self._group.send(data, peer, f"{name}, tensor {index}"), data)

    def post_gradients(self, stage: int, micro_batch: int, kind: Any) -> tuple[list[Tensor], list[Transfer]]:
        """Receive those of what ``stage`` returned, in the order of the tensors that want one."""
        peer, name = self._rank_of(stage + 1), _name("gradients", micro_batch, stage + 1, stage)
        form = self._forms[stage, kind]
        tensors = [t for t, wants in zip(form.empty(self._device), form.wants_gradient, strict=True) if wants]
        return tensors, [self._group.receive(t, peer, f"{name}, tensor {i}") for i, t in enumerate(tensors)]

    def _keep(self, pending: Transfer, data: Tensor) -> None:
        self._sent = [(works, held) for works, held in self._sent if not works.is_over()]
        self._sent.append((pending, data))

    def flush(self) -> None:
        """All that was sent has been taken."""
        for pending, _ in self._sent:
            pending.wait()
        self._sent.clear()


def _name(what: str, micro_batch: int, sender: int, receiver: int) -> str:
    return f"{what} of micro-batch {micro_batch} from stage {sender} to {receiver}"
