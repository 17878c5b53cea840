"""Check the other fields of an image before they are packed, and let boxes and points follow one that is resized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cache.errors import BadSampleError, SourceError
from readers.fields import check_field, decode_field, encode_field
from readers.headers import ImageHeader
from readers.sample import Buffer

__all__ = ["BEYOND", "WITHOUT_AREA", "FieldChecks"]

WITHOUT_AREA, BEYOND = "boxes_without_area", "boxes_beyond_the_image"
_PIXELS = ("boxes", "points")
_TOLERANCE = 1.0  # pixels; whole numbers from 0 or from 1 on, and rounding


class FieldChecks:
    """The checks for fields of these kinds; files and JSON are packed as they are.

    deep: whether masks are decoded, and not only their headers parsed.
    targets: dtype and shape of each target, of which there is one in a set.
    """

    def __init__(self, kinds: Mapping[str, str], deep: bool) -> None:
        named = ((number, name, kind) for number, (name, kind) in enumerate(kinds.items()))
        self._checked = [each for each in named if each[1] != "image" and each[2] not in ("file", "json")]
        self._deep = deep
        self.targets: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._checked)

    @property
    def in_pixels(self) -> bool:
        """Whether a field is in pixels of the image."""
        return any(kind in _PIXELS for _, _, kind in self._checked)

    def check(self, payloads: Sequence[Buffer | None]) -> None:
        """Raise BadSampleError for the first field whose bytes are not what they should be."""
        for number, name, kind in self._checked:
            payload = payloads[number]
            if payload is None and kind == "target":
                raise BadSampleError(f"has no {name}, which is its label")
            if payload is not None:
                try:
                    if kind == "target":
                        self._check_target(name, payload)
                    check_field(kind, payload, deep=self._deep)
                except BadSampleError as error:
                    raise BadSampleError(f"field {name}: {error}") from error

    def remarks(self, payloads: Sequence[Buffer | None], header: ImageHeader) -> tuple[str, ...]:
        """Of boxes that are packed as they are, though trainings may not take them. header: of the image."""
        height, width = header.upright_size
        found = set()
        for number, _, kind in self._checked:
            payload = payloads[number]
            if kind == "boxes" and payload is not None:
                boxes = decode_field(kind, payload)
                if (boxes[:, :2] >= boxes[:, 2:]).any():
                    found.add(WITHOUT_AREA)
                if (boxes < -_TOLERANCE).any() or (boxes > np.array([width, height] * 2) + _TOLERANCE).any():
                    found.add(BEYOND)
        return tuple(sorted(found))

    def check_pixels(self, header: ImageHeader, name: str) -> None:
        """Raise SourceError for raw pixels of another size than those before. name: of the file."""
        found = f"{header.height} x {header.width} pixels"
        expected = self.targets.setdefault("image", found)
        if found != expected:
            raise SourceError(
                f"{name}: has {found}, the images before it {expected}; raw images of a set have one size: give ops "
                f"that make it, as  --op Resize:256 --op CenterCrop:256  (in Python ops=[Resize(256), CenterCrop(256)])"
            )

    def _check_target(self, name: str, payload: Buffer) -> None:
        values = decode_field("target", payload)
        found = f"{values.dtype} {list(values.shape)}"
        expected = self.targets.setdefault(name, found)
        if found != expected:
            raise BadSampleError(f"is {found}, that of the samples before {expected}: all labels are alike")

    def resized(
        self, payloads: Sequence[Buffer | None], before: ImageHeader, after: ImageHeader
    ) -> Sequence[Buffer | None]:
        """The payloads with boxes and points in pixels of the resized image. A mask stays: it covers the image in any
        size."""
        (height, width), (rows, columns) = before.upright_size, after.upright_size
        if (height, width) == (rows, columns):
            return payloads
        scale = np.array([columns / width, rows / height])
        changed = list(payloads)
        for number, _, kind in self._checked:
            payload = payloads[number]
            if kind in _PIXELS and payload is not None:
                values = decode_field(kind, payload)
                factors = np.tile(scale, 2) if kind == "boxes" else scale
                changed[number] = encode_field(kind, (values * factors).astype(np.float32))
        return changed
