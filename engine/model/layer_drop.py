"""``progressive_layer_drop``: in training, layers are left out at random, deep ones more often than early ones.

Zhang & He, arXiv 2010.13369. In each micro-batch layer l of L is kept with the probability
``p = 1 - l / L * (1 - theta)``, where theta falls from 1 with the steps (engine/plan/layer_drop.py). Instead of
``block(hidden)`` a kept layer gives ``hidden + (block(hidden) - hidden) / p``, and one that is left out ``hidden``: on
average what the plain layer gives. ``"compat": "deepspeed"`` draws with the p of the layer before, as its example does.

The gate sits inside the block's forward, so what ZeRO gathers around it never depends on the gate. Gates come from
(seed, step, micro-batch, layer) alone: every rank draws the same ones, and a resumed run those of the first.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.contracts import EngineError, LossSum, SavedWork
from engine.data.batch import count_tokens
from engine.device import same_generators
from engine.model.hidden_state import hidden_argument, hidden_of, output_hidden, with_output_hidden
from engine.model.replacement import ReplacedForwards, Replacement
from engine.plan import LayerDropPlan, Plan
from engine.plan.layer_drop import SECTION, keep_probability, theta_in
from engine.random import stream_seed
from engine.torch_compat import in_backward, num_writes, tree_leaves

log = logging.getLogger("engine")

ARGUMENTS = ("progressive_layer_drop", "pld_theta")
"""What DeepSpeed calls a model with."""
PLAIN = (type(None), bool, int, float, str)


def apply(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Plan,
    section: LayerDropPlan,
    saved_work: SavedWork,
    rank: int,
) -> LayerDrop:
    """Put gates before ``blocks``, in place, or hand theta to a model that asks for it.

    Raises EngineError for a model that has neither repeated blocks nor the two arguments.
    """
    takes_theta = set(ARGUMENTS) <= set(inspect.signature(model.forward).parameters)
    if takes_theta and rank == 0:
        log.warning(
            "%s: %s.forward takes pld_theta, so it is handed theta and drops layers itself; the engine drops none, and "
            "counts none as skipped",
            SECTION,
            type(model).__name__,
        )
    if takes_theta and plan.pipeline is not None:
        raise EngineError(
            f"{SECTION}: {type(model).__name__}.forward takes pld_theta and would leave layers out by itself; under "
            f"pipeline.stages {plan.degrees.pp} no stage knows those of the others. Switch the section off"
        )
    if not takes_theta and not blocks:
        raise EngineError(
            f"{SECTION}: {type(model).__name__} has no repeated blocks that could be left out; name their container "
            f"with model.blocks, let forward take {' and '.join(ARGUMENTS)}, or switch the section off"
        )
    result = LayerDrop(section, plan.seed, () if takes_theta else blocks, saved_work)
    result.install(model)
    return result


@dataclass
class Drawn:
    """The gates of one training forward. ``kept`` and ``scales`` (1 / p) by layer; ``num_tokens`` (local) of it."""

    kept: tuple[bool, ...]
    scales: tuple[float, ...]
    num_tokens: int
    counted: set[int] = field(default_factory=set)
    """The layers left out that the ledger has."""


class LayerDrop(ReplacedForwards[Drawn]):
    """Draws the gates of every training forward."""

    def __init__(
        self, plan: LayerDropPlan, seed: int, blocks: Sequence[nn.Module] = (), saved_work: SavedWork | None = None
    ) -> None:
        self.plan, self.num_layers = plan, len(blocks)
        self._seed, self._blocks, self._saved_work = seed, list(blocks), saved_work or SavedWork()
        self._last: Drawn | None = None
        self._answering: Drawn | None = None
        self._by_passage: dict[Hashable, Drawn] = {}
        """Of the micro-batches through this rank's pipeline stages, in the window under way."""

    def get_theta(self) -> float:
        """Theta of the step under way."""
        place = self._saved_work.place()
        return theta_in(self.plan, place.applied_steps, place.global_steps)

    def get_state(self) -> dict[str, Any]:
        """What DeepSpeed calls a model with."""
        return dict(zip(ARGUMENTS, (True, self.get_theta()), strict=True))

    def install(self, model: nn.Module) -> None:
        """Replace the forwards of ``model`` and of the blocks."""
        self._saved_work.sources.append(lambda: {"Train/pld_theta": self.get_theta()})
        if not self.num_layers:
            self._put(HandedTheta(self, model))
        elif self.plan.theta < 1.0 and self.plan.gamma > 0.0:
            names = {module: name for name, module in model.named_modules()}
            # of a model that is cut into stages the others' blocks are not in it
            here = [(index, block) for index, block in enumerate(self._blocks) if block in names]
            gates = [Gate(self, block, names[block], index) for index, block in here]
            self._put(MarkedForward(self, model), *gates)

    def draw(self, num_tokens: int = 0) -> Drawn:
        """The gates of the training forward that is under way."""
        place, theta = self._saved_work.place(), self.get_theta()
        lower = range(1, self.num_layers + 1)
        keep = [keep_probability(layer, self.num_layers, theta) for layer in lower]
        drawn_with = [keep_probability(layer - 1, self.num_layers, theta) for layer in lower]
        chances = drawn_with if self.plan.deepspeed else keep
        numbers = (
            stream_seed(self._seed, "layer_drop", place.global_steps, place.micro_step, layer) / 2.0**63
            for layer in lower
        )
        kept = tuple(number < chance for number, chance in zip(numbers, chances, strict=True))
        return Drawn(kept, tuple(1.0 / p for p in keep), num_tokens)

    def gates(self) -> Drawn | None:
        """Of the training forward under way, or of the one whose activations a backward computes again."""
        if self.under_way is not None or not in_backward():
            return self.under_way
        if self._saved_work.passage is not None:
            return self._by_passage.get(self._saved_work.passage)
        return self._answering or self._last

    def skip(self, drawn: Drawn, index: int) -> None:
        """The block was left out; the ledger has it once a forward."""
        if index not in drawn.counted:
            drawn.counted.add(index)
            self._saved_work.skip_layer(drawn.num_tokens)

    def begin(self, num_tokens: int) -> Drawn:
        """A training forward of the model, of so many tokens (local)."""
        drawn = self.gates() or self.draw(num_tokens)
        if self._saved_work.passage is not None:
            self._by_passage[self._saved_work.passage] = drawn
        return drawn

    def announce(self, output: Any, drawn: Drawn) -> None:
        """A backward through ``output`` needs these gates again if it recomputes activations, whatever forwards came
        in between: it says so before it reaches any block."""
        self._last, self._answering = drawn, None

        def answer(gradient: Tensor) -> None:
            self._answering = drawn

        for leaf in tree_leaves(output.total if isinstance(output, LossSum) else output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(answer)


class HandedTheta(Replacement):
    """The forward of a model that drops layers itself."""

    def __init__(self, drop: LayerDrop, model: nn.Module) -> None:
        super().__init__(model)
        self._drop = drop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **{**kwargs, **self._drop.get_state()} if self.module.training else kwargs)


