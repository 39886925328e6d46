"""A proposed config as text with comments that say why."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Any

from engine.plan.estimates import format_bytes
from engine.plan.findings import plural
from engine.plan.propose import USABLE, Choice, Wish, learning_rate, shape, target_tokens
from engine.plan.render import SHARDED
from engine.plan.sizes import format_count

COLUMNS = 96


def render(wish: Wish, choice: Choice) -> str:
    """The file: JSON with ``//`` comments, which this engine reads; the keys are DeepSpeed's."""
    lines = ["{"]
    lines += _comment(_head(wish, choice))
    for why, keys in _groups(wish, choice).items():
        lines += ["", *_comment(why)]
        lines += [f"    {json.dumps(key)}: {_value(choice.config[key])}," for key in keys]
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, "}"]) + "\n"


def _value(value: Any, depth: int = 1) -> str:
    """One line where it fits, else a key a line."""
    text = json.dumps(value)
    if len(text) + 4 * depth <= COLUMNS - 20 or not isinstance(value, dict):
        return text
    margin = "    " * depth
    rows = [f"{margin}    {json.dumps(key)}: {_value(inner, depth + 1)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{margin}}}"


def _comment(text: str) -> list[str]:
    return [f"    // {line}" for line in wrap(text, COLUMNS - 7, break_long_words=False, break_on_hyphens=False)]


def _head(wish: Wish, choice: Choice) -> str:
    model = f"{format_count(wish.num_parameters)} parameters"
    if wish.num_gpus == 0:
        return f"{model} on a CPU, sequences of {wish.sequence_length:,} tokens."
    layers, width = shape(wish.num_parameters)
    assert wish.memory_bytes is not None
    return (
        f"{model} on {plural(wish.num_gpus, 'GPU')} with {format_bytes(wish.memory_bytes)}, sequences of "
        f"{wish.sequence_length:,} tokens. Estimated need of a GPU: {format_bytes(choice.state_bytes)} model states + "
        f"{format_bytes(choice.activation_bytes)} activations (of a GPT with {layers} layers of width {width}) = "
        f"{format_bytes(choice.needed_bytes)}, within {USABLE:.0%} of its memory."
    )


def _groups(wish: Wish, choice: Choice) -> dict[str, list[str]]:
    groups = {_batch(wish, choice): ["train_batch_size", "train_micro_batch_size_per_gpu"]}
    if wish.precision in choice.config:
        groups[_precision(wish)] = [wish.precision]
    if "zero_optimization" in choice.config:
        groups[_stage(wish, choice)] = ["zero_optimization"]
    groups[_optimizer(wish)] = ["gradient_clipping", "optimizer"]
    groups[_schedule(wish, choice)] = ["scheduler"]
    return groups


def _batch(wish: Wish, choice: Choice) -> str:
    total = choice.config["train_batch_size"]
    accumulation = choice.accumulation_steps
    batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    text = (
        f"{plural(choice.micro_batch_size, 'sequence')} x {batches} x {plural(wish.ranks, 'rank')} = "
        f"{plural(total, 'sequence')}, {total * wish.sequence_length:,} tokens an update; about "
        f"{target_tokens(wish.num_parameters):,} suit the size of the model."
    )
    return f"{text} Accumulation follows from the two numbers, on any number of ranks."


def _precision(wish: Wish) -> str:
    if wish.precision == "bf16":
        return "bf16 needs no loss scaling. GPUs older than Ampere lack it: use fp16 there."
    return "fp16 scales the loss by itself; bf16 would need no scaling, on Ampere and later."


def _stage(wish: Wish, choice: Choice) -> str:
    what = SHARDED[choice.stage]
    return (
        f"Stage {choice.stage}: {what}; a rank sends {format_bytes(choice.sent_bytes)} per update and keeps "
        f"{format_bytes(choice.state_bytes)} of model states. Instead, {'; '.join(choice.others)}."
    )


def _optimizer(wish: Wish) -> str:
    return (
        f"Settings of GPT-3 (Brown et al., 2020): a learning rate of {learning_rate(wish.num_parameters):g} suits the "
        "size. Clipping is on by default; it is written out because people look for it."
    )


def _schedule(wish: Wish, choice: Choice) -> str:
    warmup = choice.config["scheduler"]["params"]["warmup_num_steps"]
    tokens = wish.steps * choice.config["train_batch_size"] * wish.sequence_length
    return (
        f"{plural(warmup, 'update')} of warm-up, then a cosine to a tenth. {wish.steps:,} updates are "
        f"{tokens:,} tokens: set total_num_steps to the length of your run."
    )
