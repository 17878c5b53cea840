"""Samples that a program hands over, as of a torch or Hugging Face data set: which members become which fields.

A sample is a dictionary, or a tuple of an image and its label. By default its members are used by what they are:

    image     encoded bytes of an image, an image of Pillow, uint8 [h, w], [h, w, 3] or [h, w, 4], or a dictionary with
              "bytes", or the "path" of a file, as Hugging Face hands out; pixels become PNG. The first one is the
              field `image`
    target    a number with a fraction, or a vector, that is called as a label is, and the second of a tuple: the field
              `target`, which is then the label; names of classes become a vector with 1 for each
    label     an integer called label, labels, target, class, cls or y; a text of that name is the name of a class
    mask      one channel called mask, seg… or annotation
    boxes     an array [k, 4] called boxes or bboxes; points: [..., 2] called points or keypoints
    array     any other array, or tensor
    text      a str; json: what is left, numbers, lists and dictionaries, together in the field `json`
    file      any other bytes

`fields` says it otherwise: {"img": "image", "y": "label", "mask": "mask", "id": "drop"}; the kinds are those of
`readers.fields`, and "label" and "drop".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.files import read_regular
from packer.sources.targets import Targets
from readers.fields import KINDS, encode_field
from readers.headers import sniff
from readers.names import FieldName
from readers.sample import NO_LABEL, Buffer
from readers.tree import has_image_suffix

__all__ = ["SampleForm"]

LABEL, DROP, TARGET = "label", "drop", "target"
_LABELS = ("label", "labels", "target", "class", "cls", "y")
_IMAGES = ("image", "img", "picture", "photo", "jpg", "png")
_MASKS = ("mask", "seg", "annotation")
_BOXES, _POINTS = ("boxes", "bboxes"), ("points", "keypoints")
_PAIR = ("image", "label")
_MAX_LABEL = _MAX_FILE_BYTES = 1 << 31


@dataclass(frozen=True)
class SampleForm:
    """Which members of a sample become which fields.

    members: member -> (field, kind), the image first; the members of a tuple are "0", "1", ….
    label: the member with the label, "" for none.
    rest: members that are kept together in the field `json`.
    classes: the names of the labels.
    """

    members: Mapping[str, tuple[str, str]]
    label: str = ""
    rest: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, sample: Any, fields: Mapping[str, str] | None = None, classes: Sequence[str] = ()) -> SampleForm:
        """The form of samples like this one. fields: member -> kind, default by what they are. Raises SourceError."""
        values = _members(sample)
        kinds = {name: _kind(name, value) for name, value in values.items()} if fields is None else dict(fields)
        if isinstance(sample, tuple | list) and fields is None:
            if len(values) != len(_PAIR):
                raise SourceError(
                    f"a sample is a tuple of {len(values)}, expected an image and its label; name the members in their "
                    f"order, as in  fields={{'0': 'image', '1': 'label', '2': 'mask'}},  or hand out dictionaries"
                )
            kinds = {"0": _kind("image", values["0"]), "1": _kind(LABEL, values["1"])}
            kinds["1"] = kinds["1"] if kinds["1"] == TARGET else LABEL
        _check_kinds(kinds, values)
        for name, kind in kinds.items():
            if kind == LABEL and _is_target(values[name]):
                kinds[name] = TARGET
        labels = [name for name, kind in kinds.items() if kind in (LABEL, TARGET)]
        if len(labels) > 1:
            raise SourceError(f"a sample has one label, but {', '.join(labels)} are called one; drop all but one")
        images = [name for name, kind in kinds.items() if kind == "image"]
        if not images:
            raise SourceError(f"no member of a sample is an image; it has {_described(values)}")
        first = next((name for known in _IMAGES for name in images if name.lower() == known), images[0])
        members = {first: ("image", "image")}
        for name, kind in kinds.items():
            if kind in KINDS and name != first and not (kind == "json" and fields is None):
                members[name] = (_field_of(name, kind), kind)
        rest = tuple(name for name, kind in kinds.items() if kind == "json" and fields is None)
        if rest and "json" in [field for field, _ in members.values()]:
            raise SourceError("a member called json is no JSON, and others are; say what each is with  fields=")
        if len({field for field, _ in members.values()}) < len(members):
            raise SourceError(f"two members would be the same field: {', '.join(members)}; rename or drop one")
        classed = next((name for name in labels if kinds[name] == LABEL), "")
        return cls(members, classed, rest, tuple(classes))

    @property
    def fields(self) -> dict[str, str]:
        """Field -> kind, the image first."""
        return dict(self.members.values()) | ({"json": "json"} if self.rest else {})

    def payloads(self, sample: Any) -> list[Buffer | None]:
        """The bytes of each field, in the order of `fields`; None for a member that is missing or None.

        Raises BadSampleError.
        """
        values = _members(sample)
        unknown = [name for name in values if name not in self.members and name not in (*self.rest, self.label)]
        if unknown and self.rest:
            raise BadSampleError(f"has the members {', '.join(unknown)[:200]}, which the first sample has not")
        found = [
            self._target(values.get(name)) if kind == TARGET else _payload(name, kind, values.get(name))
            for name, (_, kind) in self.members.items()
        ]
        if self.rest:
            kept = {name: _plain(values[name]) for name in self.rest if values.get(name) is not None}
            found.append(encode_field("json", kept) if kept else None)
        if found[0] is None:
            raise BadSampleError("has no image")
        return found

    @property
    def target(self) -> str:
        """The member that is the label without being the number of a class; "" for none."""
        return next((name for name, (_, kind) in self.members.items() if kind == TARGET), "")

    def _target(self, value: Any) -> bytes:
        """Raises BadSampleError."""
        if value is None:
            raise BadSampleError("has no label, and others have")
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value) and self.classes:
            return Targets(len(self.classes), classes=self.classes).payload(value)
        return bytes(_payload(TARGET, TARGET, value) or b"")

    def label_of(self, sample: Any) -> int:
        """The label, NO_LABEL for none. Raises BadSampleError."""
        return self.number(_members(sample).get(self.label)) if self.label else NO_LABEL

    def number(self, label: Any) -> int:
        """A label as its number. Raises BadSampleError for a name that is no class, and numbers out of range."""
        if label is None:
            return NO_LABEL
        if isinstance(label, str):
            if label not in self.classes:
                names = f"one of {', '.join(self.classes)[:200]}"
                known = names if self.classes else "a number, or  classes=  to name it"
                raise BadSampleError(f"its label is {label!r:.80}, expected {known}")
            return self.classes.index(label)
        number = _as_number(label)
        limit = len(self.classes) or _MAX_LABEL
        if number is None or not NO_LABEL <= number < limit:
            raise BadSampleError(
                f"its label is {label!r:.80}, expected a whole number from 0 to {limit - 1}, or -1 for none"
            )
        return number


# --- what members are ---------------------------------------------------------------------------------------------
def _members(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        if not all(isinstance(name, str) for name in sample):
            raise BadSampleError(f"is a dictionary with other keys than names: {list(sample)!r:.80}")
        return sample
    if isinstance(sample, tuple | list):
        return {str(number): value for number, value in enumerate(sample)}
    return {"0": sample, "1": None}


def _kind(name: str, value: Any) -> str:
    lower = name.lower()
    if lower in _LABELS and _is_target(value):
        return TARGET
    if lower in _LABELS and (isinstance(value, str) or value is None or _as_number(value) is not None):
        return LABEL
    if _is_image(value):
        one_channel = getattr(value, "mode", "") in ("1", "L", "P", "I", "I;16") or np.ndim(value) == 2
        return "mask" if lower.startswith(_MASKS) and (one_channel or isinstance(value, dict)) else "image"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes | bytearray | memoryview):
        return "file"
    if hasattr(value, "__array__") and np.ndim(value):
        array = np.asarray(value)
        if lower in _BOXES and array.ndim == 2 and array.shape[1] == 4:
            return "boxes"
        return "points" if lower in _POINTS and array.shape[-1] == 2 else "array"
    return "json"


def _is_target(value: Any) -> bool:
    """Whether a label is a number with a fraction, or several numbers or names, rather than a class."""
    if isinstance(value, str | bytes) or value is None or _as_number(value) is not None:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, int | float | str | np.number) for item in value)
    return isinstance(value, float | np.floating) or (hasattr(value, "__array__") and np.ndim(value) <= 1)


def _field_of(name: str, kind: str) -> FieldName:
    """What the field of a member is called; containers use some names of labels themselves."""
    if kind == TARGET and (name.isdecimal() or name.lower() in _LABELS):
        return FieldName(TARGET)
    return FieldName(name.lower() if name.isascii() else name)


def _is_image(value: Any) -> bool:
    if isinstance(value, dict):
        is_stored = isinstance(value.get("bytes"), bytes) or (
            value.get("bytes") is None and has_image_suffix(_path(value))
        )
        return is_stored and set(value) <= {"bytes", "path"}
    if isinstance(value, bytes | bytearray | memoryview):
        return bool(sniff(bytes(value[:64]) if isinstance(value, bytearray) else value))
    if _is_pillow(value):
        return True
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
    dtype = str(getattr(value, "dtype", ""))
    is_pixels = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    return dtype.endswith("uint8") and is_pixels and min(shape) > 0


def _is_pillow(value: Any) -> bool:
    return hasattr(value, "mode") and hasattr(value, "getbands")


def _as_number(value: Any) -> int | None:
    """A whole number of Python, numpy or torch; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    try:
        return int(value.__index__())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _check_kinds(kinds: Mapping[str, str], values: Mapping[str, Any]) -> None:
    known = (*KINDS, LABEL, DROP)
    for name, kind in kinds.items():
        if kind not in known:
            raise SourceError(f"fields: {name!r} cannot be {kind!r}, expected one of {', '.join(known)}")
        if name not in values:
            raise SourceError(f"fields: a sample has no member {name!r}; it has {_described(values)}")


