"""Pipelines of rocAL's built-in readers over tar and TFRecord shards, without a reader of this package.

    layout = tar_layout(reader, "rocal-train")
    pipeline = native_pipeline(layout, 128, resnet_train_ops())
    iterator = ROCALClassificationIterator(pipeline)
    for epoch in range(90):
        for images, labels in native_batches(iterator, layout):
            ...

The built-in readers do not resume, have no exact last batch, and have a different order, which the generator of the C
library draws: `seed` does not change it. They fill the last batch with repeats of the last sample of the set; with
`shuffle`, the repeats can be anywhere. Sometimes they end an epoch one step too late, with old pixels, so
`native_batches` counts the batches.

They read all files of a directory, so the shards of a split get a separate directory:

    tar        DIR/shards/x.tar    symbolic links        TFRecord   DIR/x.tfrecord   hard links: rocAL's reader of
               DIR/index/x.idx     sample index                                      labels skips symbolic ones

rocAL matches images and labels by file name without directories, and stores offsets in 32 bits. For an image that it
cannot decode, it returns another image under the original label. So a set with undecodable images, by its index, is
refused.

An index is text: `v1.0 SAMPLES`, then a line for each sample with repeated `extension offset size name`, separated by
blanks (rocAL's webdataset_source_reader.cpp; the same is v1.2 in DALI's tools/wds2idx.py). rocAL reads names in v1.0
only, and refuses them in v1.2. The index in the directory lists only the label and the image, because rocAL mistakes
any further component for the first requested one. Its names are numbers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError, FormatError, OutputError, PipelineError
from cache.files import Folder, atomic_write
from cache.messages import quoted
from readers.headers import MEDIA
from readers.reader import Reader
from readers.rocal.pipelines import Machine, Ops, built
from readers.rocal.source import Limits, decodable, limits_of

_Range: TypeAlias = tuple[int, int]  # offset, bytes
_JPEG_EXTENSIONS = ("jpg", "jpeg", "jpe")
_WORDS = {"v1.0": 4, "v1.1": 3, "v1.2": 4}  # words per member, by the version of the index
_MOST_SHARD_BYTES = 1 << 32
_MOST_INDEX_BYTES = 1 << 31


# --- directories ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """A directory for rocAL's reader of `format`. label_offset: the number to subtract from the labels it returns."""

    format: Literal["tar", "tfrecord"]
    shards: Path
    index: Path | None
    samples: int
    label_offset: int
    limits: Limits


def tar_layout(
    reader: Reader,
    directory: str | os.PathLike[str],
    *,
    index_paths: Sequence[str | os.PathLike[str]] | None = None,
    max_side: int = 1024,
) -> Layout:
    """Make `directory` for the tar shards of `reader`.

    index_paths: the index files (v1.0, v1.1 or v1.2) of the shards, in shard order; by default `x.idx` next to `x.tar`,
        where `packer export-index --for rocal` writes them.
    max_side: the largest height and width of decoded images.

    Raises DatasetError for a set of another format, with images that rocAL cannot decode, without labels, or with
    shards of 4 GiB; FormatError for an index that does not match its shard; OutputError if `directory` exists or cannot
    be created.
    """
    shards = _shards(reader, "tar")
    paths = [shard.with_suffix(".idx") for shard in shards] if index_paths is None else [*map(Path, index_paths)]
    if len(paths) != len(shards):
        raise DatasetError(f"{len(shards)} shards need as many index files, found {len(paths)}")
    counts = [shard.samples for shard in reader.split_info.shards]
    indexes = [_members(path, shard, count) for path, shard, count in zip(paths, shards, counts, strict=True)]

    def fill(root: Path) -> None:
        (root / "shards").mkdir()
        (root / "index").mkdir()
        first = 0
        for number, (shard, members) in enumerate(zip(shards, indexes, strict=True)):
            (root / "shards" / f"{number:06d}.tar").symlink_to(shard.resolve())
            lines = [_line(first + i, *both) for i, both in enumerate(members)]
            text = "".join(f"{line}\n" for line in [f"v1.0 {len(lines)}", *lines])
            atomic_write(root / "index" / f"{number:06d}.idx", text.encode("ascii"))
            first += len(lines)

    root, limits = _make(Path(directory), fill), limits_of(reader, cap=max_side)
    return Layout("tar", root / "shards", root / "index", len(reader), reader.dataset.label_offset, limits)


