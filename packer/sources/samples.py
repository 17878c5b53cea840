"""Samples of Python data sets, such as those of torch and Hugging Face, and the fields that their members become.

A sample is a dictionary, or a tuple of an image and its label. By default, the kind of a member follows from its name
and its first value that is not None, among the samples examined before packing starts:

    image     any of these under a name other than array: encoded image bytes, a Pillow image, uint8 [h, w],
              [h, w, 1], [h, w, 3] or [h, w, 4], or a dictionary with "bytes" or the "path" of an image, as Hugging Face
              returns them. Pixels become PNG, floating-point Pillow images TIFF. The member called image, img, picture,
              photo, jpg or png, else the first one, becomes the field `image`
    target    a floating-point number or a vector under the name of a label, or second in a tuple: it is the label, in
              the field `target`. A list of class names becomes a vector with a 1 for each of them
    label     an integer called label, labels, target, class, cls or y, or a class name under these names; else the
              only ClassLabel of Hugging Face
    mask      one channel, [h, w], [1, h, w] or [h, w, 1], under a name that starts with mask, seg or annotation:
              integers or booleans, and if the name starts with mask, whole floating-point numbers, too
    boxes     an array [k, 4] called boxes or bboxes
    points    an array [..., 2] called points or keypoints
    array     any other array or tensor
    text      a str
    file      any other bytes
    json      numbers, lists, dictionaries and everything else, together in the field `json`

If samples have no image, the main field is the first array, else the first bytes, else the first text, and keeps its
name.

If all values of a member are None, its kind follows from its Hugging Face feature or its name, or is unknown. A later
value of a member of unknown kind is an error (`SampleForm.payloads`); it is never left out.

`fields` overrides this: {"img": "image", "y": "label", "mask": "mask", "id": "drop"}. Its kinds are those of
`readers.fields`, "label" and "drop". Members that it does not name are left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.checksums import crc32c
from cache.errors import BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed
from packer.formats.base import Arena
from packer.sources.base import SourceListing, numbered
from packer.sources.columns import Targets, is_mask
from readers.fields import KINDS, encode_field
from readers.headers import sniff
from readers.layout import FieldName
from readers.opening.tree import has_image_suffix
from readers.table import NO_LABEL, Buffer, Strings

__all__ = ["EXAMINED", "DatasetSource", "SampleForm", "class_names", "encoded_images", "features_of"]


LABEL, DROP, TARGET = "label", "drop", "target"
_LABELS = ("label", "labels", "target", "class", "cls", "y")
_IMAGES = ("image", "img", "picture", "photo", "jpg", "png")
_MASKS = ("mask", "seg", "annotation")
_BOXES, _POINTS = ("boxes", "bboxes"), ("points", "keypoints")
_PAIR = ("image", "label")
_MAINS = ("array", "file", "text")  # of a set without images
_MAX_LABEL = _MAX_FILE_BYTES = 1 << 31


@dataclass(frozen=True)
class SampleForm:
    """Which members of a sample become which fields.

    members: member -> (field, kind), the main field first; the members of a tuple are "0", "1", ….
    label: the member with the label, "" for none.
    rest: members that are stored together in the field `json`.
    classes: the class names.
    is_named: whether `fields` was given; members that it does not name are then left out.
    unnamed: the members left out. unseen: members that `fields` names and none of the examined samples has.
    """

    members: Mapping[str, tuple[str, str]]
    label: str = ""
    rest: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    is_named: bool = False
    unnamed: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        samples: Sequence[Any],
        fields: Mapping[str, str] | None = None,
        classes: Sequence[str] = (),
        features: Mapping[str, Any] = {},
    ) -> SampleForm:
        """Determine the form from some samples of a data set.

        fields: member -> kind, default from the values. features: those of Hugging Face, for members without a value.

        Raises SourceError, and BadSampleError if none of them is a sample.
        """
        values = _first_values(samples)
        kinds = _kinds(values, features) if fields is None else dict(fields)
        if isinstance(samples[0], tuple | list) and fields is None:
            if len(values) != len(_PAIR):
                raise SourceError(
                    f"a sample is a tuple of {len(values)}, expected an image and its label; name the members in their "
                    f"order, as in  fields={{'0': 'image', '1': 'label', '2': 'mask'}},  or hand out dictionaries"
                )
            kinds = {"0": _kind("image", values["0"]), "1": _kind(LABEL, values["1"])}
            kinds["1"] = kinds["1"] if kinds["1"] == TARGET else LABEL
        _check_kinds(kinds, values)
        for name, kind in kinds.items():
            if kind == LABEL and _is_target(values.get(name)):
                kinds[name] = TARGET
        labels = [name for name, kind in kinds.items() if kind in (LABEL, TARGET)]
        if len(labels) > 1:
            raise SourceError(f"a sample has one label, but {', '.join(labels)} are labels; drop all but one")
        images = [name for name, kind in kinds.items() if kind == "image"]
        others = [(name, kind) for name, kind in kinds.items() if name.lower() not in _IMAGES]
        mains = images or [name for main in _MAINS for name, kind in others if kind == main]
        if not mains:
            raise SourceError(f"no member of a sample is an image, an array or bytes; it has {_described(values)}")
        first = next((name for known in _IMAGES for name in images if name.lower() == known), mains[0])
        kind = kinds[first]
        members = {first: (kind if images or first.isdecimal() else _field_of(first, kind), kind)}
        for name, kind in kinds.items():
            if kind in KINDS and name != first and not (kind == "json" and fields is None):
                members[name] = (_field_of(name, kind), kind)
        rest = tuple(name for name, kind in kinds.items() if kind == "json" and fields is None)
        if rest and "json" in [field for field, _ in members.values()]:
            raise SourceError(
                "the member json is not JSON, but other members are; state the kind of each with  fields="
            )
        if len({field for field, _ in members.values()}) < len(members):
            raise SourceError(f"two members would be the same field: {', '.join(members)}; rename or drop one")
        classed = next((name for name in labels if kinds[name] == LABEL), "")
        unnamed = tuple(name for name in values if name not in kinds and fields is not None)
        unseen = tuple(name for name in kinds if name not in values)
        return cls(members, classed, rest, tuple(classes), fields is not None, unnamed, unseen)

    @property
    def fields(self) -> dict[str, str]:
        """Field -> kind, the main field first."""
        return dict(self.members.values()) | ({"json": "json"} if self.rest else {})

    @property
    def warnings(self) -> list[str]:
        """Warnings about members that `fields` does not mention, and about those it names that no sample has."""
        messages = []
        if self.unnamed:
            messages.append(
                f"fields= does not name {listed(self.unnamed)}, so it is left out; 'drop' makes that explicit"
            )
        if self.unseen:
            messages.append(f"fields= names {listed(self.unseen)}, which none of the examined samples has")
        return messages

    def payloads(self, sample: Any) -> list[Buffer | None]:
        """The bytes of each field, in the order of `fields`; None for a member that is missing or None.

        Raises BadSampleError, and SourceError for a value of a member of unknown kind.
        """
        values = _members(sample)
        self._check_known(values)
        encoded = [
            self._target(values.get(name)) if kind == TARGET else _payload(name, kind, values.get(name))
            for name, (_, kind) in self.members.items()
        ]
        for name in [name for name, (field, kind) in self.members.items() if kind == "image" and field != "image"]:
            if getattr(values.get(name), "mode", "") == "F":
                raise BadSampleError(
                    f"{name}: holds floating-point numbers, and readers decode further images of a sample to RGB; pack "
                    f"it as numbers, which do not follow flips and crops, with  fields={self._named({name: 'array'})!r}"
                )
        if self.rest:
            kept = {name: _plain(values[name]) for name in self.rest if values.get(name) is not None}
            encoded.append(encode_field("json", kept) if kept else None)
        if encoded[0] is None:
            raise BadSampleError(f"has no {next(iter(self.fields))}")
        return encoded

    def _check_known(self, values: Mapping[str, Any]) -> None:
        for name, value in () if self.is_named else values.items():
            if value is None or name in self.members or name == self.label:
                continue
            if name not in self.rest:
                problem = f"has no field {name!r}; it has {', '.join((*self.members, *self.rest))}"
            elif hasattr(value, "__array__") and len(getattr(value, "shape", "")):
                problem = f"has an array as {name!r}, which is JSON in earlier samples"
            else:
                continue
            known = {*self.members, self.label, *self.rest}
            others = {
                other: _kind(other, content)
                for other, content in values.items()
                if other not in known and content is not None
            }
            raise SourceError(
                f"{problem}. The first samples decide the fields; state the kind of every member with  "
                f"fields={self._named(others | {name: _kind(name, value)})!r}  (or 'drop')"
            )

    def _named(self, others: Mapping[str, str]) -> dict[str, str]:
        """This form as a value of `fields`, updated with further members or other kinds."""
        kinds = {member: kind for member, (_, kind) in self.members.items()}
        return kinds | ({self.label: LABEL} if self.label else {}) | dict.fromkeys(self.rest, "json") | dict(others)

    @property
    def target(self) -> str:
        """The member that is a label other than a class number; "" for none."""
        return next((name for name, (_, kind) in self.members.items() if kind == TARGET), "")

    def _target(self, value: Any) -> bytes:
        """The bytes of the field `target`. Raises BadSampleError."""
        if value is None:
            raise BadSampleError("has no label, but others have")
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value) and self.classes:
            return Targets(len(self.classes), classes=self.classes).payload(value)
        return bytes(_payload(TARGET, TARGET, value) or b"")

    def label_of(self, sample: Any) -> int:
        """The label, NO_LABEL for none. Raises BadSampleError."""
        return self.number(_members(sample).get(self.label)) if self.label else NO_LABEL

    def number(self, label: Any) -> int:
        """The class number of a label. Raises BadSampleError for unknown names and numbers out of range."""
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
            other = f"; for labels that are not class numbers pass  fields={{…, {self.label or LABEL!r}: 'target'}}"
            raise BadSampleError(
                f"its label is {label!r:.80}, expected a whole number from 0 to {limit - 1}, or -1 for none"
                f"{other if number is None else ''}"
            )
        return number


# --- kinds of members ---------------------------------------------------------------------------------------------
def _members(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        if not all(isinstance(name, str) for name in sample):
            raise BadSampleError(f"is a dictionary whose keys are not all text: {list(sample)!r:.80}")
        return sample
    if isinstance(sample, tuple | list):
        return {str(number): value for number, value in enumerate(sample)}
    return {"0": sample, "1": None}


def _first_values(samples: Sequence[Any]) -> dict[str, Any]:
    """The first value of each member that is not None. Raises BadSampleError if none of these is a sample."""
    first: dict[str, Any] = {}
    error = None
    for sample in samples:
        try:
            for name, value in _members(sample).items():
                if first.get(name) is None:
                    first[name] = value
        except BadSampleError as its:  # reported when the sample is packed
            error = error or its
    if error is not None and not first:
        raise error
    return first


def _kinds(values: Mapping[str, Any], features: Mapping[str, Any]) -> dict[str, str]:
    """The kinds of the members, from their values, features and names; without those of unknown kind."""
    kinds = {name: _kind(name, value) for name, value in values.items() if value is not None}
    has_label = any(kind in (LABEL, TARGET) for kind in kinds.values())
    for name, value in values.items():
        if value is None:
            kind = _kind_of_feature(name, features.get(name))
            kind = kind or (LABEL if name.lower() in _LABELS else "")
            if kind and not (has_label and kind in (LABEL, TARGET)):
                kinds[name] = kind
                has_label |= kind in (LABEL, TARGET)
    classed = [name for name in values if type(features.get(name)).__name__ == "ClassLabel"]
    if len(classed) == 1 and not has_label:
        kinds[classed[0]] = LABEL
    return {name: kinds[name] for name in values if name in kinds}


def _kind_of_feature(name: str, feature: Any) -> str:
    """The kind of the plain Python values of a Hugging Face feature; "" if unknown."""
    kind, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    is_label = name.lower() in _LABELS
    if kind == "Image":
        return "mask" if name.lower().startswith(_MASKS) else "image"
    if kind == "ClassLabel":
        return LABEL if is_label else "json"
    if kind == "Value":
        if "string" in dtype:
            return LABEL if is_label else "text"
        if "binary" in dtype:
            return ""
        return (TARGET if "float" in dtype else LABEL) if is_label else "json"
    if kind in ("Sequence", "List", "LargeList", "list", "dict"):
        return TARGET if is_label and kind != "dict" else "json"
    return ""


def _kind(name: str, value: Any) -> str:
    lower = name.lower()
    if lower in _LABELS and _is_target(value):
        return TARGET
    if lower in _LABELS and (isinstance(value, str) or value is None or _as_number(value) is not None):
        return LABEL
    if lower.startswith(_MASKS) and _is_mask(lower, value):
        return "mask"
    if lower != "array" and _is_image(value):
        return "image"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes | bytearray | memoryview):
        return "file"
    shape = tuple(getattr(value, "shape", ()))
    if hasattr(value, "__array__") and shape:
        if lower in _BOXES and len(shape) == 2 and shape[1] == 4:
            return "boxes"
        return "points" if lower in _POINTS and shape[-1] == 2 else "array"
    return "json"


def _is_mask(name: str, value: Any) -> bool:
    """Whether the value of a member under the name of a mask can be a mask."""
    if isinstance(value, dict):
        return _is_image(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return is_mask(bytes(value) if isinstance(value, bytearray) else value)
    if _is_pillow(value):
        return value.mode in ("1", "L", "P", "F") or value.mode.startswith("I")
    dtype, shape = str(getattr(value, "dtype", "")), tuple(getattr(value, "shape", ()))
    is_whole = "int" in dtype or "bool" in dtype or ("float" in dtype and name.startswith(_MASKS[0]))
    return is_whole and len(_plane(shape)) == 2 and min(shape) > 0


def _plane(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an image, without the channel axis if there is one channel."""
    if len(shape) == 3:
        return shape[1:] if shape[0] == 1 else shape[:2] if shape[2] == 1 else shape
    return shape


