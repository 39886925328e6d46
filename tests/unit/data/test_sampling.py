"""The curriculum's sampler, and the loader that draws by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts import EngineError, SavedLayout
from engine.data.loader import DistributedLoader, RepeatingLoader
from engine.data.sampling import CurriculumSampler, Drawn
from engine.plan import CurriculumMetric, DifficultySchedule

NUM_SAMPLES = 97


class Index:
    """A `MetricIndex` of an array."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.num_samples = values, len(values)
        self.smallest, self.largest = int(values.min()), int(values.max())

    def up_to(self, value: float) -> np.ndarray:
        return self.values <= value

    def easiest(self, percentile: float, num_percentiles: float) -> np.ndarray:
        count = (
            len(self.values)
            if percentile >= num_percentiles
            else int(percentile) * (len(self.values) // int(num_percentiles))
        )
        found = np.zeros(len(self.values), dtype=bool)
        found[np.argsort(self.values, kind="stable")[:count]] = True
        return found


LENGTHS = np.random.default_rng(0).integers(1, 21, NUM_SAMPLES)
RARITIES = np.random.default_rng(1).integers(100, 200, NUM_SAMPLES)


def by(name: str, low: int, high: int, steps: int, **more: Any) -> CurriculumMetric:
    schedule = DifficultySchedule("fixed_linear", low, high, total_steps=steps)
    return CurriculumMetric(name, name, "sample", schedule, **more)


def sampler(*metrics: CurriculumMetric, seed: int = 1234, **functions: Any) -> CurriculumSampler:
    values = {"length": LENGTHS, "rarity": RARITIES, "percent": RARITIES}
    indexes: Any = {metric.name: Index(values[metric.name]) for metric in metrics}
    return CurriculumSampler(metrics, indexes, seed, functions)


def batches(drawer: CurriculumSampler, count: int, size: int = 8, drawn: Drawn | None = None) -> list[np.ndarray]:
    found, drawn = [], drawn or Drawn()
    for _ in range(count):
        ids, drawn = drawer.draw(drawn, size)
        found.append(ids)
    return found


def test_only_what_is_admissible_by_every_metric_is_drawn() -> None:
    length, rarity = by("length", 5, 20, 40), by("rarity", 140, 200, 25)
    drawer = sampler(length, rarity)
    seen: set[int] = set()
    for step, ids in enumerate(batches(drawer, 60), 1):
        bounds = drawer.difficulties(step)
        assert (LENGTHS[ids] <= bounds["length"]).all()
        assert (RARITIES[ids] <= bounds["rarity"]).all()
        seen |= set(ids.tolist())
    first = batches(sampler(length, rarity), 1)[0]
    assert LENGTHS[first].max() <= 5
    assert RARITIES[first].max() <= 142
    assert len(seen) > 0.9 * NUM_SAMPLES


def test_percentiles_are_places_in_the_sorted_order() -> None:
    drawer = sampler(by("percent", 10, 20, 20, percentile=True))
    rank = np.empty(NUM_SAMPLES, dtype=int)
    rank[np.argsort(RARITIES, kind="stable")] = np.arange(NUM_SAMPLES)
    for step, ids in enumerate(batches(drawer, 30), 1):
        percentile = drawer.difficulties(step)["percent"]
        allowed = NUM_SAMPLES if percentile == 20 else percentile * (NUM_SAMPLES // 20)
        assert (rank[ids] < allowed).all()


def test_every_sample_comes_once_before_any_comes_again() -> None:
    """One cluster, all admitted from the start: passes of 97 in batches of 8."""
    drawn = np.concatenate(batches(sampler(by("length", 20, 20, 1)), 97))
    assert set(Counter(drawn.tolist()).values()) == {8}
    # A batch is shuffled as a whole, so the border of two passes is known up to one batch.
    for number in range(8):
        inside = drawn[number * 97 + 8 : (number + 1) * 97 - 8]
        assert len(set(inside.tolist())) == len(inside)
    assert drawn[:88].tolist() != drawn[97:185].tolist()


def test_clusters_are_drawn_in_proportion_to_their_size() -> None:
    metric = CurriculumMetric(
        "length", "length", "sample",
        DifficultySchedule("fixed_discrete", 5, 20, difficulties=(5, 20), last_steps=(1,)),
    )  # fmt: skip
    drawn = np.concatenate(batches(sampler(metric), 401)[1:])
    share, expected = (LENGTHS[drawn] <= 5).mean(), (LENGTHS <= 5).mean()
    assert abs(share - expected) < 3 * (expected * (1 - expected) / len(drawn)) ** 0.5


def test_the_seed_decides_and_nothing_else() -> None:
    metric = by("length", 5, 20, 40)
    first, again = batches(sampler(metric), 30), batches(sampler(metric), 30)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    other = batches(sampler(metric, seed=5), 30)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_difficulty_that_falls_leaves_out_what_it_no_longer_admits() -> None:
    metric = CurriculumMetric("length", "length", "sample", DifficultySchedule("custom", 1, 20))
    drawer = sampler(metric, length=lambda step: 20 if step == 2 else 10)
    for step, ids in enumerate(batches(drawer, 9), 1):
        assert LENGTHS[ids].max() <= (20 if step == 2 else 10)


def test_whether_all_is_always_admitted() -> None:
    assert sampler(by("length", 20, 20, 1)).always_admits_all()
    assert sampler(by("percent", 10, 10, 1, percentile=True)).always_admits_all()
    assert not sampler(by("length", 20, 20, 1), by("rarity", 150, 200, 5)).always_admits_all()
    discrete = DifficultySchedule("fixed_discrete", 5, 20, difficulties=(20, 5), last_steps=(3,))
    assert not sampler(CurriculumMetric("length", "length", "sample", discrete)).always_admits_all()


def test_nothing_admissible_is_told_with_what_there_is() -> None:
    smallest = int(RARITIES.min())
    with pytest.raises(EngineError, match=rf"no sample is admissible at step 1: rarity at most 50 .*{smallest} to"):
        batches(sampler(by("rarity", 50, 200, 1000)), 1)


class Numbers:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


METRICS = (by("length", 5, 20, 17), by("rarity", 130, 200, 29))


def loader(dp_size: int = 1, dp_rank: int = 0, micro: int = 12, accumulation: int = 1, workers: int = 0) -> Any:
    made = DistributedLoader(Numbers(), micro, accumulation, dp_size, dp_rank, seed=3, num_workers=workers)
    made.sampler = sampler(*METRICS)
    return made


def steps_of(parts: list[Any]) -> Iterator[list[int]]:
    """The global batches that loaders of all ranks hand out together, in the order of `Split`."""
    streams = [iter(RepeatingLoader(part)) for part in parts]
    accumulation = parts[0].split.accumulation_steps
    while True:
        yield [int(i) for _ in range(accumulation) for stream in streams for i in next(stream)]


SPLITS: list[dict[str, int]] = [
    {"dp_size": 1, "micro": 12},
    {"dp_size": 2, "micro": 6},
    {"dp_size": 2, "micro": 3, "accumulation": 2},
    {"dp_size": 3, "micro": 2, "accumulation": 2},
]


def ranks_of(split: dict[str, int]) -> list[Any]:
    return [loader(dp_rank=rank, **split) for rank in range(split["dp_size"])]


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_every_split_draws_the_same_steps(split: dict[str, int]) -> None:
    expected = list(islice(steps_of([loader()]), 40))
    assert list(islice(steps_of(ranks_of(split)), 40)) == expected
    assert expected[0] == batches(sampler(*METRICS), 1, 12)[0].tolist()
    assert len(expected) > 2 * len(loader()), "more than an epoch"


@pytest.mark.parametrize("after", [5, 8, 20])
@pytest.mark.parametrize(("before", "then"), [(0, 1), (2, 0), (3, 2)])
def test_a_resumed_loader_goes_on_under_another_split(after: int, before: int, then: int) -> None:
    expected = list(islice(steps_of([loader()]), 40))
    first = ranks_of(SPLITS[before])
    assert list(islice(steps_of(first), after)) == expected[:after]
    saved = json.loads(json.dumps(first[0].state()))
    assert saved["drawn"]["num_batches"] == after
    resumed = ranks_of(SPLITS[then])
    for part in resumed:
        part.load(saved, SavedLayout(1, 0, {}, 12))
    assert list(islice(steps_of(resumed), 40 - after)) == expected[after:]


def test_a_position_inside_a_step_is_kept() -> None:
    """Four micro-batches of 3 a step; stop after 2 of them."""
    first = loader(micro=3, accumulation=4)
    whole = [batch.tolist() for batch in islice(RepeatingLoader(loader(micro=3, accumulation=4)), 30)]
    assert [batch.tolist() for batch in islice(RepeatingLoader(first), 18)] == whole[:18]
    resumed = loader(micro=3, accumulation=4)
    resumed.load(first.state(), SavedLayout(1, 0, {}, 12))
    assert [batch.tolist() for batch in islice(RepeatingLoader(resumed), 12)] == whole[18:]


def test_what_workers_read_ahead_does_not_count() -> None:
    """The state is that of the batches handed out; the difficulty told is that of the last of them."""
    expected = list(islice(steps_of([loader()]), 12))
    ahead = loader(workers=1)
    assert list(islice(steps_of([ahead]), 4)) == expected[:4]
    assert ahead.state()["drawn"]["num_batches"] == 4
    assert ahead.difficulties() == sampler(*METRICS).difficulties(4)
    resumed = loader()
    resumed.load(ahead.state(), SavedLayout(1, 0, {}, 12))
    assert list(islice(steps_of([resumed]), 8)) == expected[4:]


def test_a_state_of_another_kind_of_order_starts_anew_and_says_so() -> None:
    plain = DistributedLoader(Numbers(), 12, 1, 1, 0, seed=3)
    next(iter(plain))
    drawing = loader()
    with pytest.warns(UserWarning, match="in their shuffled order"):
        drawing.load(plain.state(), SavedLayout(1, 0, {}, 12))
    next(iter(drawing))
    with pytest.warns(UserWarning, match="drawn by a curriculum"):
        plain.load(drawing.state(), SavedLayout(1, 0, {}, 12))


def test_batches_are_presented_when_they_are_handed_out() -> None:
    """However early a worker read them."""
    made, step = loader(workers=1), 0
    made.present = lambda batch: batch[:step]
    stream = iter(made)
    for step in (3, 5):
        assert len(next(stream)) == step


def test_torch_generators_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    batches(sampler(*METRICS), 5)
    assert torch.equal(before, torch.random.get_rng_state())
