"""How many bytes a set takes in a cache: exact where the index tells, else by a few samples from all over the set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from readers.cached.choice import Weights, spread
from readers.cached.keep import Decoded, Encoded, Recoded
from readers.cached.packing import Measured, may_pay, measured
from readers.cached.shelf import form_bytes
from readers.cached.source import indexed, info_of
from readers.cached.store import Slots
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.headers import MEDIA
from readers.sample import Buffer, Reader

__all__ = ["Measures", "measure"]

_PEEKED, _TAKEN, _TAKEN_BYTES = 16, 256, 32 << 20
_MARGIN = 1.1  # of what is estimated: room that is missing costs hits, room that is left over costs little
_SLOT_BYTES = 64  # a payload begins at a multiple of this
_COMPRESSED = tuple(MEDIA.index(name) for name in ("jpeg", "png", "webp", "gif"))
_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measures:
    """rate: bytes per pixel of recoded images. fields: what compression does to each. mean: bytes of an image as it is
    kept, where no index knows better."""

    reader: Reader
    slots: Slots
    keep: Encoded | Recoded | Decoded
    rate: float
    fields: Mapping[str, Measured]
    mean: float

    def weights(self) -> Weights:
        """Estimated bytes of samples with all their fields."""
        columns = {name: self.reader.sizes(name) for name in self.slots.fields}

        def of(indices: _Ints) -> _Ints:
            total = np.zeros(len(indices), np.int64)
            for name, sizes in columns.items():
                total += self._stored(name, indices, sizes[indices])
            return total

        return of

    def _stored(self, name: str, indices: _Ints, sizes: _Ints) -> _Ints:
        if name == "image" and not isinstance(self.keep, Encoded):
            return _padded(self._formed(indices, sizes))
        share = self.fields[name].share if name in self.fields else 1.0
        found = np.minimum(sizes, np.ceil(sizes * share * _MARGIN).astype(np.int64)) if share < 1 else sizes
        return np.where(sizes > 0, _padded(found), 0) if name != "image" else _padded(found)

    def _formed(self, indices: _Ints, sizes: _Ints) -> _Ints:
        if not indexed(self.reader):
            return np.full(len(indices), int(self.mean * _MARGIN) + 1, np.int64)
        info = self.keep.info(self.reader.image_info(indices))
        rate = self.rate * (_MARGIN if isinstance(self.keep, Recoded) else 1.0)
        return form_bytes(self.keep, rate, info, sizes)


def measure(reader: Reader, slots: Slots, keep: Encoded | Recoded | Decoded, compress: bool) -> Measures:
    """Look at a few samples where that is needed: none of an indexed set of JPEGs kept as they are or decoded."""
    fields: dict[str, Measured] = {}
    rate = mean = 0.0
    for name in slots.fields:
        if name == "image" and not isinstance(keep, Encoded):
            if isinstance(keep, Recoded) or not indexed(reader):
                rate, mean = _formed(reader, slots, keep)
        elif compress:
            found = _compressed(reader, slots, name)
            if found.packing is not None:
                fields[name] = found
    return Measures(reader, slots, keep, rate, fields, mean)


def _compressed(reader: Reader, slots: Slots, name: str) -> Measured:
    """What compression does to a field."""
    chosen = spread(slots.start, slots.stop, _TAKEN)
    if name == "image" and indexed(reader):
        media = reader.image_info(chosen).media
        if len(media) and np.isin(media, _COMPRESSED).mean() > 0.9:
            return Measured(None, 1.0)
    elif not may_pay(_read(reader, spread(slots.start, slots.stop, _PEEKED), name)):
        return Measured(None, 1.0)
    sizes = reader.sizes(name)[chosen]
    taken = chosen[(sizes > 0) & (np.cumsum(sizes) <= max(_TAKEN_BYTES, int(sizes.max(initial=0))))]
    return measured(_read(reader, taken, name))


def _formed(reader: Reader, slots: Slots, keep: Encoded | Recoded | Decoded) -> tuple[float, float]:
    """(bytes per pixel of those that change, bytes of an image) as it is kept."""
    forms = []
    for image in _read(reader, spread(slots.start, slots.stop, 4 * _PEEKED), "image"):
        try:
            forms.append((keep.made(image), image))
        except _SAMPLE_ERRORS:
            continue
    if not forms:
        return 1.0, 0.0
    info = info_of(form for form, _ in forms)
    sizes = np.array([len(form) for form, _ in forms])
    changed = np.array([form is not image for form, image in forms])
    pixels = (info.height.astype(np.int64) * info.width)[changed]
    rate = float(sizes[changed].sum() / pixels.sum()) if pixels.sum() else 1.0
    return rate, float(sizes.mean())


def _read(reader: Reader, indices: _Ints, name: str) -> list[Buffer]:
    """The payloads that can be read."""
    try:
        return list(reader.read_many(indices, name))
    except _SAMPLE_ERRORS:
        pass
    found: list[Buffer] = []
    for index in indices.tolist():
        try:
            found.append(reader.read(index, name))
        except _SAMPLE_ERRORS:
            continue
    return found


def _padded(sizes: _Ints) -> _Ints:
    """What payloads take of the cache."""
    return np.maximum(_SLOT_BYTES, -(-sizes // _SLOT_BYTES) * _SLOT_BYTES)