def _is_target(value: Any) -> bool:
    """Whether a label is not a class, but a floating-point number, or several numbers or names."""
    if isinstance(value, str | bytes) or value is None or _as_number(value) is not None:
        return False
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, int | float | str | np.number) for item in value)
    return isinstance(value, float | np.floating) or (hasattr(value, "__array__") and np.ndim(value) <= 1)


def _field_of(name: str, kind: str) -> FieldName:
    """The name of a member's field. A target is not called as a label is, since containers use some of those names."""
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
    """A Python, numpy or torch integer as int; None for anything else."""
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
        if kind == "image" and name not in values:  # other members may first occur in later samples
            raise SourceError(f"fields: a sample has no member {name!r}; it has {_described(values)}")


def _described(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())[:300] or "no members"


# --- bytes ----------------------------------------------------------------------------------------------------------
def _payload(name: str, kind: str, value: Any) -> Buffer | None:
    if value is None:
        return None
    try:
        if kind in ("image", "mask") and isinstance(value, dict):
            value = _file(_path(value)) if value.get("bytes") is None else value["bytes"]
        elif kind in ("image", "mask") and _is_pillow(value):
            value = _pixels(value, kind)
        elif not isinstance(value, bytes | bytearray | memoryview | str) and hasattr(value, "numpy"):
            value = value.detach().cpu().numpy() if hasattr(value, "detach") else value.numpy()  # a tensor
        if kind == "mask":
            value = _mask(value)
        elif kind == "image" and getattr(value, "ndim", 0) == 3 and value.shape[2] == 1:
            value = value[:, :, 0]
        data = encode_field(kind, value)
        return bytes(data) if isinstance(data, memoryview) else data
    except BadSampleError as error:
        raise BadSampleError(f"{name}: {error}") from error


