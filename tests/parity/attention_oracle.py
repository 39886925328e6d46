"""What ranks run to compare sliced attention with one call of torch's over the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.mesh import Mesh
from engine.model.sequence_parallel.attention import SlicedAttention
from engine.model.sequence_parallel.layout import Layout
from engine.plan import Degrees


def attention_of(mesh: Mesh, ledger: Ledger) -> SlicedAttention:
    layout = Layout(mesh.degrees["cp"], mesh.degrees["sp"], mesh.coordinates["cp"], mesh.coordinates["sp"])
    return SlicedAttention(layout, ShardGroup.of(mesh, "cp", ledger), ShardGroup.of(mesh, "sp", ledger))


def largest_deviations(
    degrees: dict[str, int], shape: tuple[int, int, int, int, int], case: str, dtype: str = "float32"
) -> tuple[list[float], dict[tuple[str, str], int]]:
    """Of the output and of the gradients of query, key and value, on this rank's slice; and the bytes by operation.

    ``shape``: batch, heads, groups of heads, length, width.
    """
    mesh, ledger = Mesh(Degrees(**degrees), torch.device("cpu")), Ledger()
    attention = attention_of(mesh, ledger)
    batch, heads, groups, length, width = shape
    torch.manual_seed(7)
    kind = getattr(torch, dtype)
    whole = [torch.randn(batch, number, length, width).to(kind) for number in (heads, groups, groups)]
    gradient = torch.randn(batch, heads, length, width).to(kind)
    arguments, mask = _case(case, batch, heads, length)
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    expected = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **arguments)
    expected_gradients = torch.autograd.grad(expected, leaves, gradient)

    indices = attention.layout.slice_indices(length)
    own = [tensor[:, :, indices].clone().requires_grad_() for tensor in whole]
    sliced = dict(arguments)
    if mask is not None:
        sliced["attn_mask"] = mask[..., indices] if mask.shape[-2] == 1 and case == "padding" else mask
        if mask.shape[-2] == length:
            sliced["attn_mask"] = mask[..., indices, :]
    found = attention.torch_signature(*own, enable_gqa=True, **sliced)
    found_gradients = torch.autograd.grad(found, own, gradient[:, :, indices])
    pairs = [(found, expected), *zip(found_gradients, expected_gradients, strict=True)]
    ledger.take()
    return [(mine - theirs[:, :, indices]).abs().max().item() for mine, theirs in pairs], ledger.operations()


def _case(case: str, batch: int, heads: int, length: int) -> tuple[dict[str, Any], Tensor | None]:
    if case == "causal":
        return {"is_causal": True}, None
    if case == "full":
        return {}, None
    if case == "padding":
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool)
        mask[0, ..., -3:] = False
        mask[-1, ..., :2] = False
    elif case == "rows":
        mask = torch.rand(batch, 1, length, length) > 0.5
        mask[:, :, 3] = False
        mask[..., 0] |= True
    else:
        assert case == "bias"
        mask = torch.randn(1, heads, length, length)
    return {"attn_mask": mask}, mask
