"""`ptrain analyze`: measure how hard each sample is, for a curriculum that draws samples by difficulty."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.options import Parser, add_config_options, positive, read_config
from engine.cli.pictures import MISSING, draw_histogram, have_matplotlib
from engine.cli.prepare import base_of, open_corpus
from engine.contracts import EngineError
from engine.launch import RankEnvironment
from engine.launch.threads import thread_environment

if TYPE_CHECKING:
    from engine.config import Config
    from engine.data.difficulty import Metric
    from engine.plan import Plan


def run(argv: Sequence[str]) -> int:
    parser = Parser(
        "ptrain analyze",
        "Measure the difficulty of every training sample and write the index that "
        "data_efficiency.data_sampling.curriculum_learning draws by. An interrupted run goes on where it stopped.",
    )
    parser.add_argument("file", nargs="?", help="the config")
    parser.add_argument("--config", dest="config", help="the config, as in ptrain train")
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes per rank (default 1)")
    parser.add_argument("--nproc", type=positive, metavar="N", help="ranks on this machine (default 1)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the index is written (default: the config's data_cluster_path)",
    )
    parser.add_argument(
        "--metric", dest="metrics", action="append", default=[], metavar="NAME",
        help="seqlen or vocabularyrarity; may be repeated (default: the config's metrics, else both)",
    )  # fmt: skip
    add_config_options(parser)
    arguments = parser.parse_args(argv)
    path = arguments.config or arguments.file
    if path is None:
        parser.error("a config is needed: ptrain analyze FILE")

    from engine.plan import imagined_world, plan

    config = read_config(path, arguments.overrides, arguments.lenient)
    environment = RankEnvironment.read()
    resolved = plan(config, imagined_world(config, 1, "ptrain analyze"))
    output = arguments.output or _index_folder(resolved, Path("output") / Path(path).stem / "analysis")
    if environment.launcher == "single" and (arguments.nproc or 1) > 1:
        from engine.launch.elastic import launch

        os.environ.update(thread_environment(arguments.nproc))
        return launch(arguments.nproc, ["analyze", *argv])
    return _analyze(resolved, arguments.metrics, output, arguments.workers, environment)


def _index_folder(plan: Plan, default: Path) -> Path:
    if plan.curriculum is None or plan.curriculum.index_path is None:
        return default
    from engine.data.build import index_folder

    return index_folder(plan.config, plan.curriculum.index_path)


def _analyze(plan: Plan, names: list[str], output: Path, num_workers: int, environment: RankEnvironment) -> int:
    import numpy as np

    from engine.data.analysis import Workers, analyze
    from engine.data.difficulty_index import SAMPLE_TO_METRIC

    metrics = _metrics(plan, names)
    dataset = open_corpus(plan.config, plan.config.vocabulary_size).train
    barrier, leave = _barrier(environment)
    workers = Workers(num_workers, environment.rank, environment.world_size, barrier)
    with _Bar(is_shown=environment.rank == 0) as bar:
        try:
            analyze(dataset, metrics, output, workers, bar.show)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise EngineError(
                f"analyze: {output} cannot be written ({reason}); name another folder: --output"
            ) from error
    if environment.rank == 0:
        for metric in metrics:
            values = np.load(output / metric.name / SAMPLE_TO_METRIC)
            print(
                f"{metric.name}: {len(values):,} samples, {values.min():,} to {values.max():,}, "
                f"mean {values.mean():,.1f}, {len(np.unique(values)):,} distinct"
            )
            if have_matplotlib():
                draw_histogram(output / metric.name / "histogram.png", metric.name, values)
        if not have_matplotlib():
            print(f"note: no histograms: {MISSING}")
        print(f"written to {output}", flush=True)
    leave()
    return 0


def _metrics(plan: Plan, names: list[str]) -> list[Metric]:
    """Those asked for; else those of the config that draw samples; else the built-in ones."""
    from engine.data.difficulty import BUILT_IN, Metric

    in_config = [metric.name for metric in plan.curriculum.sampled] if plan.curriculum is not None else []
    functions = {name: _function(plan.config, name) for name in in_config}
    chosen = list(dict.fromkeys(names or in_config or BUILT_IN))
    return [Metric(name, functions.get(name)) for name in chosen]


def _function(config: Config, name: str) -> Callable[..., Any] | None:
    from engine.cli.target import load_target

    assert config.data_efficiency is not None
    assert config.data_efficiency.data_sampling is not None
    curriculum = config.data_efficiency.data_sampling.curriculum_learning
    assert curriculum is not None
    target = curriculum.curriculum_metrics[name].function
    if target is None:
        return None
    try:
        return load_target(target, base_of(config))
    except EngineError as error:
        # It is written for the model's target, the usual one.
        raise EngineError(str(error).replace("model.target", f"curriculum_metrics.{name}.function")) from error


def _barrier(environment: RankEnvironment) -> tuple[Callable[[], None], Callable[[], None]]:
    """A wait for the other ranks, and how to leave them."""
    if environment.world_size == 1:
        return (lambda: None), (lambda: None)
    import torch
    import torch.distributed as dist

    from engine.collectives.agreement import Agreement
    from engine.collectives.ledger import Ledger
    from engine.collectives.shards import ShardGroup
    from engine.mesh import Mesh, join_process_group
    from engine.plan import Degrees

    device = torch.device("cpu")
    environment.export()
    join_process_group(environment.rank, environment.world_size, "env://", device)
    mesh = Mesh(Degrees(dp_shard=environment.world_size), device)
    agreement = Agreement(ShardGroup.of(mesh, "control", Ledger()), device)

    def wait() -> None:
        agreement.sum({"done": 1.0}, "analyze")

    return wait, dist.destroy_process_group


class _Bar:
    """One tqdm bar for each thing that is measured."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, what: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if what != self._what:
            self.__exit__()
            self._what = what
            self._bar = tqdm(total=total, desc=what, unit="chunk", disable=None if self._is_shown else True)
        self._bar.update(done - self._bar.n)
