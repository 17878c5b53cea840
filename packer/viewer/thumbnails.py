"""Small pictures of samples in a file of their own, for pages that no decoder serves.

thumbnails/SPLIT.npy           uint8, JPEGs end to end; nothing for an image that cannot be decoded
thumbnails/SPLIT.offset.npy    uint64, n + 1: picture i is bytes offset[i] to offset[i + 1]
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from cache.errors import BadSampleError
from cache.files import Folder
from cache.messages import Watcher
from cache.node import usable_cpus
from packer.viewer.columns import Column
from packer.viewer.samples import thumbnail
from readers.reader import Reader

__all__ = ["FOLDER", "write_thumbnails"]

FOLDER = "thumbnails"
_SIDE = 200  # pixels; the page draws them up to 180 wide
_AHEAD = 64
_HEADER_BYTES = 128  # of an array of one dimension, of any length


def write_thumbnails(reader: Reader, name: str, page: Path, watcher: Watcher) -> tuple[dict[str, Any], int]:
    """Write those of a split below a page, in files of this name. The columns as view.json has them, and their bytes.

    Raises OSError, and PackerError where the set cannot be read; a damaged image has no picture.
    """
    offsets = np.zeros(len(reader) + 1, np.uint64)
    done = 0
    waiting: deque[Future[bytes]] = deque()
    with Folder(page / FOLDER, create=True) as folder, ThreadPoolExecutor(usable_cpus()) as pool:
        watcher.begin(len(reader), 0, lambda: (done, 0, 0))
        try:
            with folder.writing(f"{name}.npy") as file:
                file.write(bytes(_HEADER_BYTES))
                for index in range(len(reader) + _AHEAD):
                    if index < len(reader):
                        waiting.append(pool.submit(_picture, reader, index))
                    if index >= _AHEAD and waiting:
                        data = waiting.popleft().result()
                        file.write(data)
                        offsets[done + 1] = offsets[done] + np.uint64(len(data))
                        done += 1
                pictures = Column(
                    np.broadcast_to(np.uint8(0), int(offsets[-1]))
                )  # of this length; the values are written
                assert len(pictures.header) == _HEADER_BYTES
                file.seek(0)
                file.write(pictures.header)
            column = Column(offsets)
            folder.write(f"{name}.offset.npy", column.read(0, column.size))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            watcher.end()
    url = f"{FOLDER}/{quote(name)}"
    columns = {
        "thumbnail": pictures.described(f"{url}.npy"),
        "thumbnail.offset": column.described(f"{url}.offset.npy"),
    }
    return columns, pictures.size + column.size


def _picture(reader: Reader, index: int) -> bytes:
    try:
        return thumbnail(reader, index, _SIDE) if reader.has(index, "image") else b""
    except BadSampleError:
        return b""
