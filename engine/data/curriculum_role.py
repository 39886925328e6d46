"""The Curriculum role: the engine cuts each batch to the length of the step, and tells how hard the data is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.contracts import EngineError, OnLayoutChange, SavedLayout
from engine.data.batch import scalar_loss
from engine.data.curriculum import DifficultyFunction, difficulty_at
from engine.data.sequences import (
    REMEDY,
    SequenceKeys,
    batch_shape,
    named_tensors,
    piece_length,
    reshape,
    sequence_dimensions,
    truncate,
)
from engine.plan.plan import CurriculumPlan

log = logging.getLogger("engine")


class DataCurriculum:
    """Follows the applied steps t: in the step under way every schedule stands at t + 1.

    The metric that cuts, if there is one, gives the length: of what the model is called with (`apply`), of what the
    engine's own loader hands out (`cut`), and of the targets of a ``loss_fn`` (`around`). The others bound what may be
    drawn (engine/data/sampling.py) and are only told of here.
    """

    name = "curriculum"
    on_layout_change: OnLayoutChange = "reshard"

    def __init__(
        self, plan: CurriculumPlan, sequence_keys: SequenceKeys | None = None, takes_length: bool = False
    ) -> None:
        self.plan = plan
        self.sampled: Callable[[], dict[str, float]] = dict
        """The difficulties that the sampler stands at."""
        self.functions: dict[str, DifficultyFunction] = {}
        self._keys, self._takes_length = sequence_keys, takes_length
        self._applied_steps: Callable[[], int] = lambda: 0
        self._has_loss_fn = False
        self._whole: tuple[int, int] | None = None
        self._cut: tuple[int, int] | None = None
        self._num_tokens = 0
        self._loaded: dict[str, float] = {}

    def follow(self, applied_steps: Callable[[], int]) -> None:
        self._applied_steps = applied_steps

    def set_functions(self, functions: Mapping[str, DifficultyFunction]) -> None:
        """The schedules of the metrics whose type is custom. Raises EngineError for a name that is none of them."""
        custom = [metric.name for metric in self.plan.metrics if metric.schedule.type == "custom"]
        for name, function in functions.items():
            if name not in custom:
                known = ", ".join(custom) or "none"
                raise EngineError(
                    f"set_custom_curriculum_learning_schedule: {name!r} is no metric with schedule_type custom; "
                    f"those are: {known}"
                )
            if not callable(function):
                raise EngineError(f"set_custom_curriculum_learning_schedule: {name!r} is {function!r}, no function")
        self.functions.update(functions)

    def difficulties(self) -> dict[str, float]:
        """Of the metric that cuts: the length asked for; where sequences are split, that of the pieces of the last
        batch."""
        cutting, own = self.plan.cutting, {}
        if cutting is not None:
            split = cutting.use == "reshape" and self._num_tokens > 0
            own = {cutting.name: float(self._length_of(self._num_tokens) if split else self._length())}
        return {**own, **self.sampled()}

    # --- cutting -----------------------------------------------------------------------------------------------

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Raises EngineError for a batch without a sequence dimension."""
        if self._loaded:
            self._compare()
        if self.plan.cutting is None:
            return args, kwargs
        self._whole = self._cut = None
        shape = self._shape((args, kwargs), is_whole=not self._has_loss_fn)
        if shape is None:
            there = ", ".join(f"{name} {tuple(t.shape)}" for name, t in named_tensors((args, kwargs)).items())
            raise EngineError(
                f"curriculum: the batch has no sequence dimension: none of its tensors ({there or 'it has none'}) "
                f"holds token ids, integers of shape (batch, sequence); {REMEDY}"
            )
        self._whole = shape
        args, kwargs = self._fit((args, kwargs), shape, is_whole=not self._has_loss_fn)
        if self._takes_length:
            kwargs = {**kwargs, "curriculum_seqlen": self._length_of(shape[1])}
        return args, kwargs

    def cut(self, batch: Any) -> Any:
        """A batch without a sequence dimension is handed on as it is: the forward will tell."""
        if self.plan.cutting is None:
            return batch
        shape = self._shape(batch, is_whole=True)
        return batch if shape is None else self._fit(batch, shape, is_whole=True)

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``loss_fn(outputs, targets)`` on targets that are cut as the inputs of the same micro-batch were."""
        if loss_fn is None or self.plan.cutting is None:
            return loss_fn
        self._has_loss_fn = True

        def loss_of_cut(outputs: Any, targets: Any) -> Any:
            if self._whole is not None and torch.is_grad_enabled():
                targets = self._fit({"1": targets}, self._whole, is_whole=False)["1"]
            return loss_fn(outputs, targets)

        return loss_of_cut

    def check(self, output: Any) -> None:
        if self._cut is None or self._has_loss_fn or scalar_loss(output) is not None:
            return
        along = [t for t in named_tensors(output).values() if t.ndim > 1 and tuple(t.shape[:2]) == self._cut]
        if along:
            assert self._whole is not None
            raise EngineError(
                f"curriculum: the model got its sequences cut from {self._whole} to {self._cut} and returned "
                f"{tuple(along[0].shape)} instead of a loss, so targets outside the model would not fit. Let the model "
                "compute the loss; or pass loss_fn= and call train_batch(); or let initialize(training_data=...) make "
                "the loader, which hands out whole batches cut; or begin with batch = engine.cut_to_curriculum(batch)"
            )

    def _shape(self, batch: Any, is_whole: bool) -> tuple[int, int] | None:
        return batch_shape(named_tensors(batch), self._keys, is_whole)

    def _fit(self, batch: Any, shape: tuple[int, int], is_whole: bool) -> Any:
        assert self.plan.cutting is not None
        length, self._num_tokens = self._length_of(shape[1]), max(shape[1], self._num_tokens)
        if length >= shape[1]:
            return batch
        dimensions = sequence_dimensions(named_tensors(batch), shape, self._keys, is_whole)
        if self.plan.cutting.use == "truncate":
            self._cut = shape[0], length
            return truncate(batch, dimensions, length)
        self._cut = shape[0] * (shape[1] // length), length
        return reshape(batch, dimensions, shape, length)

    def _length(self) -> int:
        metric = self.plan.cutting
        assert metric is not None
        step = self._applied_steps() + 1
        length = int(difficulty_at(metric.schedule, step, self.functions.get(metric.name)))
        if length < 1:
            raise EngineError(f"curriculum: {metric.name} is {length} tokens at step {step}; at least 1 is needed")
        return length

    def _length_of(self, num_tokens: int) -> int:
        """The length that sequences of ``num_tokens`` are given."""
        assert self.plan.cutting is not None
        length = min(self._length(), num_tokens)
        if self.plan.cutting.use == "truncate":
            return length
        pieces = piece_length(num_tokens, length)
        if 2 * pieces < length:
            raise EngineError(
                f"curriculum: sequences of {num_tokens} tokens cannot be split into equal pieces of about {length} "
                f"(the nearest is {pieces}); use a length with more divisors, or seqlen_truncate"
            )
        return pieces

    # --- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For the reader of a checkpoint and a warning: the difficulties follow from the applied steps."""
        return {"difficulties": self.difficulties()}

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None:
        self._loaded = dict(state["difficulties"])

    def _compare(self) -> None:
        """In the first forward after a load: the counters stand again, in whatever order the parts were loaded."""
        loaded, self._loaded = self._loaded, {}
        for name, now in self.difficulties().items():
            if name in loaded and loaded[name] != now:
                log.warning(
                    "curriculum: the checkpoint was saved at %s %g; the config's schedule says %g at this step",
                    name, loaded[name], now,
                )  # fmt: skip
