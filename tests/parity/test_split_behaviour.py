"""What else an engine does, with layers split over tp ranks: equal to one process, or to what one knows by hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import engine
from engine.contracts import LossSum
from engine.model.tensor_parallel import logits as cut_logits
from engine.optim.lamb import Lamb
from tests.parity.small import ADAMW, GLOBAL_BATCH, config_of, seeded
from tests.parity.split_small import (
    HIDDEN,
    LENGTH,
    VOCABULARY_SIZE,
    Gated,
    batch_of,
    finish,
    go_on,
    in_one_process,
    start,
)
from tests.parity.toy import Result, part

LAMB = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
GATE = "blocks.0.gate_up.weight"
STEPS = 3


def assert_same(expected: Result, found: Result, bound: float = 1e-5) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=bound)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert (found.parameters[name] - value).abs().max() <= bound, name


# --- optimizers ----------------------------------------------------------------------------------------------


def with_optimizers(tp: int) -> dict[str, Result]:
    found = {}
    lamb = {"type": "Lamb", "params": LAMB}
    for stage in (0, 1, 3):
        found[f"lamb {stage}"] = run_whole(start(tp, stage, optimizer=lamb))
    model = seeded(Gated)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = config_of(1, 1, tensor_parallel={"size": tp})
    del config["optimizer"]
    model_engine, *_ = engine.initialize(model=model, config=config, optimizer=torch.optim.AdamW(trained, **ADAMW))
    found["client"] = run_whole(model_engine)
    found["accumulating, clipped"] = run_whole(start(tp, 2, accumulation=2, gradient_clipping=0.5))
    return found


def run_whole(model_engine: engine.Engine) -> Result:
    return finish(model_engine, go_on(model_engine, STEPS))


def test_optimizers(ranks):
    by_rank = ranks(4).run(with_optimizers, 2, timeout=240)
    lamb = in_one_process(STEPS, lambda parameters: Lamb(parameters, **LAMB))
    adamw = in_one_process(STEPS, lambda parameters: torch.optim.AdamW(parameters, **ADAMW))
    clipped = in_one_process(STEPS, lambda parameters: torch.optim.AdamW(parameters, **ADAMW), clip=0.5)
    for found in by_rank:
        for stage in (0, 1, 3):
            assert_same(lamb, found[f"lamb {stage}"])
        assert_same(adamw, found["client"])
        assert_same(clipped, found["accumulating, clipped"])


# --- whole state ---------------------------------------------------------------------------------------------


def whole_state(tp: int, stage: int, folder: Path) -> dict[str, Any]:
    model_engine = start(tp, stage)
    go_on(model_engine, 1)
    mesh = model_engine.mesh
    model_engine.backward(model_engine(**part(batch_of(1), mesh.dp_rank, mesh.dp_size)))
    seen: dict[str, Any] = {"gradients": model_engine.full_gradients()}
    model_engine.set_full_gradients({name: g.clamp(-0.01, 0.01) for name, g in seen["gradients"].items()})
    model_engine.step()
    seen["norm"] = model_engine.get_global_grad_norm()
    seen["moments"] = model_engine.full_optimizer_states(key="exp_avg")
    seen["steps"] = model_engine.full_optimizer_states(key="step")
    saved = model_engine.optimizer.state_dict()  # type: ignore[union-attr]
    seen["state dict"] = {name: state["exp_avg"] for name, state in saved["state"].items()}
    model_engine.optimizer.load_state_dict(saved)  # type: ignore[union-attr]
    weight = model_engine.full_parameter(GATE)
    model_engine.set_full_parameters({GATE: weight + 1.0})
    with engine.full_state.gathered(model_engine.module.blocks[0].gate_up.weight, modifier_rank=1) as (inside,):  # type: ignore[union-attr, index]
        seen["inside"] = tuple(inside.shape)
        if mesh.rank == 1:
            inside.data[0] = 5.0
    seen["edited"], seen["unedited"] = model_engine.full_parameter(GATE), weight
    model_engine.save_16bit_model(folder, f"stage{stage}.bin")
    seen["parameters"] = model_engine.full_parameters()
    if stage < 3:  # a state dict of the whole model
        shifted = {name: value + 0.5 for name, value in seen["parameters"].items()}
        model_engine.load_state_dict(shifted, strict=False)
        found = model_engine.full_parameters()
        assert all(torch.equal(found[name], value) for name, value in shifted.items())
        model_engine.set_full_parameters(seen["parameters"])
    seen["bad shape"] = ""
    try:
        model_engine.set_full_parameter(GATE, torch.zeros(HIDDEN, 8))
    except engine.EngineError as error:
        seen["bad shape"] = str(error)
    evaluated = [part(batch_of(7), mesh.dp_rank, mesh.dp_size)]
    seen["evaluated"] = model_engine.eval_batch(iter(evaluated), 1).item()
    seen["counts"] = (model_engine.global_tokens, model_engine.global_samples)
    model_engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_state(ranks, tmp_path, stage):
    by_rank = ranks(4).run(whole_state, 2, stage, tmp_path, timeout=240)
    model = seeded(Gated)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    for step in range(2):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        if step == 0:
            optimizer.step()
    names = dict(model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
    for p in names.values():
        if p.grad is not None:
            p.grad.clamp_(-0.01, 0.01)
    norm = torch.cat([p.grad.flatten() for p in names.values() if p.grad is not None]).norm().item()
    optimizer.step()
    for seen in by_rank:
        assert seen["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(seen["gradients"][name], gradient, rtol=0, atol=1e-6)
            moment = optimizer.state[names[name]]["exp_avg"]
            torch.testing.assert_close(seen["moments"][name], moment, rtol=0, atol=1e-6)
            torch.testing.assert_close(seen["state dict"][name], moment, rtol=0, atol=1e-6)
            assert seen["steps"][name] == 2
        assert seen["norm"] == pytest.approx(norm, rel=1e-5)
        assert seen["inside"] == (2 * HIDDEN, 8)
        assert torch.equal(seen["edited"][1:], seen["unedited"][1:] + 1.0)
        assert torch.equal(seen["edited"][0], torch.full((8,), 5.0))
        assert "shape (24, 8)" in seen["bad shape"]
        assert seen["counts"] == (2 * GLOBAL_BATCH * LENGTH, 2 * GLOBAL_BATCH)
        assert seen["evaluated"] == by_rank[0]["evaluated"]
    exported = torch.load(tmp_path / f"stage{stage}.bin")
    fresh = Gated()
    fresh.load_state_dict(exported)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, by_rank[0]["parameters"][name]), name
    assert by_rank[0]["evaluated"] == pytest.approx(fresh.eval()(**batch_of(7)).item(), abs=1e-5)


# --- skips ---------------------------------------------------------------------------------------------------


def poisoned(stage: int) -> dict[str, Any]:
    model_engine = start(2, stage, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    go_on(model_engine, 1)
    before = model_engine.full_parameters()
    parameter = dict(model_engine.module.named_parameters())[GATE]
    if model_engine.mesh.coordinates["tp"] == 1:  # a gradient of this rank's own part
        handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
    go_on(model_engine, 1, first=1)
    after = model_engine.full_parameters()
    report = model_engine.last_report
    assert report is not None
    found = {
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "applied": report.applied,
        "scale": model_engine.loss_scale,
        "culprit": report.first_nonfinite,
    }
    if model_engine.mesh.coordinates["tp"] == 1:
        handle.remove()
    go_on(model_engine, 1, first=2)
    found["again"] = model_engine.last_report.applied  # type: ignore[union-attr]
    model_engine.destroy()
    return found


def test_a_gradient_that_is_not_finite_on_one_tp_rank_skips_on_all(ranks):
    for seen in ranks(2).run(poisoned, 1, timeout=240):
        assert seen == {"same": True, "applied": False, "scale": 8.0, "culprit": (1, GATE), "again": True}


# --- filling -------------------------------------------------------------------------------------------------


def filled(tp: int, stage: int, how: str) -> dict[str, Tensor]:
    config = config_of(stage, 1, tensor_parallel={"size": tp})
    if how == "meta":
        with torch.device("meta"):
            model = FromMeta()
    else:
        import torch.distributed as dist

        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        model = FromMeta()
    model_engine, *_ = engine.initialize(model=model, config=config)
    whole = model_engine.full_parameters()
    model_engine.destroy()
    return whole


class FromMeta(Gated):
    """Its own parameters can be filled; padding is what an embedding's initialisation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.padding_idx = 20

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.positions)
        torch.nn.init.constant_(self.temperature, 0.7)
        self.num_calls.zero_()
        self.scratch.fill_(1.0)


