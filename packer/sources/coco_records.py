"""Annotations of COCO as fields: what a worker makes of the records of one image. See `packer.sources.coco`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.sources.folder import read_file
from packer.sources.json_parts import strict_json
from packer.sources.objects import Grid, class_mask, decode_counts, grid_of, outline_pixels, pixels_of_counts
from packer.sources.streams import PlainFile
from readers.fields import encode_field
from readers.sample import Buffer

__all__ = ["CocoFile", "CocoReader", "numbers_of"]

_MAX_MEMBERS = 1 << 20  # points of an outline, or runs of a mask


class CocoFile(NamedTuple):
    """A file of annotations: what kind it is, and its bytes and time when it was listed."""

    kind: str
    path: str
    stamp: tuple[int, int]

    @property
    def has_objects(self) -> bool:
        """Whether an image without annotations in it is known to have none."""
        return self.kind not in ("image_info", "captions")


class CocoReader:
    """Reads images, and makes fields of the records of each.

    files, opened: the files of annotations. fields: names and kinds. classes: the number of each category's id.
    keypoints: of an object.
    """

    def __init__(
        self,
        files: Sequence[CocoFile],
        opened: Sequence[PlainFile],
        fields: Mapping[str, str],
        classes: Mapping[int, int],
        keypoints: int,
    ) -> None:
        self._files, self._opened = files, opened
        self._fields, self._classes, self._keypoints = fields, classes, keypoints

    def read(self, place: tuple[Any, ...], arena: Arena) -> Sequence[Buffer | None]:
        path, size, is_known, *numbers = place
        try:
            image: Buffer = read_file(path, size, arena)
        except BadSampleError as error:
            raise BadSampleError(f"{path!r} {error}") from error
        texts = [(numbers[i], self._text(*numbers[i : i + 3])) for i in range(0, len(numbers), 3)]
        try:
            found = self._values(image, texts, is_known)
        except BadSampleError as error:
            raise BadSampleError(f"{self._files[texts[-1][0]].path}: {error}") from error
        payloads: list[Buffer | None] = [image]
        for name, kind in [*self._fields.items()][1:]:
            payloads.append(encode_field(kind, found[name]) if found.get(name) is not None else None)
        return payloads

    def _text(self, file: int, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._opened[file].read_into(offset, memoryview(data))
        return bytes(data)

    def _values(self, image: Buffer, texts: Sequence[tuple[int, bytes]], is_known: bool) -> dict[str, Any]:
        """The value of each field, None where there is none. texts: the image's record, then those of annotations."""
        record = _record(texts[0][1])
        size = record.get("height"), record.get("width")
        grid = grid_of(image, size if None not in size else None)
        objects: dict[Any, dict[str, Any]] = {}
        captions: list[str] = []
        by_kind: dict[str, list[bytes]] = {}
        for number, text in texts[1:]:
            by_kind.setdefault(self._files[number].kind, []).append(text)
            annotation = _record(text)
            caption = annotation.get("caption")
            if isinstance(caption, str):
                captions.append(" ".join(caption.split()))
            if annotation.get("bbox"):
                objects.setdefault(annotation.get("id", object()), {}).update(annotation)
        groups = [b'"image":' + texts[0][1], *(b'"%s":[%s]' % (k.encode(), b",".join(v)) for k, v in by_kind.items())]
        values: dict[str, Any] = {"json": b"{" + b",".join(groups) + b"}"}
        if captions:
            values["caption"] = captions
        if is_known:
            values |= self._objects(list(objects.values()), grid)
        return values

    def _objects(self, records: Sequence[Mapping[str, Any]], grid: Grid) -> dict[str, Any]:
        boxes = np.array([numbers_of(record["bbox"], 4, "bbox") for record in records], np.float64).reshape(-1, 4)
        if (boxes[:, 2:] < 0).any():
            raise BadSampleError(
                f"a bbox has a negative width or height: {boxes[(boxes[:, 2:] < 0).any(1)][0].tolist()}"
            )
        boxes[:, 2:] += boxes[:, :2]
        labels = [self._classes[record["category_id"]] for record in records]
        values: dict[str, Any] = {"boxes": grid.boxes(boxes), "box_labels": np.array(labels, np.int64)}
        if "mask" in self._fields:
            drawn = [(label, _pixels(record, grid)) for label, record in zip(labels, records, strict=True)]
            values["mask"] = class_mask([pair for pair in drawn if pair[1] is not None], len(self._classes), grid)
        if "points" in self._fields:
            points = np.full((len(records), self._keypoints, 2), np.nan)
            for row, record in enumerate(records):
                self._fill_points(points[row], record.get("keypoints"))
            values["points"] = grid.points(points)
        return values

    def _fill_points(self, points: Any, keypoints: Any) -> None:
        if keypoints:
            found = np.array(numbers_of(keypoints, len(keypoints), "keypoints"))
            if len(found) % 3 or len(found) > 3 * self._keypoints:
                raise BadSampleError(f"keypoints have {len(found)} numbers, expected x, y and v of each")
            triples = found.reshape(-1, 3)
            labelled = triples[:, 2] > 0
            points[: len(triples)][labelled] = triples[labelled, :2]


def _record(text: bytes) -> dict[str, Any]:
    try:
        record = strict_json(text)
    except ValueError as error:
        raise BadSampleError(f"the record {text[:60]!r} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise SourceError(f"the record {text[:60]!r} is not the one that was listed: the file has changed")
    return record


def numbers_of(value: Any, count: int, what: str) -> list[float]:
    """A list of so many numbers. Raises BadSampleError."""
    good = isinstance(value, list) and len(value) == count <= _MAX_MEMBERS
    if not good or not all(type(number) in (int, float) for number in value):
        raise BadSampleError(f"{what} is {value!r:.60}, expected {count} numbers")
    try:
        return [float(number) for number in value]
    except OverflowError as error:
        raise BadSampleError(f"{what} has a number beyond all images") from error


def _pixels(record: Mapping[str, Any], grid: Grid) -> Any:
    """The pixels of an object, bool [height, width]; None where no outline is given."""
    segmentation = record.get("segmentation")
    if not segmentation:
        return None
    if isinstance(segmentation, dict):
        counts, size = segmentation.get("counts"), segmentation.get("size")
        if size != [grid.height, grid.width]:
            raise BadSampleError(f"a mask of runs is for {size!r:.40}, the image has {[grid.height, grid.width]}")
        if not isinstance(counts, (str, list)):
            raise BadSampleError("a mask of runs has no runs")
        return pixels_of_counts(decode_counts(counts) if isinstance(counts, str) else counts, grid)
    if not isinstance(segmentation, list):
        raise BadSampleError(f"segmentation is {segmentation!r:.40}, expected outlines, or runs with a size")
    pixels = np.zeros((grid.height, grid.width), np.bool_)
    for outline in segmentation:
        length = len(outline) if isinstance(outline, list) else -1
        pixels |= outline_pixels(np.array(numbers_of(outline, length & ~1, "an outline")).reshape(-1, 2), grid)
    return pixels
