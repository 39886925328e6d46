"""Runs on slices of sequences: models, batches and faults, for the engine and for one process of plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import engine
from tests.parity.runs import Pieces, pieces_of
from tests.parity.toy import SEQUENCE_LENGTH, VOCABULARY_SIZE, Result, part, reference_run, toy_batch, toy_model

SPLITS = {
    "sp2": {"sequence_parallel_size": 2},
    "cp2": {"parallel": {"context_parallel": 2}},
    "dp2-sp2": {"sequence_parallel_size": 2},
    "dp2-cp2": {"parallel": {"context_parallel": 2}},
    "sp2-cp2": {"sequence_parallel_size": 2, "parallel": {"context_parallel": 2}},
}
DP = {"sp2": 1, "cp2": 1, "dp2-sp2": 2, "dp2-cp2": 2, "sp2-cp2": 1}
WORLD = {"sp2": 2, "cp2": 2, "dp2-sp2": 4, "dp2-cp2": 4, "sp2-cp2": 4}


def model_of(kind: str, **changes: Any) -> nn.Module:
    if kind == "toy":
        return toy_model(**changes)
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "llama":
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, **changes)
            return transformers.LlamaForCausalLM(config)
        if kind == "mistral":
            config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=5, **changes)
            return transformers.MistralForCausalLM(config)
        if kind == "gpt2":
            gpt2 = transformers.GPT2Config(
                vocab_size=VOCABULARY_SIZE, n_positions=64, n_embd=32, n_layer=2, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(gpt2)
        assert kind == "bert"
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **dropouts))


def shown(case: str, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """``plain``; ``masked``: labels that count unevenly over samples and slices, one slice without any; ``padded``: as
    well with padding that the attention mask tells of; ``packed``: two documents in each sequence, by positions."""
    if case == "plain":
        return batch
    batch = dict(batch)
    size = batch["labels"].shape[0]
    if case == "packed":
        first = 12
        places = torch.arange(SEQUENCE_LENGTH)
        batch["position_ids"] = torch.where(places < first, places, places - first).repeat(size, 1)
        return batch
    generator = torch.Generator().manual_seed(step)
    labels = batch["labels"].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[: size // 2, : SEQUENCE_LENGTH // 2] = -100
    labels[:, -6:] = -100
    if case == "padded":
        mask = torch.ones_like(labels)
        mask[:, -5:] = 0
        mask[::2, -9:] = 0
        mask[1::2, :2] = 0
        batch["attention_mask"] = mask
        labels[mask == 0] = -100
    batch["labels"] = labels
    return batch


def one_process(kind: str, case: str = "plain", **more: Any) -> Result:
    model = model_of(kind)
    if kind != "toy":
        model.config.use_cache = False  # with a cache transformers does not tell packed documents apart
    return reference_run(model=model, shown=lambda batch, step: shown(case, batch, step), **more)


def train_slices(
    kind: str,
    config: dict[str, Any],
    case: str = "plain",
    steps: int = 3,
    fault: str | None = None,
    prepare: str | None = None,
) -> tuple[Result, Pieces, dict[str, Any]]:
    """What a rank sees of a run on its slices. ``prepare``: something done to the model before ("checkpointing")."""
    model = model_of(kind)
    if prepare == "checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    with planted(fault):
        model_engine, *_ = engine.initialize(model=model, config=config)
        result = Result()
        accumulation, mesh = model_engine.gradient_accumulation_steps(), model_engine.mesh
        for step in range(steps):
            for micro in range(accumulation):
                index = micro * mesh.dp_size + mesh.dp_rank
                batch = shown(case, part(toy_batch(step), index, accumulation * mesh.dp_size), step)
                loss = model_engine(**batch)
                model_engine.backward(getattr(loss, "loss", loss))
                model_engine.step()
            report = model_engine.last_report
            assert report is not None
            assert report.loss is not None
            result.losses.append(report.loss)
            result.norms.append(report.grad_norm or float("nan"))
        facts = {
            "tokens": model_engine.global_tokens,
            "samples": model_engine.global_samples,
            "bytes": model_engine.ledger.operations(),
            "elements": sum(p.numel() for _, _, _, p in pieces_of(model_engine)),
        }
        pieces = pieces_of(model_engine)
        model_engine.destroy()
    return result, pieces, facts


# --- faults ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A mistake that an engine which cuts sequences can make."""
    if fault is None:
        yield
        return
    with FAULTS[fault]():
        yield


