"""Exchanges between gloo ranks against sums taken by hand, evenly cut and not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine.collectives.agreement import Agreement
from engine.collectives.fsdp import AllGather, ReduceScatter
from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.collectives.stall import watch
from engine.contracts import EngineError

EVEN = {2: [0, 4, 8], 3: [0, 3, 6, 9]}
UNEVEN = {2: [0, 7, 8], 3: [0, 0, 5, 9]}


def values(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) * (rank + 1) + rank


def exchange(bounds: list[int]) -> tuple[list[float], list[float], dict[str, int]]:
    """This rank's shard of the sum, then the whole after an all-gather of it."""
    ledger = Ledger()
    group = ShardGroup(dist.group.WORLD, "dp_shard", ledger)
    flat = values(group.rank, bounds[-1])
    for _ in range(2):  # the second round uses scratch that the first has given back
        flat = values(group.rank, bounds[-1])
        group.reduce_scatter(flat, bounds).wait()
    own = flat[bounds[group.rank] : bounds[group.rank + 1]].clone()
    flat.fill_(-1.0)
    flat[bounds[group.rank] : bounds[group.rank + 1]] = own
    group.all_gather(flat, bounds).wait()
    return own.tolist(), flat.tolist(), ledger.take()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bounds", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_reduce_scatter_then_all_gather(ranks, world, bounds):
    cut = bounds[world]
    expected = sum(values(rank, cut[-1]) for rank in range(world)).tolist()
    for rank, (own, whole, sent) in enumerate(ranks(world).run(exchange, cut)):
        assert own == expected[cut[rank] : cut[rank + 1]]
        assert whole == expected
        shard = cut[rank + 1] - cut[rank]
        assert sent == {"dp_shard": 4 * (2 * (cut[-1] - shard) + shard * (world - 1))}


def one_rank_alone() -> tuple[list[float], dict[str, int]]:
    ledger = Ledger()
    group = ShardGroup(None, "dp_shard", ledger)
    flat = values(0, 4)
    group.reduce_scatter(flat, [0, 4]).wait()
    group.all_gather(flat, [0, 4]).wait()
    group.all_reduce(flat).wait()
    group.broadcast(flat)
    return flat.tolist(), ledger.take()


def test_a_group_of_one_sends_nothing():
    assert one_rank_alone() == (values(0, 4).tolist(), {})


def agree() -> tuple[dict[str, float], set[int], tuple[int, int] | None, tuple[int, int] | None]:
    agreement = Agreement(ShardGroup(dist.group.WORLD, "world", Ledger()), torch.device("cpu"))
    rank = dist.get_rank()
    sums = agreement.sum({"a": rank + 1.0, "b": torch.tensor(0.5), "c": True}, "step()")
    common = agreement.common([0, 2] if rank else [2, 3], 4)
    lowest = agreement.lowest((rank, 7) if rank else None)
    return sums, common, lowest, agreement.lowest(None)


def test_agreement(ranks):
    for answer in ranks(3).run(agree):
        assert answer == ({"a": 6.0, "b": 1.5, "c": 3.0}, {2}, (1, 7), None)


def disagree() -> str:
    watch.place = "before the first step"  # a rank outlives the engines of other tests
    agreement = Agreement(ShardGroup(dist.group.WORLD, "world", Ledger()), torch.device("cpu"))
    try:
        agreement.sum({"a": 1.0}, "step()" if dist.get_rank() else "eval_batch()")
    except EngineError as error:
        return str(error)
    return "nothing was raised"


def test_an_agreement_on_different_calls_is_refused_alike(ranks):
    messages = ranks(3).run(disagree)
    assert len(set(messages)) == 1
    assert "rank 0 in eval_batch()" in messages[0]
    assert "rank 1, 2 in step()" in messages[0]


def fsdp_collectives() -> tuple[list[float], list[float], bool]:
    group = ShardGroup(dist.group.WORLD, "dp_shard", Ledger())
    gather, scatter = AllGather(group), ReduceScatter(group, predivide_factor=2.0)
    cpu = torch.device("cpu")
    output = gather.allocate((4,), dtype=torch.float32, device=cpu)
    own = output[2 * group.rank : 2 * group.rank + 2]
    own.fill_(float(group.rank + 1))
    gather(output_tensor=output, input_tensor=own, group=dist.group.WORLD)
    source = scatter.allocate((4,), dtype=torch.float32, device=cpu)
    target = scatter.allocate((2,), dtype=torch.float32, device=cpu)
    source.copy_(values(group.rank, 4))
    scatter(output_tensor=target, input_tensor=source, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
    kept = target.clone()
    scatter.allocate((4,), dtype=torch.float32, device=cpu).fill_(9.0)
    return output.tolist(), target.tolist(), torch.equal(kept, target)


def test_what_fsdp_calls(ranks):
    expected = (sum(values(rank, 4) for rank in range(2)) / 2).tolist()
    for rank, (gathered, reduced, survives) in enumerate(ranks(2).run(fsdp_collectives)):
        assert gathered == [1.0, 1.0, 2.0, 2.0]
        assert reduced == expected[2 * rank : 2 * rank + 2]
        assert survives, "a gradient must not lie in a buffer that the next collective reuses"
