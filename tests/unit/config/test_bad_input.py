"""Files that are no configs: one clear message each, at once, and exit code 2."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.cli.main import main

LIMIT_SECONDS = 2.0

FILES: dict[str, tuple[bytes, str]] = {
    "objects 1,000 deep": (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested more than 64 deep"),
    "lists 1,000 deep": (b'{"seed":' + b"[" * 1000 + b"]" * 1000 + b"}", "nested more than 64 deep"),
    "50 MB": (b'{"a": "' + b"x" * 50_000_000 + b'"}', "a config has at most 2; is this the right file?"),
    "no UTF-8": (b'{"seed": 1,\n "a": "\xff\xfe"}', "2:8: byte 0xff is not UTF-8 text"),
    "NaN": (b'{"seed": NaN}', "seed: NaN is not a number that JSON has"),
    "Infinity": (b'{"gradient_clipping": -Infinity}', "-Infinity is not a number that JSON has"),
    "beyond a float": (b'{"gradient_clipping": 1e999}', "1e999 is too large a number"),
    "400 digits": (b'{"seed": ' + b"9" * 400 + b"}", "is a number of 400 digits (allowed: at most 64)"),
    "400 digits of a fraction": (b'{"gradient_clipping": 0.' + b"1" * 400 + b"}", "is a number of 401 digits"),
    "400 digits in quotes": (b'{"gradient_clipping": "' + b"9" * 400 + b'"}', "gradient_clipping"),
    "150,000 keys": (b"{" + b",".join(b'"k%d": 1' % n for n in range(150_000)) + b"}", "more than 20000 values"),
    "a million items": (b'{"a": [' + b"1," * 1_000_000 + b"]}", "more than 20000 values"),
    "an endless key": (b'{"' + b"k" * 2_000_000 + b'": 1}', "is a key of 2000000 letters"),
    "an endless word": (b'{"seed": ' + b"a" * 2_000_000 + b"}", "has no quotes"),
    "an endless text": (b'{"seed": "' + b"\\u0041" * 300_000, "this text has no closing quote"),
    "an endless placeholder": (b'{"seed": %(' + b"x" * 1_000_000, "has not been filled in"),
    "an open comment": (b"{/*" + b"*" * 1_000_000, "this comment has no end"),
    "a million lines": (b'{"seed": 1' + b"\n" * 1_000_000 + b"x}", "a comma is missing"),
    "only braces": (b"{" * 1_000_000, "stands where a key should be"),
    "nothing": (b"", "is empty"),
    "zero bytes": (b"\0" * 1000, "does not hold a JSON object"),
    "a list": (b"[1, 2]", "does not hold a JSON object"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, words = FILES[name]
    path = tmp_path / "run.json"
    path.write_bytes(content)
    began = time.process_time()
    assert main(["validate", str(path)]) == 2
    assert time.process_time() - began < LIMIT_SECONDS
    told = capsys.readouterr()
    assert words in told.out
    assert "Traceback" not in told.out + told.err
    assert max(map(len, told.out.splitlines())) < 1500
