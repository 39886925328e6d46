"""The proof that a block may run on some of the tokens: on them it gives what the whole block gives them, the dropped
tokens masked out.

The whole block needs no mask argument for that: its attention runs as matrix products and a softmax, and the dropped
tokens' scores become minus infinity before it. What then still differs depends on tokens in another way: positions that
the block counts by itself (ALiBi, relative position bias), convolutions, recurrences, sums over tokens.

Parameters and hidden states of the proof are random and float64, so that neither a layer that begins at zero nor
rounding hides a difference; all other arguments are the real ones, cut to a few samples and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config.messages import EngineError
from engine.device import same_generators
from engine.model.hidden_state import ArgumentKey, hidden_of, output_hidden, with_hidden
from engine.model.token_layout import Follow, Path, Tokens, cut, keep, map_arguments, take_rows
from engine.random import generator, kept_positions, stream_seed
from engine.torch_compat import SOFTMAX_OPERATIONS, DispatchMode

MAX_SAMPLES, MAX_TOKENS = 2, 512
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}
"""The largest difference of an element, relative to the root mean square of what the block adds to its input."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Call(nn.Module):
    """A block's own forward with other parameters, by `torch.func.functional_call`."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.inner = block, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class _Masked(DispatchMode):
    """Inside, kept tokens do not attend to dropped ones. ``kept``: bool (samples, tokens)."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.mask = (kept.unsqueeze(2) & ~kept.unsqueeze(1)).unsqueeze(1)
        self.num_masked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX_OPERATIONS:
            scores, dim = args[0], args[1]
            num_samples, length = self.mask.shape[0], self.mask.shape[-1]
            is_pairs = scores.ndim >= 3 and tuple(scores.shape[-2:]) == (length, length)
            num_leading = scores.numel() // (length * length)
            if is_pairs and dim in (-1, scores.ndim - 1) and num_leading % num_samples == 0:
                self.num_masked += 1
                each = scores.reshape(num_samples, -1, length, length)
                args = (each.masked_fill(self.mask, -torch.inf).reshape(scores.shape), *args[1:])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def prove(
    block: nn.Module,
    forward: Callable[..., Any],
    arguments: Arguments,
    names: Sequence[str],
    key: ArgumentKey,
    tokens: Tokens,
    readings: list[dict[Path, Follow]],
    seed: int,
) -> tuple[dict[Path, Follow] | None, str]:
    """The first of the ``readings`` under which the proof holds, or None and why it does not for the likeliest.

    ``forward``: the block's own; ``arguments``: those of a real call, the hidden state at ``key``; ``names``: of its
    positional parameters. Draws from no generator of the user's, and leaves the block as it was.
    """
    reasons: list[str] = []
    with _as_in_evaluation(block), same_generators(hidden_of(*arguments, key).device):
        for reading in readings:
            trial = _Trial(block, forward, arguments, names, key, tokens, reading, seed)
            reason = trial.failure()
            if reason is None:
                return reading, ""
            reasons.append(reason)
    return None, reasons[0]


