"""The analyzer: its numbers by hand, and that they depend on the data alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts import EngineError, RunFailed
from engine.data import analysis
from engine.data.analysis import Workers, analyze
from engine.data.difficulty import Metric, rarity_table
from engine.data.difficulty_index import MetricIndex, dataset_hash, open_indexes, read_description
from engine.data.tokens import TokenBlocks
from engine.plan import CurriculumMetric, DifficultySchedule

BUILT_IN = [Metric("seqlen"), Metric("vocabularyrarity")]


class Sentences:
    """Samples of different lengths, padded with zeros to 6 tokens."""

    def __init__(self, num_samples: int = 50) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 7, (num_samples,), generator=generator)
        self.masks = (torch.arange(6) < lengths[:, None]).long()
        self.tokens = torch.randint(1, 12, (num_samples, 6), generator=generator) * self.masks

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"labels": self.tokens[index], "input_ids": self.tokens[index], "attention_mask": self.masks[index]}


def blocks(num_tokens: int = 401, sequence_length: int = 4, seed: int = 0) -> TokenBlocks:
    return TokenBlocks(np.random.default_rng(seed).integers(0, 30, num_tokens).astype(np.uint16), sequence_length)


def sum_of_tokens(samples: Sequence[Any]) -> list[int]:
    return [int(sample["input_ids"].sum()) for sample in samples]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_rarity_of_three_tokens() -> None:
    """Six times 0, twice 1, never 2, once 3: C = 6 + 2 + 1 + 1."""
    corpus = TokenBlocks(np.array([0, 0, 0, 1, 0, 0, 1, 3, 0, 9], dtype=np.uint8)[:9], 2)
    assert len(corpus) == 4
    table = rarity_table(np.array([6, 2, 0, 1]))
    assert table.tolist() == pytest.approx([-math.log(c / 10) for c in (6, 2, 1, 1)])


def test_rarity_is_the_truncated_sum(tmp_path: Path) -> None:
    tokens = np.array([0, 0, 1, 0, 2, 0, 0, 1, 2, 2, 0], dtype=np.uint8)
    analyze(TokenBlocks(tokens, 2), [Metric("vocabularyrarity")], tmp_path)
    pairs = [(0, 0), (1, 0), (2, 0), (0, 1), (2, 2)]
    counts = {0: 5, 1: 2, 2: 3}
    expected = [int(sum(-math.log(counts[token] / 10) for token in pair)) for pair in pairs]
    assert MetricIndex(tmp_path / "vocabularyrarity", "rarity").sample_to_metric.tolist() == expected


def test_padding_counts_neither_for_length_nor_for_rarity(tmp_path: Path) -> None:
    sentences = Sentences()
    analyze(sentences, BUILT_IN, tmp_path)
    assert MetricIndex(tmp_path / "seqlen", "seqlen").sample_to_metric.tolist() == sentences.masks.sum(1).tolist()
    present = sentences.tokens[sentences.masks.bool()]
    counts = torch.bincount(present).clamp(min=1).double()
    table = -(counts / counts.sum()).log()
    expected = [int(table[row[mask.bool()]].sum()) for row, mask in zip(sentences.tokens, sentences.masks, strict=True)]
    assert MetricIndex(tmp_path / "vocabularyrarity", "rarity").sample_to_metric.tolist() == expected


def test_the_index_sorts_by_value_then_by_sample(tmp_path: Path) -> None:
    analyze(Sentences(), BUILT_IN, tmp_path, chunk_samples=7)
    index = MetricIndex(tmp_path / "seqlen", "seqlen")
    values = index.sample_to_metric.tolist()
    assert index.index_to_sample.tolist() == sorted(range(50), key=lambda sample: (values[sample], sample))
    assert index.index_to_metric.tolist() == sorted(set(values))
    offsets = np.load(tmp_path / "seqlen" / "index_to_sample_offsets.npy").tolist()
    assert offsets == [sum(value < limit for value in values) for limit in sorted(set(values))] + [50]
    described = read_description(tmp_path)
    assert described["metrics"]["seqlen"]["largest"] == max(values)
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("dataset", [blocks(), Sentences()], ids=["blocks", "sentences"])
def test_the_result_does_not_depend_on_who_did_it(dataset: Any, tmp_path: Path) -> None:
    metrics = [*BUILT_IN, Metric("sum", sum_of_tokens)]
    analyze(dataset, metrics, tmp_path / "one", chunk_samples=9)
    for num_processes in (2, 3):
        folder = analyze(dataset, metrics, tmp_path / str(num_processes), Workers(num_processes), chunk_samples=9)
        assert files(folder) == files(tmp_path / "one")
    values = MetricIndex(tmp_path / "one" / "sum", "sum").sample_to_metric.tolist()
    assert values == sum_of_tokens([dataset[i] for i in range(len(dataset))])


def test_the_size_of_a_chunk_does_not_matter(tmp_path: Path) -> None:
    analyze(blocks(), BUILT_IN, tmp_path / "small", chunk_samples=1)
    analyze(blocks(), BUILT_IN, tmp_path / "large")
    assert files(tmp_path / "small") == files(tmp_path / "large")


def analyze_as_rank(folder: str, num_processes: int) -> None:
    import torch.distributed as dist

    workers = Workers(num_processes, dist.get_rank(), dist.get_world_size(), dist.barrier)
    analyze(blocks(), BUILT_IN, Path(folder), workers, chunk_samples=9)


def test_ranks_share_the_work(ranks: Any, tmp_path: Path) -> None:
    analyze(blocks(), BUILT_IN, tmp_path / "one", chunk_samples=9)
    ranks(2).run(analyze_as_rank, str(tmp_path / "two"), 1, timeout=120.0)
    assert files(tmp_path / "two") == files(tmp_path / "one")


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze(blocks(), BUILT_IN, tmp_path / "whole", chunk_samples=9)
    done: list[int] = []

    def stop_after_five(*arguments: Any) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(arguments[-1])
        original(*arguments)

    original = analysis._do_chunk
    monkeypatch.setattr(analysis, "_do_chunk", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        analyze(blocks(), BUILT_IN, tmp_path / "broken", chunk_samples=9)
    assert not (tmp_path / "broken" / "index.json").exists()
    again: list[int] = []
    monkeypatch.setattr(analysis, "_do_chunk", lambda *a: (again.append(a[-1]), original(*a)))
    shown: list[tuple[str, int, int]] = []
    analyze(blocks(), BUILT_IN, tmp_path / "broken", progress=lambda *now: shown.append(now), chunk_samples=9)
    assert shown[0] == ("token counts", 5, 12)
    assert len(again) == 3 * 12 - 5
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


def die(samples: Any) -> Any:
    os._exit(9)


def test_a_worker_that_dies(tmp_path: Path) -> None:
    with pytest.raises(
        RunFailed, match=r"own: one of 2 worker processes ended.*0 of 12 chunks done.*goes on from here"
    ):
        analyze(blocks(), [Metric("own", die)], tmp_path, Workers(num_processes=2), chunk_samples=9)


def test_what_is_left_of_other_data_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "key.json").write_text(json.dumps({"dataset_hash": "other"}))
    (tmp_path / "parts" / "seqlen-000000.npy").write_bytes(b"not an array")
    analyze(blocks(), BUILT_IN, tmp_path)
    assert MetricIndex(tmp_path / "seqlen", "seqlen").smallest == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda samples: [1], r"int64 of shape \(1,\).*one whole number for each of the 50"),
        (lambda samples: [0.5] * len(samples), "float64"),
        (lambda samples: samples[0]["missing"], "raised KeyError: 'missing'"),
    ],
)
def test_a_function_that_does_not_measure(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message):
        analyze(Sentences(), [Metric("own", given)], tmp_path)


def test_what_cannot_be_analyzed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no metric 'rarety'; built in are seqlen, vocabularyrarity"):
        Metric("rarety")
    with pytest.raises(EngineError, match="sample 0 holds no tokens"):
        analyze([torch.rand(3)], BUILT_IN, tmp_path)
    with pytest.raises(EngineError, match="iterable only"):
        analyze(iter([1]), BUILT_IN, tmp_path)
    with pytest.raises(EngineError, match="empty"):
        analyze([], BUILT_IN, tmp_path)


def test_the_hash_tells_data_apart() -> None:
    tokens = np.arange(400, dtype=np.uint16) % 30
    other = tokens.copy()
    other[123] += 1
    hashes = [dataset_hash(TokenBlocks(*data)) for data in ((tokens, 4), (other, 4), (tokens, 5), (tokens[:-4], 4))]
    assert len(set(hashes)) == 4
    assert dataset_hash(TokenBlocks(tokens.copy(), 4)) == hashes[0]
    assert dataset_hash(Sentences(50)) == dataset_hash(Sentences(50)) != dataset_hash(Sentences(51))


def metric(name: str, **more: Any) -> CurriculumMetric:
    return CurriculumMetric(
        name, f"curriculum_metrics.{name}", "sample", DifficultySchedule("fixed_linear", 1, 5), **more
    )


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    wanted = (metric("seqlen"),)
    with pytest.raises(EngineError, match=r"no index of the data in .*run: ptrain analyze"):
        open_indexes(tmp_path, wanted, blocks(), tmp_path)
    analyze(blocks(), [Metric("seqlen")], tmp_path)
    assert open_indexes(tmp_path, wanted, blocks(), tmp_path)["seqlen"].num_samples == 100
    with pytest.raises(EngineError, match="has no metric 'vocabularyrarity'; it has: seqlen"):
        open_indexes(tmp_path, (metric("vocabularyrarity"),), blocks(), tmp_path)
    with pytest.raises(EngineError, match="of another data set: 100 samples with hash"):
        open_indexes(tmp_path, wanted, blocks(seed=1), tmp_path)
    with pytest.raises(EngineError, match=r"is no index_to_sample\.npy: an index of DeepSpeed's analyzer"):
        open_indexes(tmp_path, (metric("seqlen", index_to_sample_path="seqlen/seqlen_sample"),), blocks(), tmp_path)
    own = metric("length", index_to_sample_path="seqlen/index_to_sample.npy")
    assert open_indexes(tmp_path / "nowhere", (own,), blocks(), tmp_path)["length"].smallest == 4
    (tmp_path / "seqlen" / "sample_to_metric.npy").write_bytes(b"")
    with pytest.raises(EngineError, match=r"index of seqlen in .* cannot be read"):
        open_indexes(tmp_path, wanted, blocks(), tmp_path)
