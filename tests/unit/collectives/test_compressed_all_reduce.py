"""The 1-bit all-reduce on gloo ranks: golden vectors, the exact invariant, and every variant against a slow oracle."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.collectives.compressed_all_reduce import CompressedAllReduce
from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.collectives.sign_bits import pack, subtract_signs, unpack
from tests.bench import packing
from tests.unit.collectives.compressed_oracle import SlowAllReduce, sign

GOLDEN = [
    ((9.669540, 3.466356), (5.528894, 4.710536), "+-+-+-+-+-+-+-+-"),
    ((11.778610, 4.730909), (6.798324, 6.449848), "-+-++-+-+-+-+-+-"),
    ((13.494937, 5.952413), (8.240505, 7.636327), "+-+--+------+---"),
]
"""Worker scales, server scales and signs of the result in three calls on the constant inputs of `golden_input`."""


def golden_input(rank: int) -> Tensor:
    k = torch.arange(16, dtype=torch.float32)
    return (-1.0) ** k * (k + 1) if rank == 0 else torch.where(k % 3 == 0, 1.0, -0.5 * k)


def values(rank: int, call: int, numel: int) -> Tensor:
    """What rank ``rank`` reduces in call ``call``: of very different sizes, as gradients are."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    sizes = torch.logspace(-3, 1, numel) if numel > 1 else torch.ones(1)
    return torch.randn(numel, generator=generator) * sizes


# --- signs and bits --------------------------------------------------------------------------------------------


