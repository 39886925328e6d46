"""Constructor parameters from JSON, checked against the class before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from engine.contracts import EngineError


def constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """What ``cls`` takes by name, without its first argument (the parameters, or the optimizer)."""
    parameters = list(inspect.signature(cls).parameters.values())
    return {parameter.name: parameter for parameter in parameters[1:]}


def described(cls: type) -> str:
    """The constructor's parameters with their defaults, for a message."""
    return ", ".join(
        name if parameter.default is inspect.Parameter.empty else f"{name}={parameter.default!r}"
        for name, parameter in constructor_parameters(cls).items()
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )


def check_parameters(cls: type, params: Mapping[str, Any], path: str) -> None:
    """Raise EngineError when ``params``, found at the JSON path ``path``, hold a name ``cls`` lacks or miss one."""
    accepted = constructor_parameters(cls)
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if open_ended else sorted(set(params) - set(accepted))
    missing = [
        name
        for name, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        and name not in params
    ]
    problems = [f"{path}.{name} is not a parameter of {cls.__name__}" for name in unknown]
    problems += [f"{path}.{name} is missing" for name in missing]
    if problems:
        raise EngineError(f"{'; '.join(problems)}. {cls.__name__} takes {described(cls)}.")
