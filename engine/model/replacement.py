"""What stands in place of a module's forward."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class Replacement(ABC):
    """Put on a module as its ``forward``, until `remove`; a subclass says in ``__call__`` what happens.

    It has the signature of the forward that it replaces. A copy of the module, or a pickled one, has that forward
    again: it is a model of its own, which no engine trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Any = module.__dict__.get("forward")
        self.__signature__ = inspect.signature(module.forward)

    def put(self) -> None:
        self.module.forward = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward
        if self.before is not None:
            self.module.forward = self.before

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there. That of the class is looked up in each call: FSDP2 gives a module another class,
        and Hugging Face's layers compute activations again only in the forward of the class that they have."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __reduce__(self) -> Any:
        return _own_forward, (self.module, self.before)


def _own_forward(module: nn.Module, before: Any) -> Any:
    return before if before is not None else types.MethodType(type(module).forward, module)
