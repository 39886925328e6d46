"""What stands in place of a module's forward."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

Record = TypeVar("Record")


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


class ReplacedForwards(Generic[Record]):
    """The forwards that a transform has replaced, of a model and of its blocks, and which training forward of the model
    (``under_way``) its blocks run in; `close` puts the forwards back."""

    under_way: Record | None = None
    _replacements: Sequence[Replacement] = ()

    def _put(self, *replacements: Replacement) -> None:
        self._replacements = replacements
        for replacement in replacements:
            replacement.put()

    def close(self) -> None:
        """Give the modules their own forwards back."""
        for replacement in reversed(self._replacements):
            replacement.remove()
        self._replacements = ()

    @contextmanager
    def inside(self, forward: Record | None) -> Iterator[None]:
        """Around a forward of the model. None: it does not train, though it may run in one that does, as a teacher's
        does."""
        around, self.under_way = self.under_way, forward
        try:
            yield
        finally:
            self.under_way = around


def _own_forward(module: nn.Module, before: Any) -> Any:
    return before if before is not None else types.MethodType(type(module).forward, module)
