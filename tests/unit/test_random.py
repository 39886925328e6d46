from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from engine.random import generator, stream_seed


def test_the_seed_depends_on_every_argument_its_type_and_its_place() -> None:
    names: list[tuple[Any, ...]] = [
        (0,), (1,), (-1,), (0, 1), (1, 0), (0, "1"), (0, ""), (0, "", ""), (1, 23), (12, 3), (1, "a,b"), (1, "a", "b"),
        (1, 'a"'), (1, "ä"), (2**70,),
    ]  # fmt: skip
    seeds = [stream_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_seed_is_the_same_in_every_process() -> None:
    code = "from engine.random import stream_seed; print(stream_seed(7, 'sample_order', 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert stream_seed(7, "sample_order", 3) == int(other) == 8292999425617108668


def test_a_generator_is_at_the_start_of_its_own_stream() -> None:
    draw = torch.rand(4, generator=generator(7, "gate", 1))
    torch.rand(4)
    assert torch.equal(draw, torch.rand(4, generator=generator(7, "gate", 1)))
    assert not torch.equal(draw, torch.rand(4, generator=generator(7, "gate", 2)))
    assert not torch.equal(draw, torch.rand(4, generator=generator(8, "gate", 1)))


@pytest.mark.parametrize("part", [1.0, None, True, b"x", (1,)])
def test_only_integers_and_strings_name_a_stream(part: Any) -> None:
    with pytest.raises(TypeError, match="integers and strings"):
        stream_seed(1, part)
