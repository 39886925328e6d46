"""The dtypes a checkpoint can hold, and which conversions a load may do."""

from __future__ import annotations

import torch

from engine.checkpoint.errors import CheckpointError

DTYPE_OF_CODE: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""safetensors' names of the dtypes."""

CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


def conversion(saved: torch.dtype, wanted: torch.dtype) -> str | None:
    """What loading ``saved`` values into a ``wanted`` tensor does to them: None (nothing), "widened" or "rounded".

    Floats convert to floats, integers to integers that hold every value of the saved dtype. Raises `CheckpointError`
    for anything else.
    """
    if saved == wanted:
        return None
    if saved.is_floating_point and wanted.is_floating_point:
        have, want = torch.finfo(saved), torch.finfo(wanted)
        # smallest_normal too: bf16 reaches below fp16.
        exact = want.eps <= have.eps and want.max >= have.max and want.smallest_normal <= have.smallest_normal
        return "widened" if exact else "rounded"
    if _is_integer(saved) and _is_integer(wanted):
        have_range, want_range = torch.iinfo(saved), torch.iinfo(wanted)
        if want_range.min <= have_range.min and want_range.max >= have_range.max:
            return "widened"
    raise CheckpointError(
        f"{name_of(saved)} values cannot be loaded into a {name_of(wanted)} tensor without losing them"
    )


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` (CPU, not empty) into ``target`` (same shape, any device and strides), cast if need be.

    Raises `CheckpointError` where a finite value is outside the range of ``target``'s dtype.
    """
    if source.is_floating_point() and torch.finfo(target.dtype).max < torch.finfo(source.dtype).max:
        values = source if source.element_size() > 1 else source.float()  # fp8 has few kernels
        largest = values.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        if largest > torch.finfo(target.dtype).max:
            raise CheckpointError(f"values up to {largest:.3g} do not fit {name_of(target.dtype)}; load a wider dtype")
    target.copy_(source)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
