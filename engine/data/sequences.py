"""Which tensors of a batch run along the sequence, and how they are cut to a length.

`sequence_dimensions` finds them from the batch; ``sequence_keys`` in the JSON names them instead. A batch has ``B``
sequences of ``S`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.contracts import EngineError
from engine.data.batch import describe
from engine.torch_compat import tree_map_named_tensors

SequenceKeys = Mapping[str, int | Sequence[int]] | Sequence[str]
Dimensions = dict[str, tuple[int, ...]]
"""Name of a tensor -> the dimensions of it that run along the sequence."""

TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "inputs")
REMEDY = (
    'name them in the config: "sequence_keys": {"input_ids": 1, "attention_mask": [2, 3]} says which tensors have a '
    "sequence dimension, and which one"
)


def named_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of nested dicts, lists and tuples: ``labels``, ``inputs.labels``, by position ``0``."""
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    tree_map_named_tensors(note, batch)
    return found


def batch_shape(
    tensors: Mapping[str, Tensor], keys: SequenceKeys | None = None, is_whole: bool = True
) -> tuple[int, int] | None:
    """(B, S) of a batch: of its token ids, an integer tensor (B, S), else of ``inputs_embeds`` (B, S, width).

    With ``keys``, of the first tensor that they name. None where there is none.
    """
    if keys is not None:
        for name, dimensions in _given_dimensions(tensors, keys, is_whole).items():
            shape, last = tensors[name].shape, dimensions[-1]
            return (shape[0] if last else 1), shape[last]
        return None
    token_ids = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2 and _is_integer(tensor)}
    by_name = [tensor for wanted in TOKEN_NAMES for name, tensor in token_ids.items() if _last(name) == wanted]
    by_name += [tensor for name, tensor in tensors.items() if _last(name) == "inputs_embeds" and tensor.ndim == 3]
    for tensor in (*by_name, *token_ids.values()):
        return int(tensor.shape[0]), int(tensor.shape[1])
    return None


def sequence_dimensions(
    tensors: Mapping[str, Tensor], shape: tuple[int, int], keys: SequenceKeys | None = None, is_whole: bool = True
) -> Dimensions:
    """The tensors that run along the sequence, found by their shapes.

    (B, S) and (1, S), whatever follows; (S,) where S is not B, or the name speaks of positions; masks (S, S),
    (B, S, S) and (B, heads, S or 1, S) in both dimensions; position ids (k, B, S); sequence first (S, B).

    Raises EngineError where ``keys`` name what a whole batch lacks, and for token ids, labels and the like (integers of
    shape (B, another length)), of which nothing says how they belong to the sequence.
    """
    if keys is not None:
        return _given_dimensions(tensors, keys, is_whole)
    found = {name: _dimensions(name, tensor, *shape) for name, tensor in tensors.items()}
    return {name: dimensions for name, dimensions in found.items() if dimensions}