class MarkedForward(Replacement):
    """The forward of the model whose blocks have gates."""

    def __init__(self, drop: LayerDrop, model: nn.Module) -> None:
        super().__init__(model)
        self._drop = drop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.module.training and torch.is_grad_enabled()
        drawn = self._drop.begin(count_tokens((args, kwargs))) if trains else None
        with self._drop.inside(drawn):
            output = self.inner(*args, **kwargs)
        if drawn is not None:
            self._drop.announce(output, drawn)
        return output


class Gate(Replacement):
    """The forward of one block: its own, scaled, or a way past it."""

    def __init__(self, drop: LayerDrop, block: nn.Module, name: str, index: int) -> None:
        super().__init__(block)
        self._drop, self._name, self._index = drop, f"{SECTION}: block {name}", index
        self._returns: Any = None
        """What the block returns, with an empty tensor of its dtype as hidden state; None until it was called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        drawn = self._drop.gates()
        if drawn is None or not self.module.training:
            return self.inner(*args, **kwargs)
        args, kwargs = without_empty_caches(args, kwargs)
        hidden = hidden_of(args, kwargs, hidden_argument(args, kwargs, self._name))
        if not drawn.kept[self._index]:
            self._drop.skip(drawn, self._index)
            if self._returns is None:
                self._learn(args, kwargs)
            return with_output_hidden(self._returns, hidden.to(output_hidden(self._returns, self._name).dtype))
        writes = num_writes(hidden)
        output = self.inner(*args, **kwargs)
        after = self._check(output, hidden, writes)
        scale = drawn.scales[self._index]
        if scale == 1.0:
            return output
        return with_output_hidden(output, torch.lerp(hidden.to(after.dtype), after, scale))

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the block once for what it returns, in a run that begins with it left out; nothing remains of it."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        hidden = hidden_of(args, kwargs, hidden_argument(args, kwargs, self._name))
        writes = num_writes(hidden)
        with torch.no_grad(), same_generators(hidden.device):
            self._check(self.inner(*args, **kwargs), hidden, writes)
            for buffer, before in buffers:
                buffer.copy_(before)

    def _check(self, output: Any, hidden: Tensor, writes: int) -> Tensor:
        """The hidden state in ``output``. Raises EngineError for a block that cannot be passed by."""
        after = output_hidden(output, self._name)
        if after.shape != hidden.shape:
            raise EngineError(
                f"{self._name} makes a hidden state of {tuple(after.shape)} from one of {tuple(hidden.shape)}: left "
                "out, it could not hand on its input in place of its output; name other blocks with model.blocks, or "
                "switch the section off"
            )
        if num_writes(hidden) != writes:
            raise EngineError(
                f"{self._name} writes into its input, so the layer cannot be scaled against it: add to a new tensor "
                "(x = x + y in place of x += y), or switch the section off"
            )
        bare = with_output_hidden(output, hidden.new_empty(0, dtype=after.dtype))
        others = [leaf for leaf in tree_leaves(bare) if not isinstance(leaf, PLAIN)][1:]
        if others:
            kinds = ", ".join(sorted({_told(other) for other in others}))
            raise EngineError(
                f"{self._name} returns more than its hidden state ({kinds}), and a layer that is left out has nothing "
                "to give for that; switch off what asks for it (output_attentions, use_cache, auxiliary losses), or "
                "switch the section off"
            )
        self._returns = bare
        return after


def without_empty_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block without a cache of keys and values to be filled, as Hugging Face models bring one even
    in training: it would lack the layers that are left out. A filled one is read as ever."""
    return tuple(map(_no_empty_cache, args)), {name: _no_empty_cache(value) for name, value in kwargs.items()}


def _no_empty_cache(value: Any) -> Any:
    length = getattr(value, "get_seq_length", None)
    return None if length is not None and not isinstance(value, Tensor) and int(length()) == 0 else value


def _told(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
