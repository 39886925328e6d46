"""What a model keeps and computes, measured on tensors without memory, against runs with memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cli.model_facts import facts_of_target
from engine.config import load_config
from engine.contracts import EngineError
from engine.model.blocks import find_blocks
from engine.model.describe import describe_model
from engine.model.measure import measure_forward
from engine.model.tensor_parallel.split import Split, TensorPlan
from engine.plan import World, plan
from engine.plan.activations import count_activations
from engine.plan.facts import ForwardFacts
from engine.torch_compat import fake_tensors
from tests.parity.toy import gpt_class, toy_model

SAMPLES, LENGTH = 3, 32
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt_text" / "config.json"


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    return model(tokens, tokens)


def measured(build: Callable[[], nn.Module], every_block: bool = False, **options: Any) -> ForwardFacts:
    with fake_tensors():
        model = build()
        return measure_forward(model, find_blocks(model), loss_of, SAMPLES, LENGTH, every_block=every_block, **options)


def really_kept(model: nn.Module, tokens: Tensor | None = None) -> int:
    """Bytes of the storages that autograd keeps, without the parameters'."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        (loss_of(model) if tokens is None else model(tokens, tokens.clone())).backward()
    return sum(kept.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_a_real_run_keeps(dtype: torch.dtype, dropout: float) -> None:
    def build() -> nn.Module:
        model = toy_model(dropout=dropout)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    assert measured(build).kept_bytes == really_kept(build())


def test_one_block_stands_for_its_like() -> None:
    assert measured(toy_model) == measured(toy_model, every_block=True)


def test_the_example_as_the_command_measures_it() -> None:
    """Within 10 % is what the plan promises; on the CPU it is exact."""
    config = load_config(str(EXAMPLE))
    planned = plan(config, World(2, 2))
    facts = facts_of_target(config, planned)
    made = count_activations(planned, facts)
    tokens = torch.zeros(planned.batch.micro_batch_size, config.data.sequence_length, dtype=torch.int64)
    real = really_kept(gpt_class()(**config.model.args), tokens)
    assert made is not None
    assert made.kept == real
    assert made.low <= real <= made.high


class Growing(nn.Module):
    """Blocks of one class and shape, each of which is given more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubling() for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens.float()[:, :8]
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=1) * self.factor


def test_blocks_that_only_look_alike_all_run() -> None:
    found = measured(Growing)
    sizes = [kept.total_bytes for kept in found.blocks]
    assert sizes == sorted(set(sizes))
    assert found.kept_bytes == really_kept(Growing())


def test_matrix_products_and_attention_are_counted() -> None:
    """By hand: 2 per weight and token in forward, and queries x keys twice; backward is twice the products and two and
    a half times the attention, which computes its matrix again."""
    found = measured(toy_model)
    tokens, width, blocks = SAMPLES * LENGTH, 64, 4
    products = 2 * tokens * (blocks * 12 * width * width + 256 * width)
    attention = blocks * 2 * 2 * SAMPLES * LENGTH * LENGTH * width
    assert found.forward_flops == products + attention
    assert found.backward_flops == 2 * products + attention * 5 // 2
    assert found.block_forward_flops == found.forward_flops - 2 * tokens * 256 * width


def test_an_accelerator_keeps_masks_of_one_byte_and_no_matrix_of_attention() -> None:
    without, dropped = measured(toy_model), measured(lambda: toy_model(dropout=0.1))
    elements, heads = SAMPLES * LENGTH * 64, 4
    matrices = SAMPLES * heads * LENGTH * LENGTH
    block = dropped.blocks[0]
    # two masks of the residual stream; of attention everything that is queries x keys
    assert block.mask_bytes >= 2 * 3 * elements + 2 * 4 * matrices
    assert block.total_bytes - block.mask_bytes <= without.blocks[0].total_bytes + 2 * elements + 4 * elements


class Sharper(nn.Module):
    """Asks for a value in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LENGTH, 1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        y = self.layer(tokens.float())
        return F.relu(y).sum() if y.sum().item() > 0 else y.sum()


def describe(build: Callable[[], nn.Module], **settings: Any):
    config = load_config({"train_micro_batch_size_per_gpu": SAMPLES, **settings})
    return describe_model(build, plan(config, World()), loss_of, LENGTH)


def test_a_model_that_asks_for_values_has_states_and_no_activations() -> None:
    facts = describe(Sharper)
    assert facts.num_parameters == LENGTH + 1
    assert facts.forward is None
    assert "cannot run without values" in facts.why_not_measured
    assert "\n" not in facts.why_not_measured


def test_a_model_that_cannot_be_built_without_values_is_refused_in_one_sentence() -> None:
    def build() -> nn.Module:
        return nn.Linear(int(torch.ones(()).sum().item()) + 1, 1) if torch.ones(2).sum().item() else nn.Linear(1, 1)

    def stubborn() -> nn.Module:
        return nn.Linear(int(torch.randint(1, 5, ()).item()), 1)

    with pytest.raises(EngineError, match=r"cannot be built without memory: \w+Exception: [^\n]+$"):
        describe(stubborn)


def test_states_are_of_the_dtypes_of_the_model_and_activations_of_the_plan() -> None:
    full, half = describe(toy_model), describe(toy_model, bf16={"enabled": True})
    assert {p.dtype for p in half.parameters} == {"fp32"}
    assert full.forward is not None
    assert half.forward is not None
    assert half.forward.entering_bytes * 2 == full.forward.entering_bytes
    assert 0.4 < half.forward.kept_bytes / full.forward.kept_bytes < 0.7


def test_a_model_of_many_blocks_takes_no_longer() -> None:
    with fake_tensors():
        model = gpt_class()(50304, num_blocks=96, width=12288, num_heads=96, sequence_length=LENGTH)
        found = measure_forward(model, find_blocks(model), loss_of, SAMPLES, LENGTH)
    assert len(found.blocks) == 96
    assert sum(p.numel() for p in model.parameters()) > 174e9


class Planned(nn.Module):
    """Says by itself how it is cut: the first layer alone, which nothing in its data flow suggests."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(LENGTH, 6), nn.Linear(6, 1)
        self.num_heads = 3
        self.tensor_plan = TensorPlan({"first": Split("column", gather_output=True)})

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.second(self.first(tokens.float())).sum()


def test_the_plan_that_a_model_brings_says_how_it_is_cut() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": SAMPLES, "tensor_parallel": {"size": 2}})
    world = World(2, 2)
    facts = describe_model(Planned, plan(config, world), loss_of, LENGTH)
    cuts = {parameter.name: parameter.cut for parameter in facts.parameters}
    assert cuts == {"first.weight": 0, "first.bias": 0, "second.weight": None, "second.bias": None}
    plan(config, world, facts)  # its author is taken at their word: three heads on two ranks are not refused
