"""`model.target`: find the user's class or function and call it with `model.args`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.cli.user_code import describe
from engine.contracts import EngineError

FORMS = 'expected "file.py:Attribute", "package.module:Attribute" or "package.module.Attribute"'


def load_target(target: str, base: Path) -> Callable[..., Any]:
    """The object that `target` names. A file is relative to `base`, the config's folder.

    `base` and the working directory are put on `sys.path`, so that the user's modules find each other. Raises
    EngineError, saying which part of the name was not found or why the import failed.
    """
    for folder, position in ((base, 0), (Path.cwd(), len(sys.path))):
        if str(folder) not in sys.path:
            sys.path.insert(position, str(folder))
    name, _, attribute = target.rpartition(":")
    if name.endswith(".py"):
        found = _attribute(_load_file(target, base / name), attribute, target)
    elif name:
        found = _attribute(_load_module(target, name), attribute, target)
    else:
        name, _, attribute = target.rpartition(".")
        if not name or target.endswith(".py"):
            raise EngineError(f"model.target is {target!r}; {FORMS}")
        found = _dotted(target, name, attribute)
    if not callable(found):
        raise EngineError(f"model.target {target!r} is a {type(found).__name__}; it must be a class or a function")
    return found


def bind_arguments(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of the call by name, defaults included. Raises EngineError naming what does not fit."""
    name = getattr(target, "__name__", str(target))
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return dict(arguments)
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for unknown in [key for key in arguments if key not in named]:
            near = difflib.get_close_matches(unknown, named, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(named) or 'none'}"
            raise EngineError(f"model.args.{unknown}: {name} has no argument {unknown!r}; {hint}")
    missing = [p.name for p in parameters if p.name in named and p.default is p.empty and p.name not in arguments]
    if missing:
        raise EngineError(f"model.args: {name} needs {', '.join(missing)}, which {_is_are(missing)} not given")
    bound = signature.bind(**arguments)
    bound.apply_defaults()
    return dict(bound.arguments)


def build_model(target: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call the target. Raises EngineError where it fails or returns no `torch.nn.Module`."""
    from torch import nn

    name = getattr(target, "__name__", str(target))
    try:
        model = target(**arguments)
    except Exception as error:
        raise EngineError(f"model.target: building {name} failed: {describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise EngineError(f"model.target: {name} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _load_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise EngineError(f"model.target {target!r}: there is no file {path}")
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EngineError(f"model.target {target!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EngineError(f"model.target {target!r}: importing {path} failed: {describe(error)}") from error
    return module


def _load_module(target: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise EngineError(f"model.target {target!r}: there is no module {error.name!r}") from error
        raise EngineError(f"model.target {target!r}: importing {name} failed: {describe(error)}") from error
    except Exception as error:
        raise EngineError(f"model.target {target!r}: importing {name} failed: {describe(error)}") from error


def _dotted(target: str, name: str, attribute: str) -> Any:
    """`package.module.Class.method`: the module is the longest prefix that can be imported."""
    attributes = [attribute]
    while "." in name and not _exists(name):
        name, _, outer = name.rpartition(".")
        attributes.insert(0, outer)
    found: Any = _load_module(target, name)
    for part in attributes:
        found = _attribute(found, part, target)
    return found


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _attribute(owner: Any, name: str, target: str) -> Any:
    found = owner
    for part in name.split("."):
        if not hasattr(found, part):
            public = [other for other in vars(found) if not other.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            where = getattr(found, "__file__", None) or getattr(found, "__name__", found)
            raise EngineError(f"model.target {target!r}: {where} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
