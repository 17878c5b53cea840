"""Which column of a record is the image, which its label, and what becomes of the others.

image     the column of images that is called so, else the first one; further ones are fields of their own, masks
          where they are called so and their first value can be one
target    the column of labels where that holds numbers with fractions, or arrays (`packer.sources.targets`)
label     named by the caller; else a column of class labels, else one of numbers or texts with a usual name
caption   a column of texts called caption, captions, text or prompt
arrays, bytes    fields of their own
json      all other columns, together
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cache.errors import SourceError
from packer.sources.manifest_columns import LABEL_COLUMNS, field_named
from packer.sources.targets import target_field

__all__ = ["CAPTION_COLUMNS", "CONTENTS", "Roles", "choose_roles"]

CONTENTS = ("image", "mask", "class", "integer", "number", "text", "texts", "array", "bytes", "value")
"""What a column may hold; numbers may have fractions, "texts" are several a row, "value" is what JSON can say."""
_IMAGE_COLUMNS = ("image", "img", "images", "jpg", "jpeg", "png", "webp", "picture", "photo", "x")
CAPTION_COLUMNS = ("caption", "captions", "text", "prompt")
_MORE_LABELS = ("y", "cls", "fine_label")
_TARGETS = ("number", "array", "texts", "value")
_FIELD_KINDS = {"image": "image", "mask": "mask", "array": "array", "bytes": "file"}


@dataclass(frozen=True, slots=True)
class Roles:
    """fields: field -> kind, in their order; columns: field -> column, for all fields but json.

    label: None for none. target: the field with the labels, where these are not of classes.
    metadata: the columns of the json.
    """

    fields: Mapping[str, str]
    columns: Mapping[str, str]
    label: str | None
    metadata: tuple[str, ...]
    target: str | None = None


def choose_roles(contents: Mapping[str, str], label: str | None, where: object) -> Roles:
    """The role of every column. contents: column -> one of CONTENTS; label: the column that the caller named.

    Raises SourceError where there is no image, or no such label.
    """
    images = [name for name, what in contents.items() if what == "image"]
    image = _first(images, _IMAGE_COLUMNS) or next(iter(images), None)
    if image is None:
        there = ", ".join(f"{name!r} ({what})" for name, what in contents.items())
        raise SourceError(f"{where}: no column of images; it has {there or 'none'}")
    target = label if contents.get(label or "") in _TARGETS else None
    label = None if target else label
    if label is not None and contents.get(label) not in ("class", "integer", "text"):
        what = "no column" if label not in contents else "neither numbers nor names in the column"
        possible = [name for name, its in contents.items() if its in ("class", "integer", "text")]
        raise SourceError(
            f"{where}: {what} {label!r} (label_column={label!r}); labels could be in {', '.join(possible) or 'none'}"
        )
    usual = (*LABEL_COLUMNS, *_MORE_LABELS)
    for kinds in () if target else (("class",), ("integer", "text")):
        of_kind = [name for name, what in contents.items() if what in kinds]
        label = label or _first(of_kind, usual) or (of_kind[0] if kinds == ("class",) and of_kind else None)
    if label is None and target is None:
        target = _first([name for name, what in contents.items() if what == "number"], usual)
    texts = [name for name, what in contents.items() if what in ("text", "texts") and name != label]
    caption = _first(texts, CAPTION_COLUMNS)
    fields, columns = {"image": "image"}, {"image": image}
    if target is not None:
        fields[target_field(target)], columns[target_field(target)] = "target", target
    if caption is not None:
        fields["caption"], columns["caption"] = "text", caption
    metadata = []
    for name, what in contents.items():
        if name in (image, label, caption, target):
            continue
        if what not in _FIELD_KINDS:
            metadata.append(name)
            continue
        field = field_named(name)
        if field in columns:
            both = f"{columns[field]!r} and {name!r}"
            raise SourceError(f"{where}: the columns {both} would both become the field {field!r}; rename one")
        fields[field], columns[field] = _FIELD_KINDS[what], name
    if metadata:
        fields["json"] = "json"
    return Roles(fields, columns, label, tuple(metadata), target and target_field(target))


def _first(names: Iterable[str], wanted: Iterable[str]) -> str | None:
    """The first of the wanted names that there is, also in another case."""
    folded = {name.casefold(): name for name in reversed([*names])}
    return next((folded[name] for name in wanted if name in folded), None)
