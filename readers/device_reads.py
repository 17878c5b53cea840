"""Samples from the disk straight into the memory of a GPU, by kvikio and GPUDirect Storage.

For fields that need no decoding: pixels or tensors that were packed as they are. Encoded images gain nothing, since
decoders take them from the memory of the host. Where the file system or the driver has no GPUDirect, kvikio goes
through the host by itself. Needs `pip install 'packer-vision[kvikio]'` (CUDA 12) or kvikio from conda; the index says
where the bytes are, as always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from readers.errors import DatasetError, MissingExtraError, StaleIndexError, UnknownNameError

__all__ = ["DeviceReader", "Located"]

_OPEN_FILES = 64


class Located(Protocol):
    """What is asked of a reader: where each sample lies. `readers.ShardReader` says so."""

    def byte_range(self, index: int, field: str = "image") -> tuple[Path, int, int] | None: ...


class DeviceReader:
    """Reads fields of a packed set to a device; for one thread. Close it, or use it in a `with` statement.

    Raises MissingExtraError without kvikio.
    """

    def __init__(self, reader: Located, device: torch.device | str = "cuda") -> None:
        try:
            from kvikio import CuFile
        except ImportError as error:
            raise MissingExtraError("kvikio", "kvikio", "reading to a GPU") from error
        self._open: Any = CuFile
        self._reader, self._device = reader, torch.device(device)
        self._files: dict[Path, Any] = {}

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> list[torch.Tensor]:
        """The bytes of samples in the order asked for: uint8 [length] each, views of one block on the device.

        Raises UnknownNameError where a sample lacks the field, StaleIndexError where a shard ends too early.
        """
        ranges = self._ranges(indices, field)
        block = torch.empty(sum(length for _, _, length in ranges), dtype=torch.uint8, device=self._device)
        parts = list(block.split([length for _, _, length in ranges]))
        self._read(ranges, parts)
        return parts

    def read_batch(
        self,
        indices: Sequence[int] | npt.NDArray[Any],
        shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        field: str = "image",
    ) -> torch.Tensor:
        """Samples that are arrays of `shape`, C order, little-endian: [n, *shape] on the device.

        Raises DatasetError where a sample has another length, and what `read_many` raises.
        """
        ranges = self._ranges(indices, field)
        size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        for index, (_, _, length) in zip(np.asarray(indices).tolist(), ranges, strict=True):
            if length != size:
                raise DatasetError(f"sample {index}: {field} has {length} bytes, {dtype} {list(shape)} would be {size}")
        batch = torch.empty((len(ranges), *shape), dtype=dtype, device=self._device)
        self._read(ranges, list(batch.view(len(ranges), -1).view(torch.uint8)) if ranges and size else [])
        return batch

    def close(self) -> None:
        """Close the shards; the next read opens them again."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> DeviceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ranges(self, indices: Sequence[int] | npt.NDArray[Any], field: str) -> list[tuple[Path, int, int]]:
        ranges = []
        for index in np.asarray(indices, np.int64).tolist():
            found = self._reader.byte_range(index, field)
            if found is None:
                raise UnknownNameError(f"sample {index} has no field {field!r}")
            ranges.append(found)
        return ranges

    def _read(self, ranges: Sequence[tuple[Path, int, int]], parts: Sequence[torch.Tensor]) -> None:
        """All reads at once, then wait for each; a shard that ends early is noticed, whatever the index says."""
        if self._device.type == "cuda":  # kvikio writes beside the stream: nothing on it may still use the block
            torch.cuda.current_stream(self._device).synchronize()
        waiting = [
            (path, offset, length, self._file(path).pread(part, length, offset))
            for (path, offset, length), part in zip(ranges, parts, strict=bool(parts))
            if length
        ]
        done = [future.get() for *_, future in waiting]
        if len(self._files) > _OPEN_FILES:
            self.close()
        for (path, offset, length, _), found in zip(waiting, done, strict=True):
            if found != length:
                raise StaleIndexError(
                    f"{path}: expected {length} bytes at {offset}, found {found}; run `packer verify {path.parent}`"
                )

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open(path, "r")
        return self._files[path]
