"""The distributed loader over map datasets: order, sharding, position, workers."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from engine.contracts import EngineError, SavedLayout, Stateful
from engine.data.loader import DistributedLoader, RepeatingLoader, sample_order


class Numbers(Dataset[int]):
    """Item i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Draws from every generator a dataset may use."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand())], dtype=torch.float64)


def loader(size: int = 100, micro: int = 2, accumulation: int = 1, dp: int = 1, rank: int = 0, **options: Any) -> Any:
    options = {"seed": 7, **options}
    return DistributedLoader(Numbers(size), micro, accumulation, dp, rank, **options)


def layout(global_batch_size: int) -> SavedLayout:
    return SavedLayout(world_size=1, zero_stage=0, mesh={}, global_batch_size=global_batch_size)


def epoch(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def steps(ranks: list[list[list[int]]], accumulation: int) -> list[list[int]]:
    """The sorted samples that all ranks together see in each optimizer step."""
    num_steps = len(ranks[0]) // accumulation
    return [
        sorted(
            sample for rank in ranks for batch in rank[k * accumulation : (k + 1) * accumulation] for sample in batch
        )
        for k in range(num_steps)
    ]


SPLITS = [(12, 1, 1), (3, 4, 1), (3, 2, 2), (2, 2, 3), (1, 1, 12), (4, 1, 3)]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("micro", "accumulation", "dp"), SPLITS)
def test_every_split_of_a_global_batch_sees_the_same_samples_in_every_step(
    micro: int, accumulation: int, dp: int, drop_last: bool
) -> None:
    reference = loader(micro=12, drop_last=drop_last)
    loaders = [loader(100, micro, accumulation, dp, rank, drop_last=drop_last) for rank in range(dp)]
    for _ in range(2):
        ranks = [epoch(one) for one in loaders]
        assert {len(batches) for batches in ranks} == {len(loaders[0])}
        assert steps(ranks, accumulation) == steps([epoch(reference)], 1)


