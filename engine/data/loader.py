"""The data loader of a distributed run: sharded, shuffled by (seed, epoch), resumable, the same for every layout."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from engine.contracts import EngineError, OnLayoutChange, SavedLayout
from engine.data.sampling import CurriculumSampler, Drawn
from engine.data.stream import DatasetState, Position, RankStream, Split, StreamItem
from engine.random import generator, stream_seed


class DistributedLoader(Iterable[Any]):
    """This rank's micro-batches. One ``iter()`` is one epoch; the next one has another order.

    **Order.** The order of an epoch depends on (seed, epoch) alone. Optimizer step k consumes the samples
    ``[k * T, (k + 1) * T)`` of it, T = micro_batch_size * accumulation_steps * dp_size; `Split` says who takes which.
    Every split of one global batch T over ranks and accumulation sees the same samples in every step, and ranks with
    the same ``dp_rank`` (tensor, pipeline and sequence peers) get the same batches. All ranks get equally many.
    ``drop_last`` drops the ragged tail of the order that fills no whole optimizer step; without it the last step is
    filled up with samples from the start of the order, so some count twice in that epoch.

    **Position.** `state` counts the batches handed out, not those that workers have prefetched. `load` continues
    behind them: same samples, same order, with workers or without, under any dp_size and accumulation of the same
    global batch. `load` and a newer ``iter()`` end an iterator that is under way (one that has handed out nothing yet
    begins where `load` went); an iterator given up early does not rewind: the next one is the next epoch.

    **Iterable datasets** (no ``__getitem__``) must yield the same samples on every rank: do not shard them yourself;
    see `RankStream`. Their order is their own: ``shuffle`` does not apply, ``set_epoch`` is called where they have it.
    At most one worker reads them: each further one would have to read the whole stream again, and a dataset that
    splits itself by ``get_worker_info()`` would lose samples.

    **Workers** are started by a fork server, because a forked copy of a process that runs gloo, NCCL or CUDA threads
    may deadlock. So dataset and ``collate_fn`` must be picklable and a script needs ``if __name__ == "__main__":``;
    ``multiprocessing_context`` chooses another start method. Nothing here draws from the training process's generators.

    **Random datasets.** In a worker the generators of Python, NumPy and torch are seeded anew for each sample, by
    (seed, epoch, its index): what a sample draws depends neither on the worker, nor on the ranks, nor on where the run
    was resumed. For a stream they are seeded by (seed, epoch) on every rank, so that reading it again draws the same;
    one that resumes by its own ``state_dict`` keeps its generators there. A generator of the dataset's own is its own
    affair.

    Raises EngineError for sizes below 1, a rank outside dp_size, an empty dataset, one smaller than a global batch
    where ``drop_last`` is on, and a dataset that cannot be sent to workers.
    """

    name = "data_loader"
    on_layout_change: OnLayoutChange = "reshard"

    def __init__(
        self,
        dataset: Any,
        micro_batch_size: int,
        accumulation_steps: int,
        dp_size: int,
        dp_rank: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        multiprocessing_context: str = "forkserver",
    ) -> None:
        sizes = {"micro_batch_size": micro_batch_size, "accumulation_steps": accumulation_steps, "dp_size": dp_size}
        for size_name, size in sizes.items():
            if size < 1:
                raise EngineError(f"data loader: {size_name} is {size}, it must be at least 1.")
        if not 0 <= dp_rank < dp_size:
            raise EngineError(f"data loader: dp_rank is {dp_rank}, with dp_size {dp_size} it is 0 to {dp_size - 1}.")
        if num_workers < 0:
            raise EngineError(f"data loader: num_workers is {num_workers}, it must be 0 or more.")
        self.dataset = dataset
        self.split = Split(micro_batch_size, accumulation_steps, dp_size, dp_rank)
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.collate_fn: Callable[[list[Any]], Any] = default_collate if collate_fn is None else collate_fn
        self.pin_memory = pin_memory
        self.multiprocessing_context = multiprocessing_context
        if isinstance(dataset, DataLoader):
            raise EngineError(
                "training_data is a DataLoader, which makes batches already: pass its dataset, or keep the loader and "
                "give its batches to the engine yourself (each of train_micro_batch_size_per_gpu samples)"
            )
        self.is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self.num_samples = self._count_samples()
        if self.is_stream and num_workers > 1:
            warnings.warn(
                f"data loader: {num_workers} workers for an iterable dataset: 1 is used, for each would have to read "
                f"the whole stream.",
                stacklevel=2,
            )
            self.num_workers = 1
        self._position = Position()
        self._begun = False
        self._iteration = self._handing_out = 0
        self._dataset_state: DatasetState | None = None
        self.sampler: CurriculumSampler | None = None
        """Draws the samples of each step, in place of the epoch's order. An epoch is as many steps as without it."""
        self._drawn = Drawn()
        self.present: Callable[[Any], Any] = _unchanged
        """What is made of a batch when it is handed out: of the step under way then, however early it was read."""

    def __len__(self) -> int:
        """Micro-batches of one whole epoch, on each rank. Raises TypeError for a dataset without a length."""
        if self.num_samples is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length, so its loader has none")
        return self._end(Position()) // self.split.round_size

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._finish_epoch()
        self._begun = True
        self._iteration += 1
        return self._hand_out(self._iteration)

    # --- position ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The position in JSON's types, in samples of all ranks together: equal on all ranks.

        A dataset with a ``state_dict`` of its own adds ``dataset_state``, which must be JSON as well.
        """
        state: dict[str, Any] = {
            "epoch": self._position.epoch,
            "consumed_samples_in_epoch": self._position.consumed,
            "step_origin_in_epoch": self._position.origin,
            "seed": self.seed,
            "dataset_length": self.num_samples,
        }
        if self._dataset_state is not None:
            state["dataset_state"] = self._dataset_state._asdict()
        if self.sampler is not None:
            state["drawn"] = self._drawn.as_json()
        return state

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        """Continue behind the batches that had been handed out when ``state`` was taken.

        With another global batch than ``saved_layout``'s the rest of the epoch is cut into steps anew. A state of
        another dataset length, or of another seed where the order depends on it, is no position here: a warning says
        so and the loader begins at epoch 0. Raises EngineError if the position lies inside an optimizer step at a
        place where this layout has no border between micro steps.
        """
        strange = []
        if state["dataset_length"] != self.num_samples:
            strange.append(f"dataset length {state['dataset_length']} (now {self.num_samples})")
        if self.shuffle and not self.is_stream and state["seed"] != self.seed:
            strange.append(f"seed {state['seed']} (now {self.seed})")
        if not strange and ("drawn" in state) != (self.sampler is not None):
            strange.append(f"samples {'drawn by a curriculum' if 'drawn' in state else 'in their shuffled order'}")
        if strange:
            warnings.warn(
                f"data loader: the position was not restored, for it was saved with {' and '.join(strange)}: "
                f"the data starts at epoch 0.",
                stacklevel=2,
            )
            self._move_to(Position(), None)
            self._drawn = Drawn()
            return
        consumed = int(state["consumed_samples_in_epoch"])
        same_batch = saved_layout.global_batch_size == self.split.global_batch_size
        origin = int(state["step_origin_in_epoch"]) if same_batch else consumed
        if (consumed - origin) % self.split.round_size:
            raise EngineError(
                f"data loader: the saved position, sample {consumed} of epoch {state['epoch']}, lies inside an "
                f"optimizer step, and micro steps of {self.split.micro_batch_size} x {self.split.dp_size} ranks = "
                f"{self.split.round_size} samples do not meet it: resume with the micro batch and ranks of the "
                f"checkpoint, or from a checkpoint that was saved after a whole step."
            )
        dataset_state = DatasetState(**state["dataset_state"]) if "dataset_state" in state else None
        self._move_to(Position(int(state["epoch"]), consumed, origin), dataset_state)
        self._drawn = Drawn.from_json(state["drawn"]) if "drawn" in state else Drawn()

    def difficulties(self) -> dict[str, float]:
        """What the sampler drew the last batch by that was handed out; before the first, what it will draw it by."""
        return {} if self.sampler is None else self.sampler.difficulties(max(1, self._drawn.num_batches))

    def _move_to(self, position: Position, dataset_state: DatasetState | None) -> None:
        if self._handing_out == self._iteration:
            self._iteration += 1
        self._begun = False
        self._position, self._dataset_state = position, dataset_state

    # --- batches -------------------------------------------------------------------------------------------

    def _hand_out(self, iteration: int) -> Iterator[Any]:
        resumed_at = self._position.consumed
        if self._iteration == iteration:
            self._begun, self._handing_out = True, iteration
        while self._iteration == iteration:
            for item in self._read_epoch():
                if self._iteration != iteration:
                    return
                self._position = Position(
                    self._position.epoch, self._position.consumed + self.split.round_size, self._position.origin
                )
                if self.sampler is None:
                    self._dataset_state = item.resume_from
                else:
                    self._drawn = item.resume_from
                yield self.present(item.batch)
                if self._iteration != iteration:
                    return
            was_empty = self._position.consumed == resumed_at
            self._finish_epoch()
            # A position saved at the very end of an epoch: nothing is left of it, so this is the next epoch's turn.
            if not (resumed_at and was_empty):
                return
            self._begun, resumed_at = True, 0

    def _finish_epoch(self) -> None:
        self._position = Position(self._position.epoch + 1)
        self._dataset_state = None
        self._begun = False

    def _read_epoch(self) -> Iterator[StreamItem]:
        """The rest of the epoch from the position on, read anew, by workers if there are any."""
        epoch, consumed = self._position.epoch, self._position.consumed
        common: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "generator": generator(self.seed, "data_workers", epoch),
        }
        if self.num_workers:
            place = (consumed,) if self._dataset_state is not None else ()
            common["worker_init_fn"] = _WorkerSeed(self.seed, epoch, *place)
            common["multiprocessing_context"] = self.multiprocessing_context
            if self.multiprocessing_context == "forkserver":
                # Without it each worker of each epoch imports torch anew, for seconds. Heeded until the server starts.
                multiprocessing.set_forkserver_preload(["torch", __name__])
        if self.is_stream:
            stream = RankStream(
                self.dataset, self.split, self._position, self._dataset_state, self.collate_fn, self.drop_last
            )
            yield from _start(DataLoader(stream, batch_size=None, collate_fn=_unchanged, **common))
        else:
            after: deque[Any] = deque()
            indices = self._sample_indices() if self.sampler is None else self._drawn_indices(after)
            samples = _SeededSamples(self.dataset, self.seed, epoch) if self.num_workers else self.dataset
            for batch in _start(DataLoader(samples, batch_sampler=indices, collate_fn=self.collate_fn, **common)):
                yield StreamItem(batch, after.popleft() if after else None)

    def _sample_indices(self) -> Iterator[list[int]]:
        """The dataset indices of this rank's micro-batches from the position on."""
        assert self.num_samples is not None
        position, split = self._position, self.split
        order = sample_order(self.num_samples, self.seed, position.epoch) if self.shuffle else None
        # Steps are whole rounds of micro-batches, so walking the order round by round never crosses a step's border.
        for start in range(position.consumed, self._end(position), split.round_size):
            first = start + split.dp_rank * split.micro_batch_size
            places = torch.arange(first, first + split.micro_batch_size) % self.num_samples
            yield (places if order is None else order[places]).tolist()

    def _drawn_indices(self, after: deque[Any]) -> Iterator[list[int]]:
        """The same, of samples that a sampler draws step by step; ``after`` gets what to go on from behind each."""
        assert self.sampler is not None
        position, split, drawn = self._position, self.split, self._drawn
        start = position.step_start(split)
        first_micro_step = (position.consumed - start) // split.round_size
        for _ in range(start, self._end(position), split.global_batch_size):
            ids, following = self.sampler.draw(drawn, split.global_batch_size)
            for micro_step in range(first_micro_step, split.accumulation_steps):
                first = micro_step * split.round_size + split.dp_rank * split.micro_batch_size
                after.append(following if micro_step == split.accumulation_steps - 1 else drawn)
                yield ids[first : first + split.micro_batch_size].tolist()
            drawn, first_micro_step = following, 0

    def _end(self, position: Position) -> int:
        """Where the epoch ends, in samples of its order: behind its last whole (or filled-up) optimizer step."""
        assert self.num_samples is not None
        size, rest = self.split.global_batch_size, self.num_samples - position.origin
        num_steps = rest // size if self.drop_last else -(-rest // size)
        return position.origin + num_steps * size

    def _count_samples(self) -> int | None:
        try:
            num_samples = len(self.dataset)
        except TypeError as error:
            if self.is_stream:
                return None
            raise EngineError(
                f"data loader: {type(self.dataset).__name__} has __getitem__ but no __len__: give it a length, or "
                f"make it an IterableDataset."
            ) from error
        split = self.split
        if num_samples == 0:
            raise EngineError("data loader: the dataset is empty.")
        if num_samples < split.global_batch_size:
            raise EngineError(
                f"data loader: the dataset has {num_samples} samples, one optimizer step takes "
                f"{split.global_batch_size} (micro batch {split.micro_batch_size} x accumulation "
                f"{split.accumulation_steps} x {split.dp_size} ranks): use a smaller batch or more data."
            )
        return num_samples


