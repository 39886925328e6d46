"""Do the 1-bit optimizers learn what AdamW learns? The example's GPT and text, several seeds, 2 ranks.

    python -m tests.bench.convergence --output docs/benchmarks/one_bit.md

Every run trains from the seed's weights on the seed's order of the text. The 1-bit optimizers leave their warm-up after
20 % of the steps. A variant of 1-bit Adam drops the error feedback: it must be worse, or the comparison shows nothing.
Each run's result is a file under --results; runs that are there already, made with the same settings, are not repeated,
so an interrupted benchmark goes on where it stopped. Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.bench import kept
from tests.bench.page import bar_table, keep, pyplot, written_by
from tests.bench.process import machine_facts, publish
from tests.harness import REPOSITORY

MODULE = "tests.bench.convergence"
MAX_WORSE = 0.01
"""A 1-bit optimizer's validation loss may be this much above AdamW's, as the mean over seeds."""
MIN_LOST = 0.01
"""Without error feedback it must be at least this much above 1-bit Adam's."""
BASE, WITHOUT_FEEDBACK = "AdamW", "OneBitAdam without error feedback"
FREEZE_FRACTION = 0.2
FIRST_SEED = 1
"""Rates were chosen on seed 0."""
LR = {"AdamW": 2e-3, "OneBitAdam": 2e-3, "ZeroOneAdam": 2e-3, "OneBitLamb": 2e-2}
NAMES = (*LR, WITHOUT_FEEDBACK)


