"""Compression of what is not compressed already: BMP, uncompressed TIFF, raw arrays, text.

A field's payloads are stored as zstd frames, with a dictionary trained on samples of the set where that pays. JPEG,
PNG, WebP and GIF are stored as they are, in the same field too: what begins with zstd's magic (RFC 8878, 3.1.1) is a
frame, and everything else is the payload. A payload that itself begins with the magic is made a frame in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from readers.headers import sniff
from readers.sample import Buffer

__all__ = ["Measured", "Packing", "may_pay", "measured"]

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3
_COMPRESSED_MEDIA = ("jpeg", "png", "webp", "gif")
_PAYS = 0.9
_DICTIONARY_PAYS = 0.95
_DICTIONARY_BYTES = 64 << 10
# Larger payloads bring their own context, and gain next to nothing from a dictionary.
_DICTIONARY_MEAN_BYTES = 32 << 10
_TRAINING_PAYLOADS = 16


class Packing:
    """How the payloads of one field are stored. Threads may share it; it pickles.

    dictionary: what frames are compressed against, b"" for none.
    """

    def __init__(self, dictionary: bytes = b"") -> None:
        self.dictionary = dictionary
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[Packing], tuple[bytes]]:
        return Packing, (self.dictionary,)

    def packed(self, data: Buffer) -> Buffer:
        """What to store for a payload."""
        if data[:4] != _MAGIC and sniff(data) in _COMPRESSED_MEDIA:
            return data
        frame: bytes = self._codecs().compressor.compress(data)
        return frame if len(frame) < len(data) or data[:4] == _MAGIC else data

    def unpacked(self, stored: Buffer) -> Buffer:
        """The payload. Raises ValueError for a broken frame."""
        if stored[:4] != _MAGIC:
            return stored
        from zstandard import ZstdError

        try:
            data: bytes = self._codecs().decompressor.decompress(stored)
        except ZstdError as error:
            raise ValueError(f"a broken zstd frame of {len(stored)} bytes: {error}") from error
        return data

    def _codecs(self) -> Any:
        """This thread's compressor and decompressor."""
        if not hasattr(self._local, "compressor"):
            import zstandard

            shared = zstandard.ZstdCompressionDict(self.dictionary) if self.dictionary else None
            self._local.compressor = zstandard.ZstdCompressor(level=_LEVEL, dict_data=shared)
            self._local.decompressor = zstandard.ZstdDecompressor(dict_data=shared)
        return self._local


class Measured:
    """Whether compression pays for a field: packing (None where not), and the share of the bytes that is left."""

    __slots__ = ("packing", "share")

    def __init__(self, packing: Packing | None, share: float) -> None:
        self.packing, self.share = packing, share


def may_pay(payloads: Sequence[Buffer]) -> bool:
    """Whether enough of these bytes are not compressed already for it to be worth a closer look."""
    raw = sum(len(data) for data in payloads if sniff(data) not in _COMPRESSED_MEDIA)
    return raw > 0 and raw >= (1 - _PAYS) * sum(len(data) for data in payloads)


def measured(payloads: Sequence[Buffer]) -> Measured:
    """Try it on some payloads of a field: it pays where it saves a tenth of all bytes."""
    total = sum(len(data) for data in payloads)
    plain = [data for data in payloads if sniff(data) not in _COMPRESSED_MEDIA and len(data)]
    raw = sum(len(data) for data in plain)
    if not may_pay(payloads):
        return Measured(None, 1.0)
    best, left = Packing(), _stored(Packing(), plain)
    with_dictionary = _trained(plain)
    if with_dictionary is not None:
        # Judged by the half that it was not trained on.
        judges = plain[1::2]
        if _stored(with_dictionary, judges) < _DICTIONARY_PAYS * _stored(best, judges):
            best, left = with_dictionary, 2 * _stored(with_dictionary, judges)
    share = (total - raw + left) / total
    return Measured(best, min(1.0, share)) if share <= _PAYS else Measured(None, 1.0)


def _stored(packing: Packing, payloads: Sequence[Buffer]) -> int:
    return sum(len(packing.packed(data)) for data in payloads)


def _trained(payloads: Sequence[Buffer]) -> Packing | None:
    """With a dictionary from every second payload; None where there are too few, or they are too large."""
    half: list[bytes | bytearray | memoryview] = [bytes(data) for data in payloads[::2]]
    size = sum(map(len, half))
    if len(half) < _TRAINING_PAYLOADS or size > _DICTIONARY_MEAN_BYTES * len(half):
        return None
    import zstandard

    try:
        found = zstandard.train_dictionary(min(_DICTIONARY_BYTES, max(256, size // 4)), half)
    except zstandard.ZstdError:
        return None  # nothing in common
    return Packing(found.as_bytes())
