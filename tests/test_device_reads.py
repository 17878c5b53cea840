"""Reading to a device by kvikio: against a double of it, and the real one where there is one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import readers
from readers.device_reads import DeviceReader
from readers.errors import DatasetError, MissingExtraError, StaleIndexError, UnknownNameError


class CuFile:
    """kvikio.CuFile, as far as it is used: `pread` returns a future, whose `get` returns the bytes read."""

    opened: list[CuFile] = []

    def __init__(self, file: Path, flags: str = "r") -> None:
        assert flags == "r"
        self.path, self.closed, self.descriptor = file, False, os.open(file, os.O_RDONLY)
        CuFile.opened.append(self)

    def pread(self, buf: torch.Tensor, size: int | None = None, file_offset: int = 0) -> Any:
        assert not self.closed and buf.dtype == torch.uint8 and buf.is_contiguous() and buf.numel() == size

        class Future:
            def get(_) -> int:
                data = os.pread(self.descriptor, size or 0, file_offset)
                buf[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else buf[:0]
                return len(data)

        return Future()

    def close(self) -> None:
        self.closed = True
        os.close(self.descriptor)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CuFile]]:
    module = ModuleType("kvikio")
    module.CuFile = CuFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    CuFile.opened = []
    yield CuFile.opened
    assert all(file.closed for file in CuFile.opened), "a file was left open"


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    return pack(tree, "hdf5", samples_per_shard=10)


def test_bytes_are_those_of_the_reader(packed: Path, kvikio: list[CuFile]) -> None:
    with readers.open(packed, split="train") as reader, DeviceReader(reader, "cpu") as device:
        order = [5, 0, 35, 5, 17]
        found = device.read_many(order)
        assert [bytes(part.numpy()) for part in found] == [bytes(reader.read(i)) for i in order]
        assert len({part.untyped_storage().data_ptr() for part in found}) == 1
        assert device.read_many([]) == []
    assert len(kvikio) == 3, "a shard is opened once"


def test_arrays_of_one_shape_are_one_tensor(packed: Path, kvikio: list[CuFile], tmp_path: Path) -> None:
    arrays = np.random.default_rng(0).normal(size=(4, 3, 5)).astype("<f4")
    (tmp_path / "raw").write_bytes(b"head" + arrays.tobytes())

    class Reader:
        def byte_range(self, index: int, field: str = "image") -> tuple[Path, int, int] | None:
            return None if field == "mask" else (tmp_path / "raw", 4 + 60 * index, 60)

    with DeviceReader(Reader(), "cpu") as device:
        batch = device.read_batch([3, 1], (3, 5), torch.float32)
        assert batch.shape == (2, 3, 5) and np.array_equal(batch.numpy(), arrays[[3, 1]])
        assert device.read_batch([], (3, 5)).shape == (0, 3, 5)
        with pytest.raises(DatasetError, match=r"sample 1: image has 60 bytes, torch.uint8 \[3, 5\] would be 15"):
            device.read_batch([1], (3, 5))
        with pytest.raises(UnknownNameError, match="sample 2 has no field 'mask'"):
            device.read_many([2], "mask")
        with pytest.raises(StaleIndexError, match=r"raw: expected 60 bytes at 244, found 0; run `packer verify"):
            device.read_many([0, 4])


def test_without_kvikio(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with (
        readers.open(packed, split="train") as reader,
        pytest.raises(MissingExtraError, match=r"packer-vision\[kvikio\]"),
    ):
        DeviceReader(reader)


@pytest.mark.skipif(
    importlib.util.find_spec("kvikio") is None or not torch.cuda.is_available(),
    reason="no kvikio or no CUDA device: samples were never read to a GPU here",
)
def test_on_a_gpu(packed: Path) -> None:
    with readers.open(packed, split="train") as reader, DeviceReader(reader) as device:
        for part, i in zip(device.read_many(range(12)), range(12), strict=True):
            assert bytes(part.cpu().numpy()) == bytes(reader.read(i))
