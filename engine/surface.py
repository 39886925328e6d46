"""The public API of an Engine that only reads or delegates, apart from the step (engine/engine.py)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from engine.checkpoint.folder import default_tag
from engine.checkpoint.tree import StateTree
from engine.collectives.ledger import Ledger
from engine.contracts import (
    Clipping,
    Curriculum,
    EngineError,
    ForwardBackward,
    LossSum,
    Place,
    Precision,
    Reduction,
    SavedWork,
    Schedule,
    Slices,
    StepReport,
    WholeSequences,
)
from engine.mesh import Mesh
from engine.optim.optimizer import EngineOptimizer
from engine.parameters import ParameterRegistry, release
from engine.plan import Plan
from engine.watch import WatcherList
from engine.weights import save_16bit_model
from engine.window import Window
from engine.window_checks import check_loss

if TYPE_CHECKING:
    from engine.model.layer_drop import LayerDrop
    from engine.model.token_drop import TokenDrop

log = logging.getLogger("engine")


@dataclass
class Roles:
    """What takes part in the arithmetic of a step (engine/contracts.py)."""

    reduction: Reduction
    precision: Precision
    clipping: Clipping
    optimizer: EngineOptimizer | None
    schedule: Schedule
    curriculum: Curriculum
    forward_backward: ForwardBackward
    loss_fn: Callable[..., Any] | None = None
    saved_work: SavedWork = field(default_factory=SavedWork)
    num_layers: int = 0
    """The model's repeated blocks, 0 where it has none; `saved_work` counts in them."""
    layer_drop: LayerDrop | None = None
    token_drop: TokenDrop | None = None
    slices: Slices = field(default_factory=WholeSequences)


