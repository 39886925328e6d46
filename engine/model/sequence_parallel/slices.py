"""The Slices role: what of a batch this rank works on, and the loss of the whole from that of the slice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError
from engine.data.batch import describe, scalar_loss
from engine.data.sequences import (
    REMEDY,
    Dimensions,
    SequenceKeys,
    batch_shape,
    named_tensors,
    sequence_dimensions,
)
from engine.model.sequence_parallel.hugging_face import HuggingFace
from engine.model.sequence_parallel.interception import Interception
from engine.model.sequence_parallel.layout import Layout
from engine.model.sequence_parallel.losses import IGNORED, share_of, whole_loss
from engine.model.sequence_parallel.proof import Proof
from engine.torch_compat import tree_map_named_tensors

LABELS = ("labels", "label", "targets", "target")
KEYS = "sequence_parallel_size, parallel.context_parallel"


class SequenceSlices:
    """Cuts the sequences of every batch that `Engine.__call__` gets, so in evaluation as well.

    Tensors along the sequence (engine/data/sequences.py) are cut to this rank's tokens; of masks of queries and keys
    the queries alone, and masks of keys stay whole. ``position_ids`` are those of the whole sequence. Labels that the
    model shifts by itself (Hugging Face's causal models) are shifted before they are cut.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        groups: tuple[ShardGroup, ...],
        interception: Interception,
        hugging_face: HuggingFace,
        keys: SequenceKeys | None,
        ledger: Ledger,
        device: torch.device,
        is_16_bit: bool,
    ) -> None:
        self.layout, self.groups, self.interception, self.hugging_face = layout, groups, interception, hugging_face
        self.name, self.keys, self.device = type(model).__name__, keys, device
        self.is_16_bit = is_16_bit
        self._signature = inspect.signature(model.forward)
        self._shifts_labels = hugging_face.shifts_labels or "shift_labels" in self._signature.parameters
        self.has_loss_fn = False
        self._shape: tuple[int, int] | None = None
        self._proof = Proof(self, ledger)

    def forward(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises EngineError for a batch that cannot be cut, and for a model that does not work on slices."""
        batch = self._named(args, kwargs)
        shape = self._checked_shape(batch)
        self._check_labels(batch, self.dimensions(batch, shape))
        if not self._proof.is_done:
            self._proof.run(model, batch, shape)
        self._shape = shape
        return self.on_slice(model, batch, shape)

    def on_slice(self, model: Callable[..., Any], batch: dict[str, Any], shape: tuple[int, int]) -> Any:
        """The model's output for this rank's slice of the whole ``batch``, its loss that of the whole."""
        batch, dimensions = self._prepared(batch, self.dimensions(batch, shape), shape)
        own = self.cut(batch, dimensions, shape[1])
        with self.interception.forward(), self.hugging_face.forward(batch, dimensions):
            output = model(**own)
        self.interception.check()
        loss = scalar_loss(output)
        if loss is None:
            if torch.is_grad_enabled() and not self.has_loss_fn:
                raise EngineError(
                    f"sequence parallel: {self.name} returned {describe(output)} for a slice of the sequences and no "
                    "loss, so targets outside the model would not fit it. Let the model compute the loss, or pass "
                    "loss_fn= to initialize() and call train_batch()"
                )
            return output
        return whole_loss(output, self._share(batch, own), self.groups)

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if loss_fn is None:
            return None
        self.has_loss_fn = True

        def loss_of_slices(outputs: Any, targets: Any) -> Any:
            if self._shape is None:
                return loss_fn(outputs, targets)
            whole = {"1": targets}
            dimensions = sequence_dimensions(named_tensors(whole), self._shape, self.keys, False)
            own = self.cut(whole, dimensions, self._shape[1])
            labels, own_labels = (
                next((tensors[name] for name in dimensions), None) for tensors in map(named_tensors, (whole, own))
            )
            return whole_loss(
                loss_fn(outputs, own["1"]), share_of(labels, own_labels, self.layout.num_slices), self.groups
            )

        return loss_of_slices

    def close(self) -> None:
        """The model is its author's again."""
        self.hugging_face.close()
        self.interception.close()

    def dimensions(self, batch: Any, shape: tuple[int, int]) -> Dimensions:
        """What of a whole batch runs along the sequence."""
        return sequence_dimensions(named_tensors(batch), shape, self.keys, not self.has_loss_fn)

    def without_cache(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with ``use_cache=False``, where the model takes it and they do not say."""
        takes_it = "use_cache" in self._signature.parameters
        return {"use_cache": False, **batch} if takes_it else dict(batch)

    def cut(self, batch: Any, dimensions: Dimensions, length: int) -> Any:
        """This rank's tokens of what runs along sequences of ``length``."""

        def cut(name: str, tensor: Tensor) -> Tensor:
            own = dimensions.get(name, ())
            if not own or _tells_of_keys(name, tensor, own):
                return tensor
            rows = own[0]  # of a mask the queries; all keys stay
            if tensor.shape[rows] != length:
                return tensor
            indices = self.layout.slice_indices(length, tensor.device)
            return tensor.index_select(rows, indices)

        return tree_map_named_tensors(cut, batch)

    # --- inside ------------------------------------------------------------------------------------------------

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by the names of the model's forward."""
        batch: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                batch |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise EngineError(
                    f"{KEYS}: forward of {self.name} takes *{name}, so nothing says what its arguments are; name them"
                )
            else:
                batch[name] = value
        return batch

    def _checked_shape(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        tensors = named_tensors(batch)
        shape = batch_shape(tensors, self.keys, not self.has_loss_fn)
        if shape is None:
            there = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items()) or "it has none"
            raise EngineError(
                f"{KEYS}: the batch has no sequence dimension: none of its tensors ({there}) holds token ids, integers "
                f"of shape (batch, sequence); {REMEDY}"
            )
        length, unit = shape[1], self.layout.unit
        if length % unit:
            below, above = length // unit * unit, (length // unit + 1) * unit
            chunks = ", in two chunks a rank of the ring" if self.layout.cp > 1 else ""
            nearest = f"{below} and {above}" if below else str(above)
            raise EngineError(
                f"{KEYS}: sequences of {length} tokens cannot be cut into cp {self.layout.cp} x sp {self.layout.sp} "
                f"equal slices{chunks}: {length} = {length // unit} x {unit} + {length % unit}; the nearest lengths "
                f"that fit are {nearest}. Pad or cut the samples (labels of padding: {IGNORED})"
            )
        return shape

    def _check_labels(self, batch: Mapping[str, Any], dimensions: Dimensions) -> None:
        for name in LABELS:
            if isinstance(batch.get(name), Tensor) and name not in dimensions:
                raise EngineError(
                    f"{KEYS}: {name} ({describe(batch[name])}) does not run along the sequence: a loss that looks at "
                    "sequences as a whole cannot be put together from slices"
                )

    def _prepared(
        self, batch: dict[str, Any], dimensions: Dimensions, shape: tuple[int, int]
    ) -> tuple[dict[str, Any], Dimensions]:
        """With positions, shifted labels, and without a cache, as far as the model takes them."""
        batch, dimensions = dict(batch), dict(dimensions)
        tokens = next(tensor for tensor in named_tensors(batch).values())
        if "position_ids" not in batch:
            batch["position_ids"] = torch.arange(shape[1], device=tokens.device)[None]
            dimensions["position_ids"] = (1,)
        if self._shifts_labels and "shift_labels" not in batch and "labels" in dimensions:
            batch["shift_labels"] = F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORED)
            dimensions["shift_labels"] = dimensions["labels"]
        return self.without_cache(batch), dimensions

    def _share(self, batch: Mapping[str, Any], own: Mapping[str, Any]) -> Tensor | float:
        if batch.get("num_items_in_batch") is not None:  # Hugging Face's: the loss is a sum divided by it
            return 1.0
        name = next((name for name in ("shift_labels", *LABELS) if isinstance(batch.get(name), Tensor)), "")
        return share_of(batch.get(name), own.get(name), self.layout.num_slices)


def _tells_of_keys(name: str, tensor: Tensor, dimensions: tuple[int, ...]) -> bool:
    """Whether this is a mask with one row for all queries, (B, .., 1, S)."""
    is_mask = tensor.dtype == torch.bool or "mask" in name or "bias" in name
    return is_mask and tensor.ndim >= 3 and dimensions == (tensor.ndim - 1,) and tensor.shape[-2] == 1
