"""Reading every sample of a split once, in the background: what is damaged, and what no index says.

The bytes of each field are compared with the checksum of the index, and the header of each image with its columns. Of
what has no index the same pass gives the columns: sides, medium, bytes and checksum of each image.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import PackerError, UnknownNameError
from packer.comparison import header_difference
from readers.index import MemoryColumns
from readers.pixels import PIXELS, stored_bytes
from readers.reader import Reader
from readers.sample import Buffer, ImageInfo, headers_of

__all__ = ["Scan"]

_MOST_REASONS = 10_000


class Scan:
    """One pass over a split, in a thread of its own once it is started.

    done: samples that were read. reasons: what is wrong with a sample, by its number, for the first ten thousand.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._indexed = not isinstance(reader.table.columns, MemoryColumns)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._faulty = np.zeros(len(reader), np.bool_)
        self.reasons: dict[int, str] = {}
        self.done = 0
        count = 0 if self._indexed else len(reader)
        self._sizes, self._checksums = np.zeros(count, np.int64), np.zeros(count, np.uint32)
        self._info = headers_of([None] * count)

    def start(self) -> None:
        """Begin, unless that was done."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="packer-view-scan", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End it, finished or not."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Wait until it has ended."""
        self.start()
        assert self._thread is not None
        self._thread.join()

    @property
    def finished(self) -> bool:
        return self.done == len(self._reader) and (self._thread is None or not self._thread.is_alive())

    def progress(self) -> dict[str, Any]:
        """As documents have it."""
        found: dict[str, Any] = {"done": self.done, "total": len(self._reader)}
        return found | ({"error": {"type": "ScanError", "message": self._failure}} if self._failure else {})

    # --- when it has finished ---------------------------------------------------------------------------------------
    def faulty(self) -> npt.NDArray[np.int64]:
        """The numbers of the samples that are damaged, int64 [k]."""
        return np.flatnonzero(self._faulty)

    def facts(self) -> tuple[ImageInfo, npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """(headers, bytes, CRC32C) of the images of what has no index, each [n]; 0 where one cannot be read."""
        return self._info, self._sizes, self._checksums

    # --- inside -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            for index in range(len(self._reader)):
                if self._stop.is_set():
                    return
                fault = self._examine(index)
                if fault:
                    self._faulty[index] = True
                    if len(self.reasons) < _MOST_REASONS:
                        self.reasons[index] = fault
                self.done = index + 1
        except (PackerError, OSError, MemoryError) as error:
            self._failure = str(error) or type(error).__name__

    def _examine(self, index: int) -> str:
        """Read a sample; what is wrong with it."""
        reader, faults = self._reader, []
        for field in reader.fields:
            data: Buffer | None = None
            try:
                data = reader.read(index, field) if reader.has(index, field) else None
            except UnknownNameError:  # of a source, which says only now that the sample lacks it
                data = None
            except (PackerError, OSError) as error:
                faults.append(f"field {field}: {error}")
            if field == "image":
                faults += self._examine_image(index, data, bool(faults))
            if data is not None and self._indexed and reader.table.columns.has_checksums:
                found = crc32c(stored_bytes(data) if reader.kinds[field] == PIXELS else data)
                expected = int(reader.table.field_column(field, "crc32c")[index])
                if found != expected:
                    faults.append(f"field {field} is damaged: CRC32C {found:08x}, expected {expected:08x}")
        return "; ".join(faults)

    def _examine_image(self, index: int, data: Buffer | None, is_known: bool) -> list[str]:
        if self._indexed:
            fault = "" if is_known else header_difference(self._reader.info, index, data)
            return [fault] if fault else []
        header = headers_of([data])
        for name in ImageInfo._fields:
            getattr(self._info, name)[index] = getattr(header, name)[0]
        if data is not None:
            self._sizes[index], self._checksums[index] = len(data), crc32c(data)
        if data is not None and not int(header.height[0]):
            return ["the header of the image cannot be read"]
        return []
