"""Every problem is a record for programs: a stable code, what was found, what is allowed, the repair."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import examine
from engine.config.messages import CODES
from engine.plan import World, verdict

ENGINE = Path(__file__).resolve().parents[3] / "engine"
FIELDS = ["path", "line", "column", "code", "message", "found", "allowed", "repair"]
BATCH = '"train_batch_size": 8'

WRONG: dict[str, tuple[str, str, Any]] = {
    "empty": ("", "syntax", ""),
    "no object": ("[1]", "syntax", "[1]"),
    "no comma": ('{"seed": 1 "strict": true}', "syntax", '"strict": true}'),
    "no colon": ('{"seed" 1}', "syntax", "1}"),
    "open": ('{"seed": 1', "syntax", None),
    "open comment": ("{/* }", "syntax", "/* }"),
    "no quotes": ("{seed: 1}", "syntax", "seed"),
    "single quotes": ("{'seed': 1}", "syntax", "'seed'"),
    "python": ('{"strict": True}', "python", "True"),
    "placeholder": ('{"seed": ${SEED}}', "placeholder", "${SEED}"),
    "placeholder in text": ('{"seed": "{{ seed }}"}', "placeholder", "{{ seed }}"),
    "twice": ('{"seed": 1, "seed": 2}', "duplicate-key", "seed"),
    "nan": ('{"seed": NaN}', "not-finite", "NaN"),
    "deep": ('{"a": ' * 80 + "1" + "}" * 80, "too-deep", None),
    "long": ('{"seed": ' + "9" * 80 + "}", "too-long", None),
    "unknown": ('{"sed": 1}', "unknown-key", 1),
    "unknown, far": ('{"zzzzzzzz": 1}', "unknown-key", 1),
    "unknown in a section": ('{"bf16": {"enable": true}}', "unknown-key", True),
    "unknown argument": ('{"optimizer": {"type": "AdamW", "params": {"zzz": 3}}}', "unknown-key", 3),
    "unknown optimizer": ('{"optimizer": {"type": "Adamm"}}', "unknown-type", "Adamm"),
    "unusable optimizer": ('{"optimizer": {"type": "LBFGS"}}', "unusable-type", "LBFGS"),
    "unusable schedule": ('{"scheduler": {"type": "LambdaLR"}}', "unusable-type", "LambdaLR"),
    "stage": ('{"zero_optimization": {"stage": 5}}', "value", 5),
    "text": ('{"seed": "many"}', "value", "many"),
    "null": ('{"seed": null}', "value", None),
    "section": ('{"tensorboard": 3}', "value", 3),
    "negative": ('{"optimizer": {"type": "AdamW", "params": {"lr": -1}}}', "value", -1),
    "argument": ('{"optimizer": {"type": "AdamW", "params": {"lr": "x"}}}', "type", "x"),
    "betas": ('{"optimizer": {"type": "AdamW", "params": {"betas": [1.5, 1]}}}', "value", [1.5, 1.0]),
    "no type": ('{"optimizer": {"params": {}}}', "missing-key", None),
    "nvme": ('{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "missing-key", None),
    "loss scale": ('{"fp16": {"enabled": true, "min_loss_scale": 1e9}}', "conflict", 1e9),
    "mics": ('{"zero_optimization": {"mics_shard_size": 0}}', "value", 0),
    "mics below 3": ('{"zero_optimization": {"mics_shard_size": 2}}', "conflict", 2),
    "mics ranks": ('{"zero_optimization": {"stage": 3, "mics_shard_size": 3}}', "ranks", 3),
    "both": ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "conflict", True),
    "same key twice": ('{"bfloat16": {"enabled": true}, "bf16": {"enabled": false}}', "conflict", {"enabled": True}),
    "batch": ('{"train_batch_size": 7}', "batch-arithmetic", 7),
    "no total": ('{"scheduler": {"type": "WarmupDecayLR"}}', "missing-key", None),
    "cycles": (
        '{"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}}', "value", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_problem_is_a_whole_record(name: str, tmp_path: Path) -> None:
    text, code, found = WRONG[name]
    file = tmp_path / "config.json"
    file.write_text(text)
    examined = examine(str(file))
    problems = list(examined.problems)
    if examined.config is not None:
        problems += verdict(examined.config, World(2)).problems
    records = [problem.to_json() for problem in problems]
    assert code in {record["code"] for record in records}
    for record in records:
        assert list(record) == FIELDS
        assert record["code"] in CODES
        assert record["allowed"], record
        assert record["repair"], record
        json.dumps(record)
    if found is not None:
        assert found in [record["found"] for record in records if record["code"] == code]


def test_an_override_names_its_argument() -> None:
    (problem,) = examine({}, overrides=["zero_optimization.stage=9"]).problems
    assert problem.to_json()["message"].startswith("--set zero_optimization.stage=9: ")


def codes_in_the_source() -> set[str]:
    """Every word that stands as a code where a problem is made: the third positional argument, or ``code=``."""
    found = set()
    for path in (*ENGINE.rglob("config/**/*.py"), *ENGINE.rglob("plan/*.py"), ENGINE / "entry.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("Problem", "problem", "refuse", "_refused"):
                values += node.args[2:4]
            found |= {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return {word for word in found if word and " " not in word}


def test_every_code_is_explained() -> None:
    used = codes_in_the_source()
    assert used <= CODES.keys()
    assert {"syntax", "conflict", "value", "needs-values", "file", "encoding"} <= used | CODES.keys()
