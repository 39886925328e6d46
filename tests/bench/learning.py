"""Does learning from less cost anything? Curricula, random-LTD and layer drop against the plain run: losses and time.

    python -m tests.bench.learning --output docs/benchmarks/learning.md

The example's GPT and text, 2 ranks, several seeds. Every row plans a whole run, with a learning-rate schedule of its
own, for a fraction of the plain run's time, and ends with a validation loss that is compared with the plain run's.

Losses come from whole runs (a file each under --results; what is there already is not repeated). Times come from a
measurement of their own, so that a busy machine spoils neither: one step of every row in turn, each at the same
fraction of its own run, gives the ratio of mean steps; times the ratio of steps it is the ratio of wall time.
Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.bench import kept
from tests.bench.learning_rows import LARGE, LESS, ROWS, Row
from tests.bench.page import bar_table, keep, pyplot, written_by
from tests.bench.process import machine_facts, publish
from tests.harness import REPOSITORY

MODULE = "tests.bench.learning"
NUM_RANKS, FIRST_SEED = 2, 1
"""Settings were chosen on seed 0; layer drop's once more after seed 1, the rate of random-LTD after all three."""
ALL = (*ROWS, *LESS, *LARGE)
MAX_JUMP = 1.0
"""A loss this much above the lowest so far, in nats, is a spike."""