def _described(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())[:300] or "no members"


# --- bytes ----------------------------------------------------------------------------------------------------------
def _payload(name: str, kind: str, value: Any) -> Buffer | None:
    if value is None:
        return None
    if kind in ("image", "mask"):
        if isinstance(value, dict):
            value = _file(name, _path(value)) if value.get("bytes") is None else value["bytes"]
        elif _is_pillow(value):
            value = _pixels(value, kind)
        elif kind == "image" and getattr(value, "ndim", 0) == 3 and value.shape[2] == 1:
            value = value[:, :, 0]
    elif not isinstance(value, bytes | bytearray | memoryview | str) and hasattr(value, "numpy"):
        value = value.numpy()  # a tensor
    try:
        data = encode_field(kind, value)
        return bytes(data) if isinstance(data, memoryview) else data
    except BadSampleError as error:
        raise BadSampleError(f"{name}: {error}") from error


def _path(value: Mapping[str, Any]) -> str:
    path = value.get("path")
    return path if isinstance(path, str) else ""


def _file(name: str, path: str) -> bytes:
    """An image that a sample names and does not hold, as in Hugging Face's imagefolder. Raises BadSampleError."""
    try:
        data = read_regular(path, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise BadSampleError(
            f"{name}: names the file {path!r:.200}, which cannot be read: {error}; hand its bytes out"
        ) from error
    if not sniff(data):
        raise BadSampleError(f"{name}: names the file {path!r:.200}, which is not an image")
    return data


def _pixels(image: Any, kind: str) -> np.ndarray[Any, Any]:
    """The pixels of an image of Pillow, without loss: of a mask with a palette the indices."""
    if kind == "mask":
        return np.asarray(image)
    if image.mode in ("RGB", "RGBA", "L") or image.mode.startswith("I"):
        return np.asarray(image)
    return np.asarray(image.convert("L" if image.mode == "1" else "RGBA" if image.has_transparency_data else "RGB"))


def _plain(value: Any) -> Any:
    """A value as JSON knows it: numbers and arrays of numpy as those of Python."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return value.tolist() if hasattr(value, "tolist") else value
