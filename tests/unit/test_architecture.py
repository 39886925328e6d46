"""The rules of the house (docs/architecture.md) that a machine can check, read from the source with `ast`."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENGINE = REPOSITORY / "engine"

RUNGS = (
    "__init__",
    "compat",
    "cli",
    "entry",
    "mpu",
    "build",
    "engine",
    "surface",
    "full_state",
    "window_checks",
    "window",
    "weights",
    "model",
    "optim",
    "data",
    "checkpoint",
    "watch",
    "launch",
    "collectives",
    "contracts",
    "saved_work",
    "parameters",
    "cut",
    "mesh",
    "random",
    "device",
    "torch_compat",
    "plan",
    "config",
)
"""The entries of engine/, top to bottom. An entry imports only what stands after it."""

MAX_LINES = 400
MAX_BUILD_LINES = 150
MAX_STEP_LINES = 60
MAX_EXAMPLE_LINES = 60
FOREIGN_PRIVATE_ALLOWED = {
    "_exit",
    "_asdict",
    "_replace",
    "_fields",
    "_no_split_modules",
    "_init_weights",
    "_tp_plan",
    "_attn_implementation",
    "_supports_flash_attn",
}
"""Underscored, yet documented: parts of the standard library, and what transformers asks model authors to define."""


def source_files() -> list[Path]:
    return sorted(ENGINE.rglob("*.py"))


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def rung_of(path: Path) -> str:
    return path.relative_to(ENGINE).parts[0].removesuffix(".py")


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}"


def imported_modules(path: Path, tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every ``(node, dotted name)`` that the file imports, wherever the import stands. Relative ones are resolved."""
    package = path.relative_to(REPOSITORY).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            yield from ((node, ".".join([*base, alias.name])) for alias in node.names)


def rung_of_import(name: str) -> str | None:
    """The entry of engine/ that an imported dotted name belongs to; None for other packages."""
    first, *rest = name.split(".")
    if first != "engine":
        return None
    known = rest and ((ENGINE / rest[0]).is_dir() or (ENGINE / f"{rest[0]}.py").is_file())
    return rest[0] if known else "__init__"


def upward_imports(path: Path, tree: ast.Module) -> list[str]:
    own = rung_of(path)
    found = []
    for node, name in imported_modules(path, tree):
        target = rung_of_import(name)
        if target is not None and target != own and RUNGS.index(target) <= RUNGS.index(own):
            found.append(f"{at(path, node)} imports {name}")
    return found


def test_every_entry_of_the_package_has_a_rung() -> None:
    entries = {rung_of(path) for path in source_files()}
    assert entries <= set(RUNGS), f"new entries need a place in RUNGS: {entries - set(RUNGS)}"


def test_imports_go_down() -> None:
    assert not [line for path in source_files() for line in upward_imports(path, syntax_tree(path))]


@pytest.mark.parametrize(
    "source",
    [
        "from engine.model import blocks",
        "from ..model.blocks import find",
        "def later():\n    import engine.cli.main",
        "from engine import initialize",
    ],
)
def test_an_upward_import_is_found(source: str) -> None:
    assert upward_imports(ENGINE / "optim" / "adam.py", ast.parse(source))


@pytest.mark.parametrize("source", ["from engine.plan import Plan", "from . import lamb", "import torch.optim"])
def test_a_downward_import_is_fine(source: str) -> None:
    assert not upward_imports(ENGINE / "optim" / "adam.py", ast.parse(source))


def test_file_sizes() -> None:
    limits = {"engine/build.py": MAX_BUILD_LINES}
    files = [*source_files(), *sorted((REPOSITORY / "tests").rglob("*.py"))]
    sizes = {path.relative_to(REPOSITORY).as_posix(): len(path.read_text("utf-8").splitlines()) for path in files}
    assert not {name: size for name, size in sizes.items() if size > limits.get(name, MAX_LINES)}
    examples = {path.name: len(path.read_text("utf-8").splitlines()) for path in REPOSITORY.glob("examples/*/*.py")}
    assert not {name: size for name, size in examples.items() if size > MAX_EXAMPLE_LINES}


