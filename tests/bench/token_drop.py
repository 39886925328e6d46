"""What random-LTD saves: a step at half the tokens beside a whole one, in turn, in one process.

    python -m tests.bench.token_drop --size 8,256,128 --size 8,256,256 --output docs/benchmarks/token_drop.md

A size is blocks, width, tokens of a sequence. The ratio of a turn compares neighbours, and the figure is the median
over the turns with its 95 % interval. The first and the last block keep all tokens, so with L blocks at half the tokens
about (L / 2 + 1) / L of the layers' time is left, less of attention's. The bar is 0.70.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import engine
from tests.bench.paired import interval
from tests.bench.process import machine_facts, publish
from tests.parity.toy import toy_model

BAR = 0.70
NUM_WARMUP = 2
"""Turns: in the first step the blocks are proved."""

Size = tuple[int, int, int]


def made(size: Size, micro_batch: int, num_kept: int) -> engine.Engine:
    num_blocks, width, length = size
    schedule = {
        "min_value": num_kept,
        "max_value": num_kept,
        "schedule_config": {"require_steps": 1, "seq_per_step": num_kept},
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": schedule}}},
    }
    model = toy_model(sequence_length=length, num_blocks=num_blocks, width=width, num_heads=width // 64)
    return engine.initialize(model=model, config=config)[0]


def measure(size: Size, micro_batch: int, turns: int) -> dict[str, Any]:
    length = size[2]
    engines = {"full": made(size, micro_batch, length), "half": made(size, micro_batch, length // 2)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    generator = torch.Generator().manual_seed(0)
    for turn in range(turns + NUM_WARMUP):
        tokens = torch.randint(256, (micro_batch, length + 1), generator=generator)
        for name in sorted(engines, reverse=bool(turn % 2)):
            wall, cpu = time.perf_counter(), time.process_time()
            model_engine = engines[name]
            model_engine.backward(model_engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
            model_engine.step()
            if turn >= NUM_WARMUP:
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    half = engines["half"]
    found: dict[str, Any] = {"size": size, "computed": half.tokens_computed / half.global_tokens}
    for at, kind in enumerate(("wall", "cpu")):
        own = {name: [pair[at] for pair in pairs] for name, pairs in seconds.items()}
        ratios = [part / whole for part, whole in zip(own["half"], own["full"], strict=True)]
        found[kind] = {"ratio": statistics.median(ratios), "interval": interval(ratios)}
        found[kind] |= {name: 1000 * statistics.median(values) for name, values in own.items()}
    return found


def page(found: Sequence[dict[str, Any]], micro_batch: int, turns: int) -> str:
    facts = machine_facts()
    lines = [
        "# What random-LTD saves",
        "",
        f"Measured on {facts['date']} at {facts['commit'][:10]}, {facts['cpu']}, {facts['cores']} cores, torch "
        f"{facts['torch']}, with `python -m tests.bench.token_drop`.",
        "",
        f"The example's GPT in fp32, {micro_batch} sequences a step, one process with one thread, {turns} turns of one "
        "step of each run: all blocks on all tokens, and all but the first and the last block on half of them. "
        f"Computed: the part of the layers' tokens that is left. CPU time is what a busy machine changes least. The "
        f"bar is {BAR:.2f}.",
        "",
        "| blocks | width | tokens | computed | all tokens, ms | half, ms | ratio (95 %) | CPU time, ratio (95 %) | |",
        "|" + " --- |" * 9,
    ]
    for row in found:
        ratios = [
            f"{kind['ratio']:.3f} ({kind['interval'][0]:.3f}..{kind['interval'][1]:.3f})"
            for kind in (row["wall"], row["cpu"])
        ]
        cells = [
            *map(str, row["size"]),
            f"{row['computed']:.3f}",
            f"{row['wall']['full']:.1f}",
            f"{row['wall']['half']:.1f}",
            *ratios,
            "met" if row["wall"]["ratio"] <= BAR else "not met",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _size(text: str) -> Size:
    num_blocks, width, length = map(int, text.split(","))
    return num_blocks, width, length


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.token_drop", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=_size, action="append", help="BLOCKS,WIDTH,TOKENS; may be repeated")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--output", type=Path, help="write the table here as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = arguments.size or [(8, 256, 128), (8, 256, 256), (12, 256, 256)]
    found = [measure(size, arguments.batch, arguments.turns) for size in sizes]
    publish(page(found, arguments.batch, arguments.turns), arguments.output)


if __name__ == "__main__":
    main()
