"""The sentences of the keys that say what a run reads, writes and prints: model, data, checkpoints, monitors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.plan.findings import plural
from engine.plan.plan import Plan

Sentence = Callable[[Plan, Any], str | None]
"""What a key with this value does in the run of this plan; None where the description of its field says it better."""


def _target(plan: Plan, value: Any) -> str | None:
    if value is None:
        return None
    name, _, attribute = str(value).replace(".py:", ".py\0", 1).rpartition("\0")
    if name:
        return f"{attribute}, in {name} beside the config, builds the model."
    return f"{value} builds the model."


def _args(plan: Plan, value: Any) -> str | None:
    target = plan.config.model.target if plan.config.model is not None else None
    return f"Passed to {target.rpartition(':')[2] or target} by name." if target and value else None


def _data(plan: Plan, value: Any) -> str | None:
    return "The text is the Python standard library's source, which is always there." if value is None else None


def _sequence(plan: Plan, value: Any) -> str | None:
    micro = plan.batch.micro_batch_size
    return f"A sample is {value:,} tokens; a forward on one rank sees {micro} x {value} = {micro * value:,}."


def _validation(plan: Plan, value: Any) -> str | None:
    return f"{value:.0%} of the files are kept for evaluation and never trained on."


def _evaluation(plan: Plan, value: Any) -> str | None:
    return _occasions(plan, value, "The model is evaluated")


def _saves(plan: Plan, value: Any) -> str | None:
    return _occasions(plan, value, "A checkpoint is written")


def _occasions(plan: Plan, interval: int | None, what: str) -> str | None:
    steps = plan.config.training.steps
    if interval is None:
        return f"{what} once, at the end."
    if steps is None:
        return f"{what} every {plural(interval, 'step')} and at the end."
    times = [*range(interval, steps, interval), steps]
    if len(times) > 4:
        return f"{what} {len(times)} times: every {plural(interval, 'step')} and at the end."
    listed = ", ".join(map(str, times[:-1]))
    return f"{what} after {listed} and {steps} steps." if listed else f"{what} once, at the end."


def _eval_batches(plan: Plan, value: Any) -> str | None:
    if value is None:
        return "An evaluation reads the whole validation split."
    samples = value * plan.batch.global_batch_size
    return f"An evaluation reads at most {value} x {plan.batch.global_batch_size} = {samples:,} samples."


def _sample(plan: Plan, value: Any) -> str | None:
    return f"After the last step, {value} characters of the model's own text are printed." if value else None


def _tensorboard(plan: Plan, value: Any) -> str | None:
    section = plan.config.tensorboard
    return f"Rank 0 writes event files to {_folder(section)} in the run's output folder." if value else None


def _csv(plan: Plan, value: Any) -> str | None:
    section = plan.config.csv_monitor
    return f"Rank 0 writes a CSV file per scalar to {_folder(section)} in the run's output folder." if value else None


def _folder(section: Any) -> str:
    return "/".join(part.strip("/") for part in (section.output_path, section.job_name) if part)


def _wandb(plan: Plan, value: Any) -> str | None:
    return f'Rank 0 logs to the project "{plan.config.wandb.project}".' if value else None


def _print(plan: Plan, value: Any) -> str | None:
    if value is None and plan.config.model is None:
        return "Nothing is printed while a script trains, unless initialize() is given an output folder."
    if value is None:
        return "A line is printed about every 10 seconds, or a bar is shown on a terminal."
    return f"A line is printed every {plural(value, 'step')}."


def _breakdown(plan: Plan, value: Any) -> str | None:
    return "The times of forward, backward and step are printed." if value else None


def _seed(plan: Plan, value: Any) -> str:
    weights = "" if plan.config.model is None else "Initial weights, "
    return f"{weights or 'The '}{'the ' if weights else ''}order of samples and dropout follow from {value}."


def _device(plan: Plan, value: Any) -> str | None:
    return "An accelerator is used where there is one, else the CPU." if value == "auto" else f"Training is on {value}."


OF_THE_RUN: dict[str, Sentence] = {
    "model.target": _target,
    "model.args": _args,
    "data.path": _data,
    "data.sequence_length": _sequence,
    "data.validation_fraction": _validation,
    "training.eval_interval": _evaluation,
    "training.eval_batches": _eval_batches,
    "training.save_interval": _saves,
    "training.sample_length": _sample,
    "tensorboard.enabled": _tensorboard,
    "csv_monitor.enabled": _csv,
    "wandb.enabled": _wandb,
    "steps_per_print": _print,
    "wall_clock_breakdown": _breakdown,
    "seed": _seed,
    "device": _device,
}
"""Canonical path -> the sentence of a run."""