def truncate(batch: Any, dimensions: Dimensions, length: int) -> Any:
    """The first ``length`` tokens of every sequence. Contiguous, for models that ask for a ``view``."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        if name not in dimensions:
            return tensor
        for dimension in dimensions[name]:
            if tensor.shape[dimension] > length:
                tensor = tensor.narrow(dimension, 0, length)
        return tensor.contiguous()

    return tree_map_named_tensors(cut, batch)


def piece_length(length: int, wanted: int) -> int:
    """The largest divisor of ``length`` that is at most ``wanted``: pieces of one length, and no token lost."""
    return next(size for size in range(min(wanted, length), 0, -1) if length % size == 0)


def reshape(batch: Any, dimensions: Dimensions, shape: tuple[int, int], length: int) -> Any:
    """Every sequence as S / ``length`` sequences of their own: (B, S) becomes (B * S / length, length).

    The pieces of a sequence follow each other. Of masks the blocks on the diagonal stay, and positions begin anew in
    every piece. ``length`` divides S. Raises EngineError for a tensor with one entry per sequence (a class, a weight),
    which belongs to no piece alone.
    """
    num_sequences, num_tokens = shape
    num_pieces = num_tokens // length

    def split(name: str, tensor: Tensor) -> Tensor:
        own = dimensions.get(name, ())
        if not own:
            if tensor.ndim and tensor.shape[0] == num_sequences:
                raise EngineError(
                    f"curriculum: {name} has one entry per sequence ({describe(tensor)}), and seqlen_reshape splits "
                    f"each of the {num_sequences} sequences into {num_pieces}; use seqlen_truncate"
                )
            return tensor
        if len(own) == 2:
            tensor = _diagonal_blocks(name, tensor, own, num_sequences, num_pieces, length)
        elif own == (tensor.ndim - 2,) and tensor.ndim == 2 and tensor.shape[1] == num_sequences != 1:
            raise EngineError(
                f"curriculum: {name} is laid out sequence first ({describe(tensor)}); seqlen_reshape wants "
                "(batch, sequence)"
            )
        elif own == (0,):
            tensor = tensor[:length]
        else:
            tensor = _pieces(tensor, own[0], num_sequences, num_pieces, length)
        return _restarted(tensor, own[0]) if "position" in _last(name) and _is_integer(tensor) else tensor.contiguous()

    return tree_map_named_tensors(split, batch)


def _dimensions(name: str, tensor: Tensor, num_sequences: int, length: int) -> tuple[int, ...]:
    sizes = tuple(tensor.shape)
    rows = (1, num_sequences)
    is_mask = tensor.dtype == torch.bool or any(word in _last(name) for word in ("mask", "bias"))
    if len(sizes) == 1:
        return (0,) if sizes[0] == length and (length != num_sequences or "position" in _last(name)) else ()
    if len(sizes) == 2:
        if sizes == (length, length) and num_sequences not in (1, length):
            return (0, 1)
        if sizes[1] == length and sizes[0] in rows:
            return (1,)
        if sizes == (length, num_sequences):
            return (0,)
        if sizes[0] == num_sequences and _is_integer(tensor) and sizes[1] > 1:
            raise EngineError(
                f"{name} has shape {sizes}, while sequences have {length} tokens: how it belongs to "
                f"them is not clear; {REMEDY}"
            )
        return ()
    if len(sizes) == 3:
        if sizes[0] in rows and sizes[1:] == (length, length) and is_mask:
            return (1, 2)
        if sizes[0] in rows and sizes[1] == length:
            return (1,)
        if sizes[0] in rows and sizes[1:] == (1, length) and is_mask:
            return (2,)
        return (2,) if sizes[1:] == (num_sequences, length) and _is_integer(tensor) else ()
    if len(sizes) == 4 and sizes[3] == length and sizes[2] in (1, length):
        return (2, 3) if sizes[2] == length else (3,)
    return (1,) if sizes[1:2] == (length,) and sizes[0] in rows else ()


def _given_dimensions(tensors: Mapping[str, Tensor], keys: SequenceKeys, is_whole: bool) -> Dimensions:
    wanted = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, 1)
    found: Dimensions = {}
    for key, given in wanted.items():
        names = [name for name in tensors if name == key or _last(name) == key]
        if not names and is_whole:
            there = ", ".join(sorted({_last(name) for name in tensors})) or "no tensors"
            raise EngineError(f"sequence_keys names {key!r}, which the batch lacks; it has {there}")
        for name in names:
            sizes = tensors[name].shape
            given_list = [given] if isinstance(given, int) else list(given)
            if any(not -len(sizes) <= dimension < len(sizes) for dimension in given_list):
                raise EngineError(f"sequence_keys.{key}: {given} is no dimension of {describe(tensors[name])}")
            found[name] = tuple(sorted(dimension % len(sizes) for dimension in given_list))
    return found


def _pieces(tensor: Tensor, dimension: int, num_sequences: int, num_pieces: int, length: int) -> Tensor:
    """(.., B, .., S, ..) -> (.., B * pieces, .., length, ..); the rows are in the dimension before the sequence's, or
    in the first one."""
    has_rows_second = tensor.ndim == 3 and dimension == 2 and tensor.shape[1] == num_sequences
    rows = 1 if has_rows_second and tensor.shape[0] not in (1, num_sequences) else 0
    if tensor.shape[rows] == 1:
        tensor = tensor.expand(*tensor.shape[:rows], num_sequences, *tensor.shape[rows + 1 :])
    pieces = tensor.unflatten(dimension, (num_pieces, length)).movedim(dimension, rows + 1)
    return pieces.flatten(rows, rows + 1)


def _diagonal_blocks(
    name: str, tensor: Tensor, own: tuple[int, ...], num_sequences: int, num_pieces: int, length: int
) -> Tensor:
    """What the tokens of a piece see of each other; a mask without rows must say the same of every piece."""
    blocks = []
    for piece in range(num_pieces):
        block = tensor
        for dimension in own:
            block = block.narrow(dimension, piece * length, length)
        blocks.append(block)
    if own[0] == 0:
        if any(not torch.equal(block, blocks[0]) for block in blocks):
            raise EngineError(
                f"curriculum: {name} masks each piece of a sequence in its own way; seqlen_reshape needs it per "
                "sequence, (batch, 1, sequence, sequence)"
            )
        return blocks[0]
    rows = torch.stack([block.expand(num_sequences, *block.shape[1:]) for block in blocks], dim=1)
    return rows.flatten(0, 1)


def _restarted(positions: Tensor, dimension: int) -> Tensor:
    """Positions from 0 at the start of each piece; where they begin anew inside it (packed documents) they stay."""
    dimension = min(dimension, positions.ndim - 1)
    first = positions.narrow(dimension, 0, 1)
    falls = torch.zeros_like(positions)
    if positions.shape[dimension] > 1:
        falls.narrow(dimension, 1, positions.shape[dimension] - 1).copy_(positions.diff(dim=dimension) <= 0)
    return torch.where(falls.cumsum(dimension) > 0, positions, positions - first)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