class RepeatingLoader(Iterator[Any]):
    """A loader without end: epoch after epoch. It begins an epoch only when a batch is asked for, so a position that is
    loaded in between counts. Raises EngineError when an epoch has no batch at all."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
        raise EngineError("data loader: an epoch had no batch: the dataset has fewer samples than one optimizer step.")


def sample_order(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch: a permutation (num_samples,) int64 that depends on its arguments alone."""
    return torch.randperm(num_samples, generator=generator(seed, "sample_order", epoch))


class _WorkerSeed:
    """Seeds the generators of a worker process, for datasets that draw random numbers."""

    def __init__(self, seed: int, epoch: int, *place: int) -> None:
        self.seed = seed
        self.purpose: tuple[int | str, ...] = ("data_worker", epoch, *place)

    def __call__(self, worker: int) -> None:
        _seed_generators(stream_seed(self.seed, *self.purpose, worker))


class _SeededSamples(Dataset[Any]):
    """``dataset`` in a worker: the generators are seeded before each sample by what it is."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset, self.stream = dataset, (seed, "data_sample", epoch)

    def __getitem__(self, index: int) -> Any:
        _seed_generators(stream_seed(*self.stream, index))
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Datasets that read whole batches at once (torch's undocumented protocol) are seeded by the first index."""
        read = getattr(self.dataset, "__getitems__", None)
        if read is None:
            return [self[index] for index in indices]
        _seed_generators(stream_seed(*self.stream, indices[0]))
        return read(indices)

    def __len__(self) -> int:
        return len(self.dataset)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _start(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not loader.num_workers:
            raise
        raise EngineError(
            f"data loader: the dataset or collate_fn cannot be sent to a worker process ({error}): define its class "
            f"and functions at the top level of a module, or use no workers."
        ) from error


def _unchanged(item: Any) -> Any:
    return item
