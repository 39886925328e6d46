from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from engine.checkpoint import (
    CheckpointError,
    describe,
    flat_range_boxes,
    load_client_state,
    load_tensors,
    read_manifest,
    save,
    verify_files,
)
from engine.checkpoint.exchange import TorchExchange, exchange_of
from engine.contracts import Chunk


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "parameters.embed.weight": torch.randn(10, 6, generator=generator),
        "parameters.norm": torch.randn(7, generator=generator),
        "buffers.steps": torch.tensor(41),
        "optimizer.embed.weight.exp_avg": torch.randn(10, 6, generator=generator),
        "optimizer.embed.weight.step": torch.tensor(3.0),
    }


def cut(world, tensors, num_ranks):
    """Each tensor's flat data in ``num_ranks`` ranges, as the ZeRO stages 1 and 2 hold it."""
    by_rank = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        size = -(-tensor.numel() // num_ranks)
        for rank in range(num_ranks):
            first, last = (min(edge * size, tensor.numel()) for edge in (rank, rank + 1))
            by_rank[rank] += [world.part(name, tensor, box) for box in flat_range_boxes(tensor.shape, first, last)]
    return by_rank


def blank(tensors):
    return {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def test_one_process_without_a_group(world, tmp_path):
    tensors = model()
    path = save(
        tmp_path / "new" / "folder",
        "global_step3",
        chunks=[world.whole(name, tensor) for name, tensor in tensors.items()],
        states={"schedule": {"on_layout_change": "reshard", "state": {"last": 3}}},
        layout=world.layout(1),
        client_state={"epoch": 2},
        config={"train_batch_size": 24},
        counters={"global_steps": 3},
        aliases={"head.weight": "embed.weight"},
        rank=0,
        world_size=1,
    )
    assert path == tmp_path / "new" / "folder" / "global_step3"
    assert (path.parent / "latest").read_text().strip() == "global_step3"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["global_step3", "latest"]
    # One rank's file is a plain safetensors file under the plain names.
    assert_equal(load_file(path / "rank_00000.safetensors"), tensors)
    found = blank(tensors)
    loaded = load_tensors(path.parent, None, [world.whole(name, tensor) for name, tensor in found.items()])
    assert_equal(found, tensors)
    assert (loaded.missing, loaded.unexpected, loaded.converted) == ((), (), {})
    manifest = read_manifest(path.parent)
    assert manifest.path == path
    assert manifest.state("schedule", world.layout(1), 0) == {"last": 3}
    assert manifest.state("absent", world.layout(1), 0) is None
    assert (manifest.config, manifest.counters) == ({"train_batch_size": 24}, {"global_steps": 3})
    assert manifest.layout == world.layout(1)
    assert manifest.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert load_client_state(manifest) == {"epoch": 2}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (2, 3), (4, 2), (3, 8)])
def test_flat_shards_move_to_any_number_of_ranks(world, tmp_path, saved_by, loaded_by):
    tensors = model()
    world.save(tmp_path, "t", cut(world, tensors, saved_by))
    found = blank(tensors)
    world.load(tmp_path, "t", cut(world, found, loaded_by))
    assert_equal(found, tensors)


