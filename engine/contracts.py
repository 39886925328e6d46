"""What the rooms of the house agree on: records that are passed around, and the slots of a step.

Two kinds of feature take part in training (docs/architecture.md):

* a *role* takes part in the arithmetic of a step. There is a closed set of slots, each with a neutral
  element, so that the step contains no ``if feature:``;
* a *watcher* sees a frozen `StepReport` after the step and cannot alter the result.

Everything that must survive a restart is a `Stateful`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine.config.messages import EngineError
from engine.saved_work import Place, SavedWork

if TYPE_CHECKING:
    import torch

    from engine.plan import Plan


__all__ = [
    "Chunk",
    "Clipping",
    "Curriculum",
    "EngineError",
    "ForwardBackward",
    "LossSum",
    "NoCurriculum",
    "NoSchedule",
    "OnLayoutChange",
    "PipelineError",
    "Place",
    "Precision",
    "Reduction",
    "RunFailed",
    "SavedLayout",
    "SavedWork",
    "Schedule",
    "Slices",
    "Stateful",
    "StepReport",
    "Watcher",
    "WholeSequences",
]


class RunFailed(EngineError):
    """Training cannot go on (a loss that is not finite, a dead peer). The command line exits with 1."""


class PipelineError(EngineError):
    """A call that a model cut over pipeline stages cannot answer; DeepSpeed's name for it."""


# --- records -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did. Handed to watchers on every rank, after the step.

    ``loss`` is the mean over micro-batches and data-parallel ranks, unscaled. ``grad_norm`` is the global L2 norm
    before clipping, unscaled. ``seconds`` are wall-clock, by phase.

    The ledger, totals of the whole run over all data-parallel ranks: ``samples``; ``tokens_seen``, those in what the
    model was given, so without what a curriculum cut off; ``tokens_computed``, those less what was left out inside the
    model, in tokens that pass through all layers; ``layers_skipped``, one for each layer and micro-batch;
    ``skipped_steps``. ``difficulties``: of the curriculum's metrics, in this step.
    """

    step: int
    applied: bool
    loss: float | None
    lr: float
    grad_norm: float | None
    loss_scale: float
    samples: int
    tokens_seen: int
    tokens_computed: int
    skipped_steps: int
    layers_skipped: int = 0
    difficulties: Mapping[str, float] = field(default_factory=dict)
    bytes_by_axis: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    """What the optimizer and layer drop add for the monitors, by name (``Train/compression_stage``)."""
    nonfinite_kind: str | None = None
    """"inf" or "NaN" for a skipped step: what the squared norm was."""
    first_nonfinite: tuple[int, str] | None = None
    """The lowest rank that holds a non-finite gradient and the parameter's name, when the step was skipped."""

    @property
    def comm_bytes(self) -> int:
        """What this rank sent in the step, over all axes (engine/collectives/ledger.py says how it is counted)."""
        return sum(self.bytes_by_axis.values())


@dataclass(frozen=True)
class LossSum:
    """A loss that is a sum over ``count`` terms (tokens, say) instead of a mean.

    The step then divides by the count of the whole window, over all micro-batches and ranks: exact where masks leave
    them unequal. ``total`` is a 0-dim tensor with a graph, ``count`` local.
    """

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True)
class Chunk:
    """A box of a named tensor that lives on this rank.

    ``tensor`` (local) holds the elements ``[offsets, offsets + sizes)`` of the global tensor ``name`` of shape
    ``global_shape``. ``tensor.shape == sizes``. It may be a view: loading writes into it in place.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Chunk:
        """The one box of a tensor that is here as a whole."""
        shape = tuple(tensor.shape)
        return cls(name, shape, (0,) * len(shape), shape, tensor.detach())


@dataclass(frozen=True)
class SavedLayout:
    """The degrees under which a checkpoint was written."""

    world_size: int
    zero_stage: int
    mesh: Mapping[str, int]
    global_batch_size: int
    placement: str = "PDT"
    """The order of the axes: which rank stood where (engine/plan/placement.py)."""


# --- state -------------------------------------------------------------------------------------------------

OnLayoutChange = Literal["reshard", "same_layout_only", "drop"]


@runtime_checkable
class Stateful(Protocol):
    """A part of the run that survives a restart as JSON. ``on_layout_change`` says what becomes of it elsewhere."""

    name: str
    on_layout_change: OnLayoutChange

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any], saved_layout: SavedLayout) -> None: ...


# --- watchers ----------------------------------------------------------------------------------------------


class Watcher:
    """Sees the run, never alters it. Every method has a neutral body; override what you need.

    A watcher that raises is reported once and then left out: monitoring never stops training.
    """

    def on_start(self, plan: Plan) -> None: ...

    def on_step(self, report: StepReport) -> None: ...

    def on_evaluation(self, report: StepReport | None, metrics: Mapping[str, float]) -> None: ...

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Scalars of the user's own: ``(name, value, global samples)``."""

    def close(self) -> None: ...


# --- roles: the slots of a step ----------------------------------------------------------------------------


