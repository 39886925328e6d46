"""`initialize(mpu=...)`: a model that its caller has split by hand trains as the whole one does in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
from engine.compat.utils import safe_get_full_fp32_param
from engine.contracts import EngineError
from tests.building import building

WIDTH, HIDDEN, CLASSES, BATCH, STEPS = 12, 16, 8, 24, 4
LR, CLIP = 0.1, 0.5


class Copied(torch.autograd.Function):
    """The same on every model-parallel rank; gradients, of which each rank has a part, are summed."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Summed(torch.autograd.Function):
    """The sum over the model-parallel ranks; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, group: Any) -> Tensor:
        summed = inputs.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
            self.down, self.head = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = inputs + self.down(torch.relu(self.up(self.norm(inputs))))
        return nn.functional.cross_entropy(self.head(hidden), labels)


class Split(Whole):
    """``up`` by columns, ``down`` by rows, as Megatron does it; the bias of ``down`` is added once, after the sum."""

    def __init__(self, group: Any, rank: int, size: int, mark: bool = True) -> None:
        super().__init__()
        self.group = group
        cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        for name, dimension in cuts.items():
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.chunk(size, dimension)[rank].clone()
            if mark:
                parameter.tensor_model_parallel = True

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        inside = torch.relu(self.up(Copied.apply(self.norm(inputs), self.group)))
        summed = Summed.apply(nn.functional.linear(inside, self.down.weight), self.group)
        return nn.functional.cross_entropy(self.head(inputs + summed + self.down.bias), labels)


@dataclass
class Mpu:
    """Megatron's names. ``inner``: which of the two kinds of rank are neighbours."""

    model_size: int
    inner: str = "model"
    groups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        table = torch.arange(world).view(-1, self.model_size)
        if self.inner == "data":
            table = torch.arange(world).view(self.model_size, -1).T
        for name, rows in (("model", table.tolist()), ("data", table.T.tolist())):
            for row in rows:
                group = dist.new_group(row)
                if rank in row:
                    self.groups[name], self.groups[f"{name}_rank"] = group, row.index(rank)

    def get_model_parallel_group(self) -> Any:
        return self.groups["model"]

    def get_model_parallel_rank(self) -> int:
        return self.groups["model_rank"]

    def get_model_parallel_world_size(self) -> int:
        return self.model_size

    def get_data_parallel_group(self) -> Any:
        return self.groups["data"]

    def get_data_parallel_rank(self) -> int:
        return self.groups["data_rank"]

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.model_size


class MegatronMpu(Mpu):
    """The newer names, with a pipeline of one stage."""

    def get_tensor_model_parallel_group(self) -> Any:
        return self.groups["model"]

    def get_pipeline_model_parallel_group(self) -> Any:
        return None


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(CLASSES, (), generator=generator)
        return {"inputs": torch.randn(WIDTH, generator=generator), "labels": label}


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        **changes,
    }


@dataclass
class Seen:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    dp_size: int
    notes: list[str]


def train(stage: int, inner: str, kind: str, planted: str = "") -> Seen:
    """On one rank: ``STEPS`` steps of the split model on the engine's own loader."""
    mpu = (MegatronMpu if kind == "megatron" else Mpu)(2, inner)
    model = Split(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank(), 2)
    if planted == "norm":
        model.norm.weight.tensor_model_parallel = True  # counted once a rank, though all hold the same
    made, _, _, _ = engine.initialize(model=model, config=settings(stage), mpu=mpu, training_data=Samples())
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(made.train_batch()))
        norms.append(made.get_global_grad_norm())
    whole = {}
    for info in made.parameter_registry.infos:
        local = safe_get_full_fp32_param(dict(made.module.named_parameters())[info.name])
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local.contiguous(), group=mpu.get_model_parallel_group())
        cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(info.name)
        if cut is None:
            assert torch.equal(*parts), f"{info.name} has come apart"
        whole[info.name] = parts[0] if cut is None else torch.cat(parts, cut)
    notes = [note.message for note in made.plan.notes if note.path == "mpu"]
    for attempt in (made.save_checkpoint, made.load_checkpoint, made.save_16bit_model):
        with pytest.raises(EngineError, match="split by its caller"):
            attempt("anywhere")
    dp_size = made.mesh.dp_size
    made.destroy()
    return Seen(losses, norms, whole, dp_size, notes)


