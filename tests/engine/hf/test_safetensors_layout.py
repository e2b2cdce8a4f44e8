"""The layout of safetensors files: equal to the library's, and broken files are refused."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from holdfast.engine.hf.safetensors_layout import (
    DTYPE_CODES,
    INDEX_NAME,
    WEIGHTS_NAME,
    TensorSlot,
    TensorSpec,
    plan_layout,
    read_header,
    read_layout,
)
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)


def _spec(key: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(key, tuple(tensor.shape), tensor.dtype, key, tensor.nbytes)


def _header(path: Path) -> dict[str, TensorSlot]:
    with open(path, "rb") as file:
        return read_header(file)


def _layout(folder: Path) -> dict[str, TensorSlot]:
    with ExitStack() as files:
        return read_layout(folder, lambda name: files.enter_context(open(folder / name, "rb")))


def test_header_equals_the_safetensors_librarys_for_every_dtype_and_odd_names() -> None:
    tensors = {f"z.{code}": torch.zeros(2, 3).to(dtype) for dtype, code in DTYPE_CODES.items()}
    tensors |= {
        "b": torch.zeros(0, 3),
        "é": torch.zeros(5),
        'q"\\uote': torch.tensor(1.0),
        "a\t": torch.zeros(1),
    }
    layout = plan_layout([_spec(key, tensor) for key, tensor in tensors.items()], 10**9, 0)
    expected = save(tensors, {"format": "pt"})
    assert layout.index is None
    assert len(expected) == layout.total_bytes
    assert expected.startswith(layout.files[0].header)


def test_a_dtype_that_safetensors_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(
        CheckpointMismatchError,
        match=r"w has dtype torch\.complex128; safetensors files hold torch\.bool,",
    ):
        plan_layout([_spec("w", torch.zeros(2, dtype=torch.complex128))], 10**9, 0)


def test_header_that_is_read_back_gives_the_planned_slots(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(5), "c": torch.randn(2).bfloat16()}
    save_file(tensors, tmp_path / WEIGHTS_NAME, {"format": "pt"})
    layout = plan_layout([_spec(key, tensor) for key, tensor in tensors.items()], 10**9, 0)
    assert _layout(tmp_path) == layout.slots
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    for key, place in layout.slots.items():
        values = torch.frombuffer(
            bytearray(data), dtype=place.dtype, offset=place.offset, count=tensors[key].numel()
        )
        assert torch.equal(values.view(place.shape), tensors[key])


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_read_header_refuses_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(save({"w": torch.zeros(8)}, {"format": "pt"})[:keep])
    with pytest.raises(CheckpointCorruptError, match="truncated"):
        _header(path)


def test_read_header_refuses_extra_bytes_and_headers_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(save({"w": torch.zeros(8)}) + b"x")
    with pytest.raises(CheckpointCorruptError, match="too long: 97 bytes, its header asks for 96"):
        _header(path)
    for header in (
        b"not json",
        b"[]",
        b'{"w":{"dtype":"F32"}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}',
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointCorruptError, match="broken header"):
            _header(path)


def test_read_layout_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone is not a folder"):
        _layout(tmp_path / "gone")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        CheckpointNotFoundError, match=r"neither model\.safetensors.*found \['pytorch_model\.bin'\]"
    ):
        _layout(tmp_path)


def test_read_layout_refuses_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    def write_index(weight_map: object) -> None:
        (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    write_index({"a": "one.safetensors", "b": "two.safetensors"})
    assert sorted(_layout(tmp_path)) == ["a", "b"]
    write_index({"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(CheckpointCorruptError, match="says that c is in two"):
        _layout(tmp_path)
    write_index({"a": "three.safetensors"})
    with pytest.raises(CheckpointCorruptError, match=r"names three\.safetensors, which is missing"):
        _layout(tmp_path)
    write_index({"a": "../one.safetensors"})
    with pytest.raises(CheckpointCorruptError, match="a file next to it"):
        _layout(tmp_path)
    write_index(["a"])
    with pytest.raises(CheckpointCorruptError, match="not a weight index"):
        _layout(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    write_index({"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointCorruptError, match="a is in both"):
        _layout(tmp_path)