def test_micro_step_m_of_rank_r_takes_the_documented_place_in_the_order() -> None:
    micro, accumulation, dp = 2, 3, 2
    order = sample_order(50, seed=7, epoch=0).tolist()
    for rank in range(dp):
        batches = epoch(loader(50, micro, accumulation, dp, rank))
        for place, batch in enumerate(batches):
            k, m = divmod(place, accumulation)
            start = k * 12 + (m * dp + rank) * micro
            assert batch == order[start : start + micro]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 60), micro=st.integers(1, 4), accumulation=st.integers(1, 3), dp=st.integers(1, 4),
    drop_last=st.booleans(), shuffle=st.booleans(),
)  # fmt: skip
def test_ranks_do_not_overlap_and_cover_the_epoch(
    size: int, micro: int, accumulation: int, dp: int, drop_last: bool, shuffle: bool
) -> None:
    batch = micro * accumulation * dp
    if size < batch:  # a step would see a sample twice
        with pytest.raises(EngineError, match=f"{size} samples, one optimizer step takes {batch}"):
            loader(size, micro, accumulation, dp, drop_last=drop_last)
        return
    loaders = [loader(size, micro, accumulation, dp, rank, drop_last=drop_last, shuffle=shuffle) for rank in range(dp)]
    ranks = [epoch(one) for one in loaders]
    assert all(len(batches) == len(loaders[0]) and len(batches) % accumulation == 0 for batches in ranks)
    seen = [sample for batches in ranks for one in batches for sample in one]
    if drop_last:
        assert len(seen) == len(set(seen)) == size // batch * batch
    else:
        assert set(seen) == set(range(size))
        assert len(seen) == -(-size // batch) * batch
        assert max(seen.count(sample) for sample in set(seen)) <= -(-len(seen) // size)


def test_epochs_differ_and_repeat_by_seed_alone() -> None:
    first, second = loader(), loader()
    epochs = [epoch(first) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert [epoch(second) for _ in range(3)] == epochs
    assert epoch(loader(seed=8)) != epochs[0]
    assert epoch(loader(shuffle=False)) == [[2 * i, 2 * i + 1] for i in range(50)]


@pytest.mark.parametrize("num_handed_out", [0, 3, 25, 49, 50, 51, 70])
def test_resumes_behind_the_batches_handed_out(num_handed_out: int) -> None:
    uninterrupted = RepeatingLoader(loader())
    expected = [next(uninterrupted).tolist() for _ in range(120)]
    first = loader()
    batches = RepeatingLoader(first)
    assert [next(batches).tolist() for _ in range(num_handed_out)] == expected[:num_handed_out]
    state = json.loads(json.dumps(first.state()))

    second = loader()
    second.load(state, layout(2))
    assert second.state() == state
    rest = RepeatingLoader(second)
    assert [next(rest).tolist() for _ in range(120 - num_handed_out)] == expected[num_handed_out:]


def test_a_position_at_the_end_of_an_epoch_goes_on_with_the_next_one() -> None:
    first, second = loader(), loader()
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    second.load(first.state(), layout(2))
    assert list(batches) == []
    assert epoch(second) == epoch(first)
    assert first.state() == second.state() == {**loader().state(), "epoch": 2}


@pytest.mark.parametrize(("micro", "accumulation", "dp"), SPLITS)
def test_resumes_under_another_split_of_the_same_global_batch(micro: int, accumulation: int, dp: int) -> None:
    before = [loader(100, 3, 2, 2, rank) for rank in range(2)]
    iterators = [iter(one) for one in before]
    for iterator in iterators:
        for _ in range(2 * 3):
            next(iterator)
    assert before[0].state() == before[1].state()
    after = [loader(100, micro, accumulation, dp, rank) for rank in range(dp)]
    for one in after:
        one.load(before[0].state(), layout(12))
    for _ in range(2):
        assert steps([epoch(one) for one in after], accumulation) == steps(
            [epoch(iterator) for iterator in iterators], 2
        )
        iterators = [iter(one) for one in before]


def test_resumes_inside_a_step_where_the_layout_allows_it() -> None:
    before = loader(100, 3, 4, 1)
    iterator = iter(before)
    for _ in range(6):
        next(iterator)
    rest = epoch(iterator)
    before_state = {**before.state(), "epoch": 0, "consumed_samples_in_epoch": 18}
    after = [loader(100, 3, 2, 2, rank) for rank in range(2)]
    for one in after:
        one.load(before_state, layout(12))
    ranks = [epoch(one) for one in after]
    assert [batch for pair in zip(*ranks, strict=True) for batch in pair] == rest
    other = loader(100, 4, 3, 1)
    state = other.state()
    with pytest.raises(EngineError, match=r"sample 18 of epoch 0.*4 x 1 ranks = 4 samples"):
        other.load(before_state, layout(12))
    assert other.state() == state


def test_resumes_with_another_global_batch_behind_what_was_consumed() -> None:
    before = loader(100, 7)
    iterator = iter(before)
    seen = [next(iterator).tolist() for _ in range(3)]
    after = loader(100, 10)
    after.load(before.state(), layout(7))
    iterator = iter(after)
    seen.append(next(iterator).tolist())
    again = loader(100, 5, 2)
    again.load(after.state(), layout(10))
    seen += epoch(again)
    flat = [sample for batch in seen for sample in batch]
    assert flat == sample_order(100, 7, 0).tolist()[: 21 + 70]


@pytest.mark.parametrize(
    ("other", "words"),
    [({"size": 90}, r"dataset length 100 \(now 90\)"), ({"seed": 8}, r"seed 7 \(now 8\)")],
)
def test_a_position_in_other_data_or_another_order_is_left_with_a_warning(other: dict[str, int], words: str) -> None:
    before = loader()
    next(iter(before))
    after = loader(**other)
    with pytest.warns(UserWarning, match=f"not restored.*{words}"):
        after.load(before.state(), layout(2))
    assert epoch(after) == epoch(loader(**other))


def test_the_seed_does_not_matter_to_a_position_in_an_unshuffled_order(recwarn: pytest.WarningsRecorder) -> None:
    before = loader(shuffle=False)
    next(iter(before))
    after = loader(shuffle=False, seed=8)
    after.load(before.state(), layout(2))
    assert next(iter(after)).tolist() == [2, 3]
    assert not recwarn.list


def test_loading_or_a_newer_iterator_ends_the_one_under_way() -> None:
    one = loader()
    start = one.state()
    old = iter(one)
    first = next(old).tolist()
    one.load(start, layout(2))
    assert list(old) == []
    new = iter(one)
    assert next(new).tolist() == first
    newest = iter(one)
    assert list(new) == []
    assert next(newest).tolist() == sample_order(100, 7, 1)[:2].tolist()


@pytest.mark.parametrize("anew", [False, True])
def test_an_iterator_that_has_not_begun_begins_where_loading_went(anew: bool) -> None:
    one = loader()
    run = iter(one)
    for _ in range(3):
        next(run)
    saved, expected = one.state(), [next(run).tolist() for _ in range(2)]
    other = loader()
    waiting = iter(other)
    other.load(saved, layout(2))
    batches = iter(other) if anew else waiting
    assert [next(batches).tolist() for _ in range(2)] == expected
    assert other.state()["epoch"] == 0
    rest = list(batches)
    assert len(rest) == len(list(run))
    assert other.state()["epoch"] == 1


def test_a_repeating_loader_follows_a_loaded_position() -> None:
    one = loader()
    batches = RepeatingLoader(one)
    expected = [next(batches).tolist() for _ in range(3)]
    one.load(loader().state(), layout(2))
    assert [next(batches).tolist() for _ in range(3)] == expected


def test_a_repeating_loader_refuses_a_loader_without_batches() -> None:
    with pytest.raises(EngineError, match="no batch"):
        next(RepeatingLoader([]))
    one_shot = RepeatingLoader(iter([1]))
    assert next(one_shot) == 1
    with pytest.raises(EngineError, match="no batch"):
        next(one_shot)


def test_is_stateful() -> None:
    one = loader()
    assert isinstance(one, Stateful)
    assert (one.name, one.on_layout_change) == ("data_loader", "reshard")


def test_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    epoch(loader())
    assert torch.equal(torch.get_rng_state(), before)


def test_collates_as_asked() -> None:
    assert next(iter(loader(shuffle=False, micro=3, collate_fn=tuple))) == (0, 1, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro": 0}, "micro_batch_size is 0"),
        ({"accumulation": 0}, "accumulation_steps is 0"),
        ({"dp": 0}, "dp_size is 0"),
        ({"dp": 2, "rank": 2}, "dp_rank is 2, with dp_size 2 it is 0 to 1"),
        ({"rank": -1}, "dp_rank is -1"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"size": 0}, "empty"),
        (
            {"size": 15, "micro": 4, "accumulation": 2, "dp": 2},
            r"15 samples.*takes 16 \(micro batch 4 x accumulation 2",
        ),
    ],
)
def test_refuses(options: dict[str, int], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        loader(**options)


def test_refuses_a_map_dataset_without_a_length() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(EngineError, match="no __len__"):
        DistributedLoader(Endless(), 1, 1, 1, 0, seed=0)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_refuses_what_cannot_be_sent_to_a_worker() -> None:
    with pytest.raises(EngineError, match="cannot be sent to a worker"):
        next(iter(loader(num_workers=1, collate_fn=lambda samples: samples)))


def test_workers_change_neither_the_samples_nor_the_position() -> None:
    expected = epoch(loader(24, 2))
    first = loader(24, 2, num_workers=2)
    iterator = iter(first)
    assert [next(iterator).tolist() for _ in range(5)] == expected[:5]
    state = first.state()
    assert state["consumed_samples_in_epoch"] == 10, "batches prefetched by workers do not count"
    second = loader(24, 2, num_workers=2)
    second.load(state, layout(2))
    assert epoch(second) == expected[5:]


def test_what_a_sample_draws_in_a_worker_depends_on_the_sample_alone() -> None:
    def drawn(batches: Any) -> list[list[float]]:
        return [row.tolist() for batch in batches for row in batch]

    def noise(dp: int = 1, rank: int = 0, workers: int = 2) -> DistributedLoader:
        return DistributedLoader(Noise(12), 2 // dp, 1, dp, rank, seed=7, num_workers=workers)

    straight = drawn(noise())
    stopped = noise()
    batches = iter(stopped)
    first = drawn([next(batches), next(batches)])
    resumed = noise(workers=1)
    resumed.load(stopped.state(), layout(2))
    assert first + drawn(resumed) == straight
    assert sorted(drawn(noise(2, 0)) + drawn(noise(2, 1))) == sorted(straight)
    assert drawn(noise(2, 0)) != drawn(noise(2, 1))


class Shuffled(IterableDataset[Any]):
    """A stream in an order that it draws from a generator of the process."""

    def __iter__(self) -> Any:
        return iter(random.sample(range(12), 12))


def test_a_stream_that_is_read_again_draws_the_same_order() -> None:
    def stream(dp: int = 1, rank: int = 0) -> DistributedLoader:
        return DistributedLoader(Shuffled(), 2 // dp, 1, dp, rank, seed=7, num_workers=1)

    straight = epoch(stream())
    stopped = stream()
    batches = iter(stopped)
    first = epoch([next(batches), next(batches)])
    resumed = stream()
    resumed.load(stopped.state(), layout(2))
    assert first + epoch(resumed) == straight
    assert steps([epoch(stream(2, 0)), epoch(stream(2, 1))], 1) == [sorted(batch) for batch in straight]


def test_workers_draw_from_streams_of_their_own() -> None:
    def draw(seed: int = 7, rank: int = 0) -> list[torch.Tensor]:
        noise = DistributedLoader(Noise(8), 1, 1, 2, rank, seed=seed, num_workers=2)
        return list(noise)

    first = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, draw(), strict=True))
    drawn = [*first, *draw(rank=1), *draw(seed=8)]
    for generator in range(3):
        assert len({values[0, generator].item() for values in drawn}) == 12
