"""What pipeline ranks run: many cases in one start, each with training and evaluation in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import engine
from tests.parity.runs import Pieces, config_of, pieces_of
from tests.parity.toy import GLOBAL_BATCH, Result, part, toy_batch, toy_model

MODEL = {"num_blocks": 8, "width": 32}
STEPS = 3
CLIP = 0.25
"""Below every norm of these runs: clipping acts in each step."""
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}}
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
"""Schedule -> virtual stages."""


@dataclass(frozen=True)
class Case:
    """``micro_batches``: of a window on one data-parallel rank, each cut into ``pieces`` for the pipeline. ``tp`` ranks
    split the layers of a stage; ``shards``: ranks among which stage 3 cuts them, where there are replicas of those."""

    world: int
    pp: int
    schedule: str
    stage: int
    precision: str = "fp32"
    micro_batches: int = 4
    partition: Any = "uniform"
    pieces: int = 1
    tp: int = 1
    shards: int | None = None

    @property
    def name(self) -> str:
        split = f"-tp{self.tp}" if self.tp > 1 else ""
        replicas = f"-in{self.shards}" if self.shards else ""
        return f"{self.schedule}-pp{self.pp}of{self.world}{split}-stage{self.stage}{replicas}-{self.precision}"

    @property
    def layout(self) -> str:
        """As a row of the parity table: schedules stand together."""
        replicas = self.world // (self.pp * self.tp)
        data = f" x hsdp {replicas // self.shards} x {self.shards}" if self.shards else f" x dp{replicas}"
        return f"pp{self.pp}{data if replicas > 1 else ''}{f' x tp{self.tp}' if self.tp > 1 else ''}"

    @property
    def num_parts(self) -> int:
        return self.world // (self.pp * self.tp) * self.micro_batches

    def config(self) -> dict[str, Any]:
        pipeline: dict[str, Any] = {"stages": self.pp, "schedule": self.schedule, "partition": self.partition}
        if self.pieces > 1:
            pipeline["micro_batches"] = self.micro_batches * self.pieces
        if self.schedule == "interleaved_1f1b":
            pipeline["virtual_stages"] = SCHEDULES[self.schedule]
        more: dict[str, Any] = {"tensor_parallel": {"size": self.tp}} if self.tp > 1 else {}
        if self.shards:
            more["zero_optimization"] = {"mics_shard_size": self.shards}
        return config_of(
            stage=self.stage,
            precision=self.precision,
            accumulation=self.micro_batches,
            clip=CLIP,
            optimizer=SGD,
            pipeline=pipeline,
            **more,
        )


def window(model_engine: engine.Engine, step: int, size: int = GLOBAL_BATCH) -> Iterator[dict[str, Tensor]]:
    """This rank's micro-batches of a step."""
    accumulation, mesh = model_engine.gradient_accumulation_steps(), model_engine.mesh
    for micro in range(accumulation):
        index = micro * mesh.dp_size + mesh.dp_rank
        yield part(toy_batch(step, size), index, accumulation * mesh.dp_size)


Outcome = tuple[Result, Pieces, dict[str, Any]]


def run_case(case: Case, fault: str | None = None) -> Outcome:
    """Before each step the same batch is evaluated: without dropout that is the step's loss."""
    model_engine, *_ = engine.initialize(model=toy_model(**MODEL), config=case.config())
    if fault is not None:
        from tests.parity.pipeline_faults import FAULTS

        FAULTS[fault](model_engine)
    result, evaluations = Result(), []
    for step in range(STEPS):
        evaluations.append(model_engine.eval_batch(window(model_engine, step)).item())
        result.losses.append(model_engine.train_batch(window(model_engine, step)).item())
        assert model_engine.last_report is not None
        result.norms.append(model_engine.last_report.grad_norm or float("nan"))
    report = model_engine.last_report
    assert report is not None
    facts = {
        "evaluations": evaluations,
        "counted": (report.samples, report.tokens_seen, report.step),
        "names": sorted(name for name, _ in model_engine.module.named_parameters()),
        "elements": sum(p.numel() for p in model_engine.module.parameters()),
        "bytes": dict(report.bytes_by_axis),
    }
    pieces = pieces_of(model_engine) if case.tp == 1 else whole_pieces(model_engine)
    model_engine.destroy()
    return result, pieces, facts


def whole_pieces(model_engine: engine.Engine) -> Pieces:
    """Parameters of split layers, whole: each rank's in one piece."""
    whole = model_engine.full_parameters()
    return [(name, tuple(value.shape), 0, value.float().flatten()) for name, value in whole.items()]


def run_with(fault: str, case: Case) -> Outcome | Exception:
    """What a planted fault raises is an outcome too."""
    try:
        return run_case(case, fault)
    except engine.EngineError as error:
        return error


LAYOUTS = {
    "pp 2": (2, 2, 1),
    "pp 4": (4, 4, 1),
    "tp 2 x pp 2": (4, 2, 2),
    "dp 2 x pp 2": (4, 2, 1),
    "2 x 2 x 2": (8, 2, 2),
}
"""Ranks, pipeline ranks, tp ranks."""
THREE_WAYS = [Case(8, 2, "1f1b", 1, tp=2), Case(8, 2, "interleaved_1f1b", 3, tp=2)]
HYBRID = [Case(8, 2, name, 3, kind, micro_batches=3, shards=2) for name, kind in (("1f1b", "fp32"), ("zbv", "bf16"))]
"""Two replicas of two shards each, in two stages."""


def all_cases() -> list[Case]:
    """Every layout, schedule and stage in fp32 and bf16, and hybrid sharding."""
    table = itertools.product(LAYOUTS.values(), SCHEDULES, range(4), ["fp32", "bf16"])
    cases = [Case(world, pp, schedule, stage, kind, tp=tp) for (world, pp, tp), schedule, stage, kind in table]
    return [*cases, *HYBRID]


def quick_cases(cases: list[Case]) -> list[Case]:
    """A cover of those on few ranks, and two on eight."""
    return [*cover([case for case in cases if case.world < 8]), *THREE_WAYS]


def cover(cases: list[Case]) -> list[Case]:
    """Few of them, in which any two of these still meet: schedule and whether parameters are sharded, layout and stage,
    precision and each of the others. Of split layers only whether parameters are sharded beside them."""

    def pairs(case: Case) -> set[tuple[Any, ...]]:
        layout, shards = (case.world, case.pp, case.tp), case.stage == 3
        return {
            (case.schedule, shards),
            (layout, shards if case.tp > 1 else case.stage),
            *((case.precision, value) for value in (case.schedule, layout, case.stage)),
        }

    missing = set().union(*map(pairs, cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