@functools.cache
def reference() -> Seen:
    """One process of the engine with the whole model: what tests/parity proves equal to plain PyTorch."""
    made, _, _, _ = engine.initialize(model=Whole(), config=settings(0), training_data=Samples())
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(made.train_batch()))
        norms.append(made.get_global_grad_norm())
    parameters = {name: parameter.detach().clone() for name, parameter in made.module.named_parameters()}
    made.destroy()
    return Seen(losses, norms, parameters, 1, [])


def assert_equal(found: list[Seen]) -> None:
    expected = reference()
    for seen in found:
        assert seen.losses == pytest.approx(expected.losses, abs=1e-5)
        assert seen.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, value in expected.parameters.items():
            torch.testing.assert_close(seen.parameters[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "stage", "inner", "kind"),
    [
        (2, 0, "model", "old"),
        (2, 2, "model", "megatron"),
        (4, 0, "data", "old"),
        (4, 1, "model", "megatron"),
        (4, 3, "data", "megatron"),
        (4, 3, "model", "old"),
    ],
)
def test_a_model_split_by_hand_trains_as_the_whole_one(
    ranks: Any, world: int, stage: int, inner: str, kind: str
) -> None:
    found = ranks(world).run(train, stage, inner, kind)
    assert_equal(found)
    assert {seen.dp_size for seen in found} == {world // 2}
    assert all("split over 2 ranks already" in seen.notes[0] for seen in found)


def test_a_norm_that_counts_copies_twice_is_seen(ranks: Any) -> None:
    with pytest.raises(AssertionError):
        assert_equal(ranks(2).run(train, 0, "model", "old", "norm"))


def refused(case: str) -> str:
    """What every rank is told."""
    config, mpu = settings(0), Mpu(2, "data" if case == "placement" else "model")
    model: nn.Module = (
        Whole()
        if case in ("placement", "pipeline")
        else Split(mpu.get_model_parallel_group(), mpu.get_model_parallel_rank(), 2, mark=case != "unmarked")
    )
    if case == "placement":
        config["tensor_parallel"] = 2
    if case == "pipeline":
        mpu.get_pipeline_model_parallel_group = mpu.get_model_parallel_group  # type: ignore[attr-defined]
    if case == "crossed":  # groups that are no rows of a table: 0 2 | 1 3 for models, 0 3 | 1 2 for data
        members = [[0, 3], [1, 2]]
        made = [dist.new_group(row) for row in members]
        mpu.groups["data"] = made[next(index for index, row in enumerate(members) if dist.get_rank() in row)]
    if case == "no mpu":
        mpu = object()  # type: ignore[assignment]
    with building("tensor_parallel.size"), pytest.raises(EngineError) as caught:
        engine.initialize(model=model, config=config, mpu=mpu)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("placement", "mpu's data-parallel group is [0, 1], the mesh has [0, 2]"),
        ("pipeline", "pipeline.stages"),
        ("crossed", "mpu's data-parallel group is"),
        ("unmarked", "not marked as parts"),
        ("no mpu", "get_data_parallel_group"),
    ],
)
def test_what_is_refused_is_refused_on_all_ranks(ranks: Any, case: str, words: str) -> None:
    messages = ranks(4).run(refused, case)
    assert all(words in message for message in messages), messages
    if case == "placement":
        assert all('Set parallel.placement to "' in message for message in messages)


def agreeing() -> list[str]:
    """The config gives the degree; the object only says the same."""
    from engine.config import load_config
    from engine.mpu import ModelParallelUnit
    from engine.plan import World, plan

    unit = ModelParallelUnit(Mpu(2), dist.get_rank())
    with building("tensor_parallel.size"):
        config = load_config(settings(0, tensor_parallel=2))
        world = World(4, 4)
        assert unit.world(config, world) == world
        made = unit.check(plan(config, world))
    return [note.message for note in made.notes if note.path == "mpu"]


def test_groups_that_agree_with_the_config_are_a_note(ranks: Any) -> None:
    for notes in ranks(4).run(agreeing):
        assert notes == ["its groups have the same members as the mesh (data-parallel, model-parallel)"]
