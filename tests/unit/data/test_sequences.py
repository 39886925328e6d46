"""Which tensors of a batch run along the sequence, and how they are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts import EngineError
from engine.data.sequences import (
    batch_shape,
    named_tensors,
    piece_length,
    reshape,
    sequence_dimensions,
    truncate,
)

B, S = 3, 8


def dimensions(batch: Any, keys: Any = None) -> dict[str, tuple[int, ...]]:
    tensors = named_tensors(batch)
    shape = batch_shape(tensors, keys)
    assert shape is not None
    return sequence_dimensions(tensors, shape, keys)


def tokens(rows: int = B, length: int = S) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length)


FOUND = {
    "labels": (tokens(), (1,)),
    "float weights": (torch.rand(B, S), (1,)),
    "embeddings": (torch.rand(B, S, 5), (1,)),
    "embeddings as wide as long": (torch.rand(B, S, S), (1,)),
    "mask (B, S, S)": (torch.ones(B, S, S, dtype=torch.bool), (1, 2)),
    "mask (B, 1, S, S)": (torch.ones(B, 1, S, S), (2, 3)),
    "mask (1, 1, S, S)": (torch.ones(1, 1, S, S), (2, 3)),
    "mask (B, 1, 1, S)": (torch.ones(B, 1, 1, S), (3,)),
    "mask (B, heads, S, S)": (torch.ones(B, 4, S, S), (2, 3)),
    "mask (S, S)": (torch.ones(S, S), (0, 1)),
    "positions (S,)": (torch.arange(S), (0,)),
    "positions (1, S)": (torch.arange(S)[None], (1,)),
    "positions (k, B, S)": (torch.zeros(2, B, S, dtype=torch.long), (2,)),
    "sequence first": (tokens(S, B), (0,)),
    "classes": (torch.arange(B), ()),
    "features": (torch.rand(B, 5), ()),
    "images": (torch.rand(B, 3, 16, 16), ()),
    "scalar": (torch.tensor(1.0), ()),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_sequence_is_found(name: str) -> None:
    tensor, expected = FOUND[name]
    assert dimensions({"input_ids": tokens(), "other": tensor}).get("other", ()) == expected


def test_token_ids_are_known_by_name_before_by_place() -> None:
    batch = {"kind": torch.zeros(B, 2, dtype=torch.long), "input_ids": tokens()}
    assert batch_shape(named_tensors(batch)) == (B, S)
    assert batch_shape(named_tensors({"inputs_embeds": torch.rand(B, S, 4)})) == (B, S)
    assert batch_shape(named_tensors({"x": torch.rand(B, S)})) is None


def test_integers_of_another_length_are_not_guessed_at() -> None:
    with pytest.raises(EngineError, match=r"labels has shape \(3, 7\).*sequences have 8.*sequence_keys"):
        dimensions({"input_ids": tokens(), "labels": tokens(B, S - 1)})


def test_keys_decide() -> None:
    batch = {"x": torch.rand(B, S), "mask": torch.ones(B, 1, S, S), "y": torch.rand(B, S)}
    assert dimensions(batch, {"x": 1, "mask": [2, 3]}) == {"x": (1,), "mask": (2, 3)}
    assert dimensions(batch, ["x", "y"]) == {"x": (1,), "y": (1,)}
    assert dimensions((batch["x"], batch["y"]), {"0": -1}) == {"0": (1,)}
    with pytest.raises(EngineError, match="names 'z', which the batch lacks; it has mask, x, y"):
        dimensions(batch, ["z"])
    with pytest.raises(EngineError, match=r"sequence_keys\.x: 2 is no dimension"):
        dimensions(batch, {"x": 2})


def test_truncation_keeps_the_first_tokens_of_everything() -> None:
    batch = {name: tensor for name, (tensor, _) in FOUND.items()} | {"input_ids": tokens()}
    cut = truncate(batch, dimensions(batch), 5)
    assert torch.equal(cut["input_ids"], tokens()[:, :5])
    assert torch.equal(cut["mask (S, S)"], torch.ones(5, 5))
    for name, (tensor, along) in FOUND.items():
        expected = [5 if axis in along else size for axis, size in enumerate(tensor.shape)]
        assert list(cut[name].shape) == expected, name
        assert cut[name].is_contiguous(), "a model may ask for a view"


def test_what_is_no_tensor_and_how_things_are_nested_stays() -> None:
    batch = [{"input_ids": tokens(), "names": ["a", "b"]}, (torch.arange(B), None, 4)]
    cut = truncate(batch, dimensions(batch), 2)
    assert cut[0]["names"] == ["a", "b"]
    assert isinstance(cut[1], tuple)
    assert cut[1][1:] == (None, 4)
    assert cut[0]["input_ids"].shape == (B, 2)


@pytest.mark.parametrize(("length", "wanted", "piece"), [(1024, 24, 16), (96, 64, 48), (127, 8, 1), (8, 100, 8)])
def test_pieces_divide_the_sequence(length: int, wanted: int, piece: int) -> None:
    assert piece_length(length, wanted) == piece


def test_reshaping_loses_no_token() -> None:
    """Against a loop over rows and pieces."""
    mask = torch.rand(B, 1, S, S)
    batch = {
        "input_ids": tokens(),
        "labels": tokens() + 1,
        "attention_mask": torch.rand(B, S),
        "embeddings": torch.rand(B, S, 2),
        "full_mask": mask,
        "key_mask": torch.rand(B, 1, 1, S),
        "position_ids": torch.arange(S)[None].expand(B, S),
        "shared_position_ids": torch.arange(S)[None],
        "causal": torch.ones(S, S).tril(),
    }
    split = reshape(batch, dimensions(batch), (B, S), 4)
    rows = [(row, slice(start, start + 4)) for row in range(B) for start in (0, 4)]
    for name in ("input_ids", "labels", "attention_mask", "embeddings"):
        assert torch.equal(split[name], torch.stack([batch[name][row, part] for row, part in rows])), name
    assert torch.equal(split["full_mask"], torch.stack([mask[row, :, part, part] for row, part in rows]))
    assert torch.equal(split["key_mask"], torch.stack([batch["key_mask"][row, :, :, part] for row, part in rows]))
    for name in ("position_ids", "shared_position_ids"):
        assert torch.equal(split[name], torch.arange(4).expand(2 * B, 4)), name
    assert torch.equal(split["causal"], torch.ones(4, 4).tril())
    assert sorted(split["input_ids"].flatten().tolist()) == list(range(B * S))


def test_positions_of_packed_documents_begin_anew_where_they_did() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])
    batch = {"input_ids": tokens(1), "position_ids": positions}
    split = reshape(batch, dimensions(batch), (1, S), 4)
    assert split["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_one_value_per_sequence_cannot_be_split() -> None:
    batch = {"input_ids": tokens(), "weight": torch.rand(B)}
    with pytest.raises(EngineError, match=r"weight has one entry per sequence.*seqlen_truncate"):
        reshape(batch, dimensions(batch), (B, S), 4)


def test_a_mask_without_rows_must_be_the_same_for_every_piece() -> None:
    batch = {"input_ids": tokens(), "mask": torch.rand(S, S)}
    with pytest.raises(EngineError, match="masks each piece of a sequence in its own way"):
        reshape(batch, dimensions(batch), (B, S), 4)
