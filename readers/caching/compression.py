"""Compression of what is not compressed already: BMP, uncompressed TIFF, raw arrays, text.

Payloads are stored as zstd frames where that pays. JPEG, PNG, WebP and GIF are stored as they are, in the same field
too: what begins with zstd's magic (RFC 8878, 3.1.1) is a frame, and everything else is the payload. A payload that
itself begins with the magic is made a frame in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from cache.stores import Buffer
from readers.headers import sniff

__all__ = ["compress", "decompress", "may_pay", "share_left"]

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3
_COMPRESSED_MEDIA = ("jpeg", "png", "webp", "gif")
_PAYS = 0.9
_local = threading.local()


def compress(data: Buffer) -> Buffer:
    """What to store for a payload."""
    if data[:4] != _MAGIC and sniff(data) in _COMPRESSED_MEDIA:
        return data
    frame: bytes = _codecs().compressor.compress(data)
    return frame if len(frame) < len(data) or data[:4] == _MAGIC else data


def decompress(stored: Buffer) -> Buffer:
    """The payload. Raises ValueError for a broken frame."""
    if stored[:4] != _MAGIC:
        return stored
    from zstandard import ZstdError

    try:
        data: bytes = _codecs().decompressor.decompress(stored)
    except ZstdError as error:
        raise ValueError(f"a broken zstd frame of {len(stored)} bytes: {error}") from error
    return data


def may_pay(payloads: Sequence[Buffer]) -> bool:
    """Whether enough of these bytes are not compressed already for it to be worth a closer look."""
    raw = sum(len(data) for data in payloads if sniff(data) not in _COMPRESSED_MEDIA)
    return raw > 0 and raw >= (1 - _PAYS) * sum(len(data) for data in payloads)


def share_left(payloads: Sequence[Buffer]) -> float:
    """The share of the bytes of some payloads of a field that is left: 1.0 where it saves less than a tenth."""
    if not may_pay(payloads):
        return 1.0
    share = sum(len(compress(data)) for data in payloads) / sum(len(data) for data in payloads)
    return share if share <= _PAYS else 1.0


def _codecs() -> Any:
    """This thread's compressor and decompressor."""
    if not hasattr(_local, "compressor"):
        import zstandard

        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local
