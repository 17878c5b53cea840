"""Ops at pack time: `--op Resize:256 --op CenterCrop:224`, run by the code that runs them in training.

A sample is packed as training would get it with these ops (`readers.torch.ImageDataset`): pixels of 8 bits, RGB,
encoded again, and masks, boxes and points transformed with them (`readers.batch`). Only ops without random draws are
allowed, since a draw made once would be the same in every epoch. An image that the ops do not change keeps its bytes.

JSON and files of a sample are not changed; a second image is refused, as in training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from cache.errors import BadSampleError, MissingExtraError, SourceError
from packer.conversion.images import encode_pixels
from packer.conversion.options import Reencode
from packer.conversion.plan import renamed
from readers.augment import Op, Recipe, ops
from readers.augment.described import op_of
from readers.augment.ops import Stage
from readers.augment.recipe import Placement
from readers.batch import FieldMoves
from readers.fields import decode_field, encode_field
from readers.headers import ImageHeader, sniff
from readers.layout import PIXELS
from readers.options import FieldOptions
from readers.table import Buffer

__all__ = ["DETERMINISTIC", "SHOWN", "OpWork", "check_fields", "check_ops", "one_thread", "parse_op", "recorded_op"]

_NAMED: Mapping[str, type[Op]] = {
    name: its
    for name, its in ((name, getattr(ops, name)) for name in ops.__all__)
    if isinstance(its, type) and issubclass(its, Op) and its is not Op
}
SHOWN = tuple(name for name, its in _NAMED.items() if its.stage != Stage.NORMALIZE and name != "ResizeToBucket")
"""The names of the ops whose results can be displayed; the values of `Normalize` are no picture."""
DETERMINISTIC = tuple(
    name for name, its in _NAMED.items() if its.stage in (Stage.GEOMETRY, Stage.PIXELS) and not its.draws
)
"""The names of the ops that can run at pack time."""
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
_SEVERAL, _ONE = re.compile(rf"{_NUMBER}(?:x{_NUMBER})+"), re.compile(_NUMBER)


def check_ops(ops: Sequence[Op]) -> None:
    """Raise ValueError for ops that cannot run at pack time, and MissingExtraError without torch."""
    for op in ops:
        name = type(op).__name__
        if not isinstance(op, Op) or name not in DETERMINISTIC:
            why = "draws at random" if getattr(op, "draws", 0) else "does not turn one image into another"
            raise ValueError(f"{op!r:.80} {why}: at pack time there are {', '.join(DETERMINISTIC)}")
    Recipe(ops)
    if ops and find_spec("torch") is None:
        raise MissingExtraError("torch", "torch", "changing images by ops")


def check_fields(ops: Sequence[Op], fields: Mapping[str, str]) -> None:
    """Raise SourceError for fields that cannot be transformed with an image."""
    others = [name for name, kind in fields.items() if kind == "image" and name != "image"]
    if ops and fields.get("image") not in ("image", PIXELS):
        raise SourceError("ops change images, and this source has no field called image")
    if ops and others:
        raise SourceError(
            f"ops change only one image, and {others[0]} is another image of the sample; convert without ops"
        )


def parse_op(text: str, among: Collection[str] = DETERMINISTIC, why: str = "at pack time") -> Op:
    """Parse an op: its name, and after a colon its values, by position or name, as in the constructor.

        CenterCrop:256     Resize:256x320     Resize:256,interpolation=bicubic     RandomResizedCrop:224,scale=0.2x1

    A size of two sides is height x width. among: the allowed names; why: when they are allowed. Raises ValueError.
    """
    name, _, rest = text.partition(":")
    if name not in among:
        is_op = name in _NAMED
        fault = ("draws at random, or makes no image" if among is DETERMINISTIC else "cannot be shown") if is_op else ""
        raise ValueError(f"{name!r:.40} {fault or 'is not an op'}: {why} there are {', '.join(among)}")
    places: list[Any] = []
    named: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.rpartition("=")
        if equals:
            named[key] = _value(value)
        else:
            places.append(_value(value))
    try:
        return _NAMED[name](*places, **named)
    except TypeError as error:
        raise ValueError(f"{text!r:.80}: {str(error).partition('__init__() ')[2] or error}") from None


def recorded_op(text: str) -> Op:
    """Parse the repr of an op, as in dataset.json. Raises ValueError."""
    op = op_of(text)
    if type(op).__name__ not in DETERMINISTIC:
        raise ValueError(f"{text!r:.80} is not an op: at pack time there are {', '.join(DETERMINISTIC)}")
    return op


def _value(text: str) -> Any:
    if _SEVERAL.fullmatch(text):
        return tuple(_number(part) for part in text.split("x"))
    return _number(text) if _ONE.fullmatch(text) else text


def _number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


class _Result(NamedTuple):
    """The result of ops on a sample."""

    payloads: Sequence[Buffer | None]
    names: tuple[str, ...]
    header: ImageHeader


class OpWork:
    """Runs ops, with torch's kernels, on samples with these fields, for one thread.

    encoding: how results are encoded.
    """

    def __init__(self, ops: Sequence[Op], fields: Mapping[str, str], encoding: Reencode) -> None:
        from readers.torch.rendering import OpRenderer, Place

        check_fields(ops, fields)
        self._kinds, self._encoding = dict(fields), encoding
        self._renderer, self._place = OpRenderer(Recipe(ops), False), Place(0, 0, 0, 0)
        self._moves = FieldMoves(self._kinds, tuple(self._kinds), FieldOptions())

    def apply(
        self, key: str, payloads: Sequence[Buffer | None], names: tuple[str, ...], header: ImageHeader
    ) -> _Result:
        """Apply the ops to a sample. header: of its image, payloads[0]. Raises BadSampleError."""
        image = payloads[0]
        assert image is not None
        (task,) = self._renderer.tasks([self._place], [image])
        if isinstance(task, Exception):
            raise task
        pixels = self._renderer.render(image, task)
        placement = Placement(task.size, (*task.job.before, task.job.last))
        is_other = placement.moves or bool(task.job.last.steps)
        made, header, name = encode_pixels(
            image, pixels.permute(1, 2, 0).numpy(), header, (names[0], key), self._encoding, changed=is_other
        )
        fields, new_names = list(self._kinds), [name, *names[1:]]
        changed = dict(zip(fields, payloads, strict=True)) | {"image": made}
        chosen: dict[str, Any] = {}
        for field in self._moves.order if placement.moves else ():
            payload, kind = changed[field], self._kinds[field]
            if payload is None or field not in self._moves.names:
                continue
            try:
                value = self._moves.move(field, decode_field(kind, payload), placement, chosen)
                changed[field] = moved = encode_field(kind, value)
            except BadSampleError as error:
                raise BadSampleError(f"field {field}: {error}") from error
            if kind == "mask":
                number = fields.index(field)
                new_names[number] = renamed(names[number], key, sniff(moved))
        return _Result([changed[field] for field in fields], tuple(new_names), header)


@contextmanager
def one_thread(ops: Sequence[Op]) -> Iterator[None]:
    """Restrict torch to one core if there are ops: the worker processes are the parallelism."""
    if not ops:
        yield
        return
    from readers.torch.rendering import one_core

    with one_core():
        yield
