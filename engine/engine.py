"""The Engine: the step, written out, and the public training API around it.

One optimizer step is a *window* of backward passes and one `step` at its boundary. The step, in order: reduce, agree,
unscale and clip (one factor), update, publish, schedule, report. docs/how_a_step_works.md walks through it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.tree import StateTree
from engine.collectives.agreement import Agreement
from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.collectives.stall import watch
from engine.contracts import EngineError, LossSum, StepReport
from engine.data.batch import count_tokens, place
from engine.data.loader import RepeatingLoader
from engine.device import seed_generators
from engine.full_state import LocalState
from engine.mesh import Mesh
from engine.model.zero.arrivals import scaled_by
from engine.model.zero.shards import ParameterShard
from engine.optim.optimizer import EngineOptimizer
from engine.parameters import ParameterRegistry
from engine.plan import Plan
from engine.random import stream_seed
from engine.surface import Roles, Surface
from engine.watch import WatcherList
from engine.watch.health import Health
from engine.window import Counters, Window
from engine.window_checks import changed_parameters, foreign_scale_message, refuse_unfrozen

log = logging.getLogger("engine")


class Engine(Surface, LocalState):
    """A model that trains as its config says. Made by `engine.initialize`; unknown attributes are the model's own."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        mesh: Mesh,
        registry: ParameterRegistry,
        roles: Roles,
        ledger: Ledger,
        *,
        compute_dtype: torch.dtype | None,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        watchers: WatcherList,
        state: StateTree,
        frozen: Sequence[ParameterShard] = (),
        training_dataloader: Any = None,
        lr_scheduler: Any = None,
        on_destroy: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self.plan, self.mesh, self.parameter_registry = module, plan, mesh, registry
        self.roles, self.watchers, self.training_dataloader = roles, watchers, training_dataloader
        self.optimizer, self.lr_scheduler = roles.optimizer, lr_scheduler
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = self.global_tokens = 0
        self.layers_skipped = self.saved_layer_tokens = self.stop_requested = 0
        self._compute_dtype, self._autocast, self._state, self._on_destroy = compute_dtype, autocast, state, on_destroy
        self.ledger, self._frozen = ledger, list(frozen)
        self._agreement = Agreement(ShardGroup.of(mesh, "control", ledger), mesh.device)
        self._window = Window()
        self._accumulation_steps = plan.batch.accumulation_steps
        self._boundary_override: bool | None = None
        self._in_no_sync = self._noted_no_sync = self._noted_plain_backward = False
        self._stop_signal = 0
        self._health = Health(mesh.rank)
        self.last_report: StepReport | None = None
        self._batches: Iterator[Any] | None = None
        state.add(Counters(self))
        roles.curriculum.follow(lambda: self.global_steps - self.skipped_steps)
        roles.saved_work.place = self._place
        self._share_state()
        ledger.book("start")
        watchers.on_start(plan)

    # --- one window ------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's micro-batch: inputs on the device, floating ones in the compute dtype."""
        self.roles.forward_backward.by_hand("the engine's forward")
        started = self._enter("forward")
        args, kwargs = place((args, kwargs), self.mesh.device, self._compute_dtype)
        trains = self.module.training and torch.is_grad_enabled()
        if trains:
            args, kwargs = self.roles.curriculum.apply(args, kwargs)
            self._window.num_tokens += count_tokens((args, kwargs))
            # dropout depends on where the run is, not on how it came there: a resumed run draws the same masks
            place_in_run = (self.global_steps, self.micro_steps, self._window.num_forwards, self.mesh.token_rank)
            seed_generators(self.mesh.device, stream_seed(self.plan.seed, "dropout", *place_in_run))
            self._window.num_forwards += 1
        counted = contextlib.nullcontext() if torch.is_grad_enabled() else self.ledger.apart("evaluation")
        with self._autocast(), counted:
            output = self.roles.slices.forward(self.module, args, kwargs)
        if trains:
            self.roles.curriculum.check(output)
        self._window.spend("forward", started)
        return output

    forward = __call__

    def backward(self, loss: Tensor | LossSum, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of one micro-batch's loss (0-dim, a mean over the micro-batch, or a `LossSum`).

        Divides by the accumulation steps (unless ``scale_wrt_gas`` is False or accumulation is unmanaged), applies the
        loss scale, and reduces as the ZeRO stage says. Returns the loss divided by the accumulation steps.

        Raises EngineError for a loss that is not a scalar with a graph, and for means mixed with sums in a window.
        """
        self.roles.forward_backward.by_hand("backward()")
        started = self._enter("backward")
        value = self._note_loss(loss, is_divided=not scale_wrt_gas)
        divides = self.plan.batch.managed and scale_wrt_gas and not isinstance(loss, LossSum)
        scaled = value / self._accumulation_steps if divides else value
        self.roles.reduction.begin_backward(self.is_gradient_accumulation_boundary() and not self._in_no_sync)
        with scaled_by(self.roles.precision.scale):
            (scaled * self.roles.precision.scale).backward(retain_graph=retain_graph)
        self.roles.reduction.end_backward()
        self._window.spend("backward", started)
        return scaled.detach()

    @torch.no_grad()
    def step(self) -> None:
        """After every micro-batch. Inside a window it only counts; at the boundary it updates the model.

        Raises RunFailed, on all ranks alike, when training cannot go on (engine/watch/health.py).
        """
        self.roles.forward_backward.by_hand("step()")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._window.num_micro_steps += 1
        if not boundary:
            return
        started = self._enter("step")
        roles, window, optimizer = self.roles, self._window, self._require_optimizer()
        roles.reduction.finish()
        agreed = self._agree(roles.reduction.sum_of_squares())
        self._check_agreed(agreed)
        applied = not self.plan.precision.check_overflow or math.isfinite(agreed["sum_of_squares"])
        divisor = roles.precision.scale * self._divisor(agreed["count"])
        norm = math.sqrt(agreed["sum_of_squares"]) / divisor if applied else None
        lr, scale, culprit = self.get_lr()[0], roles.precision.scale, None
        difficulties = roles.curriculum.difficulties()
        self._count(agreed)
        if applied:
            if agreed["untouched"]:
                roles.reduction.drop_gradients(self._untouched_everywhere())
            optimizer.apply(roles.clipping.coefficient(norm) / divisor)  # type: ignore[arg-type]
            roles.reduction.publish()
            roles.schedule.step(self.global_tokens)
        else:
            culprit = self._find_nonfinite()
        roles.precision.update(not applied)
        roles.reduction.inspect(next_window=not applied)
        roles.reduction.zero_gradients()
        self.global_steps += 1
        self.skipped_steps += not applied
        optimizer.overflow = not applied
        window.spend("step", started)
        self._window = Window()
        watch.place = f"after step {self.global_steps}"
        self._report(agreed, window, applied, norm, lr, scale, culprit, difficulties)
        self._window.leave_out(self._window.started)

    def _check_agreed(self, agreed: Mapping[str, float]) -> None:
        """Gradients that are not there, not scaled as this engine scales, or of parameters that it does not train."""
        where = f"step {self.global_steps + 1}"
        if agreed["unfrozen"]:
            refuse_unfrozen(where, self.parameter_registry, self.module)
        if agreed["refused"]:
            raise EngineError(self._agreement.first_text(self.roles.saved_work.refusal))
        if not agreed["scales"]:
            raise EngineError(f"{where}: step() without a gradient on any rank; call engine.backward(loss) before it")
        if agreed["foreign_scales"]:
            raise EngineError(foreign_scale_message(where, self.roles.precision.scale, bool(agreed["plain"])))
        managed = self._accumulation_steps > 1 and self.plan.batch.managed
        if agreed["plain"] and managed and not self._noted_plain_backward:
            self._noted_plain_backward = True
            log.warning("loss.backward() adds micro-batches up; engine.backward(loss) would take their mean")

    def _agree(self, sum_of_squares: Tensor) -> dict[str, float]:
        """What all ranks must know alike, in one all-reduce (a second one only if the norm overflowed)."""
        window, (layers_skipped, saved_layer_tokens) = self._window, self.roles.saved_work.take()
        scales = self.roles.reduction.scales()
        mine: dict[str, Tensor | float] = {
            "sum_of_squares": sum_of_squares,
            "loss": window.mean_loss(self.plan.batch.managed),
            "num_losses": window.num_losses,
            "count": window.count,
            "tokens": window.num_tokens,
            "layers_skipped": layers_skipped,
            "saved_layer_tokens": saved_layer_tokens,
            "refused": self.roles.saved_work.refusal is not None,
            "untouched": len(self.roles.reduction.untouched()),
            "unfrozen": bool(changed_parameters(self.parameter_registry, self.module, self.last_report is None)),
            "scales": len(scales),
            "foreign_scales": len({scale or 1.0 for scale in scales} - {self.roles.precision.scale}),
            "plain": None in scales,
            "sigint": self._stop_signal == 2,
            "sigterm": self._stop_signal == 15,
        }
        agreed = self._agreement.sum(mine, "step()")
        if not math.isfinite(agreed["sum_of_squares"]):
            agreed |= self._agreement.sum({"sum_of_squares": self.roles.reduction.sum_of_squares(exact=True)}, "norm")
        self.stop_requested = 15 if agreed["sigterm"] else 2 if agreed["sigint"] else 0
        return agreed

    def _report(
        self,
        agreed: Mapping[str, float],
        window: Window,
        applied: bool,
        norm: float | None,
        lr: float,
        scale: float,
        culprit: tuple[int, str] | None,
        difficulties: Mapping[str, float],
    ) -> None:
        loss = agreed["loss"] / (agreed["count"] or self.mesh.world_size) if agreed["num_losses"] else None
        report = StepReport(
            step=self.global_steps,
            applied=applied,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            loss_scale=scale,
            samples=self.global_samples,
            tokens_seen=self.global_tokens,
            tokens_computed=self.tokens_computed,
            skipped_steps=self.skipped_steps,
            layers_skipped=self.layers_skipped,
            difficulties=difficulties,
            bytes_by_axis=self.ledger.take(),
            seconds={**window.seconds, "total": time.perf_counter() - window.started},
            scalars={**self._require_optimizer().scalars(), **self.roles.saved_work.scalars},
            nonfinite_kind=None if applied else "NaN" if math.isnan(agreed["sum_of_squares"]) else "inf",
            first_nonfinite=culprit,
        )
        self.last_report = report
        self.watchers.on_step(report)
        self._health.check(report, self.roles.precision)

    # --- whole windows -----------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step: forward and backward of every micro-batch of a window, then `step`.

        ``data_iter`` yields this rank's micro-batches; None takes them from the engine's own loader, epoch after
        epoch. Returns the loss (0-dim, CPU): the mean over the window and all ranks.
        """
        batches = data_iter if data_iter is not None else self._own_batches()
        if not self.module.training:
            self.module.train()
        self.roles.forward_backward.train(self, lambda index: self._next(batches, index))
        assert self.last_report is not None
        assert self.last_report.loss is not None
        return torch.tensor(self.last_report.loss)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> Tensor:
        """The mean loss (0-dim, CPU) of ``num_micro_batches`` micro-batches (default: a window's), over all ranks.

        No gradient, no counter and no training random stream is touched.
        """
        started, was_training = time.perf_counter(), self.module.training
        self.module.eval()
        try:
            total, count = self.roles.forward_backward.evaluate(
                self, lambda index: self._next(data_iter, index), num_micro_batches or self._accumulation_steps
            )
        finally:
            self.module.train(was_training)
        with self.ledger.apart("evaluation"):
            agreed = self._agreement.sum({"total": total, "count": count}, "eval_batch()")
        self._window.leave_out(started)
        return torch.tensor(agreed["total"] / agreed["count"])

    def flush(self, discard: bool = False) -> None:
        """Close an incomplete window: step on the mean of what has come, or discard it. No window, no effect."""
        window = self._window
        window.num_micro_steps = max(window.num_micro_steps, min(window.num_losses, 1))
        if window.num_micro_steps == 0:
            return
        self.micro_steps += -self.micro_steps % self._accumulation_steps  # the next window begins whole
        if discard:
            self._forget_window()
            return
        if self.plan.batch.managed:
            window.share = window.num_micro_steps / self._accumulation_steps
        window.num_micro_steps -= 1  # step() counts one
        self.micro_steps -= 1
        override, self._boundary_override = self._boundary_override, True
        try:
            self.step()
        finally:
            self._boundary_override = override

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside do not reduce. At stages 2 and 3, which never keep whole gradients, a no-op.

        The numbers are the same either way; what has not been reduced by the boundary is reduced there.
        """
        if not self.roles.reduction.defers() and not self._noted_no_sync:
            self._noted_no_sync = True
            stage = self.plan.zero.stage
            log.warning("no_sync() has no effect at ZeRO stage %d: every backward reduces its gradients", stage)
        before, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the model."""
        if self._boundary_override is not None:
            return self._boundary_override
        return not self.plan.batch.managed or (self.micro_steps + 1) % self._accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take over the boundary: holds until it is set again."""
        self._boundary_override = is_boundary

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _replicas(self) -> float:
        """How many ranks see the same tokens: sums over the world count each token that often."""
        return self.mesh.world_size / self.mesh.token_size

    def _divisor(self, count: float) -> float:
        """What the summed gradients are divided by besides the loss scale; ``count``: of `LossSum`, over the world."""
        if count:
            return count / self._replicas / self.plan.zero.predivide_factor
        return self.roles.reduction.divisor * self._window.share

    def _enter(self, phase: str) -> float:
        watch.place = f"step {self.global_steps + 1}, {phase}"
        return time.perf_counter()

    def _untouched_everywhere(self) -> set[int]:
        registry = self.parameter_registry
        return self._agreement.common([*self.roles.reduction.untouched(), *registry.absent()], len(registry))

    def _find_nonfinite(self) -> tuple[int, str] | None:
        """The lowest rank whose own gradient was seen not to be finite; else, for reduced gradients are nobody's own
        any more, whose loss was not; else the lowest that holds such a gradient."""
        reduction, rank = self.roles.reduction, self.mesh.rank
        arrived, index = reduction.first_nonfinite_arrival(), reduction.first_nonfinite()
        began_here = not math.isfinite(float(self._window.loss))
        found = None
        for candidate in (arrived, index if began_here else None, index):
            found = found or self._agreement.lowest(None if candidate is None else (rank, candidate))
        return None if found is None else (found[0], self.parameter_registry.infos[found[1]].name)

    def _require_optimizer(self) -> EngineOptimizer:
        if self.optimizer is None:
            raise EngineError(
                "step() needs an optimizer: add an 'optimizer' section to the config or pass optimizer= to initialize()"
            )
        return self.optimizer

    def _next(self, batches: Iterator[Any], index: int) -> Any:
        try:
            return next(batches)
        except StopIteration:
            raise EngineError(
                f"the data ended in step {self.global_steps + 1} at micro-batch {index + 1} of "
                f"{self._accumulation_steps} on rank {self.mesh.rank}; give a longer iterator, "
                "or engine.RepeatingLoader(loader)"
            ) from None

    def _own_batches(self) -> Iterator[Any]:
        if self.training_dataloader is None:
            raise EngineError("train_batch() has no data: pass an iterator, or training_data= to initialize()")
        if self._batches is None:
            self._batches = iter(RepeatingLoader(self.training_dataloader))
        return self._batches
