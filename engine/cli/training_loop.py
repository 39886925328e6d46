"""The loop of `ptrain`: train, evaluate, save, stop in good order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate

from engine.checkpoint import CheckpointError
from engine.contracts import RunFailed
from engine.launch import StopRequest

log = logging.getLogger("engine")


class TrainingLoop:
    """Takes `num_steps` optimizer steps in all, those before a resume included.

    Everything here happens on every rank alike: ranks decide by step numbers and by what they have agreed on in the
    step, never by clocks or files.
    """

    def __init__(self, model_engine: Any, corpus: Any, checkpoints: Path, stop: StopRequest) -> None:
        training = model_engine.plan.config.training
        self.engine, self.corpus, self.checkpoints, self.stop = model_engine, corpus, checkpoints, stop
        self.num_steps = training.steps or steps_of_epochs(training.num_epochs, corpus.train, model_engine)
        self.eval_interval, self.save_interval = training.eval_interval, training.save_interval
        self.eval_batches = training.eval_batches
        settings = model_engine.plan.config.checkpoint
        self.keeps_best, self.in_background = settings.keep_best is not None, getattr(settings, "async")
        self.failed_save: CheckpointError | None = None
        """What the last save failed with, if it did."""
        self.is_first = model_engine.mesh.rank == 0

    def run(self) -> int:
        """Returns the exit code: 0 at the end, 130 or 143 when a signal stopped the run and its state is saved."""
        engine = self.engine
        self.stop.tell(engine.request_stop)
        while engine.global_steps < self.num_steps:
            engine.train_batch()
            step = engine.global_steps
            if engine.stop_requested:
                return self.save_and_stop(engine.stop_requested)
            if step >= self.num_steps:
                break
            saves = bool(self.save_interval and step % self.save_interval == 0)
            evaluates = bool(self.eval_interval and step % self.eval_interval == 0)
            loss = self.evaluate() if evaluates or (saves and self.keeps_best) else None
            if saves:
                self.save(loss)
        if self.keeps_best:
            self.save(self.evaluate(), wait=True)
        else:
            self.save(wait=True)  # first: the evaluation may fail
            self.evaluate()
        return 0

    def evaluate(self) -> float:
        """The mean loss over the held-out text, the same on every rank. Touches no generator of training."""
        engine, held_out = self.engine, self.corpus.validation
        num_windows = max(1, len(held_out) // engine.train_batch_size())
        if self.eval_batches is not None:
            num_windows = min(num_windows, self.eval_batches)
        plan = engine.plan.batch
        num_micro_batches = num_windows * plan.accumulation_steps
        batches = evaluation_batches(
            held_out, num_micro_batches, plan.micro_batch_size, engine.mesh.dp_rank, engine.mesh.dp_size
        )
        loss = float(engine.eval_batch(batches, num_micro_batches))
        engine.watchers.on_evaluation(engine.last_report, {"eval_loss": loss})
        return loss

    def save(self, metric: float | None = None, wait: bool = False) -> None:
        """Save; ``wait``: also where saves run in the background. A disk that is full, or any other failure, is told
        and is no reason to lose the run: the checkpoint before is whole, and the next save may succeed."""
        step = self.engine.global_steps
        self.failed_save = None
        try:
            self.engine.save_checkpoint(str(self.checkpoints), metric=metric)
            if wait:
                self.engine.wait_for_checkpoint()
        except CheckpointError as error:
            self.failed_save = error
            if self.is_first and not self.in_background:  # there it is told when it happens
                log.error("step %d: the checkpoint is not saved, training goes on: %s", step, error)

    def check_saved(self) -> None:
        """Raises RunFailed where the last state of the run is not saved."""
        if self.failed_save is not None:
            step = self.engine.global_steps
            raise RunFailed(
                f"step {step}: the run is at its end, but its state is not saved ({self.failed_save}); repair that and "
                "use --resume auto, which goes on from the last checkpoint that is whole"
            ) from self.failed_save

    def save_and_stop(self, signal_number: int) -> int:
        self.save(wait=True)
        self.check_saved()
        step = self.engine.global_steps
        saved = self.checkpoints / f"global_step{step}"
        name = "SIGINT" if signal_number == 2 else "SIGTERM"
        self.say(f"stopped by {name} after step {step}; saved {saved}; resume with --resume auto")
        return 128 + signal_number

    def say(self, line: str) -> None:
        if self.is_first:
            self.engine.watchers.close()
            print(line, flush=True)


def steps_of_epochs(num_epochs: float, dataset: Any, model_engine: Any) -> int:
    """Optimizer steps in `num_epochs` passes over a dataset; incomplete global batches do not count."""
    return max(1, int(num_epochs * len(dataset)) // model_engine.train_batch_size())


def evaluation_batches(
    dataset: Any, num_micro_batches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[Any]:
    """This rank's micro-batches of the first samples of a dataset, in its order.

    Together the ranks see each sample once, whatever the split; a dataset smaller than one round starts over, so that
    every rank gets equally many.
    """
    for index in range(num_micro_batches):
        start = (index * dp_size + dp_rank) * micro_batch_size
        yield default_collate([dataset[(start + offset) % len(dataset)] for offset in range(micro_batch_size)])
