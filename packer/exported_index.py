"""`packer.export_index`: the index files that other libraries want beside shards; the shards stay as they are.

    dali          tar        <shard>.idx       "v1.2 <samples>", then one line a sample: <ext> <offset> <bytes> <name> …
    rocal         tar        <shard>.idx       the same as "v1.0 <samples>": rocAL reads names in no other version
    dali          tfrecord   <shard>.idx       one line a record: <offset> <bytes>, offset at the length field
    tfrecord      tfrecord   <shard>.tfindex   the same
    wids          tar        <split>.wids.json {"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}], …}

Sources: `tools/wds2idx.py` and `webdataset_loader.cc` of DALI; `webdataset_source_reader.cpp` of rocAL; `tfrecord2idx`
of DALI and of the tfrecord package; `wids_specs.py` of webdataset. Offsets and names are walked from the shards
themselves, so that what an index says is what the file holds. None of these libraries reads HDF5 shards by an index.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cache.files import Folder
from packer.formats.tar import sample_members
from packer.formats.tfrecord import record_ranges
from packer.formats.window import Window
from packer.output import local_output, output_errors
from packer.watch import Silent, Watcher
from readers.errors import FormatError, StaleIndexError
from readers.layout import ShardInfo, SplitInfo, read_dataset_info

__all__ = ["TARGETS", "ExportResult", "Target", "export_index"]

_Lines: TypeAlias = Callable[[Window, ShardInfo], Iterator[str]]
Target = Literal["dali", "rocal", "tfrecord", "wids"]
TARGETS: tuple[Target, ...] = ("dali", "rocal", "tfrecord", "wids")
_SUFFIX = {("dali", "tar"): ".idx", ("rocal", "tar"): ".idx", ("dali", "tfrecord"): ".idx"}
_SUFFIX |= {("tfrecord", "tfrecord"): ".tfindex", ("wids", "tar"): ".wids.json"}
_SHARD_SUFFIXES = (".tar", ".tfrecord", ".tfrecords")
_TAR_VERSION = {"dali": "v1.2", "rocal": "v1.0"}
_RECORD_HEAD_BYTES, _RECORD_FRAME_BYTES = 12, 16
_INSTEAD = {
    "dali": "feed the set through readers.dali, or repack it with  packer convert {path} --to tar",
    "rocal": "feed the set through readers.rocal.external_source, or repack it with  packer convert {path} --to tar",
    "tfrecord": "repack it with  packer convert {path} --to tfrecord",
    "wids": "repack it with  packer convert {path} --to tar",
}


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written: the index files in the order of the shards, and the samples they name."""

    path: Path
    target: str
    files: tuple[Path, ...]
    samples: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path), "files": [str(file) for file in self.files]}


def export_index(
    path: str | os.PathLike[str],
    target: Target,
    *,
    output: str | os.PathLike[str] | None = None,
    split: str | None = None,
    watcher: Watcher | None = None,
) -> ExportResult:
    """Write the index files of `target` for the set in `path`, beside its shards or, under the same names, in `output`.

    split: only this one. Each file appears whole or not at all, and replaces one of its name. Raises FormatError where
    the target has no reader for this format or cannot spell a name, StaleIndexError for a shard that is not the one
    that was indexed, DatasetError, UnknownNameError, OutputError.
    """
    if target not in TARGETS:
        raise ValueError(f"an index is for one of {', '.join(TARGETS)}, not {target!r}")
    root = Path(path)
    info = read_dataset_info(root)
    suffix = _SUFFIX.get((target, info.format))
    if suffix is None:
        told = _INSTEAD[target].format(path=root)
        if (target, info.format) == ("rocal", "tfrecord"):
            told = "it reads them without one, from a directory made by readers.rocal.layouts.tfrecord_layout"
        raise FormatError(f"{root}: {target} has no reader of {info.format} shards that takes an index file; {told}")
    chosen = dict([info.split(split, root)]) if split is not None else dict(info.splits)
    folder = local_output(output) if output is not None else root
    watcher = watcher or Silent()
    if target == "wids":
        files = [_write(folder, f"{name}{suffix}", _wids(root, folder, name, part)) for name, part in chosen.items()]
    else:
        lines = partial(_tar_lines, _TAR_VERSION[target]) if info.format == "tar" else _tfrecord_lines
        files = _export_shards(root, folder, suffix, lines, chosen, watcher)
    return ExportResult(root, target, tuple(files), sum(part.samples for part in chosen.values()))