class _Trial:
    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        arguments: Arguments,
        names: Sequence[str],
        key: ArgumentKey,
        tokens: Tokens,
        reading: Mapping[Path, Follow],
        seed: int,
    ) -> None:
        self.call, self.names, self.key, self.reading, self.seed = _Call(block, forward), names, key, reading, seed
        self.num_samples = min(tokens.num_samples, MAX_SAMPLES)
        self.num_tokens = min(tokens.num_tokens, MAX_TOKENS)
        self.small = Tokens(self.num_samples, self.num_tokens, tokens.order)
        self.hidden = hidden_of(*arguments, key)
        self.arguments = self._map(
            lambda path, tensor: cut(tensor.detach(), reading[path], tokens, self.num_samples, self.num_tokens),
            arguments,
        )
        shares = any(follow.shares_tokens for follow in reading.values())
        seeds = [stream_seed(seed, "token_probe", 0 if shares else sample) for sample in range(self.num_samples)]
        self.positions = kept_positions(seeds, self.num_tokens, max(1, self.num_tokens // 2), self.hidden.device)

    def _map(self, function: Callable[[Path, Tensor], Tensor], arguments: Arguments) -> Arguments:
        return map_arguments(function, *arguments, self.names, self.key)

    def failure(self) -> str | None:
        try:
            return self._compare(torch.float64)
        except Exception as error:
            # a kernel or a cast of the block's own that knows no float64
            if self.hidden.dtype == torch.float64:
                return _told(error)
        try:
            return self._compare(self.hidden.dtype)
        except Exception as error:
            return _told(error)

    def _compare(self, dtype: torch.dtype) -> str | None:
        device = self.hidden.device
        random = generator(self.seed, "token_probe_values", device=device)

        def randn(shape: torch.Size) -> Tensor:
            return torch.randn(shape, generator=random, device=device).to(dtype)

        state = {
            name: _randomized(parameter, randn) for name, parameter in self.call.named_parameters(remove_duplicate=True)
        }
        state |= {
            name: buffer.to(dtype) if buffer.is_floating_point() else buffer.clone()
            for name, buffer in self.call.named_buffers()
        }
        shape = (self.num_samples, self.num_tokens)
        shape = shape if self.small.batch_dim == 0 else shape[::-1]
        hidden = randn(torch.Size((*shape, *self.hidden.shape[2:])))
        typed = self._map(lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, self.arguments)
        kept = torch.zeros(self.num_samples, self.num_tokens, dtype=torch.bool, device=hidden.device)
        kept.scatter_(1, self.positions, True)
        masked = _Masked(kept)
        with masked:
            whole = self._run(state, typed, hidden)
        if whole.shape != hidden.shape:
            return f"it changes the shape of its hidden state, from {tuple(hidden.shape)} to {tuple(whole.shape)}"
        follow = self._map(lambda path, tensor: keep(tensor, self.reading[path], self.positions), typed)
        rows = take_rows(hidden, self.positions, self.small)
        found = self._run(state, follow, rows)
        if found.shape != rows.shape:
            return f"it changes the shape of its hidden state, from {tuple(rows.shape)} to {tuple(found.shape)}"
        expected = take_rows(whole, self.positions, self.small)
        unequal = (found - expected).abs().nan_to_num(nan=torch.inf)
        unequal = unequal.masked_fill(found.isnan() & expected.isnan(), 0.0)
        scale = (expected - rows).float().nan_to_num().square().mean().sqrt().item()
        worst = unequal.max().item() / max(scale, 1e-30)
        if worst <= TOLERANCES.get(dtype, 1e-2):
            return None
        unseen = (
            f"; no softmax over {self.num_tokens} x {self.num_tokens} scores was seen" if not masked.num_masked else ""
        )
        return (
            f"with {self.positions.shape[1]} of {self.num_tokens} tokens it gives them other values than the whole "
            f"block does with the dropped ones masked out (off by {worst:.2g} of what it adds{unseen})"
        )

    def _run(self, state: dict[str, Tensor], arguments: Arguments, hidden: Tensor) -> Tensor:
        args, kwargs = with_hidden(*arguments, self.key, hidden)
        name = type(self.call.block).__name__
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(hidden.device.type, enabled=False):
            return output_hidden(torch.func.functional_call(self.call, state, args, kwargs), name)


def _randomized(parameter: Tensor, randn: Callable[[torch.Size], Tensor]) -> Tensor:
    """Matrices keep the size of what passes through them; vectors move a little."""
    if not parameter.is_floating_point():
        return parameter.detach()
    noise = randn(parameter.shape)
    if parameter.ndim >= 2:
        return noise * (parameter.shape[0] / max(1, parameter.numel())) ** 0.5
    return parameter.detach().to(noise.dtype) + 0.1 * noise


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, EngineError):
        return str(error)
    return f"on some of the tokens it fails: {type(error).__name__}: {text[0] if text else ''}"


@contextmanager
def _as_in_evaluation(block: nn.Module) -> Iterator[None]:
    """Without dropout, and without the fused kernel of torch's encoder layer, whose softmax cannot be reached."""
    modules = list(block.modules())
    were = [module.training for module in modules]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in zip(modules, were, strict=True):
            module.training = was
