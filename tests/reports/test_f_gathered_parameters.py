"""Parameters that are shards: edited under a gather context, used outside their module, loaded with their buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
import engine as deepspeed
from engine.compat import utils
from engine.contracts import EngineError
from tests.parity.small import (
    CASES,
    VOCABULARY_SIZE,
    Case,
    Normalised,
    config_of,
    gpt,
    regression_batch,
    run_steps,
    seeded,
    token_batch,
)
from tests.parity.toy import part

WORLD = 2
STAGES = range(4)
PRECISIONS: list[dict[str, Any]] = [{}, {"bf16": {"enabled": True}}]
STILL = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}}
ROWS = slice(VOCABULARY_SIZE - 3, VOCABULARY_SIZE)


def edit_rows(stage: int, more: dict[str, Any]) -> dict[str, Any]:
    case = Case(gpt, token_batch, zero={"prefetch_bucket_size": 1} if stage == 3 else {})
    model = case.model()
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1, case, **STILL, **more))
    run_steps(model_engine, token_batch, 1)
    before = model_engine.full_parameters()
    with deepspeed.zero.GatheredParameters(model.token_embedding.weight, modifier_rank=0) as (_,):
        assert model.token_embedding.weight.shape == (VOCABULARY_SIZE, 16)
        assert model.head.weight is model.token_embedding.weight
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.token_embedding.weight[ROWS] = 0.3
    with deepspeed.zero.GatheredParameters(list(model.blocks[0].parameters()), modifier_rank=1):
        if dist.get_rank() == 1:
            model.blocks[0].mlp_norm.weight.data.fill_(2.0)
            model.blocks[0].mlp_norm.bias.data.fill_(-1.0)
    run_steps(model_engine, token_batch, 1, first=1)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = model_engine.full_parameters()
    tied = model_engine.module.head.weight is model_engine.module.token_embedding.weight
    return {"before": before, "after": after, "seen": seen, "tied": tied}


@pytest.mark.parametrize("more", PRECISIONS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_f2_edits_under_the_gather_context_stay(ranks, stage, more):
    by_rank = ranks(WORLD).run(edit_rows, stage, more)
    for outcome in by_rank:
        before, after, seen = outcome["before"], outcome["after"], outcome["seen"]
        expected = {name: tensor.clone() for name, tensor in before.items()}
        compute = torch.bfloat16 if more and stage < 3 else torch.float32
        expected["token_embedding.weight"][ROWS] = torch.tensor(0.3, dtype=compute).float()
        expected["blocks.0.mlp_norm.weight"].fill_(2.0)
        expected["blocks.0.mlp_norm.bias"].fill_(-1.0)
        for name, tensor in expected.items():
            assert torch.equal(after[name].float(), tensor.float()), name  # what was not edited keeps every bit
            assert torch.equal(seen[name].float(), after[name].to(seen[name].dtype).float()), name
        assert outcome["tied"]


# --- a weight outside its own module -------------------------------------------------------------------------


class Reused(nn.Module):
    """The parent's forward uses its child's weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return nn.functional.linear(hidden, self.embedding.weight)


def reuse(stage: int) -> tuple[list[float], dict[str, Tensor]]:
    config = config_of(stage, 1, Case(Reused, zero={"prefetch_bucket_size": 1}))
    model_engine, *_ = engine.initialize(model=seeded(Reused), config=config)
    losses = []
    for step in range(3):
        batch = part(regression_batch(step), dist.get_rank(), WORLD)
        output = model_engine(batch["x"])
        functional = nn.functional.linear(batch["x"], model_engine.module.embedding.weight)
        model_engine.backward((output - functional).square().mean())
        model_engine.step()
        losses.append(model_engine.last_report.loss)
    return losses, model_engine.full_parameters()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_f3_a_weight_used_outside_its_module_trains_as_at_stage_0(ranks, stage):
    (expected, weights), *_ = ranks(WORLD).run(reuse, 0)
    for losses, parameters in ranks(WORLD).run(reuse, stage):
        assert losses == pytest.approx(expected, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=0, atol=1e-5)


def use_a_blocks_weight(stage: int) -> str:
    config = config_of(stage, 1, Case(Reused, zero={"prefetch_bucket_size": 1}))
    model_engine, *_ = engine.initialize(model=seeded(Reused), config=config)
    x = part(regression_batch(0), dist.get_rank(), WORLD)["x"]
    try:
        nn.functional.linear(model_engine(x), model_engine.module.blocks[0].weight).sum()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_f3_a_shard_in_a_functional_loss_is_an_error_and_not_a_number(ranks):
    for message in ranks(WORLD).run(use_a_blocks_weight, 3):
        assert "mixed torch.Tensor and DTensor" in message


# --- buffers of a loaded model -------------------------------------------------------------------------------