class Reduction(Protocol):
    """Owns parameters, gradients and masters of the data-parallel axis: every ZeRO stage is one of these.

    After `finish` the gradients behind `shards` are complete: summed over micro-batches and data-parallel ranks,
    still multiplied by the loss scale. Divided by ``divisor`` they are what the config asks for (the mean over ranks).
    """

    divisor: float

    @property
    def shards(self) -> Sequence[Any]:
        """This rank's pieces of the trained parameters, as the optimizer steps on them (model/zero/shards.py)."""

    def begin_backward(self, last: bool) -> None:
        """Before each backward of `Engine.backward`; ``last``: the step follows, so that reduction may overlap."""

    def end_backward(self) -> None: ...

    def collect(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Inside a backward whose ``.grad`` autograd's hooks did not see: the gradients of these are there."""

    def finish(self) -> None:
        """Reduce whatever the backward passes of this window have not reduced yet."""

    def sum_of_squares(self, exact: bool = False) -> torch.Tensor:
        """This rank's share (0-dim float64) of the squared gradient norm; the sum over all ranks is the global value.
        ``exact``: no intermediate overflow in fp32, at the price of a pass in float64."""

    def first_nonfinite(self) -> int | None:
        """Registry index of the first parameter whose local gradient is not finite, after the reduction."""

    def inspect(self, next_window: bool) -> None:
        """Whether to look into every gradient of the next window as it arrives, before others are added to it."""

    def first_nonfinite_arrival(self) -> int | None:
        """Of those that `inspect` had looked at: this rank's own."""

    def untouched(self) -> list[int]:
        """Registry indices of parameters that got no gradient on this rank in this window."""

    def unreduced(self) -> set[int]:
        """Registry indices of parameters whose gradients stay this rank's own in this window (1-bit optimizers)."""

    def scales(self) -> set[float | None]:
        """The loss scales of the backwards that brought this window's gradients; None stands for a plain one."""

    def adopt_gradients(self, indices: set[int]) -> None:
        """The gradients of these shards were written from outside, after `finish`; they count as arrived."""

    def drop_gradients(self, indices: set[int]) -> None:
        """These got no gradient on any rank: no update and no decay for them."""

    def publish(self) -> None:
        """After the optimizer: make the parameters that the next forward reads equal to the masters."""

    def adopt_values(self) -> None:
        """The other way round: the model's values were written from outside; make the masters equal to them."""

    def zero_gradients(self) -> None: ...

    def defers(self) -> bool:
        """Whether `Engine.no_sync` truly defers the reduction."""

    def close(self) -> None: ...


class Precision(Protocol):
    """Loss scaling. Neutral element: scale 1, never changes."""

    scale: float

    exhausted: bool
    """An overflow asked for a scale below the minimum."""

    def update(self, overflow: bool) -> None: ...


class Clipping(Protocol):
    """Neutral element: the coefficient is 1."""

    def coefficient(self, norm: float) -> float: ...


class Schedule(Protocol):
    """The learning-rate schedule. Neutral element: nothing happens."""

    def step(self, tokens_seen: int) -> None:
        """After an applied step; ``tokens_seen`` in the whole run, for a schedule that follows tokens."""

    def written(self) -> Sequence[Mapping[str, Any]]:
        """What the schedule has given each parameter group."""

    def accept(self, written: Sequence[Mapping[str, Any]] = ()) -> None:
        """The schedule was moved by a load; go on from there. It was not: ``written`` is what it had given the groups
        before, which the load of the optimizer has overwritten."""


class NoSchedule:
    """The neutral element."""

    def step(self, tokens_seen: int) -> None: ...

    def written(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def accept(self, written: Sequence[Mapping[str, Any]] = ()) -> None: ...


class Curriculum(Protocol):
    """What the model sees of a batch. Neutral element: all of it."""

    def follow(self, applied_steps: Callable[[], int]) -> None:
        """From here on ``applied_steps()`` tells how many steps have updated the model."""

    def difficulties(self) -> dict[str, float]:
        """The difficulty of every metric in the step under way."""

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a training forward."""

    def check(self, output: Any) -> None:
        """What that forward returned: raises EngineError where targets outside the model would no longer fit it."""

    def cut(self, batch: Any) -> Any:
        """A whole batch, inputs and targets, as `apply` would cut it."""

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``loss_fn(outputs, targets)`` that cuts its targets as the inputs were."""


class NoCurriculum:
    """The neutral element."""

    def follow(self, applied_steps: Callable[[], int]) -> None: ...

    def difficulties(self) -> dict[str, float]:
        return {}

    def apply(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def check(self, output: Any) -> None: ...

    def cut(self, batch: Any) -> Any:
        return batch

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return loss_fn


class Slices(Protocol):
    """Which part of the sequences this rank works on. Neutral element: all of them."""

    def forward(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``model`` makes of this rank's slice of the batch. A loss in it, a mean, is that of the whole sequences
        on every rank, with the gradient that this rank's slice adds; a `LossSum` is the slice's."""

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """``loss_fn(outputs, targets)`` for the outputs of this rank's slice and whole targets."""

    def close(self) -> None: ...


class WholeSequences:
    """The neutral element."""

    def forward(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    def around(self, loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return loss_fn

    def close(self) -> None: ...


class ForwardBackward(Protocol):
    """What a whole accumulation window does with its micro-batches: one after the other, or through a pipeline.

    ``engine`` is the running `Engine`; ``next_batch(index)`` gives this rank's micro-batch ``index`` of the window.
    """

    def by_hand(self, call: str) -> None:
        """Before each forward, backward and step. Raises `PipelineError` where only whole windows can be run."""

    def train(self, engine: Any, next_batch: Callable[[int], Any]) -> None:
        """Forward and backward of a window's micro-batches, and the step."""

    def evaluate(self, engine: Any, next_batch: Callable[[int], Any], num_micro_batches: int) -> tuple[Any, Any]:
        """(sum of losses, their count) of this rank, in eval mode and without gradients. Of all ranks together the
        ratio is the mean."""

    def close(self) -> None: ...