def test_the_step_is_short() -> None:
    lengths = {
        f"{at(path, node)} {node.name}": node.end_lineno - node.lineno + 1
        for path in source_files()
        if path == ENGINE / "engine.py"
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_STEP_LINES}


# --- private torch names -----------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


@functools.cache
def own_private_names() -> frozenset[str]:
    """Every underscored name that this package itself defines: functions, classes, variables, attributes, modules."""
    names = {path.stem for path in source_files()}
    for path in source_files():
        names |= defined_names(syntax_tree(path))
    return frozenset(filter(is_private, names))


def defined_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def foreign_private_names(path: Path, tree: ast.Module) -> list[str]:
    """Uses of underscored names that belong to somebody else: imported, read as an attribute, or through getattr."""
    found = []
    for node, name in imported_modules(path, tree):
        if not name.startswith("engine.") and any(map(is_private, name.split("."))):
            found.append(f"{at(path, node)} imports {name}")
    own = own_private_names() | defined_names(tree) | FOREIGN_PRIVATE_ALLOWED
    for node in ast.walk(tree):
        attribute = None
        if isinstance(node, ast.Attribute):
            attribute = node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            attribute = str(node.args[1].value)
        if attribute is not None and is_private(attribute) and attribute not in own:
            found.append(f"{at(path, node)} uses {attribute}")
    return found


def test_private_torch_names_stand_in_torch_compat_only() -> None:
    files = [path for path in source_files() if path != ENGINE / "torch_compat.py"]
    assert not [line for path in files for line in foreign_private_names(path, syntax_tree(path))]


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.fsdp import _fully_shard",
        "import torch._dynamo",
        "norm = torch._foreach_norm(tensors)",
        "local = parameter._local_tensor",
        "group = getattr(module, '_fsdp_param_group')",
    ],
)
def test_a_private_torch_name_is_found(source: str) -> None:
    assert foreign_private_names(ENGINE / "model" / "planted.py", ast.parse(source))


def test_names_of_our_own_are_fine() -> None:
    source = "class A:\n    def __init__(self): self._cache = {}\ndef read(a): return a._cache, a.__dict__"
    assert not foreign_private_names(ENGINE / "model" / "planted.py", ast.parse(source))


# --- collectives are counted ---------------------------------------------------------------------------------


def collective_calls(path: Path, tree: ast.Module) -> list[str]:
    """Uses of torch.distributed's ways to send: ``dist.all_reduce``, and imports of such names."""
    words = ("all_reduce", "reduce", "gather", "scatter", "broadcast", "all_to_all", "barrier", "send", "recv", "P2POp")
    found = []
    for node, name in imported_modules(path, tree):
        if name.startswith("torch.distributed.") and any(word in name.rpartition(".")[2] for word in words):
            found.append(f"{at(path, node)} imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if owner in ("dist", "distributed") and any(word in node.attr for word in words):
                found.append(f"{at(path, node)} uses {node.attr}")
    return found


def test_collectives_are_called_where_they_are_counted() -> None:
    """engine/collectives/ writes every one into the ledger."""
    files = [path for path in source_files() if rung_of(path) != "collectives"]
    assert not [line for path in files for line in collective_calls(path, syntax_tree(path))]


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_reduce(flat)",
        "torch.distributed.all_gather_object(a, b)",
        "works = dist.batch_isend_irecv(operations)",
        "from torch.distributed import broadcast",
    ],
)
def test_a_collective_that_nobody_counts_is_found(source: str) -> None:
    assert collective_calls(ENGINE / "model" / "planted.py", ast.parse(source))


# --- what is loaded, and what is tracked -------------------------------------------------------------------


@pytest.mark.parametrize("module", ["engine", "engine.config", "engine.plan", "engine.contracts"])
def test_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules and 'torch was loaded')"
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


MACHINE_PATH = re.compile(r"(?<![\w.\-/}~$])/(?:home|Users|root|work)/[\w.]")


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = REPOSITORY / name
        if path.is_file():
            text = path.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{name}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found


def test_a_path_of_one_machine_is_found() -> None:
    assert MACHINE_PATH.search("output in /" + "home/someone")
    assert MACHINE_PATH.search('open("/' + 'work/data.txt")')
    assert not MACHINE_PATH.search("docs/" + "home/page and $HOME/" + "work/tree")