def test_bits_are_numpys_little_endian_and_come_back():
    x = torch.cat([torch.tensor([0.0, -1e-30, 1e-30, -3.0, 2.0, -2.0, 0.0, 5.0]), torch.randn(8 * 125)])
    bits = torch.empty(x.numel() // 8, dtype=torch.uint8)
    pack(x, bits)
    assert bits.tolist() == numpy.packbits((x >= 0).numpy(), bitorder="little").tolist()
    back = torch.empty_like(x)
    unpack(bits, back)
    assert torch.equal(back, sign(x))
    unpack(bits, back, torch.tensor(0.25))
    assert torch.equal(back, 0.25 * sign(x))
    rest = x.clone()
    subtract_signs(rest, torch.tensor(0.25))
    assert torch.equal(rest, x - 0.25 * sign(x))


def test_torch_alone_packs_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    """The way of other devices, tried on the CPU."""
    x = torch.randn(8 * 999)
    expected, bits = (torch.empty(999, dtype=torch.uint8) for _ in range(2))
    pack(x, expected)

    class Elsewhere(Tensor):
        @property
        def device(self) -> Any:
            return torch.device("meta")

    pack(x.as_subclass(Elsewhere), bits)
    assert torch.equal(bits, expected)


# --- on ranks --------------------------------------------------------------------------------------------------


def reduce_on_rank(inputs: list[list[Tensor]], options: dict[str, Any]) -> dict[str, Any]:
    """Calls one after the other; ``inputs[call][rank]``. Checks the invariant of each call on the way."""
    ledger = Ledger()
    group = ShardGroup(dist.group.WORLD, "dp_replicate", ledger)
    numel = inputs[0][0].numel()
    reduce = CompressedAllReduce(numel, group, torch.device("cpu"), **options)
    results, worker_errors, server_errors, sent = [], [], [], []
    for xs in inputs:
        x = xs[group.rank].clone()
        reduce(x)
        results.append(x)
        worker_errors.append(reduce.worker_error.clone())
        server_errors.append(reduce.server_error.clone())
        sent.append(ledger.take()["dp_replicate"])
    return {"results": results, "worker": worker_errors, "server": server_errors, "sent": sent, "padded": reduce.padded}


def check_against_oracle(ranks: Any, world: int, numel: int, options: dict[str, Any], calls: int = 4) -> None:
    inputs = [[values(rank, call, numel) for rank in range(world)] for call in range(calls)]
    answers = ranks(world).run(reduce_on_rank, inputs, options)
    slow = SlowAllReduce(
        world,
        numel,
        options.get("segments"),
        options.get("mask"),
        options.get("scale") == "l1",
        options.get("counts_padding", False),
    )
    mask = options.get("mask", torch.ones(numel))
    before: Any = None
    for call in range(calls):
        expected = slow.call(inputs[call])
        for rank, answer in enumerate(answers):
            assert torch.equal(answer["results"][call], answers[0]["results"][call]), f"rank {rank} got other bits"
            torch.testing.assert_close(answer["worker"][call].double(), slow.errors[rank], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(answer["server"][call].double(), slow.server_errors[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answers[0]["results"][call].double(), expected, rtol=1e-4, atol=1e-5)
        # mean(x) + mean(e) + E before == result + mean(e) + E after
        state = [
            torch.stack([a["worker"][call] for a in answers]).double().mean(0)[:numel],
            torch.cat([a["server"][call] for a in answers]).double()[:numel],
        ]
        mean = torch.stack(inputs[call]).double().mean(0) * mask
        left = mean + (before[0] + before[1] if before else 0.0)
        right = answers[0]["results"][call].double() + state[0] + state[1]
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-5)
        before = state


def test_golden_vector(ranks):
    answers = ranks(2).run(reduce_on_rank, [[golden_input(0), golden_input(1)]] * 3, {})
    slow = SlowAllReduce(2, 16)
    for call, (worker, server, signs) in enumerate(GOLDEN):
        slow.call([golden_input(0), golden_input(1)])
        assert [s for (s,) in slow.worker_scales] == pytest.approx(worker, abs=1e-6)  # the oracle is right
        assert [s for (s,) in slow.server_scales] == pytest.approx(server, abs=1e-6)
        for answer in answers:
            result = answer["results"][call]
            assert "".join("+" if value > 0 else "-" for value in result) == signs
            assert result[:8].abs().tolist() == pytest.approx([server[0]] * 8, rel=1e-5)
            assert result[8:].abs().tolist() == pytest.approx([server[1]] * 8, rel=1e-5)
    first = answers[0]
    assert first["worker"][0][:4].tolist() == pytest.approx([-8.669540, 7.669540, -6.669540, 5.669540], abs=2e-5)
    assert first["server"][0][:4].tolist() == pytest.approx([1.039054, -1.039054, -2.427302, 2.427302], abs=2e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 17, 64, 1000])
def test_every_size_and_number_of_ranks(ranks, world, numel):
    check_against_oracle(ranks, world, numel, {})


@pytest.mark.slow
def test_eight_ranks(ranks):
    check_against_oracle(ranks, 8, 100, {})


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": "l1"},
        {"counts_padding": True},
        {"segments": [3, 40, 1, 56]},
        {"segments": [1, 2, 1]},
        {"segments": [1, 2, 1], "counts_padding": True},
        {"mask": (torch.arange(100) % 7 != 0).float()},
        {"segments": [50, 50], "mask": (torch.arange(100) < 50).float()},
    ],
    ids=[
        "l1",
        "counts_padding",
        "segments",
        "a rank of pads",
        "segments and padding",
        "mask",
        "a segment that is masked",
    ],
)
def test_variants(ranks, world, options):
    check_against_oracle(ranks, world, sum(options.get("segments", [100])), options)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_zero_stays_exactly_zero(ranks, world):
    for answer in ranks(world).run(reduce_on_rank, [[torch.zeros(17)] * world] * 3, {}):
        for tensor in (*answer["results"], *answer["worker"], *answer["server"]):
            assert not tensor.any()


@pytest.mark.parametrize(("world", "sent"), [(2, 131080), (4, 196632)])
def test_bytes_sent(ranks, world, sent):
    """2 (N-1)/N D/8 of signs and 8 (N-1) of scales, for D = 2**20."""
    numel = 2**20
    assert 2 * (world - 1) * numel // world // 8 + 8 * (world - 1) == sent
    inputs = [[torch.ones(numel)] * world]
    for answer in ranks(world).run(reduce_on_rank, inputs, {}):
        assert answer["sent"] == [sent]


