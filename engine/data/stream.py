"""Iterable datasets: cut one stream into the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset


@dataclass(frozen=True)
class Split:
    """How a global batch is cut. Optimizer step k takes the samples ``[k * T, (k + 1) * T)`` of the epoch's order,
    T = ``global_batch_size``; of these, micro step m on rank r takes ``micro_batch_size`` samples from
    ``(m * dp_size + r) * micro_batch_size`` on. Which samples a step sees thus depends on T alone."""

    micro_batch_size: int
    accumulation_steps: int
    dp_size: int
    dp_rank: int

    @property
    def round_size(self) -> int:
        """Samples that all ranks together take in one micro step."""
        return self.micro_batch_size * self.dp_size

    @property
    def global_batch_size(self) -> int:
        return self.round_size * self.accumulation_steps

    def owns(self, sample: int) -> bool:
        return sample // self.micro_batch_size % self.dp_size == self.dp_rank


@dataclass(frozen=True)
class Position:
    """The next sample of all ranks together: ``consumed`` samples of the epoch are behind it.

    Optimizer steps begin at ``origin + k * global_batch_size``; the origin is 0 unless the batch size was changed in
    the middle of an epoch.
    """

    epoch: int = 0
    consumed: int = 0
    origin: int = 0

    def step_start(self, split: Split) -> int:
        """The first sample of the optimizer step that the next sample belongs to."""
        return self.consumed - (self.consumed - self.origin) % split.global_batch_size


class DatasetState(NamedTuple):
    """What the dataset's own ``state_dict()`` said before sample ``position`` of the epoch."""

    position: int
    state: Any


class StreamItem(NamedTuple):
    """A micro-batch, and what reading goes on from behind it: a `DatasetState`, or a sampler's `Drawn`."""

    batch: Any
    resume_from: Any


class RankStream(IterableDataset[StreamItem]):
    """This rank's micro-batches of the rest of one epoch.

    ``dataset`` must yield the same samples in the same order on every rank. Each rank reads all of them, keeps its own,
    and hands a micro-batch out only when its whole optimizer step has been read: so all ranks get equally many
    batches although nobody knows the length. A ragged last step is dropped, or, with ``drop_last`` False, filled up
    from the start of the stream.

    ``set_epoch(epoch)`` is called where the dataset has it. A dataset with ``state_dict`` and ``load_state_dict`` is
    resumed by them, any other by reading and discarding what was consumed.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        split: Split,
        position: Position,
        resume_from: DatasetState | None,
        collate_fn: Callable[[list[Any]], Any],
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.position = position
        self.resume_from = resume_from
        self.collate_fn = collate_fn
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[StreamItem]:
        split, start = self.split, self.position.step_start(self.split)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.position.epoch)
        skip = start
        if self.resume_from is not None:
            self.dataset.load_state_dict(self.resume_from.state)  # type: ignore[attr-defined]
            skip = start - self.resume_from.position
        samples = islice(iter(self.dataset), skip, None)
        before = self.resume_from
        first_micro_step = (self.position.consumed - start) // split.round_size
        while (step := self._read_step(samples)) is not None:
            own, refilled = step
            start += split.global_batch_size
            # After a refill the dataset stands at its start again; only counting leads to the end of this epoch.
            after = None if refilled else self._dataset_state(start)
            for micro_step in range(first_micro_step, split.accumulation_steps):
                last = micro_step == split.accumulation_steps - 1
                at = micro_step * split.micro_batch_size
                yield StreamItem(self.collate_fn(own[at : at + split.micro_batch_size]), after if last else before)
            first_micro_step, before = 0, after

    def _read_step(self, samples: Iterator[Any]) -> tuple[list[Any], bool] | None:
        """This rank's samples of one optimizer step, and whether the stream had to begin again to fill it.

        None when the stream has no samples left, or, if the ragged step is dropped, too few.
        """
        size = self.split.global_batch_size
        own: list[Any] = []
        num_read = 0
        refilled = False
        while True:
            before = num_read
            for sample in islice(samples, size - num_read):
                if self.split.owns(num_read):
                    own.append(sample)
                num_read += 1
            if num_read == size:
                return own, refilled
            if self.drop_last or num_read == before:
                return None
            samples, refilled = iter(self.dataset), True

    def _dataset_state(self, position: int) -> DatasetState | None:
        if not (hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")):
            return None
        return DatasetState(position, self.dataset.state_dict())