def tfrecord_layout(reader: Reader, directory: str | os.PathLike[str], *, max_side: int = 1024) -> Layout:
    """Make `directory` for the TFRecord shards of `reader`. It must be on the same file system as the shards.

    No index file is needed. Raises as `tar_layout` does, and DatasetError if file names (image/filename) contain
    directories.
    """
    shards = _shards(reader, "tfrecord")
    names = (reader.name(index) for index in range(len(reader)))
    if nested := next((name for name in names if "/" in name), None):
        raise DatasetError(
            f"{reader.path}: the file name {nested} has a directory, and rocAL would not find its label; use "
            f"readers.rocal.external_source, or tar shards and tar_layout"
        )

    def fill(root: Path) -> None:
        for number, shard in enumerate(shards):
            os.link(shard.resolve(), root / f"{number:06d}.tfrecord")

    root, limits = _make(Path(directory), fill), limits_of(reader, cap=max_side)
    return Layout("tfrecord", root, None, len(reader), reader.dataset.label_offset, limits)


def _shards(reader: Reader, format: str) -> list[Path]:
    """The paths of the shards, if rocAL's built-in reader of `format` can read them. Raises DatasetError."""
    if reader.dataset.edited or reader.dataset.separate:
        raise DatasetError(
            f"{reader.path}: its shards hold other samples or labels than its index, and rocAL would read the shards: "
            f"use readers.rocal.external_source, or  packer reshard"
        )
    if reader.dataset.format != format:
        raise DatasetError(f"{reader.path} has {reader.dataset.format} shards, expected {format}: packer convert")
    bad = np.flatnonzero(~decodable(reader.info))
    if len(bad):
        first = int(bad[0])
        raise DatasetError(
            f"{reader.path}: {len(bad)} images are not upright JPEGs of 1 or 3 components, the first is sample "
            f"{first} ({reader.keys[first]}, {MEDIA[int(reader.info.media[first])] or 'unknown'}); rocAL would show "
            f"others in their place: use readers.rocal.external_source, which converts them"
        )
    unlabelled = np.flatnonzero(reader.labels < 0)
    if len(unlabelled):
        raise DatasetError(f"{reader.path}: {len(unlabelled)} samples have no label, as rocAL's readers need")
    for shard in reader.split_info.shards:
        if shard.bytes >= _MOST_SHARD_BYTES:
            size = f"{shard.path} has {shard.bytes} bytes"
            raise DatasetError(f"{size}, rocAL reads less than 4 GiB: pack smaller shards")
    return [reader.path / shard.path for shard in reader.split_info.shards]


def _members(path: Path, shard: Path, samples: int) -> list[tuple[_Range, _Range]]:
    """The byte ranges of label and image of each sample, from an index file. Raises FormatError."""
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise ValueError(f"it has more than {_MOST_INDEX_BYTES} bytes")
        head, *lines = path.read_text(encoding="ascii").splitlines()
        version, count = head.split()
        shard_bytes = shard.stat().st_size
    except (ValueError, OSError) as error:
        raise FormatError(
            f"{path}: not a readable index of {shard.name}: {error}; write it with  "
            f"packer export-index {quoted(shard.parent)} --for rocal"
        ) from error
    if version not in _WORDS or count != str(samples) or len(lines) != samples:
        raise FormatError(
            f"{path}: expected v1.0, v1.1 or v1.2 and {samples} samples of {shard.name}, found {head[:40]!r} and "
            f"{len(lines)} lines of samples"
        )
    width = _WORDS[version]
    return [_parse(f"{path}, line {number}", line.split(), width, shard_bytes) for number, line in enumerate(lines, 2)]


def _parse(where: str, words: Sequence[str], width: int, shard_bytes: int) -> tuple[_Range, _Range]:
    """The byte ranges of label and image in a line of an index. Raises FormatError."""
    labels: list[_Range] = []
    images: list[_Range] = []
    for at in range(0, len(words), width):
        extension, *numbers = words[at : at + width]
        if len(numbers) != width - 1 or not (numbers[0].isdecimal() and numbers[1].isdecimal()):
            raise FormatError(f"{where}: expected groups of {width} words, found {' '.join(words[at : at + 4])[:60]!r}")
        member = int(numbers[0]), int(numbers[1])
        if member[0] % 512 or sum(member) > shard_bytes:
            raise FormatError(f"{where}: {member[0]} and {member[1]} are not a range of a member of the shard")
        if extension == "cls":
            labels.append(member)
        elif extension.lower() in _JPEG_EXTENSIONS:
            images.append(member)
    if len(labels) != 1 or len(images) != 1:
        raise FormatError(f"{where}: expected one cls and one JPEG, found {len(labels)} and {len(images)}")
    return labels[0], images[0]


def _line(number: int, label: _Range, image: _Range) -> str:
    return f"cls {label[0]} {label[1]} {number:09d}.cls jpg {image[0]} {image[1]} {number:09d}.jpg"


