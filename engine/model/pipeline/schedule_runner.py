"""The `ForwardBackward` role of a pipeline rank: runs the order that the schedule gives it, and forward-only ones.

Every rank has the whole micro-batches, so a stage knows its inputs, its masks and its targets; only hidden states and
their gradients travel. Nothing here decides an order (orders.py) or how things travel (transfers.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup, Transfer
from engine.collectives.stall import watch
from engine.contracts import LossSum, PipelineError, Reduction, SavedWork
from engine.data.batch import loss_of
from engine.device import seed_generators
from engine.mesh import Mesh
from engine.model.forward_backward import total_and_count
from engine.model.pipeline.cut import StagedModel
from engine.model.pipeline.micro_batches import MicroBatch, Placement
from engine.model.pipeline.orders import with_transfers
from engine.model.pipeline.transfers import Transfers, take_apart
from engine.model.zero.arrivals import scaled_by
from engine.plan import Plan
from engine.plan.pipeline_schedules import rank_of_stage
from engine.plan.plan import PipelinePlan
from engine.random import stream_seed
from engine.torch_compat import backward_of_inputs, backward_of_weights


@dataclass
class _Passage:
    """One micro-batch on its way through one stage. ``inputs``: received tensors that want a gradient; ``roots``: what
    its backward begins at; ``gradients``: of the roots, None where the root is the loss."""

    inputs: list[Tensor] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] | None = None
    rest: list[dict[str, Any]] | None = None
    """What the second half of a split backward needs."""
    seed: Callable[[int | None], None] | None = None
    """What layers draw from, also where the backward computes them again."""


class ScheduleRunner:
    """See `ForwardBackward`. ``reduction`` gets the gradients."""

    def __init__(self, staged: StagedModel, plan: Plan, mesh: Mesh, ledger: Ledger, reduction: Reduction) -> None:
        assert plan.pipeline is not None
        self._staged, self._plan, self._reduction = staged, plan, reduction
        self._pipeline: PipelinePlan = plan.pipeline
        self._num_ranks, self._rank, self._device = plan.degrees.pp, mesh.coordinates["pp"], mesh.device
        self._last = staged.num_stages - 1
        self._pieces = plan.pipeline.num_micro_batches // plan.batch.accumulation_steps
        schedule, num_ranks = plan.pipeline.schedule, plan.degrees.pp
        group = ShardGroup.of(mesh, "pp", ledger)
        self._transfers = Transfers(group, lambda stage: rank_of_stage(schedule, num_ranks, stage), mesh.device)
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._is_running = False
        self.most_held = 0
        """The most micro-batches whose activations were kept at once in training, counted in each stage of the rank."""
        self._passages: dict[tuple[int, int], _Passage] = {}
        self._handed_on: dict[tuple[str, int, int], Any] = {}
        self._posted: dict[tuple[str, int, int], tuple[list[Tensor], list[Transfer]]] = {}
        staged.watch_layers()

    def by_hand(self, call: str) -> None:
        if not self._is_running:
            raise PipelineError(
                f"{call} is not there under pipeline.stages {self._num_ranks}: one rank has only a part of the model; "
                "train_batch() runs a whole window (forward, backward and step), eval_batch() an evaluation"
            )

    def close(self) -> None: ...

    # --- training ----------------------------------------------------------------------------------------------

    def train(self, engine: Any, next_batch: Callable[[int], Any]) -> None:
        steps = self._plan.batch.accumulation_steps
        placement = self._placement(engine)
        watch.place = f"step {engine.global_steps + 1}, pipeline"
        batches = [next_batch(index) for index in range(steps)]  # before anything travels: the data may end
        micro_batches = [piece for batch in batches for piece in placement.training(batch)]
        window = engine._window
        window.num_tokens += sum(micro_batch.num_tokens for micro_batch in micro_batches)
        window.num_forwards += steps
        order = with_transfers(
            self._pipeline.schedule, self._num_ranks, self._pipeline.virtual_stages, len(micro_batches)
        )[self._rank]
        for action in order:
            started = time.perf_counter()
            stage, index = action.stage, action.micro_batch
            if action.kind == "F":
                with self._passing(engine, stage, index):
                    self._forward(engine, stage, index, micro_batches)
            elif action.kind == "RECV_F":
                self._post_output(stage, index, micro_batches[index])
            elif action.kind == "RECV_B":
                kind = self._kind(micro_batches[index])
                self._posted["B", stage, index] = self._transfers.post_gradients(stage, index, kind)
            elif action.kind in ("B", "I", "W"):
                seed = self._passages[stage, index].seed
                with self._passing(engine, stage, index), self._staged.computing_again(seed):
                    if action.kind == "W":
                        self._backward_of_weights(engine, stage, index)
                    else:
                        self._backward(engine, stage, index, whole=action.kind == "B")
            window.spend("forward" if action.kind.endswith("F") else "backward", started)
        self._transfers.flush()
        assert not self._passages
        assert not self._posted
        assert not self._handed_on
        engine.roles.saved_work.count_for(self._num_ranks)
        window.num_micro_steps += steps - 1
        engine.micro_steps += steps - 1
        self._is_running = True
        try:
            engine.step()
        finally:
            self._is_running = False

    def _passing(self, engine: Any, stage: int, index: int) -> AbstractContextManager[None]:
        """What layers leave out is drawn as without a pipeline: by the micro-batch of the accumulation."""
        micro_step, piece = divmod(index, self._pieces)
        first_sample = piece * self._plan.batch.micro_batch_size // self._pieces
        place = engine._place()._replace(micro_step=micro_step, first_sample=first_sample, num_parts=self._pieces)
        saved_work: SavedWork = engine.roles.saved_work
        return saved_work.passing((stage, index), place)

    def _placement(self, engine: Any) -> Placement:
        batch = self._plan.batch
        return Placement(
            self._device,
            engine._compute_dtype,
            engine.roles.curriculum,
            engine.roles.loss_fn,
            self._pieces,
            batch.micro_batch_size,
        )

    def _forward(self, engine: Any, stage: int, index: int, micro_batches: Sequence[MicroBatch]) -> None:
        micro_batch, passage = micro_batches[index], _Passage()
        self._passages[stage, index] = passage
        self.most_held = max(self.most_held, len(self._passages))
        received, is_first_of_kind = self._received(stage, index, micro_batch, passage)
        step, coordinate = engine.global_steps, engine.mesh.dp_rank

        def seed(layer: int | None) -> None:
            # by layer, so that the masks do not depend on where the model is cut, nor on the schedule
            place = (step, index, coordinate, "around" if layer is None else layer)
            seed_generators(self._device, stream_seed(self._plan.seed, "dropout by layer", *place))

        passage.seed = seed
        with engine._autocast():
            output = self._staged.run(stage, micro_batch.args, micro_batch.kwargs, received, seed)
        if stage == self._last:
            engine.roles.curriculum.check(output)
            self._take_loss(engine, output, micro_batch, passage, len(micro_batches))
        else:
            self._hand_on(stage, index, micro_batch, output, passage)
        if is_first_of_kind:
            self._staged.check_independent(stage, received, output)

    def _received(self, stage: int, index: int, micro_batch: MicroBatch, passage: _Passage) -> tuple[Any, bool]:
        """What ``stage`` gets from the one before, its tensors leaves of a graph of their own; and whether this is the
        first micro-batch of its kind."""
        if stage == 0:
            return None, False
        kind = self._kind(micro_batch)
        if self._transfers.is_local(stage - 1):
            form, tensors, is_first = self._handed_on.pop(("F", stage, index))
        else:
            is_first = not self._transfers.is_known(stage - 1, kind)
            if is_first:
                self._transfers.receive_form(stage, index, kind, micro_batch.checksum)
            if ("F", stage, index) not in self._posted:
                self._post_output(stage, index, micro_batch)
            tensors, pending = self._posted.pop(("F", stage, index))
            for transfer in pending:
                transfer.wait()
            form = self._transfers.form(stage - 1, kind)
        tensors = [t.detach().requires_grad_(wants) for t, wants in zip(tensors, form.wants_gradient, strict=True)]
        passage.inputs = [t for t, wants in zip(tensors, form.wants_gradient, strict=True) if wants]
        return form.assemble(tensors), is_first

    def _post_output(self, stage: int, index: int, micro_batch: MicroBatch) -> None:
        """Ahead of its use where its form is known."""
        kind = self._kind(micro_batch)
        if self._transfers.is_known(stage - 1, kind):
            self._posted["F", stage, index] = self._transfers.post_output(stage, index, kind)

    def _hand_on(self, stage: int, index: int, micro_batch: MicroBatch, output: Any, passage: _Passage) -> None:
        form, tensors = take_apart(output, f"pipeline stage {stage}")
        passage.roots = [tensor for tensor in tensors if tensor.requires_grad]
        kind = self._kind(micro_batch)
        if self._transfers.is_local(stage + 1):
            is_first = self._transfers.announce(stage, kind, form)
            self._handed_on["F", stage + 1, index] = form, tensors, is_first
        else:
            self._transfers.send_output(stage, index, kind, form, tensors, micro_batch.checksum)

    def _take_loss(
        self, engine: Any, output: Any, micro_batch: MicroBatch, passage: _Passage, num_micro_batches: int
    ) -> None:
        """Scaled for the backward; counted once for each pipeline rank, for the step's agreement sums over all."""
        loss = self._loss(engine, output, micro_batch)
        share = self._plan.batch.accumulation_steps / num_micro_batches
        value = engine._note_loss(loss, copies=self._num_ranks, share=share)
        scaled = value if isinstance(loss, LossSum) else value / num_micro_batches
        passage.roots = [scaled * engine.roles.precision.scale]

    def _loss(self, engine: Any, output: Any, micro_batch: MicroBatch) -> Tensor | LossSum:
        loss_fn = engine.roles.loss_fn
        return loss_of(output if loss_fn is None else loss_fn(output, micro_batch.targets))

    def _backward(self, engine: Any, stage: int, index: int, whole: bool) -> None:
        """The whole backward, or its first half: as far as the gradients of what was received."""
        passage = self._passages[stage, index]
        if stage < self._last:
            if self._transfers.is_local(stage + 1):
                passage.gradients = self._handed_on.pop(("B", stage, index))
            else:
                passage.gradients, pending = self._posted.pop(("B", stage, index))
                for transfer in pending:
                    transfer.wait()
        splits = not whole and passage.inputs and passage.roots
        if whole:
            self._run_backward(engine, passage)
            del self._passages[stage, index]
        elif splits and any(root.grad_fn is None for root in passage.roots):
            # a stage that handed on what it got (all its layers were left out): there is nothing to split
            self._run_backward(engine, passage)
            passage.roots = []
        elif splits:
            # looked for here, where stage 3 has gathered them: these objects stay the same
            self._parameters.setdefault(stage, self._staged.parameters_of(stage))
            passage.rest = backward_of_inputs(passage.roots, passage.gradients, passage.inputs, self._parameters[stage])
            passage.roots = []
        if stage > 0:
            gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in passage.inputs]
            for tensor in passage.inputs:
                tensor.grad = None
            if self._transfers.is_local(stage - 1):
                self._handed_on["B", stage - 1, index] = gradients
            else:
                self._transfers.send_gradients(stage, index, gradients)

    def _backward_of_weights(self, engine: Any, stage: int, index: int) -> None:
        passage = self._passages.pop((stage, index))
        if passage.rest is None:  # nothing was received that wants a gradient, so nothing has been computed yet
            self._run_backward(engine, passage)
            return
        parameters = self._parameters[stage]
        with scaled_by(engine.roles.precision.scale):
            self._reduction.begin_backward(False)
            backward_of_weights(parameters, passage.rest)
            self._reduction.collect(parameters)
            self._reduction.end_backward()

    def _run_backward(self, engine: Any, passage: _Passage) -> None:
        if not passage.roots:
            return
        with scaled_by(engine.roles.precision.scale):
            self._reduction.begin_backward(False)
            torch.autograd.backward(passage.roots, passage.gradients)
            self._reduction.end_backward()

    # --- evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, engine: Any, next_batch: Callable[[int], Any], num_micro_batches: int) -> tuple[Any, Any]:
        """Forwards only, whatever the schedule: rounds of as many micro-batches as there are ranks, in each round stage
        after stage. Results come from the last stage; the others add nothing."""
        placement = self._placement(engine)
        batches = [next_batch(index) for index in range(num_micro_batches)]
        micro_batches = [placement.evaluation(batch) for batch in batches]
        total: Any = 0.0
        count: Any = 0.0
        with engine.ledger.apart("evaluation"):
            for start in range(0, num_micro_batches, self._num_ranks):
                for stage in self._staged.stages:
                    for index in range(start, min(start + self._num_ranks, num_micro_batches)):
                        passage, micro_batch = _Passage(), micro_batches[index]
                        received, is_first_of_kind = self._received(stage, index, micro_batch, passage)
                        with engine._autocast():
                            output = self._staged.run(stage, micro_batch.args, micro_batch.kwargs, received)
                        if stage < self._last:
                            self._hand_on(stage, index, micro_batch, output, passage)
                        else:
                            one, weight = total_and_count(self._loss(engine, output, micro_batch))
                            total, count = total + one, count + weight
                        if is_first_of_kind:
                            self._staged.check_independent(stage, received, output)
            self._transfers.flush()
        return total, count

    def _kind(self, micro_batch: MicroBatch) -> tuple[Any, ...]:
        return (*micro_batch.kind, torch.is_grad_enabled(), self._staged.model.training)
