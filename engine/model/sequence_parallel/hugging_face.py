"""Hugging Face's models: their attention comes by the registry of attention functions.

Source: https://huggingface.co/docs/transformers/attention_interface. The model is given an attention function of ours;
instead of a mask it hands that function what the batch says of padding and documents, for whole sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.contracts import EngineError
from engine.data.sequences import Dimensions
from engine.model.sequence_parallel.attention import SWITCH_OFF
from engine.model.sequence_parallel.interception import Interception
from engine.model.sequence_parallel.visibility import Visibility

_numbers = itertools.count()


class HuggingFace:
    """``shifts_labels``: whether the model's own loss compares each token with the label of the next."""

    def __init__(self, model: nn.Module, interception: Interception) -> None:
        self._interception = interception
        self._documents: Tensor | None = None
        self.shifts_labels = False
        self._outermost: Any = None
        transformers = sys.modules.get("transformers")
        if transformers is None:
            return
        found = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
        if not found:
            return
        outermost = found[0]
        name = type(outermost).__name__
        if not hasattr(outermost, "set_attn_implementation") or not hasattr(transformers, "AttentionMaskInterface"):
            raise EngineError(
                f"sequence parallel: {name} needs transformers 4.56 or newer, where masks and attention can be "
                f"replaced; this is {transformers.__version__}"
            )
        if not getattr(outermost, "_supports_flash_attn", False):
            raise EngineError(
                f"sequence parallel: the attention of {name} is more than causality, windows and padding "
                "(transformers does not mark it as fit for flash attention), so its masks cannot be cut; "
                f"{SWITCH_OFF}"
            )
        self._attend_whole = transformers.AttentionInterface()["sdpa"]
        self._mask_whole = transformers.AttentionMaskInterface()["sdpa"]
        own_name = f"sequence_slices_{next(_numbers)}"
        transformers.AttentionInterface.register(own_name, _weakly(self._attend))
        transformers.AttentionMaskInterface.register(own_name, _weakly(self._mask))
        self._outermost, self._before = outermost, outermost.config._attn_implementation
        outermost.set_attn_implementation(own_name)
        loss = getattr(model, "loss_function", None)
        self.shifts_labels = getattr(loss, "__name__", "") == "ForCausalLMLoss"

    def close(self) -> None:
        """The model attends as it did."""
        if self._outermost is not None:
            self._outermost.set_attn_implementation(self._before)
            self._outermost = None

    @contextlib.contextmanager
    def forward(self, batch: Mapping[str, Any], dimensions: Dimensions) -> Iterator[None]:
        """Around a forward on slices of ``batch``, which is whole."""
        self._documents = _documents(batch, dimensions)
        try:
            yield
        finally:
            self._documents = None

    def _mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if not self._interception.is_sliced:
            mask: Tensor | None = self._mask_whole(*args, **kwargs)
            return mask
        return self._documents

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not self._interception.is_sliced:
            whole: tuple[Tensor, None] = self._attend_whole(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )
            return whole
        self._interception.note_call()
        attention = self._interception.attention
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = kwargs.get("sliding_window")
        for argument in ("position_bias", "softcap", "s_aux"):
            if kwargs.get(argument) is not None:
                raise EngineError(
                    f"sequence parallel: {type(module).__name__} attends with {argument}, which cannot be cut; "
                    f"{SWITCH_OFF}"
                )
        if window is not None and not causal:
            raise EngineError(
                f"sequence parallel: {type(module).__name__} attends in a window to both sides, which is not built "
                f"here; {SWITCH_OFF}"
            )
        if attention_mask is not None and attention_mask.ndim == 4:  # the batch's own, whole along the keys
            visibility = Visibility(mask=attention.whole_mask(attention_mask, query.shape[2]))
        else:
            visibility = Visibility(causal, window, documents=attention_mask)
        output = attention(query, key, value, visibility, dropout, scaling)
        return output.transpose(1, 2).contiguous(), None


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a registry that lasts as long as the process, which must not keep the model."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None, "a model attends after its engine is gone"
        return bound(*args, **kwargs)

    return call


def _documents(batch: Mapping[str, Any], dimensions: Dimensions) -> Tensor | None:
    """(B, S): the document of every token, -1 - document where ``attention_mask`` (B, S) says that it is padding.

    Documents are told apart, as transformers does, where positions begin anew and there is no ``attention_mask``.
    """
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if isinstance(mask, Tensor) and mask.ndim == 2 and dimensions.get("attention_mask") == (1,):
        return None if bool(mask.all()) else torch.where(mask.bool(), 0, -1)
    if mask is not None or not isinstance(positions, Tensor) or dimensions.get("position_ids") != (1,):
        return None
    documents = torch.nn.functional.pad((positions.diff(dim=1) != 1).cumsum(dim=1), (1, 0))
    if not bool(documents.any()):
        return None
    tokens = next((value for value in batch.values() if isinstance(value, Tensor) and value.ndim >= 2), positions)
    return documents.expand(tokens.shape[0], -1)
