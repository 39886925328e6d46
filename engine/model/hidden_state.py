"""The hidden state of a block: where a call carries it, and where the block's output does.

Blocks differ in how they are called: ``block(x)``, ``block(x, mask)``, ``block(hidden_states=x, attention_mask=mask)``;
and in what they return: a tensor, or a tuple, list, named tuple, dict or Hugging Face ``ModelOutput`` whose first item
it is. Transforms that replace a block's forward read these two facts here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.config.messages import EngineError

ArgumentKey = int | str
"""Position or keyword of an argument."""

KEYWORD = "hidden_states"


def hidden_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], block: str) -> ArgumentKey:
    """Which argument of a call is the hidden state.

    The keyword ``hidden_states``; else the first positional, else the first keyword floating tensor of at least three
    dimensions; else the first of any number. ``block`` names the block in the message.

    Raises EngineError where no argument is a floating tensor.
    """
    if _is_floating(kwargs.get(KEYWORD), 1):
        return KEYWORD
    named: list[tuple[ArgumentKey, Any]] = [*enumerate(args), *kwargs.items()]
    for least in (3, 1):
        for key, value in named:
            if _is_floating(value, least):
                return key
    raise EngineError(f"{block} is called without a floating tensor: it has no hidden state that could pass it by")


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], key: ArgumentKey) -> Tensor:
    """The argument at ``key``."""
    value = args[key] if isinstance(key, int) else kwargs[key]
    assert isinstance(value, Tensor)
    return value


def with_hidden(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], key: ArgumentKey, hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another hidden state."""
    if isinstance(key, int):
        return (*args[:key], hidden, *args[key + 1 :]), dict(kwargs)
    return args, {**kwargs, key: hidden}


def output_hidden(output: Any, block: str) -> Tensor:
    """The hidden state in what a block returned: the tensor itself, or the first item.

    Raises EngineError where that is not a floating tensor.
    """
    found = output
    if isinstance(output, Mapping):
        found = next(iter(output.values()), None)
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    if not _is_floating(found, 1):
        raise EngineError(
            f"{block} returns a {type(output).__name__} whose first item is no floating tensor: "
            "a block must return its hidden state, alone or first"
        )
    assert isinstance(found, Tensor)
    return found


def with_output_hidden(output: Any, hidden: Tensor) -> Any:
    """What a block returned, of the same type, with another hidden state."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, Mapping):
        first = next(iter(output))
        if dataclasses.is_dataclass(output) and not isinstance(output, type):
            return dataclasses.replace(output, **{first: hidden})
        rebuild: Any = type(output)
        return rebuild({**output, first: hidden})
    if hasattr(output, "_replace"):
        return output._replace(**{output._fields[0]: hidden})
    return type(output)((hidden, *output[1:]))


def _is_floating(value: Any, least_dimensions: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= least_dimensions
