"""Random-LTD equals a run that selects tokens, positions and masks by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import engine
from tests.parity.compare import assert_equal_to
from tests.parity.runs import Pieces, config_of, step_through, train
from tests.parity.token_drop_oracle import GptOracle, Now, bert_call, gpt2_call, install, llama_call
from tests.parity.toy import Result, reference_run, toy_model

WORLD = 2
STEPS = 5
SMALL = {"num_blocks": 4, "width": 32, "num_heads": 2}
KEPT = [8, 16, 24, 32, 32]
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def token_drop(low: int = 8, high: int = 32, steps: int = 3, **more: Any) -> dict[str, Any]:
    schedule = {"min_value": low, "max_value": high, "schedule_config": {"require_steps": steps, "seq_per_step": 8}}
    section = {"enabled": True, "random_ltd_schedule": schedule, **more}
    return {"data_efficiency": {"data_routing": {"random_ltd": section}}}


CASES = [(stage, precision) for stage in (0, 3) for precision in ("fp32", "bf16")]


def run_cases() -> list[tuple[Result, Pieces, dict[str, Any]]]:
    found = []
    for stage, precision in CASES:
        optimizer = {} if precision == "fp32" else {"optimizer": SGD}
        config = config_of(stage=stage, precision=precision, accumulation=2, **token_drop(), **optimizer)
        found.append(train(config, STEPS, SMALL))
    return found


def test_against_the_oracle(ranks: Any) -> None:
    by_rank = ranks(WORLD).run(run_cases, timeout=240.0)
    expected = {}
    for precision in ("fp32", "bf16"):
        optimizer: dict[str, Any] = {}
        if precision != "fp32":
            optimizer = {"optimizer": SGD["type"], "params": SGD["params"]}
        oracle = GptOracle(toy_model(**SMALL), Now(KEPT))
        expected[precision] = reference_run(
            num_parts=4, steps=STEPS, precision=precision, model=oracle, shown=oracle.shown, **optimizer
        )
    for number, (stage, precision) in enumerate(CASES):
        tolerance = {"losses": 1e-3, "parameters": 2e-3, "norms": 1e-2} if precision != "fp32" else {}
        try:
            assert_equal_to(expected[precision], [rank[number] for rank in by_rank], **tolerance)
        except AssertionError as error:
            raise AssertionError(f"stage {stage}, {precision}: {error}") from error


NEUTRAL = {"as many as there are": token_drop(low=32), "more than there are": token_drop(low=64, high=128)}


def run_neutral() -> dict[tuple[int, str], tuple[Result, Pieces]]:
    found = {}
    for stage in (0, 3):
        for name, section in {"plain": {}, **NEUTRAL}.items():
            model = {**SMALL, "dropout": 0.1}
            result, pieces, _ = train(config_of(stage=stage, accumulation=2, **section), 3, model)
            found[stage, name] = result, pieces
    return found


def test_keeping_all_tokens_changes_no_bit(ranks: Any) -> None:
    for found in ranks(WORLD).run(run_neutral, timeout=120.0):
        for stage in (0, 3):
            plain, pieces = found[stage, "plain"]
            for name in NEUTRAL:
                result, own = found[stage, name]
                assert result == plain, name
                assert all(torch.equal(a[3], b[3]) for a, b in zip(own, pieces, strict=True)), name


# --- Hugging Face ------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, BATCH = 64, 16, 3
HF_KEPT = [4, 8, 12]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


def gpt2(**more: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **TOKENS, **more))


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, **more))


def bert(**more: Any) -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT, **more))


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], Any], Any, bool]] = {
    "gpt2": (gpt2, lambda model: model.transformer.h, gpt2_call, True),
    "llama": (llama, lambda model: model.model.layers, llama_call, True),
    "bert": (bert, lambda model: model.bert.encoder.layer, bert_call, False),
}


def made(make: Callable[..., nn.Module], **more: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(**more)


def sentences(step: int, padded: bool, side: str = "right") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        mask = torch.ones_like(ids)
        for sample in range(1, BATCH):
            mask[sample, LENGTH - 3 * sample :] = 0
        batch["attention_mask"] = mask if side == "right" else mask.flip(1)
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def hf_config(micro: int = BATCH, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.0,
        "optimizer": SGD,
        "seed": 0,
        **token_drop(low=4, high=16, steps=3, random_ltd_schedule=hf_schedule()),
        **more,
    }


def hf_schedule() -> dict[str, Any]:
    return {"min_value": 4, "max_value": 16, "schedule_config": {"require_steps": 3, "seq_per_step": 4}}


def run_engine(model: nn.Module, padded: bool, steps: int = 3, **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    model_engine, *_ = engine.initialize(model=model, config=hf_config(**config))
    losses = []
    for step in range(steps):
        loss = model_engine(**sentences(step, padded)).loss
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model_engine.destroy()
    return losses, parameters


def run_oracle(name: str, padded: bool) -> tuple[list[float], dict[str, Tensor]]:
    make, blocks, call, is_causal = MODELS[name]
    model, now = made(make, attn_implementation="eager"), Now(HF_KEPT)
    model.config.use_cache = False
    install(blocks(model), call, is_causal, now)
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    losses = []
    for step in range(3):
        batch = sentences(step, padded)
        now.step, now.padding = step, batch.get("attention_mask")
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name: str, padded: bool) -> None:
    losses, parameters = run_oracle(name, padded)
    for attention in ("sdpa", "eager"):
        found, own = run_engine(made(MODELS[name][0], attn_implementation=attention), padded)
        assert found == pytest.approx(losses, abs=1e-5)
        for key, value in parameters.items():
            torch.testing.assert_close(own[key], value, rtol=0, atol=1e-5, msg=f"{name}, {attention}: {key}")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activations_computed_again(use_reentrant: bool) -> None:
    plain = run_engine(made(llama, attention_dropout=0.1), True)
    model = made(llama, attention_dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    again = run_engine(model, True)
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][name], value) for name, value in plain[1].items())


def test_several_forwards_before_their_backwards_computed_again() -> None:
    """A forward that is computed again keeps the tokens that it kept first."""

    def run(recompute: bool) -> dict[str, Tensor]:
        model = made(llama)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model_engine, *_ = engine.initialize(model=model, config=hf_config())
        total = sum(model_engine(**sentences(number, False)).loss for number in range(3))
        model_engine.backward(total)
        model_engine.step()
        model_engine.destroy()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    plain, again = run(False), run(True)
    assert all(torch.equal(again[name], value) for name, value in plain.items())


# --- the ledger, a resumed run, precision --------------------------------------------------------------------------


def run_ledger() -> list[tuple[int, int, int, float]]:
    config = config_of(stage=3, accumulation=2, **token_drop(random_ltd_layer_id=[1, 3]))
    model_engine, *_ = engine.initialize(model=toy_model(**{**SMALL, "num_blocks": 5}), config=config)
    found = []
    for step in range(STEPS):
        step_through(model_engine, 1, step)
        with torch.no_grad():
            model_engine(torch.zeros(1, 32, dtype=torch.int64))
        report = model_engine.last_report
        kept = report.scalars["Train/random_ltd_kept_tokens"]
        found.append((report.tokens_seen, report.tokens_computed, report.layers_skipped, kept))
    model_engine.destroy()
    return found


def test_the_ledger_recounted(ranks: Any) -> None:
    seen, through_layers, expected = 0, 0, []
    for step in range(STEPS):
        for _sample in range(24):
            seen += 32
            for layer in range(5):
                through_layers += KEPT[step] if layer in (1, 3) else 32
        expected.append((seen, seen - (5 * seen - through_layers) // 5, 0, float(KEPT[step])))
    for found in ranks(WORLD).run(run_ledger, timeout=120.0):
        assert found == expected


def run_resumed(folder: str) -> bool:
    config = config_of(stage=3, accumulation=2, **token_drop(steps=6))
    whole, *_ = engine.initialize(model=toy_model(**SMALL), config=config)
    step_through(whole, 3)
    whole.save_checkpoint(folder)
    losses = step_through(whole, 3, 3).losses
    counted = whole.tokens_computed
    whole.destroy()
    resumed, *_ = engine.initialize(model=toy_model(seed=5, **SMALL), config=config)
    resumed.load_checkpoint(folder)
    same = step_through(resumed, 3, 3).losses == losses and resumed.tokens_computed == counted
    resumed.destroy()
    return same


def test_a_resumed_run_keeps_the_same_tokens(ranks: Any, tmp_path: Path) -> None:
    assert all(ranks(WORLD).run(run_resumed, str(tmp_path), timeout=120.0))


def test_fp16_and_a_curriculum_beside_it() -> None:
    curriculum = {
        "enabled": True, "min_difficulty": 16, "max_difficulty": 32, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
    }  # fmt: skip
    fp16 = {"enabled": True, "initial_scale_power": 8}
    section = token_drop(low=16, steps=4)
    config = config_of(stage=0, accumulation=2, curriculum_learning=curriculum, fp16=fp16, optimizer=SGD, **section)
    model_engine, *_ = engine.initialize(model=toy_model(**SMALL), config=config)
    losses = step_through(model_engine, 5).losses
    assert all(torch.isfinite(torch.tensor(losses)))
    # lengths 16, 24, 24, 32, 32 of which 16, 16, 24, 24, 32 are kept by two of four layers
    saved = 24 * (0 + 8 + 0 + 8 + 0) * 2
    assert model_engine.tokens_computed == model_engine.global_tokens - saved // 4
    model_engine.destroy()
