"""What a key does in this run, in one sentence with the run's own numbers.

A key without an entry here is told by the description of its field. An entry returns None where the description says
it better.
"""

from __future__ import annotations

from typing import Any

from engine.plan.estimates import DTYPE_BYTES, MOMENTS, estimate_memory, format_bytes
from engine.plan.facts import ModelFacts
from engine.plan.findings import plural
from engine.plan.layer_drop import LAYER_DROP_SENTENCES
from engine.plan.learning_rate import curve, peak
from engine.plan.plan import Plan
from engine.plan.render import SHARDED
from engine.plan.sentences_run import OF_THE_RUN, Sentence
from engine.plan.token_drop import TOKEN_DROP_SENTENCES

MANY = 10**9
"""Parameters of an imagined model, to tell bytes per parameter."""


def sentence(path: str, plan: Plan, value: Any) -> str | None:
    """The sentence of this run for a key, None where its description is all there is to say."""
    told = SENTENCES.get(path)
    return None if told is None else told(plan, value)


def bytes_per_parameter(plan: Plan) -> float | None:
    """Bytes of parameters, gradients and optimizer state that a rank keeps for each parameter of the model."""
    estimate = estimate_memory(plan, ModelFacts(MANY, MANY))
    total = estimate.total_bytes
    return None if total is None else (total - estimate.gathered_bytes) / MANY


def tokens_per_step(plan: Plan) -> int | None:
    """Tokens of one optimizer step, where the config brings the data."""
    if plan.config.model is None:
        return None
    return plan.batch.global_batch_size * plan.config.data.sequence_length


# --- batch and length ---


def arithmetic(plan: Plan) -> str:
    """``8 samples x 4 micro-batches x 2 ranks = 64 samples``."""
    batch = plan.batch
    noun = "sequence" if plan.config.model is not None else "sample"
    return (
        f"{plural(batch.micro_batch_size, noun)} x {_micro_batches(batch.accumulation_steps)} x "
        f"{plural(plan.degrees.dp, 'rank')} = {batch.global_batch_size:,} "
        f"{'sample' if batch.global_batch_size == 1 else 'samples'}"
    )


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _total(plan: Plan, value: Any) -> str:
    tokens = tokens_per_step(plan)
    more = f" ({tokens:,} tokens)" if tokens else ""
    return f"{arithmetic(plan)}{more} per optimizer step."


def _micro(plan: Plan, value: Any) -> str:
    samples = plural(plan.batch.micro_batch_size, "sample")
    return f"A rank takes {samples} through forward and backward at once; activations need memory in proportion."


def _accumulation(plan: Plan, value: Any) -> str:
    steps = plan.batch.accumulation_steps
    if not plan.batch.managed:
        return "It only enters the arithmetic of the batch: every step() updates."
    if steps == 1:
        return "Every backward is followed by an update; nothing is accumulated."
    return f"The gradients of {steps} micro-batches are averaged before each update, at no cost in memory."


def _steps(plan: Plan, value: Any) -> str | None:
    if value is None:
        return None
    samples, tokens = value * plan.batch.global_batch_size, tokens_per_step(plan)
    more = f", {value * tokens:,} tokens" if tokens else ""
    if plan.config.model is None:
        return f"Schedules count on {plural(value, 'update')}, {samples:,} samples; the script decides when to stop."
    return f"Training ends after {plural(value, 'update')}: {samples:,} samples{more}."


def _epochs(plan: Plan, value: Any) -> str | None:
    return None if value is None else f"Training ends after {value:g} passes over the data."


# --- precision ---


def _compute(plan: Plan, value: Any) -> str:
    compute, autocast = plan.precision.compute, plan.precision.autocast
    if autocast:
        return f"Parameters are fp32, and forward runs under autocast to {autocast}."
    if compute == "fp32":
        return "Everything is computed in fp32: neither bf16 nor fp16 is on."
    return f"Forward and backward run in {compute}; the optimizer updates fp32 masters."


def _bf16(plan: Plan, value: Any) -> str | None:
    return "Forward and backward run in bf16 on fp32 masters; bf16 needs no loss scale." if value else None


def _fp16(plan: Plan, value: Any) -> str | None:
    return "Forward and backward run in fp16 on fp32 masters; the loss is scaled against underflow." if value else None


def _loss_scale(plan: Plan, value: Any) -> str | None:
    scale = plan.precision.loss_scale
    if scale.dynamic:
        return (
            f"Dynamic: it starts at {scale.initial:,.0f}, doubles after {plural(scale.window_steps, 'step')} without "
            f"overflow and halves at the {_ordinal(scale.hysteresis)} overflow, never below {scale.minimum:g}."
        )
    return f"The loss is always multiplied by {scale.static:g} before backward." if scale.static != 1 else None


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _accumulate(plan: Plan, value: Any) -> str:
    dtype = plan.precision.accumulate
    return f"Gradients are added up over micro-batches in {dtype}, {DTYPE_BYTES[dtype]} bytes each."


def _reduce(plan: Plan, value: Any) -> str:
    dtype = plan.precision.reduce
    return f"Gradients travel between ranks in {dtype}, {DTYPE_BYTES[dtype]} bytes each."


# --- ZeRO ---


def _stage(plan: Plan, value: Any) -> str:
    what = SHARDED[plan.zero.stage]
    ranks = plan.shard_size if plan.zero.stage else plan.num_replicas
    text = what[0].upper() + what[1:]
    if plan.zero.stage:
        text += f" over {plural(ranks, 'rank')}"
        text += "; with one rank that divides nothing" if ranks == 1 else ""
    elif ranks == 1:
        text = "Nothing is sharded, and with one rank nothing is sent"
    size = bytes_per_parameter(plan)
    return text + ("." if size is None else f". Each rank keeps {size:.3g} bytes per parameter of the model.")