def reduce_around(held: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A first call on everything, then one that leaves ``held`` alone."""
    group = ShardGroup(dist.group.WORLD, "dp_replicate", Ledger())
    reduce = CompressedAllReduce(50, group, torch.device("cpu"))
    reduce(values(group.rank, 0, 50))
    before = reduce.worker_error.clone(), reduce.server_error.clone()
    x = values(group.rank, 1, 50)
    reduce(x, held)
    return x, *before, reduce.worker_error, reduce.server_error


@pytest.mark.parametrize("world", [2, 3])
def test_held_ranges_are_left_alone(ranks, world):
    """As if they were not there: the rest is what a collective gives that does not count them."""
    held = [(5, 11), (20, 40)]
    left_out = torch.zeros(50, dtype=torch.bool)
    for a, b in held:
        left_out[a:b] = True
    answers = ranks(world).run(reduce_around, held)
    slow = SlowAllReduce(world, 50)
    slow.call([values(rank, 0, 50) for rank in range(world)])
    slow.counted[:50] &= ~left_out
    errors = [error.clone() for error in slow.errors]
    expected = slow.call([values(rank, 1, 50) for rank in range(world)])
    for rank, (x, worker, server, worker_after, server_after) in enumerate(answers):
        assert torch.equal(x[left_out], values(rank, 1, 50)[left_out])
        assert torch.equal(worker_after[:50][left_out], worker[:50][left_out])
        first = rank * server.numel()
        here = left_out[first : first + server.numel()]
        assert torch.equal(server_after[: here.numel()][here], server[: here.numel()][here])
        torch.testing.assert_close(x[~left_out].double(), expected[~left_out], rtol=1e-5, atol=1e-6)
        assert torch.equal(x[~left_out], answers[0][0][~left_out])
        assert errors[rank][:50][left_out].float().tolist() == pytest.approx(worker[:50][left_out].tolist(), abs=1e-5)


def several_at_once() -> list[Tensor]:
    """Three tensors of different sizes, all begun before the first is served."""
    group = ShardGroup(dist.group.WORLD, "dp_replicate", Ledger())
    tensors = [values(group.rank, size, size) for size in (100, 7, 33)]
    reduces = [CompressedAllReduce(x.numel(), group, torch.device("cpu")) for x in tensors]
    for reduce, x in zip(reduces, tensors, strict=True):
        reduce.begin(x)
    for reduce in reduces:
        reduce.serve()
    for reduce, x in zip(reduces, tensors, strict=True):
        reduce.finish(x)
    return tensors


def test_several_at_once(ranks):
    for answer in ranks(3).run(several_at_once):
        for x, size in zip(answer, (100, 7, 33), strict=True):
            expected = SlowAllReduce(3, size).call([values(rank, size, size) for rank in range(3)])
            torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


def test_one_rank_compresses_nothing():
    reduce = CompressedAllReduce(9, ShardGroup(None, "dp_replicate", Ledger()), torch.device("cpu"))
    x = values(0, 0, 9)
    reduce(x)
    assert torch.equal(x, values(0, 0, 9))


def test_the_error_of_one_call():
    """Relative squared error 2 (1 - |y|_1 / (sqrt(n) |y|_2)): 0.4042 of a Gaussian, 1.39 times a one-hot vector's norm;
    the mean absolute value as scale never makes it larger than the vector."""
    y = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double()
    one_hot = torch.zeros(1000, dtype=torch.float64)
    one_hot[3] = 1.0
    rms, l1 = SlowAllReduce(1, 200_000), SlowAllReduce(1, 200_000, l1=True)
    assert rms.compress(y, 0)[1].square().sum() / y.square().sum() == pytest.approx(0.4042, abs=3e-3)
    assert l1.compress(y, 0)[1].square().sum() / y.square().sum() == pytest.approx(0.363, abs=3e-3)
    assert SlowAllReduce(1, 1000).compress(one_hot, 0)[1].norm() == pytest.approx(1.39, abs=0.01)
    assert SlowAllReduce(1, 1000, l1=True).compress(one_hot, 0)[1].norm() < 1.0


def test_every_way_of_the_packing_bench_gives_the_same():
    assert len(packing.measure(packing.CACHED * 2)) == len(packing.PACK) + len(packing.UNPACK)
