"""Older and stray spellings: what each means today, and the note that is printed.

`ALIASES` (aliases.py) says which paths name the same key; here stand the keys that mean nothing any more, and those
whose value
changes with the spelling. Works on plain JSON before anything is typed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.config.aliases import ALIASES, CURRENT, OUTDATED
from engine.config.messages import show
from engine.config.places import Path, join_path
from engine.config.smp import translate_smp
from engine.config.translation import Translation, truth

__all__ = ["DTYPE_NAMES", "MEANINGLESS", "Translation", "translate", "truth"]

_BF16_SCALE = "belongs to fp16: bf16 has the exponent range of fp32 and needs no loss scale; ignored"

MEANINGLESS: dict[Path, str] = {
    ("zero_optimization", "grad_hooks"): "was removed from DeepSpeed; gradients are always taken from hooks; ignored",
    ("zero_optimization", "verbose"): "was removed from DeepSpeed; ignored",
    ("zero_optimization", "legacy_stage1"): "was removed from DeepSpeed; stage 1 is the same thing; ignored",
    ("fp16", "opt_level"): "is a setting of Apex AMP and means nothing under fp16; ignored",
    ("bf16", "auto_cast"): "belongs to fp16; ignored",
    **{
        ("bf16", key): _BF16_SCALE
        for key in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
}

DTYPE_NAMES: dict[str, str] = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), "fp32"),
}


def translate(translation: Translation) -> None:
    """Bring every older spelling in ``translation.tree`` to today's. Running it twice changes nothing."""
    for old in sorted(ALIASES, key=len):
        if translation.has(old):
            _rename(translation, old, ALIASES[old])
    for rule in _RULES:
        rule(translation)
    for path, why in MEANINGLESS.items():
        if translation.has(path):
            translation.pop(path)
            translation.note(path, why)


def _rename(translation: Translation, old: Path, new: Path) -> None:
    value = translation.get(old)
    if len(new) > 1 and isinstance(translation.get(new[:-1]), bool):
        _zero_as_bool(translation)
    if translation.has(new):
        other = translation.get(new)
        translation.pop(old)
        if other != value:
            line = translation.places.of_key(new)[1]
            where = f" on line {line}" if line else ""
            translation.problem(
                old,
                f"is {show(value, 30)}, and {join_path(new)}, which is the same key, is {show(other, 30)}{where}",
                "conflict",
                found=value,
                repair="keep one of them",
                options=(show(other, 30),),
            )
        return
    translation.pop(old)
    translation.put(new, value, old)
    if old not in CURRENT:
        translation.note(old, f"{OUTDATED[old][1]}; read as {join_path(new)}")


def _zero_as_bool(translation: Translation) -> None:
    path: Path = ("zero_optimization",)
    value = translation.get(path)
    if isinstance(value, bool):
        translation.tree["zero_optimization"] = {"stage": int(value)}
        translation.places.moved[("zero_optimization", "stage")] = path
        translation.note(path, f"{show(value)} is the oldest form; read as stage {int(value)}")


def _tensor_parallel_as_number(translation: Translation) -> None:
    path: Path = ("tensor_parallel",)
    value = translation.get(path)
    if isinstance(value, int) and not isinstance(value, bool):
        translation.tree["tensor_parallel"] = {"size": value}
        translation.places.moved[("tensor_parallel", "size")] = path


def _cpu_offload(old: str, new: str) -> Callable[[Translation], None]:
    def rule(translation: Translation) -> None:
        old_path: Path = ("zero_optimization", old)
        new_path: Path = ("zero_optimization", new)
        if not translation.has(old_path):
            return
        value = translation.pop(old_path)
        switch = truth(value)
        if value is not None and switch is None:
            translation.meant.add(join_path(new_path))
            translation.problem(
                old_path,
                f"is {show(value)}",
                "type",
                found=value,
                allowed="true or false",
                repair=f'better, write "{new}": {{"device": "cpu"}}',
            )
            return
        section = translation.get(new_path)
        device = section.get("device") if isinstance(section, dict) else None
        if switch and device not in (None, "cpu"):
            translation.problem(
                old_path,
                f"is true, and {new}.device is {show(device)}",
                "conflict",
                found=value,
                repair=f"delete {old}, which is deprecated",
                options=("false",),
            )
        elif switch:
            translation.put((*new_path, "device"), "cpu", old_path)
            translation.note(old_path, f'deprecated; read as {new}.device = "cpu"')
        else:
            translation.note(old_path, "deprecated, and off: nothing is offloaded by it")

    return rule


def _offload_pin_memory(translation: Translation) -> None:
    path: Path = ("zero_optimization", "cpu_offload_use_pin_memory")
    if not translation.has(path):
        return
    value = translation.pop(path)
    section = translation.get(("zero_optimization", "offload_optimizer"))
    if isinstance(section, dict) and "pin_memory" not in section and value is not None:
        translation.put(("zero_optimization", "offload_optimizer", "pin_memory"), value, path)
        translation.note(path, "deprecated; read as offload_optimizer.pin_memory (DeepSpeed drops the value)")
    else:
        translation.note(path, "deprecated; without effect here")


def _dynamic_loss_scale(translation: Translation) -> None:
    path: Path = ("fp16", "loss_scale")
    if translation.get(path) == "dynamic":
        translation.put(path, 0, path)
        translation.note(path, '"dynamic" is Apex\'s word; read as 0')


def _fp32_allreduce(translation: Translation) -> None:
    old: Path = ("fp32_allreduce",)
    new: Path = ("communication_data_type",)
    if not translation.has(old):
        return
    value = translation.pop(old)
    switch = truth(value)
    if switch is None and value is not None:
        translation.meant.add(join_path(new))
        translation.problem(old, f"is {show(value)}", "type", found=value, allowed="true or false")
    elif not switch:
        translation.note(old, "was removed from DeepSpeed, and is off; ignored")
    elif translation.get(new) not in (None, "fp32"):
        message = f"is true, and {join_path(new)} is {show(translation.get(new))}"
        translation.problem(old, message, "conflict", found=value, repair=f"delete {join_path(old)}")
    else:
        translation.put(new, "fp32", old)
        translation.note(old, f'was removed from DeepSpeed; read as {join_path(new)} = "fp32"')


def _null_output_path(section: str) -> Callable[[Translation], None]:
    def rule(translation: Translation) -> None:
        path: Path = (section, "output_path")
        if translation.has(path) and translation.get(path) is None:
            translation.pop(path)
            translation.note(path, "null, as DeepSpeed documents it and refuses it; the default stands")

    return rule


def _infinite_print_interval(translation: Translation) -> None:
    value = translation.get(("steps_per_print",))
    if isinstance(value, float) and math.isinf(value):
        translation.tree["steps_per_print"] = None
        translation.note(("steps_per_print",), "infinity: nothing is printed per step")


_RULES: tuple[Callable[[Translation], None], ...] = (
    _zero_as_bool,
    _tensor_parallel_as_number,
    _cpu_offload("cpu_offload", "offload_optimizer"),
    _cpu_offload("cpu_offload_param", "offload_param"),
    _offload_pin_memory,
    _dynamic_loss_scale,
    _infinite_print_interval,
    _fp32_allreduce,
    _null_output_path("tensorboard"),
    _null_output_path("csv_monitor"),
    translate_smp,
)
