"""`packer.export_index`: index files for other libraries; the shards are not changed.

    dali          tar        <shard>.idx       "v1.2 <samples>", then one line a sample: <ext> <offset> <bytes> <name> …
    rocal         tar        <shard>.idx       the same as "v1.0 <samples>": rocAL reads names in no other version
    dali          tfrecord   <shard>.idx       one line a record: <offset> <bytes>, offset at the length field
    tfrecord      tfrecord   <shard>.tfindex   the same
    wids          tar        <split>.wids.json {"wids_version": 1, "shardlist": [{"url", "nsamples", "filesize"}], …}

Sources: `tools/wds2idx.py` and `webdataset_loader.cc` of DALI; `webdataset_source_reader.cpp` of rocAL; `tfrecord2idx`
of DALI and of the tfrecord package; `wids_specs.py` of webdataset. Offsets and names are read from the shards
themselves, so that an index agrees with its file. None of these libraries reads HDF5 shards with an index.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from cache.errors import FormatError, StaleIndexError
from cache.files import Folder
from cache.messages import Silent, Watcher, quoted
from packer.formats import REGISTRY, format_named
from packer.formats.base import Format, Window
from packer.output import Result, local_output, output_errors
from readers.layout import ShardInfo, SplitInfo, read_dataset_info

__all__ = ["TARGETS", "ExportResult", "Target", "export_index"]

Target = Literal["dali", "rocal", "tfrecord", "wids"]
TARGETS: tuple[Target, ...] = ("dali", "rocal", "tfrecord", "wids")
_INSTEAD = {
    "dali": "feed the set through readers.dali, or repack it with  packer convert {path} --to tar",
    "rocal": "feed the set through readers.rocal.external_source, or repack it with  packer convert {path} --to tar",
    "tfrecord": "repack it with  packer convert {path} --to tfrecord",
    "wids": "repack it with  packer convert {path} --to tar",
}


@dataclass(frozen=True, slots=True)
class ExportResult(Result):
    """The written index files, in the order of the shards, and their samples."""

    path: Path
    target: str
    files: tuple[Path, ...]
    samples: int


def export_index(
    path: str | os.PathLike[str],
    target: Target,
    *,
    output: str | os.PathLike[str] | None = None,
    split: str | None = None,
    watcher: Watcher | None = None,
) -> ExportResult:
    """Write the index files of a set for another library.

    path: the set.
    target: the library: "dali", "rocal", "tfrecord" or "wids".
    output: the directory for the files, which are named after the shards; default the set.
    split: only this split.

    Each file is written atomically, replacing a file of the same name. Raises FormatError if the target has no
    reader for this format or cannot represent a name, StaleIndexError for a shard that was replaced since it was
    indexed, DatasetError, UnknownNameError, OutputError.
    """
    if target not in TARGETS:
        raise ValueError(f"an index is for one of {', '.join(TARGETS)}, not {target!r}")
    root = Path(path)
    info = read_dataset_info(root)
    container = format_named(info.format)
    suffix = container.exports.get(target)
    if suffix is None:
        instead = container.unindexed.get(target) or _INSTEAD[target].format(path=quoted(root))
        raise FormatError(f"{root}: {target} has no reader for {info.format} shards with an index file; {instead}")
    if info.edited or info.separate:
        raise FormatError(
            f"{root}: its shards have other samples or labels than its index, and {target} would read the shards; pack "
            f"it again with  packer reshard {quoted(root)} -o DIR  and export the index of that set"
        )
    chosen = dict([info.split(split, root)]) if split is not None else dict(info.splits)
    folder = local_output(output) if output is not None else root
    watcher = watcher or Silent()
    if target == "wids":
        files = [_write(folder, f"{name}{suffix}", _wids(root, folder, name, part)) for name, part in chosen.items()]
    else:
        shards = [shard for part in chosen.values() for shard in part.shards]
        names = _index_names(root, suffix, [shard.path for shard in shards])
        lines = partial(_shard_lines, root, container, target)
        files = _export_shards(folder, dict(zip(names, shards, strict=True)), lines, watcher)
    return ExportResult(root, target, tuple(files), sum(part.samples for part in chosen.values()))


def _export_shards(
    folder: Path, shards: Mapping[str, ShardInfo], lines: Callable[[ShardInfo], Iterator[str]], watcher: Watcher
) -> list[Path]:
    done: list[ShardInfo] = []
    watcher.begin(
        sum(shard.samples for shard in shards.values()),
        sum(shard.bytes for shard in shards.values()),
        lambda: (sum(shard.samples for shard in done), sum(shard.bytes for shard in done)),
    )
    try:
        for name, shard in shards.items():
            _write(folder, name, lines(shard))
            done.append(shard)
    finally:
        watcher.end()
    return [folder / name for name in shards]


def _index_names(root: Path, suffix: str, shards: list[str]) -> list[str]:
    """The name of each shard with another suffix. Raises FormatError if two names are the same."""
    names = []
    for shard in shards:
        ending = next((known for known in REGISTRY.suffixes() if shard.endswith(known)), "")
        names.append(shard[: len(shard) - len(ending)] + suffix)
    taken = Counter(names + shards)
    twice = next((name for name in names if taken[name] > 1), None)
    if twice is not None:
        raise FormatError(f"{root}: an index {twice} would belong to two shards, or replace one; rename the shards")
    return names


def _shard_lines(root: Path, container: Format, target: str, shard: ShardInfo) -> Iterator[str]:
    samples = 0
    with Window(root / shard.path) as window:
        _check_size(window, shard)
        yield container.index_head(target, shard.samples)
        for line in container.index_lines(target, window):
            samples += 1
            yield line
    if samples != shard.samples:
        raise StaleIndexError(
            f"{window.path}: has {samples} samples, expected {shard.samples} as indexed; adopt it again with  "
            f"packer index"
        )


def _wids(root: Path, folder: Path, name: str, part: SplitInfo) -> Iterator[str]:
    """`url` is relative if the file is in the set, so that both can be moved together, else absolute."""
    for shard in part.shards:
        with Window(root / shard.path) as window:
            _check_size(window, shard)
    is_in_set = folder.resolve() == root.resolve()
    shards = [
        {
            "url": shard.path if is_in_set else str((root / shard.path).resolve()),
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
            f"{window.path}: has {window.size} bytes, expected {shard.bytes} as indexed; adopt it again with  "
            f"packer index"
        )


@output_errors()
def _write(folder: Path, name: str, lines: Iterator[str]) -> Path:
    """Write `name` below `folder`, atomically."""
    above = name.rpartition("/")[0]
    with Folder(folder, create=True) as top:
        if above:
            top.folder(above, create=True).close()
        with top.writing(name) as file:
            file.writelines(line.encode() for line in lines)
    return folder / name
