"""A tolerant JSON reader that knows where everything stands.

Accepted beyond JSON: comments (``//``, ``/* */``, ``#``), trailing commas, CRLF, BOM, tabs in strings. Everything
else that is
not JSON is a problem with its place; reading goes on after it where the meaning is clear, so that all problems of a
file
come out at once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from engine.config.messages import Problem, show
from engine.config.places import Path, Places, join_path

MAX_BYTES = 2 * 2**20
MAX_DEPTH = 64
MAX_DIGITS = 64
MAX_PROBLEMS = 100
MAX_VALUES = 20_000
MAX_KEY_LENGTH = 200

_SPACE = re.compile(r"(?:[ \t\r\n\f\v\u00a0\ufeff]++|//[^\n]*+|#[^\n]*+|/\*.*?\*/)*+", re.DOTALL)
_STRING = {quote: re.compile(rf"{quote}((?:[^{quote}\\\n]++|\\.)*+){quote}") for quote in "\"'"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\Z")
_WORD = re.compile(r"[^\s,:\[\]{}\"'#/]+")
_PLACEHOLDER = re.compile(
    r"\{\{\s*([^{}\n]*?)\s*\}\}|\$\{\s*([^{}\n]*?)\s*\}|<\s*([A-Za-z_][\w .-]*?)\s*>|%\((\w+)\)[sd]"
)
_CAPITALS = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+[a-z]{0,2})+")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PYTHON = {"True": True, "False": False, "None": None, "TRUE": True, "FALSE": False, "NULL": None, "Null": None}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "Inf", "-Inf", "+Infinity"}


@dataclass
class Document:
    """What a file says. ``broken`` are paths whose value could not be read; ``complete`` is False when reading
    stopped."""

    value: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    problems: list[Problem] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    complete: bool = True


class _Stop(Exception):
    """Nothing sensible can be read after this point."""


_UNREADABLE: Any = object()

_RIGHT = {
    "duplicate-key": "each key once",
    "placeholder": "a value",
    "python": "true, false or null",
    "not-finite": "a finite number",
    "too-deep": f"at most {MAX_DEPTH} levels",
}
"""What would be right, by the code of a problem."""


def placeholder(text: str) -> str | None:
    """The name of an unfilled template placeholder in a text, or None."""
    match = _PLACEHOLDER.search(text)
    if match is None or (match[3] is not None and match[0] != text.strip()):
        return None
    return next(group for group in match.groups() if group is not None) or match[0]


def looks_unfilled(text: str) -> bool:
    """Whether a text is written as the placeholders of shell templates are: ``CL_CLUSTER_PATH``, ``MBSIZE_1st``."""
    return _CAPITALS.fullmatch(text) is not None


def read_text(text: str, file: str | None = None) -> Document:
    """Read JSON text. Never raises: what is wrong is in ``problems``."""
    document = Document(places=Places(file=file))
    if not text.strip("\ufeff \t\r\n"):
        document.problems.append(
            Problem("", "is empty", "syntax", file, 1, 1, "", allowed="a JSON object", repair="write at least {}")
        )
        document.complete = False
        return document
    try:
        _Reader(text, document).read()
    except _Stop:
        document.complete = False
    return document


class _Reader:
    def __init__(self, text: str, document: Document) -> None:
        self.text = text
        self.document = document
        self.at = 0
        self.num_values = 0
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, at: int) -> tuple[int, int]:
        line = bisect_right(self.starts, at)
        return line, at - self.starts[line - 1] + 1

    def problem(self, at: int, path: Path, message: str, code: str = "syntax", **more: Any) -> None:
        line, column = self.place(at)
        more.setdefault("found", self.text[at : at + 20].partition("\n")[0].strip() or None)
        more.setdefault("repair", "correct the text here")
        more.setdefault("options", (_RIGHT.get(code, "JSON, with comments and trailing commas"),))
        problems = self.document.problems
        problems.append(Problem(join_path(path), message, code, self.document.places.file, line, column, **more))
        if len(problems) >= MAX_PROBLEMS:
            raise _Stop

    def skip(self) -> str:
        """Pass white space and comments; the next character, '' at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        if self.text.startswith("/*", self.at):
            self.problem(self.at, (), "this comment has no end", repair="close it with */")
            raise _Stop
        return self.text[self.at : self.at + 1]

    def read(self) -> None:
        first = self.skip()
        if first != "{":
            self.problem(
                self.at,
                (),
                "the file does not hold a JSON object",
                found=self.text[self.at : self.at + 20],
                allowed="an object in braces",
                repair="begin with {",
            )
            raise _Stop
        self.document.value = self.object((), 1)
        if self.skip():
            self.problem(
                self.at, (), "there is text after the closing brace", repair="delete it, or a brace too many before it"
            )

    def object(self, path: Path, depth: int) -> dict[str, Any]:
        opening = self.at
        self.check_depth(path, depth)
        self.at += 1
        result: dict[str, Any] = {}
        places = self.document.places
        while (char := self.skip()) != "}":
            start = self.at
            key = self.key(char, path, opening)
            if len(key) > MAX_KEY_LENGTH:
                shown = show(key)
                allowed = f"at most {MAX_KEY_LENGTH}"
                self.problem(start, path, f"is a key of {len(key)} letters", "too-long", found=shown, allowed=allowed)
                raise _Stop
            here = (*path, key)
            if self.skip() != ":":
                self.problem(self.at, here, f"there is no colon after the key {show(key)}", repair='write "key": value')
                raise _Stop
            self.at += 1
            self.skip()
            repeated = key in result or here in self.document.broken
            if repeated:
                line = places.keys[here][0]
                self.problem(
                    start,
                    here,
                    f"the key is written twice, on lines {line} and {self.place(start)[0]}",
                    "duplicate-key",
                    found=key,
                    repair="keep one of them",
                )
            known = (places.keys.get(here), places.values.get(here))
            places.keys[here] = self.place(start)
            places.values[here] = self.place(self.at)
            value = self.value(here, depth)
            if repeated:
                places.keys[here], places.values[here] = known  # type: ignore[assignment]
            elif value is _UNREADABLE:
                self.document.broken.add(here)
            else:
                result[key] = value
            self.separator("}", path, opening)
        self.at += 1
        return result

    def array(self, path: Path, depth: int) -> Any:
        opening = self.at
        self.check_depth(path, depth)
        self.at += 1
        result: list[Any] = []
        whole = True
        while self.skip() != "]":
            here = (*path, len(result))
            self.document.places.values[here] = self.place(self.at)
            value = self.value(here, depth)
            whole &= value is not _UNREADABLE
            result.append(value)
            self.separator("]", path, opening)
        self.at += 1
        return result if whole else _UNREADABLE

    def check_depth(self, path: Path, depth: int) -> None:
        if depth > MAX_DEPTH:
            self.problem(self.at, path[:3], f"is nested more than {MAX_DEPTH} deep", "too-deep")
            raise _Stop

    def key(self, char: str, path: Path, opening: int) -> str:
        if char and char in "\"'":
            return self.string(char, path)
        if not char:
            self.unclosed("{", path, opening)
        match = _WORD.match(self.text, self.at)
        if match is None:
            name = "a second comma" if char == "," else show(char)
            self.problem(self.at, path, f"{name} stands where a key should be", repair='write "key": value')
            raise _Stop
        word = match[0]
        shown = show(word)
        self.problem(self.at, (*path, word[:60]), "the key has no quotes", found=word[:60], repair=f"write {shown}")
        self.at = match.end()
        return word

    def separator(self, closing: str, path: Path, opening: int) -> None:
        before = self.at
        char = self.skip()
        if char == ",":
            self.at += 1
        elif not char:
            self.unclosed("{" if closing == "}" else "[", path, opening)
        elif char != closing:
            self.problem(
                before,
                path,
                f"a comma is missing before {show(self.text[self.at : self.at + 20])}",
                repair="add one here",
            )
            if char in "}]:":
                raise _Stop

    def unclosed(self, bracket: str, path: Path, opening: int) -> None:
        line, column = self.place(opening)
        closing = {"{": "}", "[": "]"}[bracket]
        self.problem(
            len(self.text.rstrip()),
            path,
            f"the file ends inside the {bracket} of line {line}, column {column}",
            repair=f"close it with {closing}",
        )
        raise _Stop

    def value(self, path: Path, depth: int) -> Any:
        char = self.skip()
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            message = f"the file holds more than {MAX_VALUES} values, which is no config"
            self.problem(self.at, path, message, "too-long", repair="is this the right file?")
            raise _Stop
        if match := _PLACEHOLDER.match(self.text, self.at):
            return self.unfilled(match[0], placeholder(match[0]) or match[0], path)
        if char == "{":
            return self.object(path, depth + 1)
        if char == "[":
            return self.array(path, depth + 1)
        if char and char in "\"'":
            return self.string(char, path)
        match = _WORD.match(self.text, self.at)
        if match is None:
            what = "the file ends" if not char else f"{show(char)} stands"
            self.problem(self.at, path, f"{what} where a value should be")
            raise _Stop
        return self.word(match[0], path)

    def word(self, word: str, path: Path) -> Any:
        start = self.at
        self.at += len(word)
        if word in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[word]
        if _NUMBER.match(word):
            return self.number(word, path, start)
        if word in _PYTHON:
            value = _PYTHON[word]
            self.problem(
                start, path, f"{word} is Python, not JSON", "python", found=word, repair=f"write {show(value)}"
            )
            return value
        if word in _NOT_FINITE:
            self.problem(
                start,
                path,
                f"{word} is not a number that JSON has",
                "not-finite",
                found=word,
                allowed="a finite number",
            )
            return _UNREADABLE
        if word[0].isdigit() or (word[0] in "+-." and len(word) > 1):
            self.problem(
                start, path, f"{show(word)} is not a JSON number", found=word[:60], allowed="such as 12, -0.5, 5e8"
            )
            return _UNREADABLE
        if word[0].isalpha() or word[0] in "_$@%<":
            self.at = start
            if word.lower() == word and word.isalpha():
                self.at += len(word)
                shown = show(word)
                self.problem(start, path, f"the text {shown} has no quotes", found=word[:60], repair=f"write {shown}")
                return _UNREADABLE
            return self.unfilled(word, word.strip("$@%<>") or word, path)
        self.problem(start, path, f"{show(word)} is not a JSON value", found=word[:60])
        return _UNREADABLE

    def number(self, word: str, path: Path, start: int) -> Any:
        digits = sum(char.isdigit() for char in word)
        if digits > MAX_DIGITS:
            self.problem(
                start,
                path,
                f"is a number of {digits} digits",
                "too-long",
                found=word[:20] + "...",
                allowed=f"at most {MAX_DIGITS}",
            )
            return _UNREADABLE
        value: int | float = int(word) if word.lstrip("-").isdigit() else float(word)
        if abs(value) > 1e300:
            self.problem(
                start, path, f"{word} is too large a number", "not-finite", found=word, allowed="a finite number"
            )
            return _UNREADABLE
        return value

    def unfilled(self, text: str, name: str, path: Path) -> Any:
        self.problem(
            self.at,
            path,
            f"the placeholder {name[:60]} has not been filled in",
            "placeholder",
            found=text[:60],
            repair="put a value in its place",
        )
        self.at += len(text)
        return _UNREADABLE

    def string(self, quote: str, path: Path) -> str:
        start = self.at
        match = _STRING[quote].match(self.text, start)
        if match is None:
            self.problem(
                start, path, "this text has no closing quote", repair=f"close it with {quote} on the same line"
            )
            raise _Stop
        self.at = match.end()
        if quote == "'":
            self.problem(start, path, "text stands in single quotes", found=match[0], repair="use double quotes")
        if "\\" not in match[1]:
            return match[1]
        return self.unescape(match[1], path, start)

    def unescape(self, text: str, path: Path, start: int) -> str:
        def replace(match: re.Match[str]) -> str:
            code = match[1]
            if code[0] == "u" and len(code) == 5:
                return chr(int(code[1:], 16))
            if code in _ESCAPES:
                return _ESCAPES[code]
            self.problem(
                start, path, f"\\{code} is not an escape that JSON has", found=match[0], repair=f"write \\\\{code}"
            )
            return match[0]

        joined = _ESCAPE.sub(replace, text)
        return joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
