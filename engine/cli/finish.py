"""The end of a run: the summary, the final lines, and a sample of what the model writes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.contracts import StepReport
from engine.data.tokens import bigram_entropy
from engine.device import peak_memory_bytes
from engine.watch import Summary
from engine.watch.metrics_file import last_metrics
from engine.watch.summary import Counters, write_json


def finish(model_engine: Any, corpus: Any, summary: Summary, output: Path) -> None:
    """On every rank: measuring memory and sampling from a sharded model take all of them. Rank 0 writes and prints."""
    mesh, config = model_engine.mesh, model_engine.plan.config
    peaks: list[Any] = [peak_memory_bytes(mesh.device)]
    if mesh.world_size > 1:
        mine, peaks = peaks[0], [None] * mesh.world_size
        dist.all_gather_object(peaks, mine)
    if mesh.rank == 0:
        done = model_engine
        built = summary.build(
            counters=Counters(done.global_steps, done.skipped_steps, done.global_samples, done.global_tokens),
            train_loss=last_train_loss(model_engine.last_report, output),
            bigram_entropy=bigram_entropy(corpus.validation.tokens),
            world_size=mesh.world_size,
            config_hash=config.hash(),
            peak_memory_bytes_per_rank=peaks,
        )
        write_json(output / "summary.json", built)
        print(final_line(built))
        print(f"written to {output}: summary.json, metrics.jsonl, config.resolved.json, checkpoints", flush=True)
    if corpus.is_text:
        try:
            sample = sample_text(model_engine, config.training.sample_length, config.seed)
        except RuntimeError as error:
            # The run is over and saved; a model that cannot write (its weights are NaN, say) does not undo that.
            sample = None
            if mesh.rank == 0:
                print(f"no sample: generate() failed: {error}", flush=True)
        if mesh.rank == 0 and sample is not None:
            print(f"a sample of {len(sample)} characters:\n{sample}", flush=True)


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


def sample_text(model_engine: Any, length: int, seed: int) -> str | None:
    """`length` characters that the model writes after a line break; None if it has no `generate(ids, num_tokens)`.

    All ranks draw the same tokens from a generator of their own, which training never sees.
    """
    generate = getattr(model_engine.module, "generate", None)
    if length == 0 or generate is None:
        return None
    names = inspect.signature(generate).parameters
    if "num_tokens" not in names:
        return None
    device = model_engine.mesh.device
    arguments = {"generator": torch.Generator(device).manual_seed(seed)} if "generator" in names else {}
    token_ids = torch.tensor([[ord("\n")]], device=device)
    text = ""
    was_training = model_engine.module.training
    model_engine.module.eval()
    try:
        with torch.no_grad():
            # Several bytes can make one character, so the first round may fall short.
            while len(text) < length:
                token_ids = generate(token_ids, num_tokens=length - len(text), **arguments)
                text = readable(bytes(token % 256 for token in token_ids[0, 1:].tolist()))
    finally:
        model_engine.module.train(was_training)
    return text[:length]


def readable(text: bytes) -> str:
    """Text that is safe to print: no broken bytes, no control characters that would move a terminal's cursor."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
