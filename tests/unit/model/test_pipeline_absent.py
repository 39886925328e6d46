"""What stands on a stage for parameters and outputs that other stages have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.model.pipeline.children import absent_output, meta_copy, unusable

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), torch.Size([]), torch.Size([2, 0])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
def test_every_shape_without_memory(shape: Any, dtype: torch.dtype) -> None:
    nothing = unusable(shape, dtype, CPU)
    assert (tuple(nothing.shape), nothing.dtype) == (tuple(shape), dtype)
    assert nothing.untyped_storage().nbytes() == dtype.itemsize
    assert nothing.isnan().all() if dtype.is_floating_point else not nothing.any()


class Several(nn.Module):
    """Returns a scalar, an empty tensor and integers beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.wide(x)
        return {"hidden": hidden, "mean": hidden.mean(), "none": hidden[:0], "best": hidden.argmax(-1)}


def test_an_absent_layer_returns_every_kind_of_tensor() -> None:
    layer, x = Several(), torch.randn(2, 3, 4, dtype=torch.bfloat16)
    true = layer(x.float())
    found = absent_output(meta_copy(layer), "layer", (x,), {}, x)
    assert found.keys() == true.keys()
    for key, tensor in true.items():
        assert found[key].shape == tensor.shape
        if tensor.is_floating_point():
            assert found[key].dtype == torch.bfloat16
            assert found[key].isnan().all()
        else:
            assert found[key].dtype == tensor.dtype
            assert not found[key].any()
