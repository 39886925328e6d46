"""Where ranks stand changes nothing of what is learnt: split models under every placement of dp and tp."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.runs import config_of
from tests.parity.split_models import train_split
from tests.parity.test_tensor_parallel import CLIP, assert_equal_to, reference


@pytest.mark.parametrize(
    ("world", "stage", "placement", "zero"),
    [
        (4, 1, "TPD", {}),
        pytest.param(4, 3, "TDP", {}, marks=pytest.mark.slow),
        pytest.param(4, 0, "DTP", {}, marks=pytest.mark.slow),
        pytest.param(8, 3, "TPD", {"mics_shard_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_placement_changes_no_result(
    ranks: Any, world: int, stage: int, placement: str, zero: dict[str, int]
) -> None:
    steps = 3 if world == 8 else 10
    config = config_of(stage=stage, clip=CLIP, zero_optimization=zero, parallel={"placement": placement})
    by_rank = ranks(world).run(train_split, "toy", config, 2, steps)
    assert_equal_to(reference("toy", "fp32", world // 2, steps), by_rank)
