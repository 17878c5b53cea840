"""The options of packing, by subject: `Choose` the samples, check and encode the `Images`, size the `Shards`, `Run`.

`packer.convert`, `packer.writer` and the changes of a set that pack take the same objects. Each checks its values;
`ConvertOptions` checks combinations, and determines the plan.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from cache.errors import SourceError
from cache.messages import listed, parse_size
from packer.formats import resolve_format
from packer.sets.deal import deal
from packer.workers import Workers
from readers.augment.ops.base import Op
from readers.layout import PIXELS, SplitName
from readers.where import parse_where

__all__ = [
    "CHECKS",
    "CODECS",
    "DECODES",
    "ON_ERROR",
    "Choose",
    "ConvertOptions",
    "Images",
    "Reencode",
    "Run",
    "Shards",
    "refuse_others",
    "takes_old_names",
]

ON_ERROR = ("raise", "skip", "quarantine")
CHECKS = ("header", "decode")
DECODES = ("RGB", "unchanged", "none")
CODECS = ("keep", "jpeg", "png", "webp", "raw")
_LATER: dict[str, Any] = {"where": None, "ops": [], "checksums": False}  # options added later, with their defaults


def _one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def _at_least_one(subject: str, value: int | None, unit: str) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{subject} must have at least 1 {unit}, not {value}")


@dataclass(frozen=True, slots=True)
class Choose:
    """The samples of a source to pack, and their splits.

    split: the only split to pack, or the name for a source without splits.
    classes: the only classes to pack; their labels are then 0, 1, … in this order.
    where: pack the samples for which this is true, such as 'min_side >= 64 and class_name in ("cat", "dog")'
    (`readers.where`); conditions on images are evaluated during packing, before ops and re-encoding.
    fractions: deal the samples of one split to new ones, such as {"train": 0.9, "val": 0.1}.
    seed: of the draw.
    stratify: divide every class in these shares.
    group: a column of the table, such as "patient": samples with the same value stay together; or "folder", the folder
        of the key.

    Raises ValueError and BadNameError.
    """

    split: str | None = None
    classes: Sequence[str] | None = None
    where: str | None = None
    fractions: Mapping[str, float] | None = None
    seed: int = 0
    stratify: bool = False
    group: str | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            SplitName(self.split)
        if self.classes is not None and (not self.classes or len({*self.classes}) < len(self.classes)):
            raise ValueError(f"classes are one or more names, each once, not {list(self.classes)!r:.200}")
        names = parse_where(self.where).names if self.where is not None else ()
        if self.fractions is None:
            if self.stratify or self.seed or self.group is not None:
                raise ValueError("seed, stratify and group need fractions; give fractions, too")
            return
        if "split" in names:
            raise ValueError("fractions divide one split, so where cannot distinguish splits; leave one out")
        for name in self.fractions:
            SplitName(name)
        deal(np.zeros(0, np.int64), list(self.fractions.values()), self.seed)  # checks fractions and seed


@dataclass(frozen=True, slots=True)
class Reencode:
    """Make images smaller while packing.

    codec: the new codec ("keep": the codec of the image; GIF, BMP and TIFF become PNG). "raw": pixels without a codec,
    uint8 [height, width, 3], for HDF5 shards of images of one size, which ops can produce (`readers.opening.packed`).
    max_side: longest side at most this many pixels.
    resize_short: shortest side exactly this many pixels, never enlarged.
    quality: 1 to 100, of JPEG and WebP.
    """

    codec: str = "keep"
    max_side: int | None = None
    resize_short: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        _one_of("codec", self.codec, CODECS)
        for name, value in (("max_side", self.max_side), ("resize_short", self.resize_short)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 pixel, not {value}")
        if self.max_side is not None and self.resize_short is not None:
            raise ValueError("max_side and resize_short exclude each other")
        if self.codec == "raw" and (self.max_side or self.resize_short or self.quality):
            raise ValueError("raw pixels have no quality, and one size; resize and crop them by ops")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be from 1 to 100, not {self.quality}")


@dataclass(frozen=True, slots=True)
class Images:
    """How images are checked, re-encoded and changed.

    check: "header", or "decode" for a full decode of each image.
    decode: how readers will decode images: "RGB", "unchanged" or "none"; other images are refused.
    reencode: how to make images smaller, or the codec of the results of `ops`.
    ops: ops of `readers.augment` without random draws, such as [Resize(256), CenterCrop(224)], run by the code of
        training; masks, boxes and points are transformed, too (`packer.conversion.ops`). Needs torch.

    Raises ValueError.
    """

    check: str = "header"
    decode: str = "RGB"
    reencode: Reencode | None = None
    ops: Sequence[Op] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        _one_of("check", self.check, CHECKS)
        _one_of("decode", self.decode, DECODES)
        if self.decode == "none" and self.check == "decode":
            raise ValueError("check='decode' decodes images, but decode='none' refuses that; leave one of them out")
        if self.decode != "RGB" and self.reencode is not None:
            raise ValueError("re-encoded images are for decode='RGB'; leave decode or the re-encoding out")
        if self.ops and self.decode != "RGB":
            raise ValueError("ops are for decode='RGB'; leave decode or the ops out")
        if self.ops and self.reencode is not None and (self.reencode.max_side or self.reencode.resize_short):
            raise ValueError("max_side and resize_short resize images, as do ops; leave one of them out")

    @property
    def is_raw(self) -> bool:
        """Whether images are packed as raw pixels."""
        return self.reencode is not None and self.reencode.codec == "raw"

    @property
    def encoding(self) -> Reencode | None:
        """How changed images are encoded; None if all keep their bytes."""
        return self.reencode or (Reencode() if self.ops else None)


@dataclass(frozen=True, slots=True)
class Shards:
    """How samples are laid out in shards.

    size: bytes of a shard at most, give or take a sample, or a text like "1GiB"; default 8 shards per split, each from
    64 MiB to 1 GiB; 1 GiB for a writer.
    samples: samples per shard, instead of a size.
    shuffle: seed of a random order.
    label_offset: added to labels in the shards.
    checksums: write SHA256SUMS, for  sha256sum -c ; `packer.verify(…, sums=True)` writes it later.

    Raises ValueError.
    """

    size: int | str | None = None
    samples: int | None = None
    shuffle: int | None = None
    label_offset: int = 0
    checksums: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, str):
            object.__setattr__(self, "size", parse_size(self.size))
        if self.size is not None and self.samples is not None:
            raise ValueError("give either a shard size or the samples per shard, not both")
        _at_least_one("a shard", self.bytes, "byte")
        _at_least_one("a shard", self.samples, "sample")
        if self.shuffle is not None and not 0 <= self.shuffle < 1 << 32:
            raise ValueError(f"the shuffle seed must be from 0 to 2^32 - 1, not {self.shuffle}")
        if isinstance(self.label_offset, bool) or not 0 <= self.label_offset < 1 << 31:
            raise ValueError(f"the label offset must be from 0 to 2^31 - 1, not {self.label_offset}")

    @property
    def bytes(self) -> int | None:
        """The size in bytes."""
        return None if self.size is None else int(self.size)


@dataclass(frozen=True, slots=True)
class Run:
    """How the work is done. The set does not depend on it, except for unreadable samples.

    workers: number of processes; default the CPUs that this process may use. With an engine, shards at a time; default
        as many as it can run.
    engine: an executor to pack shards with, by default local processes; see `packer.open_engine`.
    on_error: treatment of unreadable images ("raise", "skip", "quarantine").
    task: (i, n), i from 0: pack the i-th of n shares of the shards only, as a task of an array job; `packer.commit`
    makes the set when all are packed.
    work: local directory of a set for an address until it is uploaded; default a hidden one, removed afterwards.

    Raises ValueError and TypeError.
    """

    workers: int | None = None
    engine: Executor | None = None
    on_error: str = "raise"
    task: tuple[int, int] | None = None
    work: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _one_of("on_error", self.on_error, ON_ERROR)
        if self.task is not None and not 0 <= self.task[0] < self.task[1]:
            raise ValueError(f"task must be (i, n) with i from 0 to n - 1, not {self.task}")
        self.crew  # noqa: B018  checks both

    @property
    def crew(self) -> Workers:
        """The workers that run the tasks."""
        return Workers(self.workers, self.engine)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """All options that determine the shards of a set, besides the listing of its source. to: the format.

    Raises ValueError.
    """

    to: str
    split: str | None = None
    where: str | None = None
    images: Images = field(default_factory=Images)
    shards: Shards = field(default_factory=Shards)
    on_error: str = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", resolve_format(self.to))
        if self.images.is_raw and self.to != "hdf5":
            raise ValueError(f"raw pixels are for HDF5 shards, not for {self.to}")

    def packed_fields(self, fields: Mapping[str, str]) -> dict[str, str]:
        """The fields of the set, from those of its source. Raises SourceError for image options without images."""
        if self.images.encoding is not None and "image" not in fields:
            raise SourceError(
                f"only images can be resized, encoded or changed, and this source has {listed([*fields])}"
            )
        raw = self.images.is_raw
        return {name: PIXELS if name == "image" and raw else kind for name, kind in fields.items()}

    def to_json(self) -> dict[str, Any]:
        """For dataset.json and the fingerprint; options that were added later appear only if they are set."""
        images, shards = self.images, self.shards
        named = {
            "to": self.to,
            "split": self.split,
            "shard_bytes": shards.bytes,
            "samples_per_shard": shards.samples,
            "shuffle": shards.shuffle,
            "on_error": self.on_error,
            "check": images.check,
            "reencode": images.reencode and asdict(images.reencode),
            "label_offset": shards.label_offset,
            "decode": images.decode,
            "checksums": shards.checksums,
            "where": self.where,
            "ops": [repr(op) for op in images.ops],
        }
        return {name: value for name, value in named.items() if name not in _LATER or value != _LATER[name]}


def refuse_others(options: Run | Shards, *taken: str) -> None:
    """Raise ValueError for an option that a call does not take."""
    for option in fields(options):
        if option.name not in taken and getattr(options, option.name) != option.default:
            kind = type(options).__name__
            raise ValueError(f"{kind}({option.name}=…) does not apply here; expected {', '.join(taken)}")


# --- names of release 0.1, kept for one release ---------------------------------------------------------------------
_KINDS = {"choose": Choose, "images": Images, "shards": Shards, "run": Run}
_OLD = {
    **{name: ("choose", name) for name in ("split", "classes", "where", "seed", "stratify", "group")},
    "split_fractions": ("choose", "fractions"),
    **{name: ("images", name) for name in ("check", "decode", "reencode", "ops")},
    "shard_size": ("shards", "size"),
    "samples_per_shard": ("shards", "samples"),
    **{name: ("shards", name) for name in ("shuffle", "label_offset", "checksums")},
    **{name: ("run", name) for name in ("workers", "engine", "on_error", "task", "work")},
}
F = TypeVar("F", bound=Callable[..., Any])


def takes_old_names(function: F) -> F:
    """Let a function accept the keywords that moved to its option objects, with a DeprecationWarning."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        moved: dict[str, dict[str, Any]] = {}
        for name in [name for name in options if name not in names and _OLD.get(name, ("", ""))[0] in names]:
            group, new = _OLD[name]
            moved.setdefault(group, {})[new] = options.pop(name)
        for group, values in moved.items():
            if group in options:
                raise TypeError(f"{function.__name__}: give {', '.join(values)} in {group}=, not next to it")
            options[group] = _KINDS[group](**values)
        if moved:
            new = ", ".join(
                f"{group}=packer.{_KINDS[group].__name__}({', '.join(f'{name}=…' for name in values)})"
                for group, values in moved.items()
            )
            warnings.warn(
                f"packer.{function.__name__} takes {new}; separate arguments are removed in the next release",
                DeprecationWarning,
                stacklevel=2,
            )
        return function(*args, **options)

    return call  # type: ignore[return-value]
