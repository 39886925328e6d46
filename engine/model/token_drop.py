"""Random layerwise token dropping (Yao et al., arXiv 2211.11586; JSON ``data_efficiency.data_routing.random_ltd``).

In a training forward each chosen block runs on a random part of the tokens, another one for every layer and sample; the
others pass it by. Positions are drawn by (seed, step, layer, sample of the global batch): the same on every split of
that batch, on ranks that share a sample, and where a forward is computed again for its activations. Whatever belongs to
tokens in a block's arguments follows them (token_layout.py), and a block drops tokens only after a proof
(token_probe.py). The model's code stays as it is: `forward` of the blocks is replaced on the instances.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.contracts import EngineError, Place, SavedWork
from engine.data.curriculum import difficulty_at
from engine.mesh import Mesh
from engine.model.hidden_state import hidden_argument, hidden_of, output_hidden, with_hidden, with_output_hidden
from engine.model.replacement import ReplacedForwards, Replacement
from engine.model.token_layout import (
    Follow,
    Path,
    Tokens,
    keep,
    layouts,
    map_arguments,
    map_tensors,
    put_rows,
    signature,
    take_rows,
)
from engine.model.token_probe import prove
from engine.plan import Plan
from engine.plan.plan import TokenDropPlan
from engine.plan.token_drop import SECTION
from engine.random import kept_positions, stream_seed
from engine.torch_compat import in_backward

log = logging.getLogger("engine")


SCALAR = "Train/random_ltd_kept_tokens"


def apply(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Plan,
    section: TokenDropPlan,
    mesh: Mesh,
    saved_work: SavedWork,
) -> TokenDrop:
    """Let the chosen ``blocks`` drop tokens.

    Raises EngineError for a model without repeated blocks, another number of them than the config says, and layers
    that it does not have.
    """
    layers = chosen_layers(section, len(blocks))
    first_sample = (plan.batch.micro_batch_size, mesh.dp_size, mesh.dp_rank)
    token_drop = TokenDrop(section, plan.seed, first_sample, saved_work)
    token_drop.install(model, {layer: blocks[layer] for layer in layers})
    taken = _parameters(blocks[layers[0]].forward)
    if section.mask_name and not {section.mask_name, "*"} & {*taken[0], *taken[1]} and mesh.rank == 0:
        log.warning(
            "%s.model_mask_name is %r, which is no argument of the blocks (%s); masks are found without it",
            SECTION, section.mask_name, ", ".join((*taken[0], *taken[1])),
        )  # fmt: skip
    saved_work.sources.append(token_drop.scalars)
    return token_drop


def chosen_layers(section: TokenDropPlan, num_blocks: int) -> tuple[int, ...]:
    """The layers that drop tokens; without a list all but the first and the last. Raises EngineError."""
    if num_blocks == 0:
        raise EngineError(
            f"{SECTION}: the model has no repeated blocks, so there are no layers that could drop tokens; "
            "model.blocks names them"
        )
    if section.num_layers is not None and section.num_layers != num_blocks:
        raise EngineError(f"{SECTION}.total_layer_num is {section.num_layers}; the model has {num_blocks} blocks")
    if section.layers is not None:
        missing = [layer for layer in section.layers if layer >= num_blocks]
        if missing:
            raise EngineError(
                f"{SECTION}.random_ltd_layer_id names {', '.join(map(str, missing))}; "
                f"the model's blocks are 0 to {num_blocks - 1}"
            )
        return section.layers
    if num_blocks < 3:
        raise EngineError(
            f"{SECTION}: the model has {num_blocks} blocks, and the first and the last keep all tokens; "
            "random_ltd_layer_id names the layers that drop some"
        )
    if section.num_dropping is not None and section.num_dropping != num_blocks - 2:
        raise EngineError(
            f"{SECTION}.random_ltd_layer_num is {section.num_dropping}, and the model has {num_blocks} blocks, "
            f"{num_blocks - 2} of them between the first and the last: random_ltd_layer_id says which are meant"
        )
    return tuple(range(1, num_blocks - 1))


@dataclass(frozen=True)
class Forward:
    """One training forward: where the run is, and how many tokens of a sequence the chosen blocks keep at most."""

    place: Place
    num_kept: int


class TokenDrop(ReplacedForwards[Forward]):
    """What the blocks that drop tokens share."""

    def __init__(
        self, section: TokenDropPlan, seed: int, first_sample: tuple[int, int, int], saved_work: SavedWork
    ) -> None:
        self.section, self.seed, self.saved_work = section, seed, saved_work
        self._micro_batch_size, self._dp_size, self._dp_rank = first_sample
        self._forwards: dict[int, Forward] = {}
        self._last_kept, self._is_here = 0, True

    def install(self, model: nn.Module, blocks: Mapping[int, nn.Module]) -> None:
        """Replace the forwards of ``model`` and of the ``blocks``, by their layer."""
        names = {module: f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
        # of a model that is cut into stages the others' blocks are not in it
        here = [(layer, block) for layer, block in blocks.items() if block in names]
        self._is_here = bool(here)
        on_tokens = [BlockOnTokens(self, block, names[block], layer) for layer, block in here]
        self._put(ModelForward(self, model), *on_tokens)

    def num_kept(self, applied_steps: int) -> int:
        """Tokens that a layer keeps of a sequence, if it has as many, after so many applied steps."""
        return int(difficulty_at(self.section.schedule, applied_steps))

    def scalars(self) -> Mapping[str, float]:
        kept = self._last_kept if self._is_here else self.num_kept(self.saved_work.place().applied_steps)
        return {SCALAR: float(kept)} if kept else {}

    def begin(self) -> Forward:
        """A training forward of the model, for which the engine has seeded the generators."""
        place = self.saved_work.place()
        if any(other.place.global_steps != place.global_steps for other in self._forwards.values()):
            self._forwards.clear()
        forward = Forward(place, self.num_kept(place.applied_steps))
        self._forwards[torch.initial_seed()] = forward
        return forward

    def forward_of(self) -> tuple[Forward, bool] | None:
        """The training forward that a block runs in, and whether it is being computed again; None outside of one.

        A forward is computed again with the generator as it was, so the seed tells which one it is.
        """
        if self.saved_work.passage is not None and in_backward():
            place = self.saved_work.place()
            return Forward(place, self.num_kept(place.applied_steps)), True
        if not in_backward():
            return None if self.under_way is None else (self.under_way, False)
        if not self._forwards:
            return None
        found = self._forwards.get(torch.initial_seed())
        if found is None and len(self._forwards) == 1:
            (found,) = self._forwards.values()
        if found is None:
            raise EngineError(
                f"{SECTION}: activations are computed again without the generator's state of their forward "
                "(preserve_rng_state=False), so which tokens were kept is not known after several forwards in a window"
            )
        return found, True

    def positions(self, forward: Forward, layer: int, tokens: Tokens, shared: bool, device: torch.device) -> Tensor:
        """int64 (samples, kept), ascending; with ``shared`` the same for all samples of the micro-batch."""
        place, size = forward.place, self._micro_batch_size
        first = (place.micro_step * self._dp_size + self._dp_rank) * size + place.first_sample
        # more rows than samples: a curriculum split each sequence into as many that follow each other
        per_sample = max(1, -(-tokens.num_samples * place.num_parts // size))
        samples = (
            [(first, 0)] * tokens.num_samples
            if shared
            else [(first + at // per_sample, at % per_sample) for at in range(tokens.num_samples)]
        )
        seeds = [stream_seed(self.seed, "kept_tokens", place.global_steps, layer, *sample) for sample in samples]
        return kept_positions(seeds, tokens.num_tokens, forward.num_kept, device)

    def note_kept(self, num_kept: int) -> None:
        self._last_kept = num_kept

    def refuse(self, name: str, reason: str) -> None:
        """The step that follows ends the run, on all ranks alike."""
        if self.saved_work.refusal is None:
            self.saved_work.refusal = (
                f"{SECTION}: block {name} cannot drop tokens: {reason}. Positions that a block counts by itself "
                "(ALiBi, relative position bias), convolutions and anything else that mixes tokens outside of softmax "
                "attention do that; leave the layer out of random_ltd_layer_id, or switch random_ltd off"
            )


class ModelForward(Replacement):
    """Marks training forwards."""

    def __init__(self, drop: TokenDrop, model: nn.Module) -> None:
        super().__init__(model)
        self.drop = drop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.module.training and torch.is_grad_enabled()
        with self.drop.inside(self.drop.begin() if trains else None):
            return self.inner(*args, **kwargs)


class BlockOnTokens(Replacement):
    """Runs a block on the kept tokens."""

    def __init__(self, drop: TokenDrop, block: nn.Module, name: str, layer: int) -> None:
        super().__init__(block)
        self.drop, self.name, self.layer = drop, name, layer
        self.names, _ = _parameters(block.forward)
        self.readings: dict[Any, dict[Path, Follow] | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.drop.forward_of()
        if found is None:
            return self.inner(*args, **kwargs)
        forward, again = found
        key = hidden_argument(args, kwargs, self.name)
        hidden = hidden_of(args, kwargs, key)
        if hidden.ndim < 3:
            shape = tuple(hidden.shape)
            self.drop.refuse(self.name, f"its hidden state has the shape {shape}, without a dimension of tokens")
            return self.inner(*args, **kwargs)
        tokens = Tokens.of(hidden, self.drop.section.order)
        num_kept = min(forward.num_kept, tokens.num_tokens)
        if not again:
            self.drop.note_kept(num_kept)
        used = tuple(_without_cache(arg) for arg in args), {name: _without_cache(arg) for name, arg in kwargs.items()}
        reading = self._reading(*used, key, tokens)
        if reading is None or num_kept == tokens.num_tokens:
            return self.inner(*args, **kwargs)
        shared = any(follow.shares_tokens for follow in reading.values())
        positions = self.drop.positions(forward, self.layer, tokens, shared, hidden.device)
        output = self._on_tokens(*used, key, hidden, tokens, reading, positions)
        if not again:
            self.drop.saved_work.drop_tokens(tokens.num_samples * (tokens.num_tokens - num_kept))
        return output

    def _reading(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, tokens: Tokens
    ) -> dict[Path, Follow] | None:
        """Of this kind of call, proven when it first comes; None where the block is refused."""
        leaves: dict[Path, Tensor] = {}

        def note(path: Path, tensor: Tensor) -> Tensor:
            leaves[path] = tensor
            return tensor

        map_arguments(note, args, kwargs, self.names, key)
        kind = (key, signature(leaves, tokens))
        if kind not in self.readings:
            if tokens.num_tokens < 2:
                return None
            possible = layouts(leaves, tokens, self.drop.section.mask_name)
            reading, reason = prove(
                self.module, self.inner, (args, kwargs), self.names, key, tokens, possible, self.drop.seed
            )
            self.readings[kind] = reading
            if reading is None:
                self.drop.refuse(self.name, reason)
        return self.readings[kind]

    def _on_tokens(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int | str,
        hidden: Tensor,
        tokens: Tokens,
        reading: Mapping[Path, Follow],
        positions: Tensor,
    ) -> Any:
        whole: dict[int, Tensor] = {}

        def follow(path: Path, tensor: Tensor) -> Tensor:
            kept = keep(tensor, reading[path], positions)
            whole[id(kept)] = tensor
            return kept

        new_args, new_kwargs = map_arguments(follow, args, kwargs, self.names, key)
        rows = take_rows(hidden, positions, tokens)
        new_args, new_kwargs = with_hidden(new_args, new_kwargs, key, rows)
        output = self.inner(*new_args, **new_kwargs)
        found = output_hidden(output, self.name)
        # what is handed through, as a bias for the next block, goes on whole
        output = map_tensors(lambda _, tensor: whole.get(id(tensor), tensor), output)
        return with_output_hidden(output, put_rows(hidden, found, positions, tokens))


def _parameters(forward: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Names of the positional and of the other parameters; "*" where it takes any keyword."""
    positional, others = [], []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter.name)
        elif parameter.kind == parameter.KEYWORD_ONLY:
            others.append(parameter.name)
        elif parameter.kind == parameter.VAR_KEYWORD:
            others.append("*")
    return positional, others


def _without_cache(value: Any) -> Any:
    """Keys and values kept for generation have no use in training, and none that fit where tokens are dropped."""
    is_cache = callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))
    return None if is_cache else value
