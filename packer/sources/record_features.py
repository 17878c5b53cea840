"""One tf.train.Example made elsewhere as a sample: which feature is the image, which the label, which the name.

image     image/encoded, or the first of IMAGE_FEATURES that the record has
label     image/class/label, or the first of LABEL_FEATURES; an offset may be subtracted
class     its name: image/class/synset or image/class/text
name      the first of NAME_FEATURES; key: image/key, or the name without its suffix
fields    <field>/encoded, with <field>/filename, is a file, json is JSON; all other features stay behind
"""

from __future__ import annotations

from dataclasses import dataclass, field

from packer.formats.example import Feature, walk
from packer.sources.names import is_field_name, safe_name
from readers.errors import FormatError
from readers.sample import NO_LABEL
from readers.tree import key_of_name

__all__ = ["IMAGE_FEATURES", "LABEL_FEATURES", "ExampleKeys", "ExampleSample", "read_example"]

IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "encoded", "jpeg", "img")
LABEL_FEATURES = ("image/class/label", "label", "class", "target")
NAME_FEATURES = ("image/filename", "filename", "file_name")
CLASS_FEATURES = ("image/class/synset", "image/class/text")
_DERIVED = ("image/format", "image/height", "image/width", "image/channels", "image/colorspace", "image/key")


@dataclass(frozen=True, slots=True)
class ExampleKeys:
    """The features to look for, the first that is there; label_offset is subtracted from labels."""

    image: tuple[str, ...] = IMAGE_FEATURES
    label: tuple[str, ...] = LABEL_FEATURES
    label_offset: int = 0


@dataclass(slots=True)
class ExampleSample:
    """What a record holds. ranges: byte range of each field in the record; None where the record is damaged.

    key and class_name are "" where the record does not tell; left_behind: features that are no part of a
    sample.
    """

    key: str = ""
    label: int = NO_LABEL
    class_name: str = ""
    ranges: dict[str, tuple[int, int]] | None = None
    names: dict[str, str] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)


def read_example(data: memoryview, keys: ExampleKeys) -> ExampleSample:
    """The sample in a record's data.

    Raises FormatError where that is no Example, or its label no whole number.
    """
    features = walk(data)
    image_key = _first(features, keys.image)
    name_key = _first(features, NAME_FEATURES)
    class_key = _first(features, CLASS_FEATURES)
    sample = ExampleSample(label=_label(features, keys), ranges={})
    assert sample.ranges is not None
    if image_key:
        sample.ranges["image"] = features[image_key].ranges[0]
    if name_key:
        sample.names["image"] = safe_name(_text(data, features[name_key]))
    if class_key:
        sample.class_name = _text(data, features[class_key])
    used = {image_key, name_key, *CLASS_FEATURES, *keys.label, *_DERIVED}
    for name, feature in features.items():
        if name in used:
            continue
        field_name, _, part = name.partition("/")
        if name == "json" and _is_bytes(feature):
            sample.ranges["json"] = feature.ranges[0]
        elif part == "encoded" and is_field_name(field_name) and _is_bytes(feature):
            sample.ranges[field_name] = feature.ranges[0]
        elif part == "filename" and f"{field_name}/encoded" in features and _is_bytes(feature):
            sample.names[field_name] = safe_name(_text(data, feature))
        else:
            sample.left_behind.append(name)
    told = _text(data, features["image/key"]) if _is_bytes(features.get("image/key")) else ""
    sample.key = safe_name(told) if told else key_of_name(sample.names.get("image", ""))
    return sample


def _label(features: dict[str, Feature], keys: ExampleKeys) -> int:
    key = next((key for key in keys.label if key in features), None)
    if key is None or features[key].kind == "":
        return NO_LABEL
    kind, values = features[key].kind, features[key].values
    if kind != "int64" or len(values) > 1:
        raise FormatError(f"the label {key!r} holds {len(values)} numbers of kind {kind}, expected one int64")
    if not values or values[0] == NO_LABEL:
        return NO_LABEL
    label = values[0] - keys.label_offset
    if label < NO_LABEL:
        raise FormatError(
            f"the label {key!r} is {values[0]}, less {keys.label_offset} is {label}: classes count from 0"
        )
    return label


def _first(features: dict[str, Feature], names: tuple[str, ...]) -> str:
    return next((name for name in names if _is_bytes(features.get(name))), "")


def _is_bytes(feature: Feature | None) -> bool:
    return feature is not None and len(feature.ranges) == 1


def _text(data: memoryview, feature: Feature) -> str:
    start, stop = feature.ranges[0]
    return str(data[start:stop], "utf-8", "replace")