def _buckets(plan: Plan, value: Any) -> str:
    size = format_bytes(plan.zero.bucket_elements * DTYPE_BYTES[plan.precision.reduce])
    return f"Gradients are reduced {plan.zero.bucket_elements:,} elements ({size}) at a time, while backward runs."


def _groups(plan: Plan, value: Any) -> str:
    return f"Consecutive blocks are gathered together, in groups of at least {plan.zero.group_elements:,} elements."


def _mics(plan: Plan, value: Any) -> str | None:
    degrees = plan.degrees
    if value is None or value <= 0:
        return None
    return f"Groups of {plan.shard_size} ranks hold a whole model each; there are {degrees.dp_replicate} groups."


# --- optimizer ---


def _optimizer(plan: Plan, value: Any) -> str | None:
    optimizer = plan.optimizer
    if optimizer is None:
        return "The config names none: a script passes its own to initialize()."
    moments = MOMENTS.get(optimizer.type)
    if moments is None:
        return f"{optimizer.type} is a class of your own, made with the arguments below."
    kept = f"{plural(moments, 'fp32 number')} per parameter" if moments else "nothing beside the parameters"
    return f"{optimizer.type} makes the updates and keeps {kept} as its state."


def _lr(plan: Plan, value: Any) -> str | None:
    if plan.optimizer is None or not isinstance(value, int | float):
        return None
    if plan.schedule is None:
        return f"Every update uses {value:g}: there is no schedule."
    return "The highest learning rate of the schedule below." if peak(plan) == value else None


def _decay(plan: Plan, value: Any) -> str | None:
    if not isinstance(value, int | float) or plan.optimizer is None:
        return None
    if value == 0:
        return "Weights are not decayed."
    rate = peak(plan)
    if rate is None or plan.optimizer.type not in ("AdamW", "Lion", "Muon"):
        return None
    return (
        f"At the peak of the learning rate, each update shrinks every weight by {rate:g} x {value:g} = "
        f"{rate * value * 100:.3g}%."
    )


def _clipping(plan: Plan, value: Any) -> str:
    if not plan.gradient_clipping:
        return "Off: gradients are used as large as they are."
    return (
        f"Where the norm of all gradients together exceeds {plan.gradient_clipping:g}, they are scaled down to it; "
        "the norm that is reported is the one before."
    )


# --- learning rate ---


def _schedule(plan: Plan, value: Any) -> str | None:
    if plan.schedule is None:
        return "None: the learning rate is constant, or a script passes a scheduler to initialize()."
    return curve(plan)


def _warmup(plan: Plan, value: Any) -> str | None:
    steps = plan.config.training.steps
    if not isinstance(value, int):
        return None
    if value == 0:
        return "There is no warm-up."
    share = f", {value / steps:.1%} of training" if steps and value < steps else ""
    return f"The learning rate rises for {plural(value, 'update')}{share}."


def _total_steps(plan: Plan, value: Any) -> str | None:
    steps = plan.config.training.steps
    if not isinstance(value, int):
        return None
    if steps is None:
        return f"The learning rate reaches its end after {value:,} updates; later it stays there."
    if value == steps:
        return f"The learning rate reaches its end with the last of the {steps:,} updates."
    return f"The learning rate is made for {value:,} updates, and training takes {steps:,}."


def _warmup_type(plan: Plan, value: Any) -> str | None:
    if value == "linear":
        return "The warm-up is a straight line."
    return "The warm-up rises fast at first and slowly later; linear would be a straight line." if value else None


def _warmup_max(plan: Plan, value: Any) -> str | None:
    rate = peak(plan)
    return f"The peak is the optimizer's own lr, {rate:g}." if value is None and rate is not None else None


def _end_ratio(plan: Plan, value: Any) -> str | None:
    rate = peak(plan)
    if rate is None or not isinstance(value, int | float):
        return None
    return f"The last learning rate is {value:g} x {rate:g} = {value * rate:g}."


SAY_WHY = frozenset(
    {
        "train_batch_size", "gradient_accumulation_steps", "data_types.param_dtype", "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
    }
)  # fmt: skip
"""Keys whose sentence tells by itself why the value is what it is."""

SENTENCES: dict[str, Sentence] = {
    **OF_THE_RUN,
    **LAYER_DROP_SENTENCES,
    **TOKEN_DROP_SENTENCES,
    "train_batch_size": _total,
    "train_micro_batch_size_per_gpu": _micro,
    "gradient_accumulation_steps": _accumulation,
    "training.steps": _steps,
    "training.num_epochs": _epochs,
    "data_types.param_dtype": _compute,
    "bf16.enabled": _bf16,
    "fp16.enabled": _fp16,
    "fp16.loss_scale": _loss_scale,
    "data_types.grad_accum_dtype": _accumulate,
    "communication_data_type": _reduce,
    "zero_optimization.stage": _stage,
    "zero_optimization.reduce_bucket_size": _buckets,
    "zero_optimization.prefetch_bucket_size": _groups,
    "zero_optimization.mics_shard_size": _mics,
    "optimizer.type": _optimizer,
    "optimizer": _optimizer,
    "optimizer.params.lr": _lr,
    "optimizer.params.weight_decay": _decay,
    "gradient_clipping": _clipping,
    "scheduler.type": _schedule,
    "scheduler.params.warmup_num_steps": _warmup,
    "scheduler.params.total_num_steps": _total_steps,
    "scheduler.params.warmup_max_lr": _warmup_max,
    "scheduler.params.warmup_type": _warmup_type,
    "scheduler.params.cos_min_ratio": _end_ratio,
}
"""Canonical path -> the sentence of a run."""
