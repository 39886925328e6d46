"""The JSON reader: what it tolerates, and where it says that something is wrong."""

from __future__ import annotations

import time

import pytest

from engine.config.reader import MAX_BYTES, placeholder, read_text
from tests.unit.config.conftest import Write, problems_of

TOLERATED = {
    "line comments": '{// why\n"seed": 7}',
    "block comments": '{/* why\n not */"seed": /* here */ 7}',
    "hash comments": '{\n# why\n"seed": 7 # because\n}',
    "trailing comma": '{"seed": 7,}',
    "trailing comma in a list": '{"seed": 7, "list": [1, 2,],}',
    "windows line ends": '{\r\n"seed": 7\r\n}\r\n',
    "byte order mark": '\ufeff{"seed": 7}',
    "tabs": '{\t"seed":\t7\t}',
    "a slash in text": '{"seed": 7, "url": "http://x//y # z"}',
    "escapes": '{"seed": 7, "text": "a\\u00e9\\n\\"\\\\"}',
}


@pytest.mark.parametrize("text", TOLERATED.values(), ids=TOLERATED.keys())
def test_what_people_write_is_read(text: str) -> None:
    document = read_text(text)
    assert document.problems == []
    assert document.value["seed"] == 7


def test_values_are_those_of_json() -> None:
    document = read_text('{"a": [1, -2.5, 1e3, true, false, null, "x\\ud83d\\ude00"], "b": {"c": {}}}')
    assert document.value == {"a": [1, -2.5, 1000.0, True, False, None, "x\U0001f600"], "b": {"c": {}}}


def test_positions_of_keys_and_values() -> None:
    places = read_text('{\n  "fp16": {\n    "enabled": true,\n    "list": [1,\n 2]\n  }\n}').places
    assert places.keys[("fp16", "enabled")] == (3, 5)
    assert places.values[("fp16", "enabled")] == (3, 16)
    assert places.values[("fp16", "list", 1)] == (5, 2)


BROKEN = {
    "nothing": ("", 1, 1, "is empty"),
    "not an object": ("[1]", 1, 1, "does not hold a JSON object"),
    "duplicate": ('{"seed": 1,\n"bf16": {},\n"seed": 2}', 3, 1, "on lines 1 and 3"),
    "python true": ('{"dump_state": True}', 1, 16, "write true"),
    "python none": ('{"seed": 3,\n "optimizer": None}', 2, 15, "write null"),
    "missing comma": ('{"seed": 1\n"dump_state": true}', 1, 11, "a comma is missing"),
    "missing colon": ('{"seed" 1}', 1, 9, "no colon"),
    "missing value": ('{"seed": }', 1, 10, "where a value should be"),
    "two commas": ('{"seed": 1,, "dump_state": true}', 1, 12, "a second comma"),
    "unquoted key": ("{seed: 1}", 1, 2, 'write "seed"'),
    "unquoted text": ('{"device": cpu}', 1, 12, 'write "cpu"'),
    "single quotes": ("{'seed': 1}", 1, 2, "double quotes"),
    "open text": ('{"device": "cpu\n}', 1, 12, "no closing quote"),
    "open object": ('{"bf16": {"enabled": true}', 1, 27, "the file ends inside the { of line 1, column 1"),
    "open comment": ('{"seed": 1 /* why }', 1, 12, "this comment has no end"),
    "text after the end": ('{"seed": 1}}', 1, 12, "after the closing brace"),
    "nan": ('{"gradient_clipping": NaN}', 1, 23, "finite"),
    "infinity": ('{"gradient_clipping": -Infinity}', 1, 23, "finite"),
    "too large": ('{"gradient_clipping": 1e999}', 1, 23, "too large"),
    "leading zero": ('{"seed": 007}', 1, 10, "not a JSON number"),
    "underscore": ('{"seed": 1_000}', 1, 10, "not a JSON number"),
    "bad escape": ('{"device": "c\\pu"}', 1, 12, "not an escape"),
}


