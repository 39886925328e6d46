"""Attention over slices equals torch's over the whole sequence: outputs, gradients, masks, grouped heads, bytes."""

from __future__ import annotations

import pytest

from tests.parity.attention_oracle import largest_deviations

SPLITS = [{"sp": 2}, {"cp": 2}, {"sp": 2, "cp": 2}, {"sp": 4}, {"cp": 4}]
CASES = ["causal", "full", "padding", "rows", "bias"]


def all_cases(degrees, shape):
    return {case: largest_deviations(degrees, shape, case)[0] for case in CASES}


@pytest.mark.parametrize("shape", [(2, 4, 4, 16, 8), (1, 8, 2, 32, 4), (2, 4, 1, 16, 8)], ids=["plain", "gqa", "mqa"])
@pytest.mark.parametrize("degrees", SPLITS, ids=lambda degrees: "-".join(f"{a}{n}" for a, n in degrees.items()))
def test_equal_to_the_whole(ranks, degrees, shape):
    world = degrees.get("sp", 1) * degrees.get("cp", 1)
    for rank, by_case in enumerate(ranks(world).run(all_cases, degrees, shape)):
        for case, deviations in by_case.items():
            assert max(deviations) < 2e-6, f"rank {rank}, {case}: output, query, key, value are off by {deviations}"