@pytest.mark.parametrize("how", ["meta", "unequal seeds"])
def test_every_split_starts_equal(ranks, how):
    (expected,) = ranks(1).run(filled, 1, 0, how, timeout=240)
    for stage in (0, 3):
        for found in ranks(4).run(filled, 2, stage, how, timeout=240):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


# --- random streams ------------------------------------------------------------------------------------------


def masks() -> dict[str, Tensor]:
    """Where dropout has dropped, on cut and on whole activations, in two forwards; a second time with all
    activations computed again in backward."""
    seen: dict[str, Tensor] = {}
    model = seeded(functools.partial(Gated, dropout=0.5))
    model_engine, *_ = engine.initialize(model=model, config=config_of(0, 1, tensor_parallel={"size": 2}))
    block: Any = model_engine.module.blocks[0]  # type: ignore[index, union-attr]
    dropout = F.dropout
    kept: list[Tensor] = []

    def noting(x: Tensor, *arguments: Any) -> Tensor:
        kept.append(dropout(torch.ones_like(x), *arguments) > 0)
        return x * kept[-1]

    F.dropout = noting
    try:
        for name in ("first", "second"):
            kept.clear()
            model_engine(**part(batch_of(0), model_engine.mesh.dp_rank, model_engine.mesh.dp_size))
            seen |= {f"{name} cut": kept[0], f"{name} whole": kept[1], f"{name} next cut": kept[2]}
        kept.clear()
        x = torch.randn(2, LENGTH, 8, requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
        seen |= {f"{at} {kind}": kept[i] for i, (at, kind) in enumerate(_ORDER)}
    finally:
        F.dropout = dropout
    model_engine.destroy()
    return seen


_ORDER = [(at, kind) for at in ("forward", "again") for kind in ("cut", "whole")]


def test_masks_are_equal_on_whole_activations_and_apart_on_cut_ones(ranks):
    first, second = ranks(2).run(masks, timeout=240)
    for name, mask in first.items():
        assert torch.equal(mask, second[name]) == ("whole" in name), name
        assert 0.2 < mask.float().mean() < 0.8
    for seen in (first, second):
        assert not torch.equal(seen["first cut"], seen["second cut"])
        assert not torch.equal(seen["first cut"], seen["first next cut"])
        assert torch.equal(seen["forward cut"], seen["again cut"])
        assert torch.equal(seen["forward whole"], seen["again whole"])


# --- losses --------------------------------------------------------------------------------------------------


def losses_outside() -> dict[str, Any]:
    """The logits come out cut; the loss is computed outside, with `cross_entropy` or by hand from joined logits."""
    seen: dict[str, Any] = {}
    joins: list[str] = []
    join = cut_logits.CutLogits.join

    def noting(self: Any) -> Tensor:
        joins.append("")
        return join(self)

    cut_logits.CutLogits.join = noting  # type: ignore[method-assign]
    try:
        for kind in ("cross entropy", "sum", "by hand"):
            model_engine = start(2, 1)
            joins.clear()
            mesh = model_engine.mesh
            for step in range(2):
                batch = part(batch_of(step), mesh.dp_rank, mesh.dp_size)
                logits = model_engine(batch["input_ids"])
                labels = batch["labels"]
                if kind == "by hand":
                    loss = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).mean()
                elif kind == "sum":
                    total = F.cross_entropy(logits.view(-1, VOCABULARY_SIZE), labels.view(-1), reduction="sum")
                    loss = LossSum(total, labels.numel())
                else:
                    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                model_engine.backward(loss)
                model_engine.step()
            seen[f"joins {kind}"] = len(joins)
            seen[kind] = finish(model_engine, Result())
    finally:
        cut_logits.CutLogits.join = join  # type: ignore[method-assign]
    return seen


