"""A first config for a model of some size on some GPUs: `propose`, which chooses by the plan's own estimates.

Activations are those of a GPT of the size: layers and width from 12 layers width^2 parameters with 100 units of width
per layer, and 34 bytes per token, layer and unit of width in 16 bit with fused attention (Korthikanti et al., 2022,
arXiv 2205.05198). Batch sizes and learning rates by size are those of Brown et al., 2020 (arXiv 2005.14165, table 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.config import load_config
from engine.config.messages import EngineError
from engine.plan.estimates import estimate_memory, format_bytes
from engine.plan.facts import ModelFacts
from engine.plan.findings import plural
from engine.plan.plan import Plan, World
from engine.plan.resolve import plan as make_plan
from engine.plan.sizes import format_count
from engine.plan.traffic import estimate_traffic

USABLE = 0.9
"""Share of a GPU's memory to plan with: the rest is for the CUDA context, communication buffers and fragmentation."""

BYTES_PER_UNIT = 34
VOCABULARY_SIZE = 50_257
LOGITS_BYTES = 8
"""Per token and vocabulary entry: the logits, their softmax and the gradient."""
WIDTH_PER_LAYER = 100

GPT3 = (
    (125e6, 0.5e6, 6e-4), (350e6, 0.5e6, 3e-4), (760e6, 0.5e6, 2.5e-4), (1.3e9, 1e6, 2e-4), (2.7e9, 1e6, 1.6e-4),
    (6.7e9, 2e6, 1.2e-4), (13e9, 2e6, 1e-4), (175e9, 3.2e6, 0.6e-4),
)  # fmt: skip
"""Parameters, tokens per update, learning rate."""
SMALLEST_BATCH_TOKENS = 8192
SEQUENCES_ON_A_CPU = 4

Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Wish:
    """What there is: ``memory_bytes`` of one GPU (None: unknown, a CPU), ``num_gpus`` 0 for a CPU."""

    num_parameters: int
    num_gpus: int
    memory_bytes: int | None
    sequence_length: int = 2048
    steps: int = 10_000
    precision: Precision = "bf16"

    @property
    def ranks(self) -> int:
        return max(1, self.num_gpus)


@dataclass(frozen=True)
class Choice:
    """A stage and a batch that fit, with what they cost. ``state_bytes`` and ``activation_bytes`` are of one rank."""

    stage: int
    micro_batch_size: int
    accumulation_steps: int
    state_bytes: int
    activation_bytes: int
    sent_bytes: int
    """By one rank, per update."""
    config: dict[str, Any]
    others: tuple[str, ...] = ()
    """Why not the other stages, a clause each."""

    @property
    def needed_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def propose(wish: Wish) -> Choice:
    """The stage that sends the least among those that leave room for a fair batch.

    Raises: EngineError with the arithmetic where not even stage 3 fits.
    """
    options = {stage: _option(wish, stage) for stage in _stages(wish)}
    fitting = [option for option in options.values() if option is not None]
    if not fitting:
        raise EngineError(_too_large(wish))
    roomiest = max(option.micro_batch_size for option in fitting)
    roomy = [option for option in fitting if option.micro_batch_size >= min(4, roomiest)]
    best = min(roomy, key=lambda option: (option.sent_bytes, option.state_bytes))
    others = tuple(_why_not(wish, stage, option) for stage, option in options.items() if option is not best)
    return replace(best, others=others)


def _why_not(wish: Wish, stage: int, option: Choice | None) -> str:
    if option is None:
        return f"stage {stage} does not fit, with {format_bytes(_state_bytes(wish, stage))} of model states"
    return (
        f"stage {stage} would send {format_bytes(option.sent_bytes)} and keep {format_bytes(option.state_bytes)} "
        f"of model states, {plural(option.micro_batch_size, 'sequence')} at a time"
    )


def _stages(wish: Wish) -> tuple[int, ...]:
    return (0,) if wish.ranks == 1 else (0, 1, 2, 3)


