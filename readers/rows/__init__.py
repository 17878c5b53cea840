"""Rows of a JPEG as a JPEG of its own: where rows begin, noted once, and small files for any decoder.

    row index  ──►  which bytes of the file the wanted rows are in  ──►  a strip: a JPEG of these rows

`entries` says what the index of a split has for each image, `strips` how a JPEG is made of a part of another one, and
`reading` reads them; `Reader.read_rows` is the way in. The files themselves stay as they are. `packer index
--jpeg-rows` makes the index, and needs numba.
"""

from readers.rows.entries import RowColumns, RowEntry, pack_entry
from readers.rows.strips import Strip

__all__ = ["RowColumns", "RowEntry", "Strip", "pack_entry"]
