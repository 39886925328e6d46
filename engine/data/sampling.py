"""Which samples a curriculum draws (JSON ``data_efficiency.data_sampling.curriculum_learning``; arXiv 2212.03597).

A sample is admissible in a step when every metric of it is within that step's difficulty. The samples that a rise of
the difficulties admits are a cluster. A batch takes of each cluster in proportion to its size, at random; inside a
cluster samples come in shuffled order, pass after pass, so each comes once before any comes again.

All numbers come from streams of (seed, purpose, step or pass): every rank draws the same batch without asking another,
and what was drawn so far is all there is to resume from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contracts import EngineError
from engine.data.curriculum import DifficultyFunction, difficulty_at
from engine.data.difficulty_index import MetricIndex
from engine.plan.plan import CurriculumMetric
from engine.random import generator

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Cluster:
    """``bounds``: the difficulties, by metric, that admitted its samples. ``num_drawn``: from it, in all passes."""

    bounds: tuple[tuple[str, float], ...]
    num_drawn: int = 0


@dataclass(frozen=True)
class Drawn:
    """What has been drawn: global batches, and of each cluster."""

    num_batches: int = 0
    clusters: tuple[Cluster, ...] = ()

    def as_json(self) -> dict[str, Any]:
        clusters = [{"bounds": dict(cluster.bounds), "num_drawn": cluster.num_drawn} for cluster in self.clusters]
        return {"num_batches": self.num_batches, "clusters": clusters}

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> Drawn:
        clusters = [Cluster(tuple(entry["bounds"].items()), int(entry["num_drawn"])) for entry in state["clusters"]]
        return Drawn(int(state["num_batches"]), tuple(clusters))


@dataclass
class _Members:
    """The samples of a cluster, and the order of the pass that was used last."""

    bounds: tuple[tuple[str, float], ...]
    ids: Ids
    number: int
    pass_number: int = -1
    order: Ids = field(default_factory=lambda: np.empty(0, np.int64))


class CurriculumSampler:
    """``indexes``: by metric. Difficulties follow the sampler's own count of batches, so that they may be drawn ahead.

    Raises EngineError in `draw` when no sample is admissible.
    """

    def __init__(
        self,
        metrics: Sequence[CurriculumMetric],
        indexes: Mapping[str, MetricIndex],
        seed: int,
        functions: Mapping[str, DifficultyFunction],
    ) -> None:
        self.metrics, self.indexes, self.seed, self.functions = tuple(metrics), indexes, seed, functions
        self.num_samples = min(index.num_samples for index in indexes.values())
        self._members: list[_Members] = []
        self._assigned = np.zeros(self.num_samples, dtype=bool)
        self._examined: tuple[tuple[str, float], ...] | None = None

    def difficulties(self, step: int) -> dict[str, float]:
        return {m.name: difficulty_at(m.schedule, step, self.functions.get(m.name)) for m in self.metrics}

    def always_admits_all(self) -> bool:
        """Whether no step leaves any sample out, so that there is nothing to choose."""
        for metric in self.metrics:
            if metric.schedule.type == "custom":
                return False
            lowest = min((difficulty_at(metric.schedule, 1), *metric.schedule.difficulties))
            if not self._admissible(metric, lowest).all():
                return False
        return True

    def draw(self, drawn: Drawn, batch_size: int) -> tuple[Ids, Drawn]:
        """The sample ids (batch_size,) of the global batch behind ``drawn``, and what has been drawn with it."""
        step = drawn.num_batches + 1
        now = self.difficulties(step)
        clusters = self._clusters(drawn.clusters, tuple(now.items()))
        sizes = [
            len(members.ids) if all(bound <= now[name] for name, bound in members.bounds) else 0
            for members in self._members
        ]
        if not any(sizes):
            raise EngineError(self._nothing_admissible(step, now))
        weights = torch.tensor(sizes, dtype=torch.float64)
        chosen = torch.multinomial(
            weights, batch_size, replacement=True, generator=generator(self.seed, "curriculum_clusters", step)
        )
        counts = torch.bincount(chosen, minlength=len(sizes)).tolist()
        parts, after = [], []
        for members, cluster, count in zip(self._members, clusters, counts, strict=True):
            parts.append(self._walk(members, cluster.num_drawn, count))
            after.append(Cluster(cluster.bounds, cluster.num_drawn + count))
        order = torch.randperm(batch_size, generator=generator(self.seed, "curriculum_batch", step))
        return np.concatenate(parts)[order.numpy()], Drawn(step, tuple(after))

    def _clusters(self, known: tuple[Cluster, ...], now: tuple[tuple[str, float], ...]) -> tuple[Cluster, ...]:
        """``known``, and one more if ``now`` admits samples that none of them has. Their members stand ready."""
        if [members.bounds for members in self._members] != [cluster.bounds for cluster in known]:
            self._members, self._examined = [], None
            self._assigned[:] = False
            for cluster in known:
                self._add(cluster.bounds)
        if now != self._examined:
            self._examined = now
            if self._add(now):
                known = (*known, Cluster(now))
        return known

    def _add(self, bounds: tuple[tuple[str, float], ...]) -> bool:
        admitted = ~self._assigned
        for metric in self.metrics:
            admitted &= self._admissible(metric, dict(bounds)[metric.name])
        ids = np.flatnonzero(admitted)
        if not len(ids):
            return False
        self._assigned |= admitted
        self._members.append(_Members(bounds, ids, len(self._members)))
        return True

    def _admissible(self, metric: CurriculumMetric, difficulty: float) -> NDArray[np.bool_]:
        index = self.indexes[metric.name]
        if metric.percentile:
            return index.easiest(difficulty, metric.schedule.maximum)[: self.num_samples]
        return index.up_to(difficulty)[: self.num_samples]

    def _walk(self, members: _Members, num_drawn: int, count: int) -> Ids:
        """The next ``count`` ids of a cluster of which ``num_drawn`` have been drawn."""
        taken, size = [], len(members.ids)
        while count:
            pass_number, start = divmod(num_drawn, size)
            if members.pass_number != pass_number:
                stream = generator(self.seed, "curriculum_cluster", members.number, pass_number)
                members.order = members.ids[torch.randperm(size, generator=stream).numpy()]
                members.pass_number = pass_number
            part = members.order[start : start + count]
            taken.append(part)
            num_drawn, count = num_drawn + len(part), count - len(part)
        return np.concatenate(taken) if taken else np.empty(0, np.int64)

    def _nothing_admissible(self, step: int, now: Mapping[str, float]) -> str:
        told = []
        for metric in self.metrics:
            index, what = self.indexes[metric.name], "percentile" if metric.percentile else "at most"
            told.append(f"{metric.name} {what} {now[metric.name]:g} (in the data: {index.smallest} to {index.largest})")
        return f"curriculum: no sample is admissible at step {step}: {' and '.join(told)}; raise min_difficulty"