def _mask(value: Any) -> Any:
    """An array as a mask [h, w] of integers; other values unchanged. Raises BadSampleError for fractions."""
    if not hasattr(value, "dtype"):
        return value
    array = np.asarray(value).reshape(_plane(np.shape(value)))
    if array.dtype.kind != "f":
        return array
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    if not np.array_equal(whole, array):
        raise BadSampleError(
            "a mask has whole numbers; as  fields={…, 'mask': 'array'}  it is packed unchanged, and does not follow "
            "flips and crops"
        )
    return whole


def _path(value: Mapping[str, Any]) -> str:
    path = value.get("path")
    return path if isinstance(path, str) else ""


def _file(path: str) -> bytes:
    """The image file that a sample refers to by path, as in Hugging Face's imagefolder. Raises BadSampleError."""
    try:
        data = read_regular(path, _MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise BadSampleError(
            f"names the file {path!r:.200}, which cannot be read: {error}; return its bytes instead"
        ) from error
    if not sniff(data):
        raise BadSampleError(f"names the file {path!r:.200}, which is not an image")
    return data


def _pixels(image: Any, kind: str) -> np.ndarray[Any, Any] | bytes:
    """The pixels of a Pillow image, without loss: for a mask with a palette, the palette indices.

    Floating-point images are returned as an encoded TIFF, since no other format can store them.
    """
    if kind == "mask":
        return np.asarray(image)
    if image.mode == "F":
        out = io.BytesIO()
        image.save(out, "TIFF", compression="tiff_adobe_deflate")
        return out.getvalue()
    if image.mode in ("RGB", "RGBA", "L") or image.mode.startswith("I"):
        return np.asarray(image)
    return np.asarray(image.convert("L" if image.mode == "1" else "RGBA" if image.has_transparency_data else "RGB"))


def _plain(value: Any) -> Any:
    """A value in plain Python for JSON: numpy numbers and arrays become numbers and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    return value.tolist() if hasattr(value, "tolist") else value


# ------------------------------------------------------------------------------
# Python data sets as sources: any object with a length that returns samples by number, as torch's map-style data sets.
#
# Workers read every sample once; labels are known only then. Keys are the sample numbers. The kinds of members and the
# sizes are estimated from a few samples, whose bytes also tell apart data sets of the same length. The fingerprint of a
# Hugging Face data set identifies all of it; without one, the listing is `sampled`: before samples packed earlier are
# accepted for this data set, they are compared with it.


EXAMINED = 16
"""Number of samples that are examined to recognise their members."""
_Errors = (SourceError, BadSampleError)


class DatasetSource:
    """A Python data set as a source.

    samples: has `__len__` and `__getitem__` with numbers from 0. fields, classes: see `SampleForm`.

    Images of Hugging Face data sets are packed as stored, without decoding; class names come with the data set.
    """

    def __init__(
        self, samples: Any, fields: Mapping[str, str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self._samples = encoded_images(samples)
        self._fields, self._classes = fields, classes
        self._form: SampleForm | None = None

    @property
    def title(self) -> str:
        return f"{type(self._samples).__name__} of {len(self._samples):,} samples"

    def list(self, split: str | None) -> SourceListing:
        count = len(self._samples)
        if not count:
            raise SourceError(f"{self.title}: is empty")
        examined = self._examined(count)
        try:
            classes = class_names(self._samples) if self._classes is None else self._classes
            form = SampleForm.of([sample for _, sample in examined], self._fields, classes, features_of(self._samples))
        except _Errors as error:
            raise SourceError(f"{self.title}: sample {examined[0][0]}: {error}") from error
        self._form = form
        fingerprint = getattr(self._samples, "_fingerprint", "") if hasattr(self._samples, "cast_column") else ""
        sizes, digest = [], crc32c(str(fingerprint).encode())
        for _, sample in examined:
            payloads: Sequence[Buffer | None] = ()
            try:
                payloads = form.payloads(sample)
            except _Errors:  # the worker reports it
                continue
            sizes.append(sum(len(payload) for payload in payloads if payload is not None))
            for payload in payloads:
                digest = crc32c(payload or b"", digest)
        size, width = int(np.mean(sizes)) if sizes else 0, len(str(count - 1))
        part = numbered("", np.arange(count, dtype=np.int64)[:, None], size, len(form.fields))
        part.keys = Strings.of(f"{i:0{width}d}" for i in range(count))
        part.stamps = np.full(count, digest, np.int64)
        return SourceListing(
            {split or "train": part},
            form.fields,
            form.classes,
            warnings=form.warnings,
            late_labels=bool(form.label),
            sampled=not fingerprint,
        )

    def _examined(self, count: int) -> Sequence[tuple[int, Any]]:
        """(number, sample) of samples spread over the data set; those that cannot be read are left to the worker."""
        examined = []
        for number in np.unique(np.linspace(0, count - 1, EXAMINED).astype(np.int64)).tolist():
            try:
                examined.append((number, self._sample(number)))
            except BadSampleError as error:
                last = error
        if not examined:
            raise SourceError(f"{self.title}: sample 0, and others: {last}") from last
        return examined

    @contextmanager
    def open(self) -> Iterator[_SampleReader]:
        assert self._form is not None  # `list` has set it
        yield _SampleReader(self, self._form)

    def paths(self, listing: SourceListing) -> Iterator[str]:
        return iter(())

    def _sample(self, number: int) -> Any:
        try:
            return self._samples[number]
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError, RuntimeError) as error:
            raise BadSampleError(f"cannot be read: {type(error).__name__}: {error}") from error


class _SampleReader:
    """Reads samples by number. The arena is not used, because samples are separate objects."""

    def __init__(self, source: DatasetSource, form: SampleForm) -> None:
        self._source, self._form, self._label = source, form, NO_LABEL

    def read(self, place: tuple[int], arena: Arena) -> Sequence[Buffer | None]:
        sample = self._source._sample(place[0])
        try:
            self._label = self._form.label_of(sample)
            return self._form.payloads(sample)
        except SourceError as error:
            raise SourceError(f"{self._source.title}: sample {place[0]}: {error}") from error

    def label(self, place: tuple[int]) -> int:
        return self._label


def encoded_images(samples: Any) -> Any:
    """A Hugging Face data set that returns its images as stored, not decoded; any other data set unchanged."""
    features = getattr(samples, "features", None)
    if not isinstance(features, Mapping) or not hasattr(samples, "cast_column"):
        return samples
    for name, feature in features.items():
        if type(feature).__name__ == "Image" and getattr(feature, "decode", False):
            samples = samples.cast_column(name, type(feature)(decode=False))
    return samples


def features_of(samples: Any) -> Mapping[str, Any]:
    """The features of a Hugging Face data set that returns plain Python values; {} for any other."""
    features = getattr(samples, "features", None)
    form = getattr(samples, "format", None)
    is_plain = not isinstance(form, Mapping) or form.get("type") in (None, "python")
    return features if isinstance(features, Mapping) and is_plain else {}


def class_names(samples: Any) -> tuple[str, ...]:
    """The class names: those of the only ClassLabel of a Hugging Face data set, or torchvision's `classes`."""
    features = getattr(samples, "features", None)
    if isinstance(features, Mapping):
        named = [feature.names for feature in features.values() if type(feature).__name__ == "ClassLabel"]
        return tuple(map(str, named[0])) if len(named) == 1 else ()
    classes = getattr(samples, "classes", None)
    is_names = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    return tuple(classes) if is_names and classes is not None else ()
