"""The end of a run: the summary, the final lines, and a sample of what the model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.cli.sample import sample_text
from engine.cli.user_code import describe
from engine.collectives.objects import ObjectGroup
from engine.contracts import PipelineError, StepReport
from engine.data.tokens import bigram_entropy
from engine.device import peak_memory_bytes
from engine.watch import Summary
from engine.watch.metrics_file import last_metrics
from engine.watch.summary import Counters, write_json


def finish(model_engine: Any, corpus: Any, summary: Summary, output: Path) -> None:
    """On every rank: measuring memory and sampling from a sharded model take all of them. Rank 0 writes and prints."""
    mesh, config = model_engine.mesh, model_engine.plan.config
    peak = peak_memory_bytes(mesh.device)
    peaks = ObjectGroup(None, model_engine.ledger).gather(peak) if mesh.world_size > 1 else [peak]
    if peaks is not None:
        done = model_engine
        built = summary.build(
            counters=Counters(
                done.global_steps,
                done.skipped_steps,
                done.global_samples,
                done.global_tokens,
                done.tokens_computed,
                done.layers_skipped,
            ),
            train_loss=last_train_loss(model_engine.last_report, output),
            bigram_entropy=bigram_entropy(corpus.validation.tokens),
            world_size=mesh.world_size,
            config_hash=config.hash(),
            peak_memory_bytes_per_rank=peaks,
            comm_bytes=model_engine.ledger.totals(),
        )
        write_json(output / "summary.json", built)
        print(final_line(built))
        print(f"written to {output}: summary.json, metrics.jsonl, config.resolved.json, checkpoints", flush=True)
    if corpus.is_text and config.training.sample_length:
        try:
            sample = sample_text(model_engine, config.training.sample_length)
            said = f"a sample of {len(sample)} characters:\n{sample}"
        except PipelineError:
            said = (
                "no sample: under a pipeline no rank has the whole model; resumed without one, a run ends with a sample"
            )
        except Exception as error:
            # The run is over and saved; a model that cannot write (its weights are NaN, say) does not undo that.
            said = f"no sample: {describe(error)}"
        if mesh.rank == 0:
            print(said, flush=True)


def last_train_loss(report: StepReport | None, output: Path) -> float | None:
    """Of the last step; a run that was stopped after its last step and resumed has it only in its metrics."""
    if report is not None:
        return report.loss
    last = last_metrics(output / "metrics.jsonl")
    return last["loss"] if last is not None else None


def final_line(summary: dict[str, Any]) -> str:
    losses = {"train loss": "train_loss", "validation loss": "validation_loss", "bigram entropy": "bigram_entropy"}
    values = {name: summary[key] for name, key in losses.items()}
    shown = [f"{name} {'not finite' if value is None else format(value, '.4f')}" for name, value in values.items()]
    speed = f"{summary['tokens']:,} tokens in {summary['seconds']:.1f} s"
    return f"step {summary['steps']}: {' | '.join(shown)} (nats per token) | {speed}"
