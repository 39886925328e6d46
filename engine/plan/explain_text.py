"""An explanation as text: what the run does in a few lines, then the keys by subject, then what is not used."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from engine.config.messages import show
from engine.plan.findings import plural
from engine.plan.keys import all_keys
from engine.plan.learning_rate import curve
from engine.plan.plan import Plan
from engine.plan.render import SHARDED
from engine.plan.sentences import bytes_per_parameter, tokens_per_step
from engine.plan.subjects import SUBJECTS, subject_of

if TYPE_CHECKING:
    from engine.plan.explain import Explained, Explanation

WIDEST = 100
"""Longer lines are hard to read."""

MARGIN = "      "


def render(explained: Explained, columns: int, everything: bool) -> str:
    from engine.plan.explain import short_name

    columns = min(columns, WIDEST)
    world = plural(explained.world.size, "rank")
    lines = [f"{short_name(explained.file)} on {world}", ""]
    lines += wrap(summary(explained), columns, break_long_words=False)
    used, unused = _split(explained.keys, everything)
    for subject, heading in SUBJECTS.items():
        keys = [key for key in used if key.subject == subject]
        if keys:
            lines += ["", heading]
            for key in sorted(keys, key=lambda key: not key.is_written):
                lines += _key(key, columns)
    if unused:
        lines += ["", "Not used here"]
        for key in unused:
            lines += _key(key, columns)
    lines += _problems(explained, columns)
    if not everything:
        lines += ["", *wrap(_silent(explained), columns, break_long_words=False)]
    return "\n".join(lines)


def _split(keys: tuple[Explanation, ...], everything: bool) -> tuple[list[Explanation], list[Explanation]]:
    """The keys to explain by subject, and those that the user wrote in vain."""
    shown = [key for key in keys if everything or key.matters]
    unused = [key for key in shown if key.status == "inert" and (key.is_written or everything)]
    return [key for key in shown if key not in unused], unused


def _key(key: Explanation, columns: int) -> Iterator[str]:
    left = f"  {key.path} = {_value(key.value, max(20, columns - len(key.path) - 5 - len(key.source) - 2))}"
    space = columns - len(left) - len(key.source)
    yield left + (" " * space + key.source if space >= 2 else f"  {key.source}")
    yield from wrap(
        _told(key), columns, initial_indent=MARGIN, subsequent_indent=MARGIN, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _told(key: Explanation) -> str:
    """The sentence, the reason of its status before or after it, and what the notes add."""
    remark = f" {_sentence(key.remark)}" if key.remark else ""
    if key.status == "acts":
        because = {"derived": "Derived", "auto": 'For "auto"', "default": "The default"}.get(key.origin)
        return key.meaning + (f" {because}: {key.because}." if because and key.because else "") + remark
    if key.status == "as-always":
        return f"{key.meaning} Nothing to choose: {key.reason}.{remark}"
    if key.status == "inert":
        return f"{key.meaning} No effect: {key.reason}.{remark}"
    word = {"conflict": "PROBLEM", "needs-value": "NEEDS A VALUE", "not-built": "NOT BUILT HERE"}[key.status]
    return f"{word}: {_sentence(key.reason)} {key.meaning}{remark}"


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:] if text.split(" ")[0].isalpha() else text
    return text if text.endswith((".", "?", "!")) else text + "."


def _value(value: Any, limit: int) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return show(value, limit)


def _problems(explained: Explained, columns: int) -> Iterator[str]:
    problems = explained.verdict.problems
    if not problems:
        return
    yield ""
    yield plural(len(problems), "problem")
    for problem in problems:
        yield from wrap(f"  {problem.render()}", columns, subsequent_indent=MARGIN, break_long_words=False)


def _silent(explained: Explained) -> str:
    """What was left out, so that nobody wonders."""
    left = [key for key in explained.keys if not key.matters]
    off = {}
    for key in all_keys(explained.config):
        section = key.absent or (key.switch or "").rpartition(".")[0]
        if section and "." not in section and subject_of(section) not in ("services", "data", "optimizer", "schedule"):
            off[section] = True
    sections = f" Off, or not given: {', '.join(sorted(off))}." if off else ""
    return f"{plural(len(left), 'key')} more, at the default or switched off: --all shows them.{sections}"


# --- the summary ---


def summary(explained: Explained) -> str:
    """The run in a few sentences."""
    plan = explained.plan
    if plan is None:
        return f"Without a batch size there is no plan, so keys are told one by one. {_state(explained)}"
    parts = [_aim(plan), _computation(plan), _sharding(plan), _optimizer(plan), _state(explained)]
    return " ".join(part for part in parts if part)


def _aim(plan: Plan) -> str:
    batch, model, training = plan.batch, plan.config.model, plan.config.training
    who = "A script trains a model of its own"
    if model is not None and model.target:
        place, _, name = model.target.rpartition(":")
        who = f"This run trains {name} of {place}" if place else f"This run trains {name}"
    length = f" for {plural(training.steps, 'update')}" if training.steps else ""
    length = length or (f" for {training.num_epochs:g} epochs" if training.num_epochs else "")
    tokens = tokens_per_step(plan)
    size = f"{plural(batch.global_batch_size, 'sample')}" + (f" ({tokens:,} tokens)" if tokens else "")
    each = f" of {size} each" if training.steps else f", {size} to an update"
    return f"{who}{length}{each}."


def _computation(plan: Plan) -> str:
    precision = plan.precision
    if precision.autocast:
        return f"Forward runs under autocast to {precision.autocast} on fp32 parameters."
    if precision.compute == "fp32":
        return "It computes in fp32."
    scaled = ", with loss scaling" if precision.compute == "fp16" else ""
    return f"It computes in {precision.compute} on fp32 masters{scaled}."


def _sharding(plan: Plan) -> str:
    ranks, stage = plan.degrees.dp * plan.degrees.slices, plan.zero.stage
    size = bytes_per_parameter(plan)
    memory = f" ({size:.3g} bytes per parameter, activations aside)" if size is not None else ""
    if ranks == 1:
        return f"One rank holds everything{memory}."
    if stage == 0:
        return f"Each of the {ranks} ranks holds a whole replica{memory}, and gradients are averaged."
    return f"ZeRO stage {stage}: {SHARDED[stage]} over {plural(plan.shard_size, 'rank')}{memory}."


def _optimizer(plan: Plan) -> str:
    if plan.optimizer is None:
        return "The optimizer comes from the script."
    told = curve(plan)
    if told is None:
        return f"{plan.optimizer.type} makes the updates."
    return f"{plan.optimizer.type} makes the updates: {told[0].lower() + told[1:]}"


def _state(explained: Explained) -> str:
    verdict = explained.verdict
    parts = []
    if verdict.problems:
        parts.append(f"{plural(len(verdict.problems), 'problem')} must be mended before it can run.")
    if verdict.needs_values:
        parts.append(f"It needs {plural(len(verdict.needs_values), 'value')} that the file leaves open.")
    if verdict.not_built:
        parts.append(f"It asks for what is not built here: {', '.join(verdict.not_built)}.")
    vain = [key for key in explained.keys if key.status == "inert" and key.is_written]
    if vain:
        has = "key has" if len(vain) == 1 else "keys have"
        parts.append(f"{len(vain)} {has} no effect: see the end.")
    return " ".join(parts)