def load_whole(stage: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    whole = {
        name: torch.randn_like(t) if t.is_floating_point() else t + 7 for name, t in Normalised().state_dict().items()
    }
    case = Case(Normalised, zero={"prefetch_bucket_size": 1})
    model = case.model()
    model.load_state_dict(whole)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1, case))
    held = {**dict(model_engine.module.named_buffers()), **model_engine.full_parameters()}
    return {name: (held[name] - tensor).abs().max().float() for name, tensor in whole.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_f6_buffers_of_a_pretrained_model_are_kept(ranks, stage):
    for differences in ranks(WORLD).run(load_whole, stage):
        assert "norm.running_mean" in differences
        assert not any(differences.values())


# --- DeepSpeed's names ---------------------------------------------------------------------------------------


def through_other_names(stage: int) -> list[str]:
    """Compares DeepSpeed's functions with ours; returns what differs."""
    case = CASES["no blocks"]
    model = case.model()
    early = dict(model.named_parameters())
    with deepspeed.zero.Init(config_dict_or_path={}):
        stranger = nn.Linear(2, 2)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1, case))
    run_steps(model_engine, regression_batch, 1)
    model_engine.backward(model_engine(**part(regression_batch(1), dist.get_rank(), WORLD)))
    wrong = []
    for parameters in (dict(model.named_parameters()), early):
        for name, parameter in parameters.items():
            pairs = {
                "parameter": (utils.safe_get_full_fp32_param(parameter), model_engine.full_parameter(name)),
                "gradient": (utils.safe_get_full_grad(parameter), model_engine.full_gradient(name)),
                "state": (
                    utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
                    model_engine.full_optimizer_state(name, "exp_avg_sq"),
                ),
            }
            wrong += [f"{what} of {name}" for what, (theirs, ours) in pairs.items() if not torch.equal(theirs, ours)]
    parameter = dict(model.named_parameters())["layers.0.weight"]
    full = torch.arange(13 * 8.0).view(13, 8)
    utils.safe_set_full_fp32_param(parameter, full)
    utils.safe_set_full_optimizer_state(parameter, full * 2, "exp_avg")
    utils.safe_set_full_grad(parameter, full * 3)
    utils.safe_update_full_grad_vectorized([parameter], lambda gradient, _: gradient + 1)
    name = "layers.0.weight"
    found = (
        model_engine.full_parameter(name),
        model_engine.full_optimizer_state(name, "exp_avg"),
        model_engine.full_gradient(name),
    )
    for what, tensor, expected in zip(
        ("parameter", "state", "gradient"), found, (full, full * 2, full * 3 + 1), strict=True
    ):
        wrong += [] if torch.allclose(tensor, expected) else [f"{what} that was set"]
    locals_ = [
        utils.safe_get_local_fp32_param(parameter),
        utils.safe_get_local_grad(parameter),
        utils.safe_get_local_optimizer_state(parameter, "exp_avg"),
    ]
    total = torch.stack([part.sum() for part in locals_]) / (WORLD if stage == 0 else 1)
    dist.all_reduce(total)
    expected_sums = torch.stack([full.sum(), (full * 3 + 1).sum(), (full * 2).sum()])
    wrong += [] if torch.allclose(total, expected_sums) else ["local parts"]
    utils.safe_set_local_fp32_param(parameter, torch.ones_like(locals_[0]))
    utils.safe_set_local_grad(parameter, torch.zeros_like(locals_[1]))
    utils.safe_set_local_optimizer_state(parameter, torch.ones_like(locals_[2]), "exp_avg")
    everything = model_engine.full_parameter(name), model_engine.full_optimizer_state(name, "exp_avg")
    wrong += [] if all(bool((tensor == 1).all()) for tensor in everything) else ["local parts that were set"]
    wrong += [] if not model_engine.full_gradient(name).any() else ["the local gradient that was set"]
    wrong += [] if utils.safe_get_full_fp32_param(stranger.weight) is None else ["a stranger"]
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_names_do_the_same(ranks, stage):
    assert ranks(WORLD).run(through_other_names, stage) == [[], []]


# --- refusals ------------------------------------------------------------------------------------------------


def refused(stage: int) -> list[str]:
    model = CASES["no blocks"].model()
    model.layers[3].weight.requires_grad_(False)
    model_engine, *_ = engine.initialize(model=model, config=config_of(stage, 1))
    calls = [
        lambda: model_engine.full_parameter("layers.0.wieght"),
        lambda: model_engine.full_gradient("layers.0.weight"),
        lambda: model_engine.full_gradient("layers.3.weight"),
        lambda: model_engine.full_optimizer_state("layers.0.weight", "exp_avg"),
        lambda: model_engine.set_full_parameter("layers.0.weight", torch.zeros(2)),
        lambda: model_engine.set_full_parameter("layers.0.weight", torch.full((13, 8), float(dist.get_rank()))),
        lambda: model_engine.full_parameters(["layers.0.weight", "layers.0.bias"][: 1 + dist.get_rank()]),
    ]
    messages = []
    for number, call in enumerate(calls):
        if number == 2:
            run_steps(model_engine, regression_batch, 1)
            model_engine.backward(model_engine(**part(regression_batch(1), dist.get_rank(), WORLD)))
        if number == 3:
            model_engine.optimizer.forget_state(["layers.0.weight"])
        try:
            call()
        except EngineError as error:
            messages.append(str(error))
        else:
            messages.append("nothing was raised")
    return messages


@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_be_read_is_refused_in_one_sentence_on_all_ranks(ranks, stage):
    first, second = ranks(WORLD).run(refused, stage)
    assert first == second
    for message, words in zip(
        first,
        [
            ("no parameter 'layers.0.wieght'", "did you mean 'layers.0.weight'"),
            ("no gradients", "between backward() and the step"),
            ("layers.3.weight is not trained here",),
            ("no state 'exp_avg' for layers.0.weight", "first step"),
            ("(13, 8)", "(2,)"),
            ("rank 0 in set_full_parameters", "rank 1 in", "checksum"),
            (
                "rank 0 in full_parameters of layers.0.weight ",
                "rank 1 in full_parameters of layers.0.weight, layers.0.bias",
            ),
        ],
        strict=True,
    ):
        assert all(word in message for word in words), message