def test_losses_outside_the_model(ranks):
    expected = in_one_process(2, lambda parameters: torch.optim.AdamW(parameters, **ADAMW))
    for seen in ranks(4).run(losses_outside, timeout=240):
        for kind, num_joins in (("cross entropy", 0), ("sum", 0), ("by hand", 2)):
            assert seen[f"joins {kind}"] == num_joins
            for name, value in expected.parameters.items():
                assert (seen[kind].parameters[name] - value).abs().max() <= 1e-5, (kind, name)


def collectives_of_a_step() -> list[str]:
    """The names of the tp axis' collectives in a forward and a backward."""
    model_engine = start(2, 0)
    names: list[str] = []
    forward: Any = model_engine.module.forward
    region = next(cell.cell_contents for cell in forward.__closure__ if hasattr(cell.cell_contents, "group"))
    ticket = region.group.ticket

    def noting(what: str) -> Any:
        names.append(what)
        return ticket(what)

    region.group.ticket = noting
    go_on(model_engine, 1)
    model_engine.destroy()
    return names


def test_each_pair_of_layers_sums_once_in_forward_and_once_in_backward(ranks):
    for names in ranks(2).run(collectives_of_a_step, timeout=240):
        assert names == [
            "summing the output of embedding",
            "summing the output of blocks.0.down",
            "summing the output of blocks.1.down",
            "summing the vocabulary's exponentials",
            "summing gradients before head",
            "summing gradients before blocks.1.gate_up",
            "summing gradients before blocks.0.gate_up",
        ]
