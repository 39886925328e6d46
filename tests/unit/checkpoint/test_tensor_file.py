from __future__ import annotations

import json

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.checkpoint import CheckpointError, synced_file, tensor_file
from engine.checkpoint.dtypes import CODE_OF_DTYPE, DTYPE_OF_CODE, assign, conversion
from engine.checkpoint.tensor_file import TensorFile, write_tensor_file


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_safetensors_library_reads_every_dtype_and_stride(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (code, torch.randint(0, 2, (3, 5, dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)[..., 0])
        for code, dtype in DTYPE_OF_CODE.items()
        if dtype != torch.complex64  # the library's torch reader lacks it
    ]
    tensors += [
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.arange(12.0).reshape(3, 4).t()),
        ("expanded", torch.arange(3.0).unsqueeze(1).expand(3, 7)),
        ("strided", torch.arange(40)[3::7]),
        ("gradient", torch.ones(2, requires_grad=True)),
    ]
    record = write_tensor_file(tmp_path / "a.safetensors", tensors)
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert (record.size_bytes, record.xxh3_128) == (len(raw), xxhash.xxh3_128(raw).hexdigest())
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == {key for key, _ in tensors}
    for key, tensor in tensors:
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert torch.equal(bits(loaded[key]), bits(tensor.detach())), key
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_complex_views_are_written_resolved(tmp_path):
    value = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    write_tensor_file(tmp_path / "c", [("c", value.conj()), ("i", value.conj().imag)])
    with TensorFile(tmp_path / "c") as file:
        target = torch.empty(2, dtype=torch.complex64)
        file.read("c", ((0,), (2,)), target)
        imaginary = torch.empty(2)
        file.read("i", ((0,), (2,)), imaginary)
    assert torch.equal(target, value.conj().resolve_conj())
    assert imaginary.tolist() == [-2.0, 1.0]


def test_files_of_the_library_are_read(tmp_path):
    value = torch.arange(24.0).reshape(2, 3, 4)
    save_file({"x": value, "y": torch.ones((), dtype=torch.bfloat16)}, tmp_path / "b")
    with TensorFile(tmp_path / "b") as file:
        target = torch.zeros(1, 2, 2)
        file.read("x", ((1, 1, 1), (1, 2, 2)), target)
        scalar = torch.zeros(())
        file.read("y", ((), ()), scalar)
    assert torch.equal(target, value[1:, 1:, 1:3])
    assert scalar == 1


@st.composite
def shape_and_box(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    sizes = tuple(draw(st.integers(1, extent - offset)) for extent, offset in zip(shape, offsets, strict=True))
    return shape, (offsets, sizes)


@settings(max_examples=80, deadline=None)
@given(
    case=shape_and_box(),
    block_bytes=st.sampled_from([4, 24, 100, 1 << 20]),
    run_bytes=st.sampled_from([1, 12, 1 << 20]),
    wanted=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_any_box_is_read_whatever_the_block_sizes(tmp_path_factory, case, block_bytes, run_bytes, wanted, transposed):
    shape, box = case
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    path = tmp_path_factory.mktemp("box") / "f"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
        patch.setattr(synced_file, "BUFFER_BYTES", 4096)
        patch.setattr(tensor_file, "_MIN_RUN_BYTES", run_bytes)
        stored = value.mT.contiguous().mT if transposed and len(shape) >= 2 else value
        write_tensor_file(path, [("x", stored)])
        target = torch.full(box[1], -1.0, dtype=wanted)
        if transposed and len(shape) >= 2:
            target = target.mT.contiguous().mT
        with TensorFile(path) as file:
            file.read("x", box, target)
    expected = value[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]
    assert torch.equal(target, expected.to(wanted))


def test_only_the_rows_of_the_box_are_read(tmp_path):
    write_tensor_file(tmp_path / "f", [("x", torch.arange(4_000_000.0).reshape(4000, 1000))])
    with TensorFile(tmp_path / "f") as file:
        header = file.bytes_read
        target = torch.empty(10, 1000)
        file.read("x", ((1000, 0), (10, 1000)), target)
        assert file.bytes_read - header == 40_000
        file.read("x", ((1000, 400), (10, 100)), target[:, :100])
        assert file.bytes_read - header == 80_000
    assert target[0, 0] == 1_000_400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\x80\x02}q\x00." * 4, "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
        ((8).to_bytes(8, "little") + b"not json", "not JSON"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "its header has"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not JSON"),
    ],
)
def test_what_is_no_tensor_file_is_refused(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"f .*{message}"):
        TensorFile(tmp_path / "f")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]},
        {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"shape": [2]},
        7,
    ],
)
def test_impossible_header_entries_are_refused(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="impossible header entry for 'x'"):
        TensorFile(tmp_path / "f")


def test_a_named_pipe_is_refused_not_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "f")
    with pytest.raises(CheckpointError, match="not a regular file"):
        TensorFile(tmp_path / "f")


@pytest.mark.parametrize(
    ("saved", "wanted", "change"),
    [
        (torch.float32, torch.float32, None),
        (torch.float32, torch.bfloat16, "rounded"),
        (torch.float32, torch.float16, "rounded"),
        (torch.float16, torch.bfloat16, "rounded"),
        (torch.bfloat16, torch.float16, "rounded"),
        (torch.bfloat16, torch.float32, "widened"),
        (torch.float16, torch.float32, "widened"),
        (torch.float8_e4m3fn, torch.float16, "widened"),
        (torch.int32, torch.int64, "widened"),
        (torch.uint8, torch.int16, "widened"),
    ],
)
def test_conversions(saved, wanted, change):
    assert conversion(saved, wanted) == change


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.int64, torch.int32),
        (torch.int8, torch.uint8),
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.bool),
        (torch.complex64, torch.float32),
    ],
)
def test_refused_conversions(saved, wanted):
    with pytest.raises(CheckpointError, match="without losing them"):
        conversion(saved, wanted)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor([1.0, 7e4]), torch.float16),
        (torch.tensor([1e39], dtype=torch.float64), torch.float32),
        (torch.tensor([4e4]).to(torch.float8_e5m2), torch.float8_e4m3fn),
    ],
)
def test_an_overflow_is_an_error_not_an_infinity(value, wanted):
    with pytest.raises(CheckpointError, match="do not fit"):
        assign(torch.empty(value.shape, dtype=wanted), value)


def test_infinities_stay_what_they_are():
    target = torch.empty(3, dtype=torch.float16)
    assign(target, torch.tensor([float("inf"), float("nan"), 1.0]))
    assert target[0] == float("inf")
    assert target[1].isnan()


def test_the_table_of_dtypes_is_one_to_one():
    assert len(CODE_OF_DTYPE) == len(DTYPE_OF_CODE)
