"""What a block may drop tokens on, what follows them, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.contracts import EngineError, SavedWork
from engine.model.token_drop import TokenDrop, chosen_layers
from engine.model.token_layout import Follow, Tokens, candidates, keep, put_rows, take_rows
from engine.plan.plan import DifficultySchedule, TokenDropPlan
from engine.random import kept_positions

WIDTH, LENGTH, VOCABULARY = 16, 16, 32


class Attention(nn.Module):
    """A pre-norm block with one head; ``scores`` may change what attends to what."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def bias(self, length: int) -> Tensor | float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / WIDTH**0.5 + self.bias(x.shape[-2])
        if self.causal:
            behind = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).tril()
            scores = scores.masked_fill(~behind, -torch.inf)
        return x + self.out(scores.softmax(dim=-1) @ value)


class Alibi(Attention):
    def bias(self, length: int) -> Tensor:
        positions = torch.arange(length)
        return -0.25 * (positions.unsqueeze(1) - positions).abs()


class RelativeBias(Attention):
    """Begins at zero, where it changes nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(2 * LENGTH, 1))

    def bias(self, length: int) -> Tensor:
        positions = torch.arange(length)
        return self.table[positions.unsqueeze(1) - positions + LENGTH].squeeze(-1)


class OwnRotary(Attention):
    """Counts its positions by itself."""

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) / 10.0 ** torch.arange(WIDTH // 2)
        first, second = x.chunk(2, dim=-1)
        turned = (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos())
        return super().forward(torch.cat(turned, dim=-1).to(x.dtype))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


class TokenMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class Pooling(nn.Module):
    """Halves the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, ::2] if x.shape[1] > 1 else x


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, : x.shape[1]].flatten())