@st.composite
def partition(draw, shape):
    """Disjoint boxes that cover ``shape``: repeated cuts of some box along some dimension."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dimension]))
        for start, length in ((0, at), (at, sizes[dimension] - at)):
            moved, cut_sizes = list(offsets), list(sizes)
            moved[dimension] += start
            cut_sizes[dimension] = length
            boxes.append((tuple(moved), tuple(cut_sizes)))
    return boxes


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), partition(shape), partition(shape))))
def test_any_boxes_load_into_any_boxes(world, tmp_path_factory, case):
    shape, saved_boxes, loaded_boxes = case
    tmp_path = tmp_path_factory.mktemp("boxes")
    value = torch.arange(math.prod(shape)).reshape(shape)
    saved = [[world.part("parameters.x", value, box) for box in saved_boxes[rank::2]] for rank in range(2)]
    saved[0] += [world.whole("parameters.anchor", torch.ones(1))]
    if not value.numel():
        saved = [[world.whole("parameters.x", value), world.whole("parameters.anchor", torch.ones(1))], []]
    world.save(tmp_path, "t", saved)
    found = torch.full(shape, -1)
    loaded = [[world.part("parameters.x", found, box) for box in loaded_boxes[rank::3]] for rank in range(3)]
    loaded[2] += [world.whole("parameters.anchor", torch.zeros(1))]
    world.load(tmp_path, "t", loaded)
    assert torch.equal(found, value)


def test_reading_less_than_everything(world, tmp_path):
    big = torch.arange(100_000.0).reshape(1000, 100)
    world.save(tmp_path, "t", cut(world, {"parameters.big": big}, 2))
    target = torch.empty(10, 100)
    chunk = Chunk("parameters.big", (1000, 100), (500, 0), (10, 100), target)
    loaded = load_tensors(tmp_path, "t", [chunk], verify=False)
    assert torch.equal(target, big[500:510])
    assert loaded.bytes_read < 4000 + 1000


def test_missing_and_unexpected_names(world, tmp_path):
    tensors = model()
    world.save(tmp_path, "t", cut(world, tensors, 2))
    new = torch.zeros(3)
    chunks = [
        [world.whole("parameters.new", new), world.whole("parameters.norm", torch.empty(7))],
        [world.whole("buffers.steps", torch.tensor(0))],
    ]
    with pytest.raises(
        CheckpointError, match=r"not in the checkpoint: parameters\.new; .*asked for: parameters\.embed"
    ):
        world.load(tmp_path, "t", chunks)
    loaded = world.load(tmp_path, "t", chunks, strict=False)
    assert loaded[0].missing == loaded[1].missing == ("parameters.new",)
    # Nobody asked for the optimizer: its absence is no surprise.
    assert loaded[0].unexpected == loaded[1].unexpected == ("parameters.embed.weight",)
    assert new.eq(0).all()
    with pytest.raises(CheckpointError, match=r"parameters\.new"):
        world.load(tmp_path, "t", chunks, strict={"parameters"})
    world.load(tmp_path, "t", chunks, strict={"buffers"})


def test_aliases_of_tied_parameters_load_under_either_name(world, tmp_path):
    tensors = model()
    world.save(tmp_path, "t", cut(world, tensors, 2), aliases={"head.weight": "embed.weight"})
    found = {
        "parameters.head.weight": torch.zeros(10, 6),
        "optimizer.head.weight.exp_avg": torch.zeros(10, 6),
    }
    loaded = load_tensors(tmp_path, "t", [world.whole(*item) for item in found.items()], strict=False)
    assert torch.equal(found["parameters.head.weight"], tensors["parameters.embed.weight"])
    assert torch.equal(found["optimizer.head.weight.exp_avg"], tensors["optimizer.embed.weight.exp_avg"])
    assert "parameters.embed.weight" not in loaded.unexpected
    with pytest.raises(CheckpointError, match=r"optimizer\.head\.weight\.exp_avg_sq"):
        load_tensors(tmp_path, "t", [world.whole("optimizer.head.weight.exp_avg_sq", torch.zeros(10, 6))])


def test_dtypes_convert_by_rule_and_are_noted(world, tmp_path):
    value = torch.tensor([1.0, 1.0 + 2**-20, 3e38])
    world.save(tmp_path, "t", [[world.whole("parameters.x", value)], []])
    target = torch.zeros(3, dtype=torch.bfloat16)
    loaded = load_tensors(tmp_path, "t", [world.whole("parameters.x", target)])
    assert torch.equal(target, value.bfloat16())
    assert loaded.converted == {"parameters.x": "float32 rounded to bfloat16"}
    with pytest.raises(CheckpointError, match=r"values up to 3e\+38 do not fit float16"):
        load_tensors(tmp_path, "t", [world.whole("parameters.x", torch.zeros(3, dtype=torch.float16))])
    with pytest.raises(CheckpointError, match=r"parameters\.x: float32 values cannot be loaded into a int64"):
        load_tensors(tmp_path, "t", [world.whole("parameters.x", torch.zeros(3, dtype=torch.int64))])


def test_a_misfit_on_one_rank_touches_no_tensor_on_any(world, tmp_path):
    tensors = model()
    world.save(tmp_path, "t", cut(world, tensors, 2))
    good = torch.full((7,), -1.0)
    wrong = [[world.whole("parameters.norm", good)], [world.whole("parameters.embed.weight", torch.zeros(10, 5))]]
    with pytest.raises(
        CheckpointError, match=r"rank 1: parameters\.embed\.weight has shape \[10, 5\] here and \[10, 6\]"
    ):
        world.load(tmp_path, "t", wrong)
    assert good.eq(-1).all()
    with pytest.raises(CheckpointError, match="meta device"):
        load_tensors(tmp_path, "t", [world.whole("parameters.norm", torch.empty(7, device="meta"))])


def test_client_state_keeps_types_and_tensors(world, tmp_path):
    state = {"seen": {1: (2, 3)}, "best": math.inf, "rng": torch.arange(5, dtype=torch.uint8), "list": [torch.ones(())]}
    world.save(tmp_path, "t", cut(world, model(), 2), client_state=state)
    found = load_client_state(read_manifest(tmp_path, "t"))
    assert found.keys() == state.keys()
    assert found["seen"] == {1: (2, 3)}
    assert found["best"] == math.inf
    assert torch.equal(found["rng"], state["rng"])
    assert found["rng"].dtype == torch.uint8
    assert found["list"][0].item() == 1.0


def test_states_of_ranks(world, tmp_path):
    def states(rank):
        return {
            "random": {"on_layout_change": "drop", "state": {"seed": rank}},
            "errors": {"on_layout_change": "same_layout_only", "state": [rank]},
            "schedule": {"on_layout_change": "reshard", "state": {"lr": 0.1}},
        }

    world.save(tmp_path, "t", cut(world, model(), 2), states=states)
    manifest = read_manifest(tmp_path, "t")
    here, elsewhere = world.layout(2, zero_stage=3, global_batch_size=48), world.layout(3)
    assert [manifest.state("random", here, rank) for rank in range(2)] == [{"seed": 0}, {"seed": 1}]
    assert [manifest.state("errors", here, rank) for rank in range(2)] == [[0], [1]]
    assert manifest.state("random", elsewhere, 2) is None
    assert manifest.state("schedule", elsewhere, 2) == {"lr": 0.1}
    with pytest.raises(
        CheckpointError, match=r"'errors' belongs to the layout.*world size 2 with dp_shard=2.*world size 3"
    ):
        manifest.state("errors", elsewhere, 2)
    assert not manifest.same_ranks(world.layout(2, mesh={"tp": 2}))
    assert manifest.same_ranks(world.layout(2, placement="TPD")), "one axis stands the same in every order"
    two_axes = replace(manifest, layout=world.layout(4, mesh={"dp_shard": 2, "tp": 2}))
    assert two_axes.same_ranks(world.layout(4, mesh={"dp_shard": 2, "tp": 2}, placement="DPT"))
    assert not two_axes.same_ranks(world.layout(4, mesh={"dp_shard": 2, "tp": 2}, placement="TPD"))
    with pytest.raises(CheckpointError, match=r"states\.loader differs between rank 0 and rank 1"):
        world.save(
            tmp_path,
            "u",
            cut(world, model(), 2),
            states=lambda rank: {"loader": {"on_layout_change": "reshard", "state": rank}},
        )
    with pytest.raises(CheckpointError, match=r"states\.extra is missing on rank 0"):
        world.save(
            tmp_path,
            "u",
            cut(world, model(), 2),
            states=lambda rank: {"extra": {"on_layout_change": "drop", "state": 1}} if rank else {},
        )


def test_describe_says_what_was_left(world, tmp_path):
    states = {
        "random": {"on_layout_change": "drop", "state": 1},
        "schedule": {"on_layout_change": "reshard", "state": 1},
    }
    tensors = model()
    world.save(tmp_path, "t", cut(world, tensors, 2), states=states, client_state={"epoch": 1, "t": torch.ones(1)})
    manifest = read_manifest(tmp_path, "t")
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    loaded = load_tensors(tmp_path, "t", [world.whole(*item) for item in found.items()])
    everything = {"layout": world.layout(2), "restored_states": states}
    assert describe(manifest, loaded=loaded, **everything) == []
    chunks = [
        world.whole("parameters.norm", torch.zeros(7, dtype=torch.bfloat16)),
        world.whole("parameters.lora", torch.zeros(2)),
    ]
    loaded = load_tensors(tmp_path, "t", chunks, strict=False)
    elsewhere = world.layout(3, global_batch_size=48)
    assert describe(
        manifest, layout=elsewhere, loaded=loaded, restored_states=["schedule"], client_state_restored=False
    ) == [
        "Not in the checkpoint, left as initialised: parameters.lora.",
        "Not restored: 1 saved tensors of 'buffers'.",
        "Not restored: 2 saved tensors of 'optimizer'.",
        "Not restored: 1 saved tensors of 'parameters'.",
        "Converted: 1 tensors from float32 rounded to bfloat16.",
        "Not restored: the state of 'random': it belongs to the ranks of the layout it was saved under.",
        "Not restored: client_state.",
        "The global batch is 48 samples; the checkpoint's was 24.",
    ]


def test_the_same_tag_again_and_save_latest_off(world, tmp_path):
    world.save(tmp_path, "t", cut(world, model(0), 3))
    world.save(tmp_path, "t", cut(world, model(1), 2))
    assert sorted(entry.name for entry in (tmp_path / "t").iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]
    world.save(tmp_path, "side", cut(world, model(2), 2), save_latest=False)
    assert read_manifest(tmp_path).tag == "t"
    found = blank(model())
    world.load(tmp_path, None, cut(world, found, 2))
    assert_equal(found, model(1))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "side", "t"]


def test_the_manifest_is_plain_json_and_verifies(world, tmp_path):
    path = world.save(tmp_path, "t", cut(world, model(), 2), client_state={"nan": math.nan})
    content = json.loads((path / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert content["tensors"]["parameters.norm"] == {
        "shape": [7],
        "dtype": "F32",
        "pieces": [
            ["rank_00000.safetensors", "parameters.norm[0:4]", [0], [4]],
            ["rank_00001.safetensors", "parameters.norm[4:7]", [4], [3]],
        ],
    }
    verify_files(read_manifest(tmp_path, "t"))


def test_a_group_of_another_size_is_refused(world):
    def wrong(exchange):
        exchange_of(exchange, exchange.rank, 3)

    results = world.on_ranks(2, wrong)
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "rank 1 of 3, but its process group says rank 1 of 2" in str(results[1])


def test_over_a_torch_process_group(world, tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        exchange = exchange_of(group, 0, 1)
        assert isinstance(exchange, TorchExchange)
        assert exchange.gather({"a": 1}) == [{"a": 1}]
        assert exchange.broadcast((1, None)) == (1, None)
        with pytest.raises(CheckpointError, match="Doing it failed: OSError: disk"):
            exchange.collect(lambda: (_ for _ in ()).throw(OSError("disk")), "Doing it")
        world.save(tmp_path, "t", [[world.whole("parameters.x", torch.ones(3))]])
        target = torch.zeros(3)
        load_tensors(tmp_path, "t", [world.whole("parameters.x", target)], group=group)
        assert target.eq(1).all()
        assert read_manifest(tmp_path, group=group).tag == "t"
    finally:
        torch.distributed.destroy_process_group()
