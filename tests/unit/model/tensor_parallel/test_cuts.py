"""A tensor plan that does not fit the model is refused with everything that is wrong with it."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from engine.config.messages import EngineError
from engine.model.tensor_parallel import Split, TensorPlan
from engine.model.tensor_parallel.cuts import parameter_cuts
from engine.parameters import ParameterRegistry


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2)
        )
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.num_heads = 6

    def forward(self, x: Tensor) -> Tensor:
        return x


def refusal(plan: TensorPlan, size: int = 2) -> str:
    model = Model()
    with pytest.raises(EngineError) as caught:
        parameter_cuts(model, ParameterRegistry(model), plan, size, 0, list(model.blocks))
    return str(caught.value)


COLUMN, ROW = Split("column"), Split("row")


def test_everything_is_told_at_once():
    text = refusal(
        TensorPlan(
            {
                "blocks.0.up": COLUMN,
                "blocks.0.norm": ROW,
                "blocks.1.up": Split("column", segments=(4, 4)),
                "bilinear": COLUMN,
                "nothing": ROW,
                "embedding": Split("vocabulary"),
            },
            {"num_hats": 3},
            summed=("blocks.7",),
        ),
        size=4,
    )
    assert text.startswith("tensor_parallel over 4 ranks: ")
    for part in (
        "blocks.0.up.weight: 6 = 4 x 1 + 2 cannot be shared evenly",
        "blocks.0.up.bias: 6 = 4 x 1 + 2",
        "blocks.0.norm (LayerNorm) cannot be split as row: it has no matrix called weight",
        "blocks.1.up.weight: its segments [4, 4] add up to 8, not to 6",
        "bilinear (Bilinear) cannot be split as column: it has no matrix",
        "the model has no module 'nothing'",
        "embedding.weight: 5 rows in parts of 2 leave the last of 4 ranks without any",
        "the model has no module 'blocks.7'",
        "the model has no whole number num_hats",
    ):
        assert part in text, part


def test_a_tied_matrix_is_split_by_all_who_use_it():
    text = refusal(TensorPlan({"embedding": Split("vocabulary")}))
    assert "head.weight is embedding.weight, which embedding splits; split head too" in text
    text = refusal(TensorPlan({"embedding": Split("vocabulary"), "head": ROW}))
    assert "head shares embedding.weight with embedding, and the two are to be split differently" in text


def test_an_embedding_is_split_by_its_rows_alone():
    assert "embedding (Embedding) cannot be split as column" in refusal(TensorPlan({"embedding": COLUMN}))
    assert "head (Linear) cannot be split as vocabulary" in refusal(TensorPlan({"head": Split("vocabulary")}))
    assert "splits nothing" in refusal(TensorPlan({}))


def test_a_sequence_needs_every_parameter_of_a_block():
    splits = {f"blocks.{i}.{name}": split for i in range(2) for name, split in (("up", COLUMN), ("down", ROW))}
    text = refusal(TensorPlan(splits, sequence=("blocks.0.norm", "head")))
    assert 'head is called "sequence" and lies in no repeated block' in text
    assert "blocks.1.norm.weight would see shards of the sequence" in text
    joined = {**splits, "blocks.0.up": Split("column", gather_output=True)}
    text = refusal(TensorPlan(joined, sequence=("blocks.0.norm", "blocks.1.norm")))
    assert "blocks.0.up takes or gives whole activations" in text


def test_what_fits():
    model = Model()
    plan = TensorPlan(
        {"embedding": Split("vocabulary"), "head": Split("head"), "blocks.0.up": COLUMN, "blocks.0.down": ROW},
        {"num_heads": 3},
    )
    cuts = parameter_cuts(model, ParameterRegistry(model), plan, 2, 1)
    assert {name: cut.shape for name, cut in cuts.items()} == {
        "embedding.weight": (2, 4),
        "blocks.0.up.weight": (3, 4),
        "blocks.0.up.bias": (3,),
        "blocks.0.down.weight": (4, 3),
    }
