"""Where the calls of `torch.nn.functional.scaled_dot_product_attention` go while a model works on slices.

Calls are diverted inside the forwards of the model and of its blocks, also when activation checkpointing runs a block,
or a part of one, again in the backward. Outside of those forwards torch's function is in its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.contracts import EngineError
from engine.model.replacement import ReplacedForwards, Replacement
from engine.model.sequence_parallel.attention import SWITCH_OFF, SlicedAttention, attend_whole
from engine.torch_compat import at_end_of_backward, backward_under_way, tree_leaves


class Interception(ReplacedForwards[None]):
    """Diverts attention to ``attention`` and notes which blocks called it.

    ``is_sliced``: whether the model's forward that ran last, or runs, is on slices. A direct call of the module sees
    whole sequences and torch's own attention.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], attention: SlicedAttention) -> None:
        self.attention = attention
        self.is_sliced = False
        self._entering = False
        self._num_calls = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._silent: dict[nn.Module, bool] = {}
        self._in_backward = contextlib.ExitStack()
        self._backward: int | None = None
        self._blocks = list(blocks)
        self._put(ModelForward(self, model), *(BlockForward(self, block) for block in blocks))

    def note_call(self) -> None:
        """A call of attention that reached this class another way (engine/model/sequence_parallel/hugging_face.py)."""
        self._num_calls += 1

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the whole model on slices."""
        self._entering = True
        try:
            with self.diverted():
                yield
        finally:
            self._entering = False

    def check(self) -> None:
        """After a forward on slices. Raises EngineError for blocks whose tokens met by none of the ways known here.

        A model that has blocks must have met once: later forwards may pass by all of them (layer drop).
        """
        silent = [self._names[block] for block, is_silent in self._silent.items() if is_silent]
        self._silent.clear()
        kind = type(self._blocks[0]).__name__ if self._blocks else ""
        if self._num_calls and not silent:
            if not self._blocks:
                self._num_calls = 0
            return
        where = f"{', '.join(silent[:3])}{' ...' if len(silent) > 3 else ''} ({kind})" if silent else "the model"
        raise EngineError(
            f"sequence parallel: {where} made no call of torch.nn.functional.scaled_dot_product_attention, so nothing "
            "lets its tokens see those of other slices. Call it as F.scaled_dot_product_attention, by that name at the "
            "time of the call (nn.MultiheadAttention does with need_weights=False; Hugging Face models do where they "
            f"support attention interfaces), or {SWITCH_OFF}"
        )

    def begin_forward(self) -> None:
        """The model is called: on slices if `forward` is around it."""
        self._in_backward.close()  # of a backward that raised
        self.is_sliced, self._entering = self._entering, False

    def divert_backward(self, gradient: Tensor) -> None:
        """Divert calls for the rest of the backward that has come to what a block returned: the block may compute again
        what its own forward has checkpointed."""
        number = backward_under_way()
        if number != self._backward:
            self._in_backward.close()
            self._in_backward.enter_context(self.diverted())
            self._in_backward.callback(setattr, self, "_backward", None)
            self._backward = number
            at_end_of_backward(self._in_backward.close)

    @contextlib.contextmanager
    def block(self, block: nn.Module) -> Iterator[None]:
        """Around a forward of ``block`` on slices, which may be that of a backward."""
        before = self._num_calls
        with self.diverted():
            yield
        self._silent[block] = self._num_calls == before

    @contextlib.contextmanager
    def diverted(self) -> Iterator[None]:
        # torch's fused encoder layers would attend without calling anything
        fast_path, here = torch.backends.mha.get_fastpath_enabled(), F.scaled_dot_product_attention
        torch.backends.mha.set_fastpath_enabled(False)
        F.scaled_dot_product_attention = self._attend
        try:
            yield
        finally:
            F.scaled_dot_product_attention = here
            torch.backends.mha.set_fastpath_enabled(fast_path)

    @functools.cached_property
    def _attend(self) -> Callable[..., Any]:
        @functools.wraps(attend_whole)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            self._num_calls += 1
            return self.attention.torch_signature(*args, **kwargs)

        return scaled_dot_product_attention


class ModelForward(Replacement):
    """Notes whether the model is called on slices."""

    def __init__(self, interception: Interception, model: nn.Module) -> None:
        super().__init__(model)
        self._interception = interception

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._interception.begin_forward()
        return self.inner(*args, **kwargs)


class BlockForward(Replacement):
    """Diverts the attention of a block, also when activation checkpointing runs it again."""

    def __init__(self, interception: Interception, block: nn.Module) -> None:
        super().__init__(block)
        self._interception = interception

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._interception.is_sliced:
            return self.inner(*args, **kwargs)
        with self._interception.block(self.module):
            output = self.inner(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._interception.divert_backward)
        return output