class Taught(Stack):
    """Runs itself first, in ``around``; its blocks note whether gradients are on and how many tokens they get."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__(Attention)
        self.around, self.is_teacher = around, False
        self.seen: list[tuple[bool, int]] = []
        self.blocks[1].norm.register_forward_pre_hook(  # type: ignore[union-attr, operator]
            lambda module, args: self.seen.append((torch.is_grad_enabled(), args[0].shape[1]))
        )

    def forward(self, ids: Tensor) -> Tensor:
        if not self.is_teacher:
            self.is_teacher = True
            with self.around():
                self(ids)
            self.is_teacher = False
        return super().forward(ids)


class Vectors(nn.Module):
    """A stack without a dimension of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config(low: int = 8, high: int = 16, **more: Any) -> dict[str, Any]:
    schedule = {"min_value": low, "max_value": high, "schedule_config": {"require_steps": 4, "seq_per_step": 8}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, "random_ltd_schedule": schedule, **more}}},
    }


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, **more: Any) -> engine.Engine:
    model_engine, *_ = engine.initialize(model=model, config=config(**more))
    try:
        model_engine.backward(model_engine(ids()))
        model_engine.step()
    except EngineError:
        model_engine.destroy()
        raise
    return model_engine


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ALiBi": (lambda: Stack(Alibi), r"block blocks\.1 \(Alibi\) cannot drop tokens: .*other values than the whole"),
    "relative bias": (lambda: Stack(RelativeBias), r"block blocks\.1 \(RelativeBias\) cannot drop tokens"),
    "rotary of its own": (lambda: Stack(OwnRotary), r"block blocks\.1 \(OwnRotary\) cannot drop tokens"),
    "convolution": (lambda: Stack(Convolution), r"\(Convolution\) .*no softmax over 16 x 16 scores was seen"),
    "recurrence": (lambda: Stack(Recurrence), r"block blocks\.1 \(Recurrence\) cannot drop tokens"),
    "mixing": (lambda: Stack(TokenMixing), r"block blocks\.1 \(TokenMixing\) cannot drop tokens: on some .* it fails"),
    "pooling": (lambda: Stack(Pooling), r"block blocks\.1 \(Pooling\) .*changes the shape of its hidden state"),
    "no tokens": (Vectors, r"block blocks\.1 \(Linear\) cannot drop tokens: .* without a dimension of tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_cannot_drop_tokens_are_refused(name: str) -> None:
    make, words = REFUSED[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(EngineError, match=words):
        step(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def run_refused(rank_with_mask: int) -> str:
    rank = torch.distributed.get_rank()
    model = Stack(Alibi if rank == rank_with_mask else Attention)
    try:
        step(model).destroy()
    except EngineError as error:
        return str(error)
    return ""


def test_what_one_rank_finds_ends_the_step_on_all(ranks: Any) -> None:
    first, second = ranks(2).run(run_refused, 1, timeout=60.0)
    assert "(Alibi) cannot drop tokens" in first
    assert first == second


def test_a_forward_inside_a_training_forward_drops_where_it_trains() -> None:
    for around, of_teacher in ((torch.no_grad, (False, LENGTH)), (torch.enable_grad, (True, 8))):
        model = Taught(around)
        model_engine = step(model)  # the first forward proves the blocks
        model.seen.clear()
        model_engine(ids())
        assert model.seen == [of_teacher, (True, 8)]
        model_engine.destroy()


@pytest.mark.parametrize("causal", [True, False])
def test_a_model_of_plain_attention_is_not_refused(causal: bool) -> None:
    model_engine = step(Stack(lambda: Attention(causal)))
    assert model_engine.tokens_computed == 2 * LENGTH - 2 * 2 * 8 // 4
    model_engine.destroy()


def test_a_fixed_number_of_blocks_is_asked_for() -> None:
    for changes, words in (
        ({"total_layer_num": 24}, r"total_layer_num is 24; the model has 4 blocks"),
        ({"random_ltd_layer_id": [1, 4]}, r"names 4; the model's blocks are 0 to 3"),
        ({"random_ltd_layer_num": 1}, r"random_ltd_layer_num is 1, .* random_ltd_layer_id says which"),
    ):
        with pytest.raises(EngineError, match=words):
            engine.initialize(model=Stack(Attention), config=config(**changes))
    with pytest.raises(EngineError, match="no repeated blocks"):
        engine.initialize(model=nn.Linear(4, 4), config=config())
    with pytest.raises(EngineError, match="has 2 blocks, and the first and the last keep all"):
        engine.initialize(model=Stack(Attention, 2), config=config())


def test_layers_that_are_named_drop_tokens() -> None:
    plan = TokenDropPlan(DifficultySchedule("fixed_linear", 8, 16))
    assert chosen_layers(plan, 5) == (1, 2, 3)
    assert chosen_layers(TokenDropPlan(plan.schedule, layers=(0, 4)), 5) == (0, 4)
    model_engine = step(Stack(Attention), random_ltd_layer_id=[0])
    assert model_engine.tokens_computed == 2 * LENGTH - 2 * 8 // 4
    model_engine.destroy()


# --- what dropped tokens see ---------------------------------------------------------------------------------------


class Recorded(Stack):
    """Keeps the hidden states between its blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        self.states = [self.embedding(ids)]
        for block in self.blocks:
            self.states.append(block(self.states[-1]))
        return self.head(self.states[-1])


def test_dropped_rows_pass_untouched_and_layers_draw_for_themselves() -> None:
    model = Recorded(Attention)
    model_engine, *_ = engine.initialize(model=model, config=config())
    model_engine(ids())
    changed = [(after != before).any(-1) for before, after in zip(model.states, model.states[1:], strict=False)]
    assert [mask.sum(-1).tolist() for mask in changed] == [[16, 16], [8, 8], [8, 8], [16, 16]]
    drawn = {tuple(row.tolist()) for mask in changed[1:3] for row in mask}
    assert len(drawn) == 4  # another set for each layer and sample
    model_engine.eval()
    model_engine(ids())
    assert bool(torch.stack([a != b for a, b in zip(model.states, model.states[1:], strict=False)]).any(-1).all())
    model_engine.destroy()


def test_no_token_sees_a_later_one() -> None:
    model = Recorded(Attention)
    model_engine, *_ = engine.initialize(model=model, config=config())
    batch = ids()
    plain = model_engine(batch).detach()
    model_engine.flush(discard=True)  # the same step again: the same tokens are kept
    model_engine._window.num_forwards = 0
    batch[:, 9] = (batch[:, 9] + 1) % VOCABULARY
    other = model_engine(batch).detach()
    assert torch.equal(plain[:, :9], other[:, :9])
    assert not torch.equal(plain[:, 9], other[:, 9])
    model_engine.destroy()


def test_gradients_are_those_of_naive_indexing() -> None:
    hidden = torch.randn(3, 7, 4, requires_grad=True)
    positions = torch.tensor([[0, 3, 6], [1, 2, 3], [2, 4, 5]])
    weight = torch.randn(3, 7, 4)
    tokens = Tokens(3, 7)
    out = put_rows(hidden, take_rows(hidden, positions, tokens).sin(), positions, tokens)
    (gradient,) = torch.autograd.grad((out * weight).sum(), hidden)
    rows = [hidden[sample, at].sin() if at in positions[sample] else hidden[sample, at]
            for sample in range(3) for at in range(7)]  # fmt: skip
    naive = torch.stack(rows).view(3, 7, 4)
    assert torch.equal(out, naive)
    assert torch.equal(gradient, torch.autograd.grad((naive * weight).sum(), hidden)[0])
    swapped = hidden.detach().transpose(0, 1)
    other = Tokens.of(swapped, "seq_batch_dim")
    assert torch.equal(take_rows(swapped, positions, other), take_rows(hidden, positions, tokens).transpose(0, 1))
    assert torch.equal(put_rows(swapped, take_rows(swapped, positions, other), positions, other), swapped)


def test_positions_are_subsets_in_order_all_equally_likely() -> None:
    device = torch.device("cpu")
    found = kept_positions(range(6000), 5, 2, device)
    assert bool((found.diff(dim=1) > 0).all())
    pairs = torch.bincount(found[:, 0] * 5 + found[:, 1], minlength=25)
    counts = pairs[pairs > 0]
    assert len(counts) == 10
    assert float((counts - 600).abs().max()) < 5 * (6000 * 0.1 * 0.9) ** 0.5
    assert kept_positions([7, 2**63 - 1], 1, 1, device).tolist() == [[0], [0]]


# --- what follows the tokens ---------------------------------------------------------------------------------------

POSITIONS = torch.tensor([[0, 2], [1, 3]])
TOKENS = Tokens(2, 4)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("attention_mask", (2, 1, 4, 4), Follow(pairs=True, batch_dim=0)),
        ("attention_mask", (1, 1, 4, 4), Follow(pairs=True, batch_dim=0)),
        ("attention_mask", (2, 1, 1, 4), Follow(3, batch_dim=0)),
        ("attention_mask", (2, 4), Follow(1, batch_dim=0)),
        ("mask", (4, 4), Follow(pairs=True)),
        ("cos", (1, 4, 8), Follow(1, batch_dim=0)),
        ("position_ids", (1, 4), Follow(1, batch_dim=0)),
        ("freqs", (4, 8), Follow(0)),
        ("alibi", (6, 1, 4), Follow(2, batch_dim=0)),
        ("condition", (2, 8), Follow()),
        ("encoder_hidden_states", (2, 4, 8), Follow()),
    ],
)
def test_the_likeliest_reading_of_an_argument(name: str, shape: tuple[int, ...], expected: Follow) -> None:
    assert candidates((name,), torch.zeros(shape), TOKENS, None)[0] == expected


def test_arguments_follow_their_tokens() -> None:
    mask = torch.randn(2, 3, 4, 4)
    kept = keep(mask, Follow(pairs=True, batch_dim=0), POSITIONS)
    for sample in range(2):
        rows = POSITIONS[sample]
        assert torch.equal(kept[sample], mask[sample][:, rows][:, :, rows])
    shared = torch.randn(1, 4, 5)
    kept = keep(shared, Follow(1, batch_dim=0), POSITIONS)
    assert torch.equal(kept, torch.stack([shared[0, POSITIONS[0]], shared[0, POSITIONS[1]]]))
    heads = torch.randn(6, 1, 4)  # three heads of each of two samples
    kept = keep(heads, Follow(2, batch_dim=0), POSITIONS)
    assert torch.equal(kept[2], heads[2][:, POSITIONS[0]])
    assert torch.equal(kept[3], heads[3][:, POSITIONS[1]])


def test_the_schedule_and_its_layer_tokens() -> None:
    def kept(schedule: DifficultySchedule, applied: int) -> int:
        return TokenDrop(TokenDropPlan(schedule), 0, (1, 1, 0), SavedWork()).num_kept(applied)

    ours = DifficultySchedule("fixed_linear", 128, 2048, total_steps=200_000, step_size=16)
    assert [kept(ours, t) for t in (0, 1, 1666, 1667, 100_000, 199_999, 200_000)] == [
        128, 128, 128, 144, 1088, 2032, 2048,
    ]  # fmt: skip
    theirs = DifficultySchedule("fixed_linear", 100, 1000, total_steps=100, step_size=16, deepspeed=True)
    assert [kept(theirs, t) for t in (0, 50, 100, 101, 102)] == [96, 544, 992, 1000, 1000]
    # one sequence through 24 layers, 22 of which keep 128 of 2048 tokens
    saved = SavedWork()
    for _layer in range(22):
        saved.drop_tokens(2048 - 128)
    assert 24 * 2048 - saved.take()[1] == 6912


def test_a_copy_of_the_model_is_the_plain_model() -> None:
    model_engine = step(Stack(Attention))
    twin = copy.deepcopy(model_engine.module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert model_engine(ids()).item() != twin(ids()).item()
    assert twin.blocks[1].forward.__self__ is twin.blocks[1]
    forward = model_engine.module.blocks[1].forward
    model_engine.destroy()
    assert model_engine.module.blocks[1].forward != forward
