"""Annotations of Pascal VOC, an XML file an image: objects with names and boxes.

    <annotation>
      <size><width>500</width><height>375</height><depth>3</depth></size>
      <object><name>dog</name><bndbox><xmin>8</xmin><ymin>11</ymin><xmax>300</xmax><ymax>98</ymax></bndbox></object> …

An annotation has no document type, so one that declares some is refused before anything in it is: entities that grow,
and files elsewhere, come in there alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from xml.parsers import expat

import numpy as np

from cache.errors import BadSampleError
from packer.sources.objects import Floats

__all__ = ["MAX_XML_BYTES", "XmlObjects", "parse_objects"]

MAX_XML_BYTES = 16 << 20
_MAX_DEPTH = 32
_MAX_ELEMENTS = 1 << 18
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class XmlObjects(NamedTuple):
    """What an annotation says.

    record: all of it: an element is its text, or a mapping of those in it; several of one name are a list, as those
        called object always are.
    size: (height, width) of the image, None where it is not stated, or 0.
    names, corners: of each object; float64 [k, 4], as they are written.
    """

    record: dict[str, Any]
    size: tuple[int, int] | None
    names: list[str]
    corners: Floats


def parse_objects(data: bytes) -> XmlObjects:
    """Read an annotation. Raises BadSampleError."""
    record = _Tree().parse(data)
    objects = record.get("object", [])
    size = record.get("size")
    sides = (
        tuple(_number(size.get(name, "0"), name) for name in ("height", "width")) if isinstance(size, dict) else (0, 0)
    )
    names, corners = [], []
    for item in objects:
        name, box = (item.get("name"), item.get("bndbox")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(box, dict):
            raise BadSampleError("an object has no name, or not one bndbox")
        names.append(name)
        corners.append([_number(box.get(corner), corner) for corner in _CORNERS])
    height, width = sides
    known = (int(height), int(width)) if height >= 1 and width >= 1 else None
    return XmlObjects(record, known, names, np.array(corners, np.float64).reshape(-1, 4))


def _number(text: Any, what: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = float("nan")
    if not abs(value) < 1 << 32:
        raise BadSampleError(f"{what} is {text!r:.40}, expected a number of pixels")
    return value


class _Tree:
    """Collects elements while expat reads."""

    def __init__(self) -> None:
        self._open: list[tuple[str, dict[str, Any], list[str]]] = []
        self._count = 0
        self._root: Any = None
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        self._parser = parser

    def parse(self, data: bytes) -> dict[str, Any]:
        if len(data) > MAX_XML_BYTES:
            raise BadSampleError(f"has {len(data):,} bytes, expected at most {MAX_XML_BYTES:,}")
        try:
            self._parser.Parse(data, True)
        except (expat.ExpatError, ValueError, LookupError) as error:  # ValueError, LookupError: of an encoding
            if isinstance(error, BadSampleError):
                raise
            raise BadSampleError(f"is not XML: {error}") from error
        if not isinstance(self._root, dict):
            raise BadSampleError("is not an annotation: its root holds no elements")
        objects = self._root.get("object", [])
        self._root["object"] = objects if isinstance(objects, list) else [objects]
        return self._root

    def _refuse(self, *_: Any) -> None:
        raise BadSampleError("declares a document type or entities, which no annotation has")

    def _start(self, name: str, attributes: Any) -> None:
        self._count += 1
        if len(self._open) >= _MAX_DEPTH or self._count > _MAX_ELEMENTS:
            raise BadSampleError(f"has more than {_MAX_ELEMENTS:,} elements, or {_MAX_DEPTH} inside each other")
        self._open.append((name, {}, []))

    def _end(self, name: str) -> None:
        _, children, texts = self._open.pop()
        value: Any = children or "".join(texts).strip()
        if not self._open:
            self._root = value
            return
        above = self._open[-1][1]
        if name not in above:
            above[name] = value
        elif isinstance(above[name], list):
            above[name].append(value)
        else:
            above[name] = [above[name], value]

    def _text(self, text: str) -> None:
        if self._open:
            self._open[-1][2].append(text)