def measured(what: str, given: Any, results: Path, timeout_seconds: float) -> Any:
    """What the ranks leave: read where the same measurement has left it, else made now. Raises RuntimeError."""
    text = json.dumps(given, sort_keys=True)
    return kept.figures(kept.file_of(results, what, text), NUM_RANKS, f"{MODULE}_rank", [what, text], timeout_seconds)


Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Per row one result for each seed."""


def time_ratios(rows: Sequence[Row], seconds: Sequence[Sequence[float]], base: Row) -> dict[str, float]:
    """Wall time of every row's run over the base's: mean step by mean step, times the numbers of steps.

    ``seconds``: of each turn, one step of each row. The turns in which the machine was busy with something else, those
    whose sum is above twice the median's, are left out for all rows alike.
    """
    sums = sorted(map(sum, seconds))
    kept = [turn for turn in seconds if sum(turn) <= 2 * sums[len(sums) // 2]]
    means = [fmean(turn[index] for turn in kept) for index in range(len(rows))]
    at = rows.index(base)
    return {
        row.name: mean * row.num_steps / (means[at] * base.num_steps) for row, mean in zip(rows, means, strict=True)
    }


def largest_spike(losses: Sequence[float], num_warmup: int) -> float:
    """How far a training loss rose above the lowest before it, in nats; warm-up left out."""
    largest, lowest = 0.0, float("inf")
    for loss in losses[num_warmup:]:
        lowest = min(lowest, loss)
        largest = max(largest, loss - lowest)
    return largest


def mean_loss(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """None where a run did not come to its end."""
    losses = [run["validation_loss"] for run in runs]
    return None if None in losses else fmean(losses)


def bars(found: Found, times: Mapping[str, float]) -> list[tuple[str, str, str, bool]]:
    """(what, found, the bar, whether it holds) for whatever was measured."""
    made = []
    base, plain = ROWS[0], mean_loss(found.get(ROWS[0].name, ()) or ({"validation_loss": None},))
    for row in ROWS:
        if row.max_time is None or row.name not in found:
            continue
        if row.name in times:
            ratio = times[row.name]
            made.append(
                (
                    f"{row.name}: wall time / {base.name}",
                    f"{ratio:.3f}",
                    f"<= {row.max_time:.2f}",
                    ratio <= row.max_time,
                )
            )
        loss = mean_loss(found[row.name])
        if loss is not None and plain is not None:
            made.append((f"{row.name}: validation loss", f"{loss:.4f}", f"<= {plain:.4f}", loss <= plain))
    for unstable, stable in ((plain.name, own.name) for plain, own in zip(LARGE[::2], LARGE[1::2], strict=True)):
        if not (found.get(unstable) and found.get(stable)):
            continue
        worst = min(spike(run) for run in found[unstable])
        made.append((f"{unstable}: spikes", f"{worst:.2f}", f"> {MAX_JUMP:.2f}", worst > MAX_JUMP))
        worst = max(spike(run) for run in found[stable])
        made.append((f"{stable}: spikes", f"{worst:.2f}", f"<= {MAX_JUMP:.2f}", worst <= MAX_JUMP))
        plain, loss = mean_loss(found[unstable]), mean_loss(found[stable])
        if loss is not None:
            bar = "of the plain twin: none" if plain is None else f"<= {plain:.4f}"
            made.append((f"{stable}: validation loss", f"{loss:.4f}", bar, plain is None or loss <= plain))
    return made


def spike(run: Mapping[str, Any]) -> float:
    """`largest_spike` of a run; infinite for one that could not go on."""
    return float("inf") if run["ended"] else largest_spike(run["losses"], 0)


def page(
    seeds: Sequence[int],
    found: Found,
    times: Mapping[str, float],
    cpu_times: Mapping[str, float],
    facts: Mapping[str, Any],
    pictures: Sequence[str],
) -> str:
    lines = [
        "# Learning from less: losses and time",
        "",
        written_by("bench-learning", MODULE, facts),
        "",
        f"The GPT and the text of examples/gpt_text on {NUM_RANKS} ranks, seeds "
        f"{', '.join(map(str, seeds))}. "
        "Settings were chosen on seed 0; layer drop's once more after seed 1, so there the other seeds count, and the "
        "learning rate of random-LTD after all of them, so there three more were run (the page named below has "
        "them). Validation losses are in nats per byte, of 1024 samples. Tokens are fractions of the "
        "first row's, times too; the times of large batches are fractions of their own first row's. A row that "
        "plans a whole run for a part of the plain run's time has a bar on both; the plain rows of fewer steps, "
        "one seed each, are what that time gives without the feature. What else was tried, and why bars are "
        "missed: "
        "[learning_tried.md](learning_tried.md).",
        "",
        "| row | steps | batch | lr | wall time | CPU time | tokens seen | tokens computed | validation loss | by seed "
        "| spread |",
        "|" + " --- |" * 11,
    ]
    base = found[ROWS[0].name][0]
    for row in ALL:
        if not found.get(row.name):
            continue
        runs = found[row.name]
        losses = [run["validation_loss"] for run in runs]
        whole = None not in losses
        cells = [
            row.name,
            f"{row.num_steps}",
            f"{row.global_batch}",
            f"{row.lr:g}",
            *(f"{kind[row.name]:.3f}" if row.name in kind else "" for kind in (times, cpu_times)),
            f"{runs[0]['tokens_seen'] / base['tokens_seen']:.2f}",
            f"{runs[0]['tokens_computed'] / base['tokens_computed']:.2f}",
            f"{fmean(losses):.4f}" if whole else "did not end",
            ", ".join("-" if loss is None else f"{loss:.4f}" for loss in losses),
            f"{max(losses) - min(losses):.4f}" if whole else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [line for name in pictures for line in ("", f"![{name.rpartition('.')[0].replace('_', ' ')}]({name})")]
    lines += ["", *bar_table(bars(found, times))]
    return "\n".join(lines) + "\n"


def results(seeds: Sequence[int], found: Found, times: Mapping[str, float]) -> str:
    """What the page and its pictures are made of, as JSON: settings, times, and per seed the losses and the curve."""
    rows = {
        row.name: {
            "steps": row.num_steps,
            "batch": row.global_batch,
            "lr": row.lr,
            "changes": row.changes,
            "wall_time": times.get(row.name),
            "runs": [
                {
                    "seed": seed,
                    "validation_loss": run["validation_loss"],
                    "ended": run["ended"],
                    "tokens_seen": run["tokens_seen"],
                    "tokens_computed": run["tokens_computed"],
                    "curve": [[step, tokens, round(loss, 4)] for step, tokens, loss in run["curve"]],
                    "losses": [round(loss, 3) for loss in run["losses"]],
                }
                for seed, run in zip(seeds, found[row.name], strict=False)
            ],
        }
        for row in ALL
        if found.get(row.name)
    }
    numbers = re.compile(r"\[[^\[\]]*\]")
    return numbers.sub(lambda match: " ".join(match[0].split()), json.dumps(rows, indent=1)) + "\n"


def draw(found: Found, times: Mapping[str, float], path: Path) -> None:
    """Validation loss over wall time (of the plain run: 1), means over seeds, the seeds faint."""
    figure, axes = pyplot().subplots(figsize=(8, 5))
    for index, row in enumerate(row for row in ROWS if found.get(row.name)):
        runs, scale = found[row.name], times.get(row.name, 1.0)
        at = [step / row.num_steps * scale for step, _, _ in runs[0]["curve"]]
        losses = [[loss for *_, loss in run["curve"]] for run in runs]
        for each in losses:
            axes.plot(at, each, color=f"C{index}", alpha=0.25, linewidth=0.8)
        means = [fmean(values) for values in zip(*losses, strict=True)]
        loss = mean_loss(runs)
        label = row.name if loss is None else f"{row.name}: {loss:.3f} over all samples"
        axes.plot(at, means, color=f"C{index}", label=label, linewidth=1.6)
    for index, row in enumerate(row for row in LESS if found.get(row.name)):
        once = None if index else "plain, planned for less time (one seed)"
        axes.plot(times[row.name], found[row.name][0]["curve"][-1][2], "kx", label=once)
    axes.set_xlabel("wall time, plain run = 1")
    axes.set_ylabel("validation loss over 64 samples, nats per byte")
    axes.set_ylim(top=3.2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    keep(figure, path)


def draw_large(found: Found, path: Path) -> None:
    """Training losses of the large batch and rate, all seeds."""
    figure, axes = pyplot().subplots(figsize=(8, 5))
    for index, row in enumerate(row for row in LARGE if found.get(row.name)):
        for number, run in enumerate(found[row.name]):
            once = row.name if number == 0 else None
            axes.plot(range(1, len(run["losses"]) + 1), run["losses"], color=f"C{index}", alpha=0.7, label=once)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    keep(figure, path)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ALL]
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=120, help="of the measurement of time")
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=names, help="; ".join(names))
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build" / "learning", help="a file per run")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds for one run")
    parser.add_argument("--output", type=Path, help="write the page here, and pictures beside it")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.rows if name not in names]:
        parser.error(f"no such rows: {'; '.join(unknown)}; there are {'; '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    rows = [row for row in ALL if row.name in args.rows]
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    found: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    for index, seed in enumerate(seeds):
        for row in (row for row in rows if index < row.max_seeds):
            found[row.name].append(measured("train", row.run(seed), args.results, args.timeout))
            last = found[row.name][-1]
            print(f"seed {seed}, {row.name}: {last['validation_loss']} {last['ended']}", file=sys.stderr, flush=True)
    times: dict[str, float] = {}
    cpu_times: dict[str, float] = {}
    for group, num_turns in ((ROWS, args.turns), (LARGE, args.turns // 4)):
        if num_turns and any(row in rows for row in group):
            runs = [row.run(FIRST_SEED, num_turns) for row in group]
            seconds = measured("time", runs, args.results, args.timeout)
            times |= time_ratios(group, seconds["wall"], group[0])
            cpu_times |= time_ratios(group, seconds["cpu"], group[0])
    times |= {row.name: row.num_steps / ROWS[0].num_steps for row in LESS}
    pictures = [args.output.with_suffix(".png"), args.output.with_name(f"{args.output.stem}_large.png")]
    text = page(seeds, found, times, cpu_times, machine_facts(), [picture.name for picture in pictures])
    publish(text, args.output)
    if args.output:
        args.output.with_suffix(".json").write_text(results(seeds, found, times))
        draw(found, times, pictures[0])
        draw_large(found, pictures[1])
    return 0 if all(holds for *_, holds in bars(found, times)) else 1


if __name__ == "__main__":
    sys.exit(main())