@dataclass(frozen=True)
class Setting:
    """One size of the comparison. ``global_batch`` samples of ``sequence_length`` tokens a step."""

    num_steps: int = 1000
    global_batch: int = 16
    sequence_length: int = 64
    num_ranks: int = 2
    num_curve_samples: int = 128
    num_final_samples: int = 1024
    num_evaluations: int = 20
    num_blocks: int = 8
    width: int = 96

    @property
    def freeze_step(self) -> int:
        return int(self.num_steps * FREEZE_FRACTION)

    def optimizer(self, kind: str) -> dict[str, Any]:
        params: dict[str, Any] = {"lr": LR[kind], "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
        if kind != "AdamW":
            params["bias_correction"] = True  # AdamW has it, and a variance frozen this early needs it
        if kind == "ZeroOneAdam":
            local_steps = self.num_steps - self.freeze_step
            params |= {"var_freeze_step": self.freeze_step, "var_update_scaler": 64}
            params |= {"local_step_scaler": local_steps // 2, "local_step_clipper": 4}
        elif kind != "AdamW":
            params["freeze_step"] = self.freeze_step
        if kind == "OneBitLamb":  # in so short a run the ratio of variances is mostly noise: the frozen one holds
            params |= {"factor_min": 1.0, "factor_max": 1.0, "compression_unit": "tensor"}
        return {"type": kind, "params": params}

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """What the ranks need to know."""
        kind = name.split()[0]
        warmup = {"total_num_steps": self.num_steps, "warmup_num_steps": self.num_steps // 10}
        shape = {"warmup_type": "linear", "cos_min_ratio": 0.05}
        return {
            "seed": seed,
            "num_steps": self.num_steps,
            "sequence_length": self.sequence_length,
            "eval_interval": max(1, self.num_steps // self.num_evaluations),
            "num_curve_samples": self.num_curve_samples,
            "num_final_samples": self.num_final_samples,
            "error_feedback": name != WITHOUT_FEEDBACK,
            "model": {"num_blocks": self.num_blocks, "width": self.width, "num_heads": 4},
            "config": {
                "train_batch_size": self.global_batch,
                "seed": seed,
                "optimizer": self.optimizer(kind),
                "scheduler": {"type": "WarmupCosineLR", "params": {**warmup, **shape}},
                "gradient_clipping": 1.0,
                "steps_per_print": 1_000_000,
            },
        }


def result_of(run: Mapping[str, Any], num_ranks: int, results: Path, timeout_seconds: float) -> dict[str, Any]:
    """The run's figures: read where the same run has left them, else measured now. Raises RuntimeError."""
    text = json.dumps(run, sort_keys=True)
    path = kept.file_of(results, run["config"]["optimizer"]["type"], f"{num_ranks} {text}")
    found: dict[str, Any] = kept.figures(path, num_ranks, f"{MODULE}_rank", [text], timeout_seconds)
    return found


Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Per name one result for each seed."""


def measure(
    setting: Setting, names: Sequence[str], seeds: Sequence[int], results: Path, timeout_seconds: float
) -> dict[str, list[dict[str, Any]]]:
    """Seed by seed, so that an interrupted benchmark has whole rounds."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            run = setting.run(name, seed)
            found[name].append(result_of(run, setting.num_ranks, results, timeout_seconds))
            last = found[name][-1]
            line = f"seed {seed}, {name}: validation loss {last['validation_loss']:.4f}, {last['seconds']:.0f} s"
            print(line, file=sys.stderr, flush=True)
    return found


def mean_loss(runs: Sequence[Mapping[str, Any]]) -> float:
    return fmean(run["validation_loss"] for run in runs)


def bars(found: Results) -> list[tuple[str, float, str, bool]]:
    """(what, found, the bar, whether it holds) for whatever was measured; losses are means over seeds."""
    made = []
    for name, runs in found.items():
        if name in (BASE, WITHOUT_FEEDBACK) or BASE not in found:
            continue
        change = mean_loss(runs) / mean_loss(found[BASE]) - 1.0
        what = f"{name}: validation loss against {BASE}'s"
        made.append((what, change, f"<= {MAX_WORSE:+.0%}", change <= MAX_WORSE))
    if WITHOUT_FEEDBACK in found and "OneBitAdam" in found:
        change = mean_loss(found[WITHOUT_FEEDBACK]) / mean_loss(found["OneBitAdam"]) - 1.0
        made.append((f"{WITHOUT_FEEDBACK}, against OneBitAdam's", change, f">= {MIN_LOST:+.0%}", change >= MIN_LOST))
    return made


def page(setting: Setting, seeds: Sequence[int], found: Results, facts: Mapping[str, Any], picture: str | None) -> str:
    base_bytes = fmean(run["sent_bytes"] for run in found[BASE]) if BASE in found else None
    lines = [
        "# 1-bit optimizers: do they learn the same?",
        "",
        written_by("bench-onebit", MODULE, facts),
        "",
        f"The GPT and the text of examples/gpt_text: {setting.num_blocks} blocks of width {setting.width}, "
        f"{setting.global_batch} x {setting.sequence_length} tokens a step on {setting.num_ranks} ranks, "
        f"{setting.num_steps} steps, {len(seeds)} seeds; warm-up and variance end at step {setting.freeze_step}. "
        f"Validation losses are in nats per byte, over {setting.num_final_samples} samples.",
        "",
        "| optimizer | lr | validation loss, mean | by seed | against AdamW | bytes sent / AdamW's |",
        "|" + " --- |" * 6,
    ]
    for name, runs in found.items():
        loss = mean_loss(runs)
        against = f"{loss / mean_loss(found[BASE]) - 1:+.2%}" if BASE in found else ""
        sent = f"1/{base_bytes / fmean(run['sent_bytes'] for run in runs):.2f}" if base_bytes else ""
        by_seed = ", ".join(f"{run['validation_loss']:.4f}" for run in runs)
        lines.append(f"| {name} | {LR[name.split()[0]]:g} | {loss:.4f} | {by_seed} | {against} | {sent} |")
    if picture:
        lines += ["", f"![Validation loss over steps]({picture})"]
    lines += ["", *bar_table((what, f"{value:+.2%}", bar, holds) for what, value, bar, holds in bars(found))]
    return "\n".join(lines) + "\n"


def draw(setting: Setting, found: Results, path: Path) -> None:
    """Validation loss over steps, and its distance from AdamW's at the same step: means over seeds, the seeds faint."""
    figure, (above, below) = pyplot().subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2))
    base = [fmean(values) for values in zip(*([loss for _, loss in run["curve"]] for run in found[BASE]), strict=True)]
    for index, (name, runs) in enumerate(found.items()):
        color = f"C{index}"
        steps = [step for step, _ in runs[0]["curve"]]
        losses = [[loss for _, loss in run["curve"]] for run in runs]
        for each in losses:
            above.plot(steps, each, color=color, alpha=0.25, linewidth=0.8)
        means = [fmean(values) for values in zip(*losses, strict=True)]
        above.plot(steps, means, color=color, label=name, linewidth=1.6)
        below.plot(steps, [100 * (a / b - 1) for a, b in zip(means, base, strict=True)], color=color, linewidth=1.6)
    for axes in (above, below):
        axes.axvline(setting.freeze_step, color="grey", linestyle=":", linewidth=1)
        axes.grid(alpha=0.3)
    above.set_yscale("log")
    above.set_ylabel("validation loss, nats per byte")
    above.annotate(
        "compression begins",
        (setting.freeze_step, 0.96),
        xycoords=("data", "axes fraction"),
        fontsize=8,
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
    )
    above.yaxis.set_major_formatter("{x:.2f}")
    above.yaxis.set_minor_formatter("{x:.2f}")
    above.legend(fontsize=8)
    below.axhspan(-100 * MAX_WORSE, 100 * MAX_WORSE, color="grey", alpha=0.15)
    below.set_ylim(-8, 12)
    below.set_ylabel("% above AdamW")
    below.set_xlabel("step")
    keep(figure, path)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=Setting.num_steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", type=lambda text: text.split(","), default=list(NAMES), help=",".join(NAMES))
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build" / "convergence", help="a file per run")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one run")
    parser.add_argument("--output", type=Path, help="write the page here, and a picture beside it")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.optimizers if name not in NAMES]:
        parser.error(f"no such optimizers: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    setting, seeds = Setting(num_steps=args.steps), range(FIRST_SEED, FIRST_SEED + args.seeds)
    found = measure(setting, args.optimizers, seeds, args.results, args.timeout)
    picture = args.output.with_suffix(".png") if args.output and BASE in found else None
    text = page(setting, seeds, found, machine_facts(), picture.name if picture else None)
    publish(text, args.output)
    if picture:
        draw(setting, found, picture)
    return 0 if all(holds for *_, holds in bars(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
