"""``optimizer`` and ``scheduler``."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from engine.config.messages import show
from engine.config.sections.arguments import BOOLEANS, INTEGERS, NOT_NEGATIVE, NUMBERS, PAIRS
from engine.config.sections.base import Fault, Section


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _type_fault(key: str, value: Any) -> str:
    """What an argument should have been, '' when it is right."""
    if key in PAIRS:
        right = isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
        return "" if right else "a list of two numbers"
    if value is None:
        return ""
    if key in BOOLEANS:
        return "" if isinstance(value, bool) else "true or false"
    if key in INTEGERS:
        return "" if isinstance(value, int) and not isinstance(value, bool) else "an integer"
    if key in NUMBERS:
        values = value if isinstance(value, list) else [value]
        return "" if all(item is None or _is_number(item) for item in values) else "a number"
    return ""


def _params_faults(params: dict[str, Any]) -> Iterator[Fault]:
    for key, value in params.items():
        expected = _type_fault(key, value)
        if expected:
            yield Fault(f"params.{key}", f"{show(value, 30)} is not allowed here", expected, code="type")
        elif key in NOT_NEGATIVE and _is_number(value) and value < 0:
            yield Fault(f"params.{key}", f"{value} is negative", "0 or more", code="value")
        elif key == "betas" and not all(0 <= beta < 1 for beta in value):
            allowed = "two numbers from 0 up to but not including 1"
            yield Fault("params.betas", f"{show(value)} is out of range", allowed, code="value")


class OptimizerSection(Section):
    """Which optimizer, and its constructor's arguments."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "type"

    type: str | None = Field(
        None,
        description='A name of torch.optim, "Lamb", "OneBitAdam", ..., or a dotted path to a class. Adam is AdamW.',
    )
    params: dict[str, Any] = Field({}, description="The constructor's arguments.")
    legacy_fusion: bool = Field(False, description="An old fused step of DeepSpeed's; no effect here.")

    def faults(self) -> Iterator[Fault]:
        if not self.type:
            yield Fault("type", "is missing: without it there is no optimizer", "a name such as AdamW", 'add "type"')
        yield from _params_faults(self.params)


class SchedulerSection(Section):
    """Which learning-rate schedule, and its arguments."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "type"

    type: str | None = Field(
        None,
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or a torch scheduler.",
    )
    params: dict[str, Any] = Field({}, description="The schedule's arguments.")

    def faults(self) -> Iterator[Fault]:
        if not self.type:
            yield Fault("type", "is missing: without it there is no schedule", "a name such as WarmupLR", 'add "type"')
        yield from _params_faults(self.params)
        warmup_type = self.params.get("warmup_type")
        if warmup_type is not None and warmup_type not in ("log", "linear"):
            yield Fault(
                "params.warmup_type",
                f'"{warmup_type}" is unknown (DeepSpeed takes "log")',
                '"log" or "linear"',
                code="value",
            )
