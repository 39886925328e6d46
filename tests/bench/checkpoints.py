"""Saving and loading: MB/s beside torch.save and torch.load of the same bytes, and what a save does to the steps.

    python -m tests.bench.checkpoints --rounds 5

One rank, one thread. torch.save is timed with and without an fsync of its file; this engine's save always hashes and
syncs. Loads are of files that were just written; torch.load reads them back through the page cache, which its save has
filled. The step time is the mean of the steps that a background save overlaps, over that of steps without one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.checkpoint.folder import LATEST
from tests.bench.process import machine_facts, publish

WIDTH, NUM_BLOCKS = 1024, 24
"""25 M parameters: 300 MB with the moments."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def build(background: bool, batch_size: int) -> engine.Engine:
    config = {
        "train_batch_size": batch_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "checkpoint": {"async": background},
        "seed": 0,
    }
    return engine.initialize(model=Stack(), config=config)[0]


def step_seconds(model_engine: engine.Engine, batch: Tensor) -> float:
    started = time.perf_counter()
    model_engine.backward(model_engine(batch))
    model_engine.step()
    return time.perf_counter() - started


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def throughput(rounds: int, folder: Path) -> dict[str, list[float]]:
    """MB/s of each round."""
    model_engine = build(False, 2)
    step_seconds(model_engine, torch.ones(2, WIDTH))
    assert model_engine.optimizer is not None
    whole = {name: parameter.detach() for name, parameter in model_engine.module.named_parameters()}
    for name, state in model_engine.optimizer.named_state().items():
        whole |= {f"{name}.{key}": torch.as_tensor(value) for key, value in state.items()}
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in whole.values()) / 1e6
    found: dict[str, list[float]] = {
        name: [] for name in ("save", "torch.save", "torch.save and fsync", "load", "load without verify", "torch.load")
    }
    unverified = build(False, 2)
    unverified._state._settings = unverified._state._settings.model_copy(update={"verify": False})
    for number in range(rounds):
        ours, theirs = folder / f"ours{number}", folder / f"theirs{number}.pt"
        found["save"].append(megabytes / timed(lambda to=ours: model_engine.save_checkpoint(to)))  # type: ignore[misc]
        plain = timed(lambda to=theirs: torch.save(whole, to))  # type: ignore[misc]
        found["torch.save"].append(megabytes / plain)
        found["torch.save and fsync"].append(megabytes / (plain + timed(lambda of=theirs: sync(of))))  # type: ignore[misc]
        assert (ours / LATEST).exists()
        found["load"].append(megabytes / timed(lambda of=ours: model_engine.load_checkpoint(of)))  # type: ignore[misc]
        found["load without verify"].append(
            megabytes / timed(lambda of=ours: unverified.load_checkpoint(of))  # type: ignore[misc]
        )
        found["torch.load"].append(megabytes / timed(lambda of=theirs: torch.load(of, weights_only=True)))  # type: ignore[misc]
        shutil.rmtree(ours)
        theirs.unlink()
    model_engine.destroy()
    unverified.destroy()
    return found


def overlap(rounds: int, folder: Path, batch_size: int) -> dict[str, list[float]]:
    """Of each round: seconds of a step without a save, of one that a save overlaps, and of the call that begins it."""
    model_engine = build(True, batch_size)
    batch = torch.randn(batch_size, WIDTH)
    found: dict[str, list[float]] = {"step": [], "step during a save": [], "the call": [], "the save": []}
    for _ in range(3):
        step_seconds(model_engine, batch)
    writer = model_engine._state._background
    assert writer is not None
    for number in range(rounds):
        found["step"].append(mean(step_seconds(model_engine, batch) for _ in range(4)))
        begun = time.perf_counter()
        found["the call"].append(timed(lambda to=folder / f"b{number}": model_engine.save_checkpoint(to)))  # type: ignore[misc]
        during = []
        while writer.is_writing:
            during.append(step_seconds(model_engine, batch))
        found["the save"].append(time.perf_counter() - begun)
        model_engine.wait_for_checkpoint()
        found["step during a save"].append(mean(during) if during else found["step"][-1])
        shutil.rmtree(folder / f"b{number}")
    model_engine.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checkpoints", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a step while saves run")
    parser.add_argument("--output", type=Path, help="write the table here as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rates = throughput(args.rounds, Path(folder))
        seconds = overlap(args.rounds, Path(folder), args.batch_size)
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    ratios = [during / alone for during, alone in zip(seconds["step during a save"], seconds["step"], strict=True)]
    lines = ["# Checkpoints", "", f"{args.rounds} rounds, one rank, one thread. {facts}.", ""]
    lines += ["| | MB/s, median (min..max) |", "| --- | --- |"]
    lines += [f"| {name} | {median(each):.0f} ({min(each):.0f}..{max(each):.0f}) |" for name, each in rates.items()]
    lines += ["", "| with `checkpoint.async` | seconds, median (min..max) |", "| --- | --- |"]
    lines += [f"| {name} | {median(each):.3f} ({min(each):.3f}..{max(each):.3f}) |" for name, each in seconds.items()]
    lines += [
        "",
        f"A step during a save takes {median(ratios):.2f} times as long ({min(ratios):.2f}..{max(ratios):.2f}).",
    ]
    text = "\n".join(lines) + "\n"
    publish(text, args.output)


if __name__ == "__main__":
    main()
