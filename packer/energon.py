"""What Megatron-Energon reads with tar shards: the folder .nv-meta and an index of each shard.

    <shard>.tar.idx          uint64, little-endian: where each sample's first header begins, and where the last ends
    .nv-meta/.info.json      {"shard_counts": {shard: samples}}; .info.yaml: the same for its versions before 6
    .nv-meta/split.yaml      {"split_parts": {split: [shard, …]}, "exclude": []}
    .nv-meta/dataset.yaml    what a sample becomes; one that is there stays, since people edit it
    .nv-meta/index.sqlite    samples and their parts by key, for joins and lookups; index.uuid: of which state

Source: `flavors/webdataset/{itar,indexing,metadata,structs,prepare}.py` of megatron-energon 7.4. The YAML files are
written as JSON, which is YAML. Offsets are read from the shards. .info.json comes last and is what makes it a data set
for Energon.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cache.errors import FormatError, StaleIndexError
from cache.files import Folder
from cache.messages import Watcher
from packer.formats.files import Window
from packer.formats.tar import IMAGE_EXTENSIONS, sample_members
from packer.formats.ustar import BLOCK_BYTES, walk
from packer.output import output_errors
from readers.index import Index
from readers.layout import DatasetInfo, ShardInfo
from readers.sample import NO_LABEL

__all__ = ["META_FOLDER", "export_energon"]

META_FOLDER = ".nv-meta"
_TABLES = """
    CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE,
                          sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER);
    CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,
                               content_byte_offset INTEGER, content_byte_size INTEGER);
"""
_INDEXES = """
    CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
    CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
    CREATE INDEX idx_sample_parts_full
        ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""
_TWICE = "no index.sqlite: the key {key!r} is in two splits, so Energon reads this set but finds no sample by its key"
_BRACES = frozenset("{}")


class _Sample(NamedTuple):
    """key, where its first header begins, where it ends, and its parts: (name, offset, bytes)."""

    key: str
    start: int
    end: int
    parts: list[tuple[str, int, int]]


@output_errors()
def export_energon(root: Path, info: DatasetInfo, splits: Iterable[str], suffix: str, watcher: Watcher) -> list[Path]:
    """Write Energon's files into the directory of a set; the indexes of the shards, in their order, then the others.

    suffix: of the index of a shard, in place of ".tar".

    Raises FormatError for shards that Energon would not find, StaleIndexError for one that was not indexed.
    """
    parts = {name: [shard.path for shard in info.splits[name].shards] for name in splits}
    shards = {shard.path: shard for name in parts for shard in info.splits[name].shards}
    for path in shards:
        if not path.endswith(".tar") or _BRACES & set(path):
            raise FormatError(f"{root / path}: Energon reads files that end with .tar, without braces; rename it")
    with Folder(root) as place, place.folder(META_FOLDER, create=True) as meta:
        database = f".index.sqlite.{uuid.uuid4().hex}.tmp"
        try:
            written = _write_indexes(root, place, shards, suffix, meta.path / database, watcher)
            if written:
                meta.rename(database, "index.sqlite", durable=True)
                meta.write("index.uuid", str(uuid.UUID(hex=info.fingerprint())).encode())
            else:
                meta.unlink("index.sqlite")
        finally:
            meta.unlink(database)
            meta.unlink(f"{database}-journal")
        counts = _json({"shard_counts": {path: shard.samples for path, shard in shards.items()}})
        meta.write("split.yaml", _json({"split_parts": parts, "exclude": []}))
        if not meta.kind("dataset.yaml"):
            meta.write("dataset.yaml", _json(_sample_type(root, info, parts)))
        for name in (".info.yaml", ".info.json"):
            meta.write(name, counts)
    names = ("index.sqlite", "index.uuid", "split.yaml", "dataset.yaml", ".info.yaml", ".info.json")
    others = [root / META_FOLDER / name for name in names if (root / META_FOLDER / name).exists()]
    return [root / f"{path.removesuffix('.tar')}{suffix}" for path in shards] + others


def _write_indexes(
    root: Path, place: Folder, shards: Mapping[str, ShardInfo], suffix: str, database: Path, watcher: Watcher
) -> bool:
    """Write the index of each shard, and all samples into a database; False where a key is there twice."""
    done: list[ShardInfo] = []
    watcher.begin(
        sum(shard.samples for shard in shards.values()),
        sum(shard.bytes for shard in shards.values()),
        lambda: (sum(shard.samples for shard in done), sum(shard.bytes for shard in done)),
    )
    keys_are_unique = True
    connection = sqlite3.connect(database)
    try:
        connection.executescript(_TABLES)
        for number, (path, shard) in enumerate(shards.items()):
            samples = list(_samples(root / path, shard))
            starts = [sample.start for sample in samples] + [samples[-1].end if samples else 0]
            place.write(f"{path.removesuffix('.tar')}{suffix}", struct.pack(f"<{len(starts)}Q", *starts))
            if keys_are_unique:
                keys_are_unique = _insert(connection, number, samples, watcher)
            done.append(shard)
        connection.executescript(_INDEXES)
        connection.commit()
    finally:
        connection.close()
        watcher.end()
    return keys_are_unique


def _insert(connection: sqlite3.Connection, number: int, samples: list[_Sample], watcher: Watcher) -> bool:
    try:
        for i, sample in enumerate(samples):
            row = (number, sample.key, i, sample.start, sample.end - sample.start)
            connection.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", row)
            connection.executemany(
                "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", ((number, i, *part) for part in sample.parts)
            )
    except sqlite3.IntegrityError:
        watcher.note(_TWICE.format(key=sample.key))
        return False
    return True


def _samples(path: Path, shard: ShardInfo) -> Iterator[_Sample]:
    """The samples of a shard, with what tarfile calls the offset of a member: that of its first header."""
    with Window(path) as window:
        if window.size != shard.bytes:
            raise StaleIndexError(
                f"{path}: {window.size} bytes, {shard.bytes} were indexed; adopt it again with  packer index"
            )
        starts, end = {}, 0
        for member in walk(window):
            starts[member.offset] = end
            end = member.offset + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
        count, sample = 0, None
        for member, stem, _ in sample_members(window):
            start = starts[member.offset]
            if sample is None or stem != sample.key:
                if sample is not None:
                    yield sample._replace(end=start)
                sample, count = _Sample(stem, start, end, []), count + 1
            sample.parts.append((member.name[len(stem) + 1 :], member.offset, member.size))
        if sample is not None:
            yield sample
    if count != shard.samples:
        raise StaleIndexError(
            f"{path}: holds {count} samples, {shard.samples} were indexed; adopt it again with  packer index"
        )


def _sample_type(root: Path, info: DatasetInfo, splits: Iterable[str]) -> dict[str, object]:
    """Images with their labels, where every sample has both; otherwise a dict for each, for a cooker to decode."""
    labels = [Index(root / info.splits[name].index, info.splits[name].samples).column("label") for name in splits]
    is_labelled = all(int(column.min(initial=0)) > NO_LABEL for column in labels)
    if not is_labelled or "image" not in info.fields:
        return {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    images = IMAGE_EXTENSIONS.replace(";", ",")
    return {
        "sample_type": {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"},
        "field_map": {"image": images, "label": "cls"},
    }


def _json(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