def _make(directory: Path, fill: Callable[[Path], None]) -> Path:
    """Create `directory` with `fill`, completely or not at all. Raises OutputError."""
    if directory.exists():
        raise OutputError(f"{directory} exists; give a new directory, or remove it")
    building = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
        fill(building)
        with Folder(directory.parent) as parent:
            for path in (building, *building.iterdir()):
                if path.is_dir():
                    with Folder(path) as folder:
                        folder.sync()
            parent.rename(building.name, directory.name, durable=True)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{directory} cannot be made: {error}; hard links need the file system of the shards, so choose one "
            f"there, or copy the set first (packer stage)"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


# --- pipelines --------------------------------------------------------------------------------------------------
def native_pipeline(
    layout: Layout,
    batch_size: int,
    ops: Ops,
    *,
    shuffle: bool = True,
    machine: Machine | None = None,
    seed: int = 0,
) -> Any:
    """A built pipeline that reads `layout` with rocAL's built-in reader.

    ops: the operators on the images, for example `resnet_train_ops()`.
    shuffle: read in a random order, which does not depend on `seed`.
    machine: the device and the threads of the pipeline.
    seed: for crops and flips.

    `native_batches` needs a `ROCALClassificationIterator` of `amd.rocal.plugin.generic` over it.
    """

    def graph(rocal: Any) -> Any:
        encoded, arguments = _NATIVE[layout.format].encoded(rocal, layout)
        images = rocal.fn.decoders.image(
            encoded,
            random_shuffle=shuffle,
            max_decoded_width=layout.limits.width,
            max_decoded_height=layout.limits.height,
            **arguments,
        )
        return ops(rocal, images)

    return built(graph, machine or Machine(), batch_size=batch_size, seed=seed)


def native_batches(iterator: Any, layout: Layout) -> Iterator[tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]]:
    """One epoch of `iterator`: (images, labels) of ceil(samples / batch_size) batches, as copies.

    iterator: a `ROCALClassificationIterator` of a pipeline over `layout`. The end of the epoch resets it; a loop that
        ends early does not. Raises PipelineError if rocAL ends the epoch too early.
    """
    steps = -(-layout.samples // iterator.batch_size)
    for step in range(steps):
        try:
            outputs, _ = next(iterator)
        except StopIteration:
            raise PipelineError(f"rocAL ended the epoch after {step} of {steps} batches") from None
        yield outputs[0].copy(), labels_of(iterator.loader, layout)
    iterator.reset()


def labels_of(pipeline: Any, layout: Layout) -> npt.NDArray[np.int64]:
    """Labels of the last batch, int64 [batch_size], counted from 0 as in the reader."""
    return _NATIVE[layout.format].labels(pipeline) - layout.label_offset


class _Native(NamedTuple):
    """The differences between rocAL's built-in readers.

    encoded: (rocAL, layout) → the node of the encoded images, and further arguments for their decoder. labels: a
    function that returns the labels of the last batch of a pipeline.
    """

    encoded: Callable[[Any, Layout], tuple[Any, dict[str, Any]]]
    labels: Callable[[Any], npt.NDArray[np.int64]]


def _tar_images(rocal: Any, layout: Layout) -> tuple[Any, dict[str, Any]]:
    shards, index = f"{layout.shards}/", f"{layout.index}/"  # rocAL appends names without a slash
    encoded = rocal.fn.readers.webdataset(
        path=shards,
        index_paths=index,
        ext=[{"jpg", "cls"}],
        missing_components_behavior=rocal.types.MISSING_COMPONENT_ERROR,
    )
    return encoded, {"file_root": shards, "index_path": index}


def _tar_labels(pipeline: Any) -> npt.NDArray[np.int64]:
    """The labels of the last batch. rocAL returns a list of contents for each component; the first has the labels."""
    return np.array([int(bytes(text)) for text in pipeline.get_ascii_datas()[0]], np.int64)


def _tfrecord_images(rocal: Any, layout: Layout) -> tuple[Any, dict[str, Any]]:
    names = {name: name for name in ("image/encoded", "image/class/label", "image/filename")}
    nodes = rocal.fn.readers.tfrecord(
        path=str(layout.shards), user_feature_key_map=names, features=dict.fromkeys(names), reader_type=0
    )
    return nodes["image/encoded"], {"user_feature_key_map": names, "path": str(layout.shards)}


def _tfrecord_labels(pipeline: Any) -> npt.NDArray[np.int64]:
    return np.asarray(pipeline.get_image_labels()).astype(np.int64)


_NATIVE = {"tar": _Native(_tar_images, _tar_labels), "tfrecord": _Native(_tfrecord_images, _tfrecord_labels)}
