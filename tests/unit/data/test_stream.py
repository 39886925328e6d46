"""The distributed loader over iterable datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from engine.contracts import EngineError, SavedLayout
from engine.data.loader import DistributedLoader, RepeatingLoader


class Stream(IterableDataset[int]):
    """0, 1, 2, ... of no known length; counts the samples that were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        for sample in range(self.size):
            self.num_read += 1
            yield sample


class EpochStream(Stream):
    """Another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            yield (sample + 1000 * self.epoch)


class StatefulStream(EpochStream):
    """Resumes by itself: a loaded position holds for the next ``iter()``."""

    at = 0
    loaded: int | None = None

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]

    def __iter__(self) -> Iterator[int]:
        self.at, self.loaded = self.loaded or 0, None
        while self.at < self.size:
            self.at += 1
            self.num_read += 1
            yield self.at - 1 + 1000 * self.epoch


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def loader(
    dataset: Any, micro: int = 2, accumulation: int = 1, dp: int = 1, rank: int = 0, **options: Any
) -> DistributedLoader:
    return DistributedLoader(dataset, micro, accumulation, dp, rank, seed=7, **options)


def layout(global_batch_size: int) -> SavedLayout:
    return SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=global_batch_size)


def epoch(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("micro", "accumulation", "dp"), [(12, 1, 1), (3, 2, 2), (2, 2, 3), (1, 1, 12)])
def test_ranks_share_the_stream_without_overlap_and_get_equally_many(
    micro: int, accumulation: int, dp: int, drop_last: bool
) -> None:
    ranks = [epoch(loader(Stream(41), micro, accumulation, dp, rank, drop_last=drop_last)) for rank in range(dp)]
    assert {len(batches) for batches in ranks} == {accumulation * (3 if drop_last else 4)}
    in_order = [sample for batches in zip(*ranks, strict=True) for batch in batches for sample in batch]
    assert in_order == (list(range(36)) if drop_last else [*range(41), *range(7)])


def test_a_stream_shorter_than_a_step_has_no_batch_or_is_repeated() -> None:
    assert epoch(loader(Stream(3), 4)) == []
    assert epoch(loader(Stream(3), 4, 2, drop_last=False)) == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert epoch(loader(Stream(0), 4, drop_last=False)) == []
    with pytest.raises(EngineError, match="no batch"):
        next(RepeatingLoader(loader(Stream(3), 4)))


def test_tells_the_dataset_the_epoch() -> None:
    one = loader(EpochStream(4))
    assert epoch(one) == [[0, 1], [2, 3]]
    assert epoch(one) == [[1000, 1001], [1002, 1003]]


@pytest.mark.parametrize("stream", [Stream, EpochStream, StatefulStream])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_handed_out", [0, 1, 4, 9, 10, 11, 12, 13, 25])
def test_resumes_behind_the_batches_handed_out(stream: Any, drop_last: bool, num_handed_out: int) -> None:
    options: dict[str, Any] = {"micro": 2, "accumulation": 2, "drop_last": drop_last}
    uninterrupted = RepeatingLoader(loader(stream(23), **options))
    expected = [next(uninterrupted).tolist() for _ in range(40)]
    first = loader(stream(23), **options)
    assert epoch(islice(RepeatingLoader(first), num_handed_out)) == expected[:num_handed_out]
    second = loader(stream(23), **options)
    second.load(json.loads(json.dumps(first.state())), layout(4))
    assert epoch(islice(RepeatingLoader(second), 40 - num_handed_out)) == expected[num_handed_out:]


@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_resumes_under_another_split_of_the_same_global_batch(stream: Any) -> None:
    before = [loader(stream(40), 2, 2, 2, rank) for rank in range(2)]
    for one in before:
        assert len(epoch(islice(one, 4))) == 4
    assert before[0].state() == before[1].state()
    after = [loader(stream(40), 1, 2, 4, rank) for rank in range(4)]
    for one in after:
        one.load(before[0].state(), layout(8))
    ranks = [epoch(one) for one in after]
    assert [sample for row in zip(*ranks, strict=True) for batch in row for sample in batch] == list(range(16, 40))


def test_resumes_with_another_global_batch() -> None:
    before = loader(StatefulStream(40), 2, 2)
    assert epoch(islice(before, 3)) == [[0, 1], [2, 3], [4, 5]]
    after = loader(StatefulStream(40), 5)
    after.load(before.state(), layout(4))
    assert epoch(after)[0] == [6, 7, 8, 9, 10]


def test_a_dataset_that_keeps_its_own_state_is_not_read_again_from_the_start() -> None:
    reads = {}
    for stream in (Stream, StatefulStream):
        before = loader(stream(1000), 10)
        assert len(epoch(islice(before, 50))) == 50
        dataset = stream(1000)
        after = loader(dataset, 10)
        after.load(before.state(), layout(10))
        assert next(iter(after)).tolist() == list(range(500, 510))
        reads[stream] = dataset.num_read
    assert reads == {Stream: 510, StatefulStream: 10}


@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_a_worker_changes_neither_samples_nor_position(stream: Any) -> None:
    first = loader(stream(24), num_workers=1)
    iterator = iter(first)
    assert epoch(islice(iterator, 5)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert first.state()["consumed_samples_in_epoch"] == 10
    second = loader(stream(24), num_workers=1)
    second.load(json.loads(json.dumps(first.state())), layout(2))
    assert epoch(second) == [[sample, sample + 1] for sample in range(10, 24, 2)]


def test_more_workers_than_one_are_announced_as_useless() -> None:
    with pytest.warns(UserWarning, match="3 workers for an iterable dataset: 1 is used"):
        assert loader(Stream(24), num_workers=3).num_workers == 1


def test_has_the_length_that_the_dataset_has() -> None:
    assert len(loader(SizedStream(23), 2, 2)) == 10
    assert len(loader(SizedStream(23), 2, 2, drop_last=False)) == 12
    with pytest.raises(TypeError, match="Stream has no length"):
        len(loader(Stream(23)))


def test_takes_an_iterable_that_is_no_torch_dataset() -> None:
    class Words:
        def __iter__(self) -> Iterator[str]:
            return iter(["a", "b", "c", "d"])

    assert list(loader(Words(), collate_fn="".join)) == ["ab", "cd"]


def test_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    epoch(loader(Stream(10)))
    assert torch.equal(torch.get_rng_state(), before)