def _option(wish: Wish, stage: int) -> Choice | None:
    """The largest power of two of sequences that fits at a stage, up to a rank's share of the batch."""
    states = _state_bytes(wish, stage)
    one = activation_bytes(wish, 1)
    room = math.inf if wish.memory_bytes is None else USABLE * wish.memory_bytes - states
    share = -(-target_batch(wish) // wish.ranks)
    if room < one:
        return None
    at_once = min(room / one, share) if wish.memory_bytes is not None else min(SEQUENCES_ON_A_CPU, share)
    micro = 2 ** int(math.log2(at_once))
    accumulation = 2 ** max(0, round(math.log2(share / micro)))
    config = as_config(wish, stage, micro, accumulation)
    sent = estimate_traffic(_planned(wish, config), _facts(wish)).total_bytes
    return Choice(stage, micro, accumulation, states, activation_bytes(wish, micro), sent, config)


def _state_bytes(wish: Wish, stage: int) -> int:
    estimate = estimate_memory(_planned(wish, as_config(wish, stage, 1, 1)), _facts(wish))
    assert estimate.total_bytes is not None
    return estimate.total_bytes


def _planned(wish: Wish, config: dict[str, Any]) -> Plan:
    return make_plan(load_config(config), World(size=wish.ranks, local_size=wish.ranks))


def _facts(wish: Wish) -> ModelFacts:
    layers, width = shape(wish.num_parameters)
    blocks = tuple(f"block {index}" for index in range(layers))
    block = min(wish.num_parameters, 12 * width * width)
    return ModelFacts(wish.num_parameters, wish.num_parameters, blocks, num_block_parameters=block)


def shape(num_parameters: int) -> tuple[int, int]:
    """Layers and width of a GPT of that size."""
    width = (num_parameters * WIDTH_PER_LAYER / 12) ** (1 / 3)
    return max(1, round(width / WIDTH_PER_LAYER)), max(1, round(width))


def activation_bytes(wish: Wish, micro_batch_size: int) -> int:
    """Bytes that so many sequences keep for backward on one rank, logits included."""
    layers, width = shape(wish.num_parameters)
    wide = 2 if wish.precision == "fp32" else 1
    per_token = wide * BYTES_PER_UNIT * layers * width + LOGITS_BYTES * VOCABULARY_SIZE
    return micro_batch_size * wish.sequence_length * per_token


def target_tokens(num_parameters: int) -> int:
    """Tokens per update that suit a model of that size; smaller models than the table's in proportion."""
    size, tokens, _ = _nearest(num_parameters)
    return int(max(SMALLEST_BATCH_TOKENS, tokens * min(1.0, num_parameters / size) if size == GPT3[0][0] else tokens))


def target_batch(wish: Wish) -> int:
    """Sequences per update."""
    return max(1, target_tokens(wish.num_parameters) // wish.sequence_length)


def learning_rate(num_parameters: int) -> float:
    return _nearest(num_parameters)[2]


def _nearest(num_parameters: int) -> tuple[float, float, float]:
    return min(GPT3, key=lambda row: abs(math.log(row[0] / num_parameters)))


def as_config(wish: Wish, stage: int, micro_batch_size: int, accumulation_steps: int) -> dict[str, Any]:
    """The config as a dict, every key of which DeepSpeed has too."""
    config: dict[str, Any] = {
        "train_batch_size": micro_batch_size * accumulation_steps * wish.ranks,
        "train_micro_batch_size_per_gpu": micro_batch_size,
    }
    if wish.precision != "fp32":
        config[wish.precision] = {"enabled": True}
    if wish.ranks > 1:
        config["zero_optimization"] = {"stage": stage}
    config["gradient_clipping"] = 1.0
    lr = learning_rate(wish.num_parameters)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    warmup = min(max(1, wish.steps // 50), 2000)
    config["scheduler"] = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": wish.steps, "warmup_num_steps": warmup, "warmup_type": "linear",
                   "cos_min_ratio": 0.1},
    }  # fmt: skip
    return config


def _too_large(wish: Wish) -> str:
    assert wish.memory_bytes is not None
    stage = _stages(wish)[-1]
    states, activations = _state_bytes(wish, stage), activation_bytes(wish, 1)
    usable = USABLE * wish.memory_bytes
    message = (
        f"{format_count(wish.num_parameters)} parameters do not fit: at stage {stage} on {plural(wish.ranks, 'GPU')} "
        f"the model states take {format_bytes(states)} a GPU and one sequence of {wish.sequence_length:,} tokens "
        f"{format_bytes(activations)}, and {format_bytes(wish.memory_bytes)} leave {format_bytes(round(usable))} to use"
    )
    for ranks in (2**power for power in range(1, 15)):
        if ranks > wish.ranks and _states_at(wish, ranks) + activations <= usable:
            return f"{message}; {ranks} GPUs would do"
    return f"{message}; take shorter sequences (--sequence-length) or GPUs with more memory"


def _states_at(wish: Wish, ranks: int) -> int:
    return _state_bytes(Wish(**{**vars(wish), "num_gpus": ranks}), 3)