@pytest.mark.parametrize(("text", "line", "column", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_wrong_is_said_with_its_place(write: Write, text: str, line: int, column: int, words: str) -> None:
    first = problems_of(write(text))[0]
    assert (first.line, first.column) == (line, column)
    assert words in first.render()
    assert first.render().startswith(f"{first.file}:{line}:{column}: ")


@pytest.mark.parametrize("template", ["{{ micro }}", "${micro}", "<micro>", "MICRO", "%(micro)s", "$MICRO"])
def test_unfilled_placeholders_are_named(write: Write, template: str) -> None:
    for text in (f'{{"train_batch_size": {template}}}', f'{{"train_batch_size": "{template}"}}'):
        if '"MICRO"' in text or '"$MICRO"' in text:
            continue  # indistinguishable from text; the type of the key refuses it
        (problem,) = problems_of(write(text))
        assert problem.code == "placeholder"
        assert problem.path == "train_batch_size"
        assert "micro" in problem.message.lower()


def test_placeholders_in_lists_and_arguments_are_named() -> None:
    params = {"lr": "{{ lr }}", "betas": ["${beta1}", 0.9], "eps": "1e-8"}
    tree = {"optimizer": {"type": "Adam", "params": params}, "elasticity": {"micro_batch_sizes": [1, "<size>"]}}
    assert [(problem.path, problem.code) for problem in problems_of(tree)] == [
        ("elasticity.micro_batch_sizes[1]", "placeholder"),
        ("optimizer.params.betas[0]", "placeholder"),
        ("optimizer.params.lr", "placeholder"),
    ]


def test_a_comparison_is_no_placeholder() -> None:
    assert placeholder("a < b and c > d") is None


def test_all_problems_of_a_file_come_out_at_once(write: Write) -> None:
    text = '{\n"dump_state": True,\n"train_batch_size": GB_SIZE,\n"stage": 3,\n"bf16": {"enabled": "perhaps"}\n}'
    assert [(problem.line, problem.code) for problem in problems_of(write(text))] == [
        (2, "python"),
        (3, "placeholder"),
        (4, "unknown-key"),
        (5, "value"),
    ]


HUGE = {
    "nested": ('{"data": ' * 1000 + "1" + "}" * 1000, "nested more than"),
    "lists": ('{"data": ' + "[" * 1000 + "]" * 1000 + "}", "nested more than"),
    "digits": ('{"seed": ' + "9" * 400 + "}", "400 digits"),
    "fraction": ('{"gradient_clipping": 0.' + "1" * 400 + "}", "digits"),
    "open text": ('{"device": "' + "x" * 1_000_000, "no closing quote"),
    "many problems": ("{" + ",".join(f'"a{index}": True' for index in range(5000)) + "}", "Python"),
    "backslashes": ('{"device": "' + "\\" * 200_001, "no closing quote"),
}


@pytest.mark.parametrize(("text", "words"), HUGE.values(), ids=HUGE.keys())
def test_huge_inputs_are_refused_quickly(write: Write, text: str, words: str) -> None:
    start = time.perf_counter()
    assert any(words in problem.render() for problem in problems_of(write(text)))
    assert time.perf_counter() - start < 2.0


def test_a_file_that_is_too_large_is_not_read(tmp_path: object, write: Write) -> None:
    path = write("")
    with open(path, "wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    (problem,) = problems_of(path)
    assert "MiB" in problem.message
    assert problem.file == path


def test_text_that_is_not_utf8_is_refused_with_its_place(tmp_path: object, write: Write) -> None:
    path = write("")
    with open(path, "wb") as stream:
        stream.write(b'{\n "device": "\xff"}')
    (problem,) = problems_of(path)
    assert (problem.line, problem.column) == (2, 13)
    assert "0xff" in problem.message


def test_utf16_with_a_byte_order_mark_is_read(write: Write) -> None:
    path = write("")
    with open(path, "wb") as stream:
        stream.write('{"seed": 7}'.encode("utf-16"))
    from engine.config import load_config

    assert load_config(path).seed == 7
