"""What random-LTD saves: a step at half the tokens beside a whole one, in turn, in one process.

    python -m tests.bench.token_drop --blocks 8 --width 256 --length 256 --turns 20

Prints the medians of both steps, wall clock and CPU time, and their ratio. The first and the last block keep all
tokens, so with L blocks at half the tokens about (L / 2 + 1) / L of the layers' time is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import engine
from tests.parity.toy import toy_model


def made(arguments: argparse.Namespace, num_kept: int) -> engine.Engine:
    size = {"num_blocks": arguments.blocks, "width": arguments.width, "num_heads": arguments.width // 64}
    schedule = {
        "min_value": num_kept,
        "max_value": num_kept,
        "schedule_config": {"require_steps": 1, "seq_per_step": num_kept},
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": schedule}}},
    }
    return engine.initialize(model=toy_model(sequence_length=arguments.length, **size), config=config)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("blocks", 8), ("width", 256), ("length", 256), ("batch", 4), ("turns", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engines = {"full": made(arguments, arguments.length), "half": made(arguments, arguments.length // 2)}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    generator = torch.Generator().manual_seed(0)
    for turn in range(arguments.turns + 2):
        tokens = torch.randint(256, (arguments.batch, arguments.length + 1), generator=generator)
        order = list(engines) if turn % 2 else list(reversed(engines))
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            model_engine = engines[name]
            model_engine.backward(model_engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
            model_engine.step()
            if turn >= 2:  # the first steps prove the blocks and warm up
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for at, kind in enumerate(("wall clock", "CPU time")):
        full, half = (statistics.median(pair[at] for pair in seconds[name]) for name in ("full", "half"))
        print(f"{kind}: full {full:.3f} s, half {half:.3f} s, ratio {half / full:.3f} (bar 0.70)")
    seen, computed = engines["half"].global_tokens, engines["half"].tokens_computed
    print(f"tokens computed / seen: {computed / seen:.3f}")


if __name__ == "__main__":
    main()
