"""`model.target`: every form of the name, and what is said when something is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from engine.cli.target import bind_arguments, build_model, load_target
from engine.contracts import EngineError

MODEL = """
from torch import nn
import part_of_it
class Net(nn.Module):
    def __init__(self, width, depth=2, *, bias=True):
        super().__init__()
        if width > 100:
            raise ValueError("too wide")
        self.layer = nn.Linear(width, width, bias)
def build(**sizes):
    return Net(**sizes)
number = 3
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "net_file.py").write_text(MODEL)
    (tmp_path / "part_of_it.py").write_text("")
    package = tmp_path / "net_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net_module.py").write_text(MODEL + "class Outer:\n    Inner = Net\n")
    (package / "broken.py").write_text("x = 1\nimport absent_dependency\n")
    (tmp_path / "syntax.py").write_text("x = 1\ndef (:\n")
    return tmp_path


@pytest.mark.parametrize(
    "target",
    [
        "net_file.py:Net",
        "net_package/net_module.py:Net",
        "net_package.net_module:Net",
        "net_package.net_module.Net",
        "net_package.net_module:Outer.Inner",
        "net_package.net_module.Outer.Inner",
    ],
)
def test_forms(base: Path, target: str) -> None:
    assert load_target(target, base).__name__ == "Net"


def test_a_file_named_like_a_loaded_module_does_not_replace_it(base: Path) -> None:
    (base / "json.py").write_text(MODEL)
    before = sys.modules["json"]
    assert load_target("json.py:Net", base).__name__ == "Net"
    assert sys.modules["json"] is before


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("absent.py:Net", "there is no file"),
        ("net_file.py:Nte", "has no 'Nte'; did you mean 'Net'?"),
        ("net_file.py", 'expected "file.py:Attribute"'),
        ("Net", 'expected "file.py:Attribute"'),
        ("no_such_package.module:Net", "there is no module 'no_such_package'"),
        ("net_package.absent:Net", "there is no module 'net_package.absent'"),
        ("net_package.net_module.Nte", "has no 'Nte'; did you mean 'Net'?"),
        ("net_package.broken:Net", "broken.py:2"),
        ("syntax.py:Net", "syntax.py:2: "),
        ("net_file.py:number", "is a int; it must be a class or a function"),
    ],
)
def test_what_is_not_there(base: Path, target: str, words: str) -> None:
    with pytest.raises(EngineError) as caught:
        load_target(target, base)
    assert words in str(caught.value)
    assert target in str(caught.value)


def test_arguments_are_bound_with_their_defaults(base: Path) -> None:
    net = load_target("net_file.py:Net", base)
    assert bind_arguments(net, {"width": 4}) == {"width": 4, "depth": 2, "bias": True}
    assert bind_arguments(load_target("net_file.py:build", base), {"width": 4}) == {"sizes": {"width": 4}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"widht": 3, "width": 3}, "model.args.widht: Net has no argument 'widht'; did you mean 'width'?"),
        ({"zzz": 3, "width": 3}, "it takes width, depth, bias"),
        ({}, "Net needs width, which is not given"),
    ],
)
def test_arguments_that_do_not_fit(base: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError) as caught:
        bind_arguments(load_target("net_file.py:Net", base), arguments)
    assert words in str(caught.value)


def test_building(base: Path) -> None:
    net = load_target("net_file.py:Net", base)
    assert isinstance(build_model(net, {"width": 4}), nn.Module)
    with pytest.raises(EngineError, match=r"building Net failed: ValueError: too wide \(.*net_file.py:8\)"):
        build_model(net, {"width": 101})
    with pytest.raises(EngineError, match=r"returned a int; it must return a torch.nn.Module"):
        build_model(int, {})
