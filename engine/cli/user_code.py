"""Errors that the user's own code raised: told by their innermost line there, which a traceback would bury."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[1])
_PATHS = sysconfig.get_paths()
STANDARD_LIBRARY = (_PATHS["stdlib"], _PATHS["platstdlib"])
INSTALLED = (_PATHS["purelib"], _PATHS["platlib"])


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame outside this package, torch and the standard library: in the user's files if any of them
    took part, else in an installed package. None where only torch and this package did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_foreign(frame.filename)]
    own = [frame for frame in frames if not _lies_in(frame.filename, INSTALLED)]
    return own[-1] if own else frames[-1] if frames else None


def describe(error: BaseException) -> str:
    """`ValueError: too wide (model.py:8)`."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frame = user_frame(error)
    where = f" ({frame.filename}:{frame.lineno})" if frame else ""
    return f"{type(error).__name__}: {error}{where}"


def _is_foreign(filename: str) -> bool:
    if filename.startswith("<") or _lies_in(filename, (PACKAGE,)) or Path(filename).name == "ptrain":
        return True
    torch = tuple(f"{folder}/torch" for folder in INSTALLED)
    return _lies_in(filename, torch) or (_lies_in(filename, STANDARD_LIBRARY) and not _lies_in(filename, INSTALLED))


def _lies_in(filename: str, folders: tuple[str, ...]) -> bool:
    return any(filename.startswith(f"{folder}/") for folder in folders)