class Surface:
    """What `Engine` is made of, and how to ask it. Unknown attributes are the model's own."""

    module: nn.Module
    plan: Plan
    mesh: Mesh
    parameter_registry: ParameterRegistry
    ledger: Ledger
    roles: Roles
    watchers: WatcherList
    optimizer: EngineOptimizer | None
    last_report: StepReport | None
    global_steps: int
    global_samples: int
    skipped_steps: int
    global_tokens: int
    layers_skipped: int
    saved_layer_tokens: int
    micro_steps: int
    _window: Window
    _batches: Iterator[Any] | None
    _accumulation_steps: int
    _stop_signal: int
    _state: StateTree
    _on_destroy: Callable[[], None]

    def _forget_window(self) -> None:
        self.roles.reduction.zero_gradients()
        self._window = Window()

    def _note_loss(
        self, loss: Tensor | LossSum, is_divided: bool = False, copies: int = 1, share: float = 1.0
    ) -> Tensor:
        """Count the loss of a micro-batch into the window; returns what a backward begins at, unscaled.

        ``is_divided``: by the accumulation steps, by the caller. ``copies``: of how many ranks this one is the only one
        that has it. ``share``: of a mean in the window's sum.
        """
        window, value = self._window, loss.total if isinstance(loss, LossSum) else loss
        check_loss(value, isinstance(loss, LossSum), window)
        if isinstance(loss, LossSum):
            window.count, window.num_counted = window.count + loss.count * copies, window.num_counted + 1
            share = 1.0
        noted, factor = value.detach().float(), copies * share
        window.add_loss(noted if factor == 1.0 else noted * factor, is_divided)
        return value

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group; answers before the first step too."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else [0.0]

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last applied step's gradients, before clipping; None before the first."""
        return self.last_report.grad_norm if self.last_report else None

    def was_step_applied(self) -> bool:
        """Whether the last boundary updated the model (it does not when a gradient is not finite)."""
        return self.last_report is not None and self.last_report.applied

    @property
    def loss_scale(self) -> float:
        return self.roles.precision.scale

    @property
    def device(self) -> torch.device:
        """Where this rank's parameters are and its inputs go."""
        return self.mesh.device

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def local_rank(self) -> int:
        """The index of this rank's device: what ``x.to(engine.local_rank)`` wants on accelerators (0 on the CPU)."""
        return self.mesh.device.index or 0

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def train_batch_size(self) -> int:
        """Samples in an optimizer step, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self._accumulation_steps * self.mesh.dp_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.plan.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation_steps

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # --- the curriculum and the ledger -------------------------------------------------------------------------

    @property
    def tokens_computed(self) -> int:
        """`global_tokens` less what was left out inside the model, in tokens that pass through all its layers."""
        return self.global_tokens - self.saved_layer_tokens // max(1, self.roles.num_layers)

    def curriculum_difficulties(self) -> dict[str, float]:
        """The difficulty of every metric of the curriculum in the step under way."""
        return self.roles.curriculum.difficulties()

    def cut_to_curriculum(self, batch: Any) -> Any:
        """A whole batch as the curriculum lets the model see it: for loops that compute their own loss from it."""
        return self.roles.curriculum.cut(batch)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], float]]) -> None:
        """``{metric: function}`` for the metrics whose schedule_type is custom; ``function(step)``, from step 1 on."""
        set_functions = getattr(self.roles.curriculum, "set_functions", None)
        if set_functions is None:
            raise EngineError("set_custom_curriculum_learning_schedule: the config switches no curriculum on")
        set_functions(schedule_func_dict)

    @property
    def progressive_layer_drop(self) -> LayerDrop | None:
        """Layer drop with its `get_theta` and `get_state`; None where the config does not switch it on."""
        return self.roles.layer_drop

    def get_pld_theta(self) -> float | None:
        """Layer drop's theta in the step under way; None where it is off."""
        return self.roles.layer_drop.get_theta() if self.roles.layer_drop is not None else None

    def _place(self) -> Place:
        return Place(self.global_steps, self.global_steps - self.skipped_steps, max(self._window.num_forwards - 1, 0))

    def _count(self, agreed: Mapping[str, float]) -> None:
        """A window's samples, tokens and layers, once for all ranks that share them."""
        window, replicas = self._window, self.mesh.world_size / self.mesh.dp_size
        num_micro_batches = window.num_micro_steps if self.plan.batch.managed else window.num_forwards
        self.global_samples += num_micro_batches * self.plan.batch.micro_batch_size * self.mesh.dp_size
        self.global_tokens += round(agreed["tokens"] / replicas)
        self.layers_skipped += round(agreed["layers_skipped"] / replicas)
        self.saved_layer_tokens += round(agreed["saved_layer_tokens"] / (replicas / self.mesh.num_slices))

    def zero_grad(self) -> None:
        """Drop the gradients that have come together in this window; its micro-steps stay counted."""
        num_micro_steps = self._window.num_micro_steps
        self._forget_window()
        self._window.num_micro_steps = num_micro_steps

    # --- state, requests, end ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        metric: float | None = None,
    ) -> bool:
        """Save all that a resumed run needs under ``save_dir/tag`` (default ``global_stepN``). All ranks call it.

        ``metric``: what ``checkpoint.keep_best`` compares, lower is better. With ``checkpoint.async`` the files are
        written after the return: `wait_for_checkpoint` tells how it ended, and rank 0 logs a failure.

        Raises EngineError, on all ranks alike, if any rank cannot write, and on the ranks that called it if others did
        not; nothing half-written stays.
        """
        self.mesh.check_parts_known("save_checkpoint()")
        started = time.perf_counter()
        if self._window.num_micro_steps and self.mesh.rank == 0:
            log.warning(
                "saved inside an accumulation window: a resumed run does not see its %d micro-batches again",
                self._window.num_micro_steps,
            )
        tag = tag or default_tag(self.global_steps)
        with self.ledger.apart("checkpoint"):
            self._state.save(save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters, metric)
        self._window.leave_out(started)
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the save that runs in the background, if any, is on the disk. All ranks call it.

        Raises CheckpointError, an EngineError, on all ranks alike, where it failed.
        """
        started = time.perf_counter()
        failure = self._state.wait()
        self._window.leave_out(started)
        if failure is not None:
            raise failure

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        override_batch: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` wrote, under this or any other layout. Returns ``(path, client_state)``.

        A missing or empty folder warns and returns ``(None, None)``; one that cannot be loaded raises EngineError, and
        so does one trained with another global batch unless ``override_batch``.
        """
        self.mesh.check_parts_known("load_checkpoint()")
        written = self.roles.schedule.written()
        with self.ledger.apart("checkpoint"):
            result = self._state.load(
                load_dir,
                tag,
                strict=load_module_strict,
                optimizer=load_optimizer_states and not load_module_only,
                lr_scheduler=load_lr_scheduler_states and not load_module_only,
                run=not load_module_only,
                override_batch=override_batch,
            )
            if result[0] is not None:
                self.roles.reduction.publish()
                self._forget_window()
                self.roles.schedule.accept(() if "lr_scheduler" in self._state.restored else written)
                if "data_loader" in self._state.restored:
                    self._batches = None
        return result

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights that forward reads, in its dtype, to one file that plain PyTorch loads. All ranks call it.

        A ``save_filename`` that ends in .safetensors is written tensor by tensor; torch's format, DeepSpeed's default,
        needs the whole model in rank 0's memory. Raises EngineError, on all ranks alike, if rank 0 cannot write.
        """
        self.mesh.check_parts_known("save_16bit_model()")
        started = time.perf_counter()
        saved = save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)
        self._window.leave_out(started)
        return saved

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Scalars of your own, ``(name, value, global samples)``, to every monitor that is on."""
        self.watchers.write_events(events)

    def request_stop(self, signal_number: int) -> None:
        """Ask all ranks to stop; `stop_requested` holds the signal on every rank after the step that agreed on it."""
        self._stop_signal = signal_number

    def destroy(self) -> None:
        """Finish a save under way; let go of loader workers, hooks, watchers and the process group that `initialize`
        made."""
        self._state.wait()
        self._batches = None
        self.roles.reduction.close()
        self.roles.forward_backward.close()
        if self.roles.layer_drop is not None:
            self.roles.layer_drop.close()
        if self.roles.token_drop is not None:
            self.roles.token_drop.close()
        self.roles.slices.close()
        if not self.parameter_registry.absent():  # a model cut over pipeline stages stays cut
            release(self.module, self.parameter_registry)
        self.watchers.close()
        self._on_destroy()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)
