"""Random canonical configs, made from the sections: today's spellings, values of their own types, some wrong."""

from __future__ import annotations

import random
from typing import Any, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config.auto import automatic_paths
from engine.config.config import Config
from engine.config.fields import choices, members, section_of
from engine.config.sections.arguments import (
    BOOLEANS,
    INTEGERS,
    NUMBERS,
    OPTIMIZER_PARAMS,
    PAIRS,
    SCHEDULER_PARAMS,
    TORCH_SCHEDULERS,
)
from engine.config.sections.optimizer import OptimizerSection, SchedulerSection

WRONG: dict[Any, list[Any]] = {
    bool: [2, "perhaps", 1.5, [True], {}],
    int: ["many", 1.5, True, [1], {"a": 1}],
    float: ["much", True, {}, "1,5"],
    str: [5, True, 1.5, ["a", 1]],
    list: [5, {"a": 1}, True, [{}]],
    dict: [5, "text", [1], True],
}
"""Values that no dialect reads as something else, by the type that is wanted."""


class Generator:
    """``wrong``: the share of values that are of another type or out of range, and of keys that do not exist."""

    def __init__(self, seed: int, wrong: float) -> None:
        self.stream = random.Random(seed)
        self.wrong = wrong

    def config(self) -> dict[str, Any]:
        tree = self.section(Config, "", self.stream.randint(1, 4))
        tree.pop("strict", None)  # a lenient file takes unknown keys, which the schema never does
        return tree

    def section(self, model: type[BaseModel], path: str, num_keys: int) -> dict[str, Any]:
        stream = self.stream
        keys = list(model.model_fields)
        tree = {
            key: self.value(model.model_fields[key], f"{path}.{key}".lstrip("."))
            for key in stream.sample(keys, min(num_keys, len(keys)))
        }
        if model in (OptimizerSection, SchedulerSection):
            tree |= self.constructor(OPTIMIZER_PARAMS if model is OptimizerSection else SCHEDULER_PARAMS)
        if "enabled" in keys and stream.random() < 0.5:
            tree["enabled"] = True
        if stream.random() < self.wrong / 4:
            tree["no_such_key_at_all"] = 1
        return tree

    def value(self, info: FieldInfo, path: str) -> Any:
        stream = self.stream
        if path in automatic_paths() and stream.random() < 0.1:
            return "auto"
        kinds = members(info.annotation)
        if stream.random() < self.wrong:
            return self.bad(info)
        if type(None) in kinds and stream.random() < 0.2:
            return None
        section = section_of(info.annotation)
        kind = stream.choice([member for member in kinds if member is not type(None)])
        if section is not None:
            tree = self.section(section, path, stream.randint(0, 4))
            return [tree] if get_origin(kind) is list else {"first": tree} if get_origin(kind) is dict else tree
        return self.good(kind, info)

    def good(self, kind: Any, info: FieldInfo) -> Any:
        stream = self.stream
        if get_origin(kind) is not None and choices(kind):
            return stream.choice(choices(kind))
        if kind is bool:
            return stream.random() < 0.5
        if kind in (int, float):
            low, high = limits(info)
            number = stream.choice([low, min(high, low + 1), min(high, low + 7), min(high, low + 1000)])
            return int(number) if kind is int else float(number) + 0.25 * (low < number < high)
        if kind is str:
            return stream.choice(["text", "a.b", "h.0"])
        if get_origin(kind) is list:
            return [self.good(members(get_args(kind)[0])[0], info) for _ in range(stream.randint(0, 3))]
        return {"key": 1} if get_origin(kind) is dict else "anything"

    def bad(self, info: FieldInfo) -> Any:
        stream = self.stream
        kinds = [kind for kind in members(info.annotation) if kind is not type(None)]
        if section_of(info.annotation) is not None:
            return stream.choice([5, "text"])  # true for zero_optimization is a spelling of its own
        if Any in kinds:
            return stream.choice([1, "x"])
        low, high = limits(info)
        if kinds[0] in (int, float) and low > -5 and stream.random() < 0.4:
            return low - 1 if stream.random() < 0.5 or high > 1e6 else high + 1
        if choices(info.annotation):
            return stream.choice(["no such word", 77])
        options = WRONG[get_origin(kinds[0]) or kinds[0]]
        return stream.choice([value for value in options if type(value) not in kinds])

    def constructor(self, table: dict[str, tuple[str, ...]]) -> dict[str, Any]:
        stream = self.stream
        others = list(TORCH_SCHEDULERS) if table is SCHEDULER_PARAMS else []
        name = stream.choice([*table, *others])
        if stream.random() < self.wrong:
            return {"type": "NoSuchTypeAtAll"}
        keys = stream.sample(table.get(name, ()), min(3, len(table.get(name, ()))))
        params = {key: self.argument(key) for key in keys}
        if stream.random() < self.wrong / 2 and name in table:
            params["no_such_argument"] = 1
        return {"type": name, "params": params}

    def argument(self, key: str) -> Any:
        stream = self.stream
        is_wrong = stream.random() < self.wrong / 2
        if key in PAIRS:
            return stream.choice([0.5, [0.5], [0.5, "x"]]) if is_wrong else [0.5, 0.75]
        if key in BOOLEANS:
            return stream.choice([2, "perhaps"]) if is_wrong else stream.random() < 0.5
        if key in INTEGERS:
            return stream.choice([1.5, "x", True]) if is_wrong else 5
        if key in NUMBERS and key != "eps":
            return stream.choice(["x", True, {}]) if is_wrong else stream.choice([0.5, 1, None])
        if key == "warmup_type":
            return "cosine" if is_wrong else stream.choice(["log", "linear", None, "auto"])
        return None


def limits(info: FieldInfo) -> tuple[float, float]:
    """The smallest and the largest value that a number may have, nearly so for open ends."""
    low, high = -5.0, 1e9
    for limit in info.metadata:
        if isinstance(limit, annotated_types.Ge):
            low = float(limit.ge)  # type: ignore[arg-type]
        elif isinstance(limit, annotated_types.Gt):
            low = float(limit.gt) + 1  # type: ignore[arg-type]
        elif isinstance(limit, annotated_types.Le):
            high = float(limit.le)  # type: ignore[arg-type]
        elif isinstance(limit, annotated_types.Lt):
            high = float(limit.lt) - 0.25  # type: ignore[arg-type]
    return low, high