@contextlib.contextmanager
def _without_proof() -> Iterator[None]:
    """The comparison of a few tokens before the first step would refuse most of these."""
    from engine.model.sequence_parallel.proof import Proof

    with _replaced(Proof, "run", lambda self, model, batch, shape: setattr(self, "is_done", True)):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def positions_not_shifted() -> Iterator[None]:
    from engine.model.sequence_parallel.slices import SequenceSlices

    prepared = SequenceSlices._prepared

    def from_zero(self: Any, *args: Any) -> Any:
        batch, dimensions = prepared(self, *args)
        own = batch["position_ids"].shape[1] // self.layout.num_slices
        batch["position_ids"] = torch.arange(own).repeat(self.layout.num_slices)[None]
        return batch, dimensions

    with _without_proof(), _replaced(SequenceSlices, "_prepared", from_zero):
        yield


@contextlib.contextmanager
def border_label_lost() -> Iterator[None]:
    from engine.model.sequence_parallel.slices import SequenceSlices

    prepared = SequenceSlices._prepared

    def shifted_in_slices(self: Any, *args: Any) -> Any:
        batch, dimensions = prepared(self, *args)
        for name in ("shift_labels", "labels"):
            if name in batch:
                labels = batch[name].clone()
                labels[:, labels.shape[1] // self.layout.num_slices - 1] = -100
                batch[name] = labels
                break
        return batch, dimensions

    with _without_proof(), _replaced(SequenceSlices, "_prepared", shifted_in_slices):
        yield


@contextlib.contextmanager
def gradients_not_summed_over_slices() -> Iterator[None]:
    from engine.model.sequence_parallel import losses

    # each rank takes what its slice adds for the mean over all: a divisor too many
    backward = losses._SumOverSlices.backward

    def divided(ctx: Any, *gradients: Tensor) -> Any:
        return backward(ctx, *(gradient / 2 for gradient in gradients))

    with _without_proof(), _replaced(losses._SumOverSlices, "backward", staticmethod(divided)):
        yield


@contextlib.contextmanager
def slices_reduced_alone() -> Iterator[None]:
    """No reduction over cp and sp."""
    from engine.collectives.shards import ShardGroup

    def wrong(self: Any, flat: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _NoWork()

    with _without_proof(), _replaced(ShardGroup, "reduce_scatter", wrong):
        yield


class _NoWork:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def equal_shares_of_uneven_slices() -> Iterator[None]:
    from engine.model.sequence_parallel import slices

    with _without_proof(), _replaced(slices, "share_of", lambda labels, own, num_slices: 1.0 / num_slices):
        yield


@contextlib.contextmanager
def causal_within_slices_only() -> Iterator[None]:
    from engine.model.sequence_parallel.attention import SlicedAttention, attend_whole

    def local(self: Any, query: Tensor, key: Tensor, value: Tensor, visibility: Any, *rest: Any) -> Tensor:
        return attend_whole(query, key, value, is_causal=visibility.is_causal, enable_gqa=True)

    with _without_proof(), _replaced(SlicedAttention, "__call__", local):
        yield


@contextlib.contextmanager
def heads_of_another_rank() -> Iterator[None]:
    """What comes back from the exchange stands one head off."""
    from engine.model.sequence_parallel import attention

    back = attention.gather_heads

    def turned(output: Tensor, group: Any) -> Tensor:
        return back(output, group).roll(1, dims=1)

    with _without_proof(), _replaced(attention, "gather_heads", turned):
        yield


@contextlib.contextmanager
def far_blocks_left_out() -> Iterator[None]:
    """A ring in which a rank's queries meet its own keys alone."""
    from engine.model.sequence_parallel.ring import _Blocks

    with_keys_of = _Blocks.with_keys_of

    def near(self: Any, source: int) -> Any:
        return with_keys_of(self, source) if source == self.layout.cp_rank else iter(())

    with _without_proof(), _replaced(_Blocks, "with_keys_of", near):
        yield


SPLITS_OF = {"heads_of_another_rank": ("sp2",), "far_blocks_left_out": ("cp2",)}
"""Where a fault can be planted; not named: under both."""

FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    plant.__name__: plant
    for plant in (
        positions_not_shifted,
        border_label_lost,
        gradients_not_summed_over_slices,
        slices_reduced_alone,
        equal_shares_of_uneven_slices,
        causal_within_slices_only,
        heads_of_another_rank,
        far_blocks_left_out,
    )
}