def _export_shards(
    root: Path, folder: Path, suffix: str, lines: _Lines, chosen: dict[str, SplitInfo], watcher: Watcher
) -> list[Path]:
    shards = [shard for part in chosen.values() for shard in part.shards]
    names = _index_names(root, suffix, [shard.path for shard in shards])
    done: list[ShardInfo] = []
    watcher.begin(
        sum(shard.samples for shard in shards),
        sum(shard.bytes for shard in shards),
        lambda: (sum(shard.samples for shard in done), sum(shard.bytes for shard in done)),
    )
    try:
        for shard, name in zip(shards, names, strict=True):
            _write(folder, name, _shard_lines(root, shard, lines))
            done.append(shard)
    finally:
        watcher.end()
    return [folder / name for name in names]


def _index_names(root: Path, suffix: str, shards: list[str]) -> list[str]:
    """Of each shard, its own name with another ending. Raises FormatError where two names fall together."""
    names = []
    for shard in shards:
        ending = next((known for known in _SHARD_SUFFIXES if shard.endswith(known)), "")
        names.append(shard[: len(shard) - len(ending)] + suffix)
    taken = Counter(names + shards)
    twice = next((name for name in names if taken[name] > 1), None)
    if twice is not None:
        raise FormatError(f"{root}: an index {twice} would stand for two shards, or replace one; rename the shards")
    return names


def _shard_lines(root: Path, shard: ShardInfo, lines: _Lines) -> Iterator[str]:
    with Window(root / shard.path) as window:
        _check_size(window, shard)
        yield from lines(window, shard)


def _tar_lines(version: str, window: Window, shard: ShardInfo) -> Iterator[str]:
    """The lines of an index with names. Blanks separate its columns, so no name may hold one."""
    yield f"{version} {shard.samples}\n"
    stem, parts, samples = "", list[str](), 0
    for member, member_stem, extension in sample_members(window):
        if any(character.isspace() for character in member.name):
            raise FormatError(
                f"{window.path}: member {member.name!r} has a blank in its name, which no index for DALI or rocAL "
                f"can hold; repack it with  packer convert {window.path} --to tar"
            )
        if member_stem != stem and parts:
            yield " ".join(parts) + "\n"
            parts, samples = [], samples + 1
        stem = member_stem
        parts.append(f"{extension} {member.offset} {member.size} {member.name}")
    if parts:
        yield " ".join(parts) + "\n"
        samples += 1
    _check_count(window, samples, shard)


def _tfrecord_lines(window: Window, shard: ShardInfo) -> Iterator[str]:
    samples = 0
    for start, length in record_ranges(window):
        yield f"{start - _RECORD_HEAD_BYTES} {length + _RECORD_FRAME_BYTES}\n"
        samples += 1
    _check_count(window, samples, shard)


def _wids(root: Path, folder: Path, name: str, part: SplitInfo) -> Iterator[str]:
    """`url` is relative to the file beside the shards, so that both may move, and absolute elsewhere."""
    for shard in part.shards:
        with Window(root / shard.path) as window:
            _check_size(window, shard)
    beside = folder.resolve() == root.resolve()
    shards = [
        {
            "url": shard.path if beside else str((root / shard.path).resolve()),
            "nsamples": shard.samples,
            "filesize": shard.bytes,
        }
        for shard in part.shards
    ]
    content = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": name, "shardlist": shards}
    yield json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _check_size(window: Window, shard: ShardInfo) -> None:
    if window.size != shard.bytes:
        raise StaleIndexError(
            f"{window.path}: {window.size} bytes, {shard.bytes} were indexed; adopt it again with  packer index"
        )


def _check_count(window: Window, found: int, shard: ShardInfo) -> None:
    if found != shard.samples:
        raise StaleIndexError(
            f"{window.path}: holds {found} samples, {shard.samples} were indexed; adopt it again with  packer index"
        )


@output_errors()
def _write(folder: Path, name: str, lines: Iterator[str]) -> Path:
    """Write `name` below `folder`, whole; nothing is left of a file that could not be finished."""
    above = name.rpartition("/")[0]
    with Folder(folder, create=True) as top:
        if above:
            top.folder(above, create=True).close()
        with top.writing(name) as file:
            file.writelines(line.encode() for line in lines)
    return folder / name
