"""Sets whose images are raw pixels: bytes of one length each, [height, width, 3], without a header.

The index has their sizes. Readers hand them out behind the header that caches of decoded images use, too
(`readers.headers.base`), by which everything that decodes knows them: nothing is decoded, and one copy is made.
"""

from __future__ import annotations

from cache.errors import DamagedSampleError
from cache.messages import quoted
from cache.stores import Buffer, Extents, Store, StoreOver
from cache.stores.base import Payloads
from readers.headers.base import PIXELS_HEADER_BYTES, pixels_header
from readers.index import Columns

__all__ = ["PIXELS", "Pixels", "stored_bytes"]

PIXELS = "pixels"  # the kind of the field image in such sets


def stored_bytes(payload: Buffer) -> Buffer:
    """The raw pixels in a payload of `Pixels`."""
    return payload[PIXELS_HEADER_BYTES:]


class Pixels(StoreOver):
    """A store of raw pixels, which are handed out behind their header. Raises DamagedSampleError."""

    def __init__(self, source: Store, columns: Columns) -> None:
        self.source, self.columns = source, columns

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._behind_header(row, self.source.read_one(row, shard, offset, length))

    def read(self, extents: Extents) -> list[Buffer]:
        found = self.source.read(extents)
        return [self._behind_header(row, data) for row, data in zip(extents.row.tolist(), found, strict=True)]

    def _behind_header(self, row: int, data: Buffer) -> Buffer:
        payloads = Payloads(len(self.columns.fields))
        sample, number = payloads.sample(row), payloads.field(row)
        if self.columns.fields[number] != "image":
            return data
        height, width = (int(self.columns.column(name)[sample]) for name in ("height", "width"))
        if len(data) != 3 * height * width:
            raise DamagedSampleError(
                f"sample {sample}: has {len(data):,} bytes of pixels, expected 3 x {height} x {width} by the index; "
                f"run  packer verify {quoted(self.columns.place)}"
            )
        return b"".join((pixels_header(height, width), data))
