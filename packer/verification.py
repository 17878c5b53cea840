"""`packer.verify`: is every byte of a set what it was when it was packed, and is the index true?

For each file of an index: its size and CRC32C. For each shard: its size; that its format finds exactly the samples,
keys, labels, file names and byte ranges of the index; the CRC32C of every sample; and that the header of its image is
the one in the index. deep adds the CRC32C of the whole file, the format's own checksums of the payload and a
full decode of every image. against compares with the original source, sample by sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crc32c import crc32c

import readers
from cache.node import usable_cpus
from cache.remote import is_remote
from cache.text import plural
from packer.comparison import compare
from packer.conversion.images import decode_fully
from packer.engines.local import run_shards
from packer.formats import format_named
from packer.formats.base import LocateOptions, locate_options
from packer.formats.window import Window
from packer.index_check import check_index, header_difference, sample_difference
from packer.problems import MAX_PROBLEMS, Problem, Problems
from packer.sources import Source, open_source
from packer.sources.shards import located_samples
from packer.watch import Counter, Silent, Watcher
from readers.errors import BadSampleError, DatasetError, FormatError, PackerError, StaleIndexError
from readers.headers import sniff
from readers.layout import DATASET_FILE, ShardInfo, read_dataset_info
from readers.sample import Buffer

__all__ = ["Problem", "VerifyResult", "verify"]

_REPORT_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was checked and what is wrong. problems holds the first 10,000; problem_count counts all."""

    path: Path | str
    shards: int
    samples: int
    shard_bytes: int
    deep: bool
    against: str | None
    problems: tuple[Problem, ...]
    problem_count: int
    left_out: int = 0

    @property
    def ok(self) -> bool:
        return self.problem_count == 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class _Task:
    root: Path
    split: str
    number: int
    shard: ShardInfo
    first: int  # sample of the split
    format: str
    options: LocateOptions
    deep: bool
    decode: str


def verify(
    path: str | Path,
    *,
    deep: bool = False,
    against: str | Path | Source | None = None,
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> VerifyResult:
    """Check a packed set. Damage is reported in the result; raises DatasetError where there is no set to check.

    Of a set at an address the checksum of every shard is compared, and the index; see `packer.remote_verification`.
    """
    if is_remote(path):
        from packer.remote_verification import verify_remote

        return verify_remote(str(path), deep=deep or against is not None, workers=workers, watcher=watcher)
    root = Path(path)
    info = read_dataset_info(root)
    options = replace(locate_options(info), check_payload=deep)
    found, sound = Problems(), True
    tasks: list[_Task] = []
    made = info.made.get("options")
    decode = str(made.get("decode", "RGB")) if isinstance(made, dict) else "RGB"
    for name, split in info.splits.items():
        first = 0
        for number, shard in enumerate(split.shards):
            tasks.append(_Task(root, name, number, shard, first, info.format, options, deep, decode))
            first += shard.samples
        sound &= check_index(root, info, name, found)
    if not any(split.samples for split in info.splits.values()):
        found.add(Problem("all", DATASET_FILE, "the set has no samples: there is nothing to read or train on"))
    if sound:
        samples, size = sum(task.shard.samples for task in tasks), sum(task.shard.bytes for task in tasks)
        watched = watcher or Silent()
        for part in run_shards(verify_shard, tasks, len(tasks), workers or usable_cpus(), watched, samples, size):
            found.count += part.count
            found.problems += part.problems[: MAX_PROBLEMS - len(found.problems)]
    left_out = 0
    if against is not None:
        source = open_source(against, layout="tree") if isinstance(against, (str, Path)) else against
        left_out = compare(root, source, found, watcher or Silent())
        against = source.title
    return VerifyResult(
        path=root,
        shards=len(tasks),
        samples=sum(split.samples for split in info.splits.values()),
        shard_bytes=sum(task.shard.bytes for task in tasks),
        deep=deep,
        against=against,
        problems=tuple(found.problems),
        problem_count=found.count,
        left_out=left_out,
    )


def verify_shard(task: _Task, counter: Counter) -> Problems:
    """Everything that can be wrong with one shard."""
    found = Problems()

    reader = readers.open(task.root, task.split)

    def wrong(what: str, index: int | None = None) -> None:
        key = None if index is None else _key_of(reader, index)
        found.add(Problem(task.split, task.shard.path, what, index, key))

    try:
        reader.check_shard(task.number)
    except StaleIndexError as error:
        wrong(str(error))
        return found
    path = task.root / task.shard.path
    if task.deep:
        with Window(path) as window:
            crc = window.checksum()
        if crc != task.shard.crc32c:
            wrong(f"the CRC32C of the whole file is {crc:08x}, dataset.json says {task.shard.crc32c:08x}")
    _check_located(task, reader, path, wrong)
    _check_samples(task, reader, wrong, counter)
    return found


def _check_located(task: _Task, reader: readers.ShardReader, path: Path, wrong: Any) -> None:
    """The format finds in the file what the index says of it."""
    count = 0
    try:
        for count, sample in enumerate(located_samples(format_named(task.format), path, task.options), start=1):
            index = task.first + count - 1
            if count > task.shard.samples:
                continue
            try:
                what = sample_difference(reader, index, sample, task.shard.path)
            except DatasetError as error:
                what = str(error)
            if what:
                wrong(what, index)
    except FormatError as error:
        wrong(f"{task.format} structure: {error}")
        return
    if count != task.shard.samples:
        wrong(f"holds {plural(count, 'sample')}, dataset.json says {task.shard.samples}")


def _key_of(reader: readers.ShardReader, index: int) -> str | None:
    try:
        return reader.keys[index]
    except DatasetError:
        return None


def _check_samples(task: _Task, reader: readers.ShardReader, wrong: Any, counter: Counter) -> None:
    """The checksum of every field of every sample, the header of its image, and under deep the pixels."""
    info = reader.info
    for done, index in enumerate(range(task.first, task.first + task.shard.samples), start=1):
        for name in reader.fields:
            try:
                payload = reader.read(index, name) if reader.has(index, name) else None
            except PackerError as error:
                wrong(str(error), index)
                continue
            what = _payload_fault(reader, index, name, payload, task.decode if task.deep else "none")
            if not what and name == "image":
                what = header_difference(info, index, payload)
            if what:
                wrong(what, index)
            counter.report(0, len(payload or b""))
        if done % _REPORT_SAMPLES == 0:
            counter.report(_REPORT_SAMPLES, 0)


def _payload_fault(reader: readers.ShardReader, index: int, name: str, payload: Buffer | None, decode: str) -> str:
    """What is wrong with the bytes of a field; "" for nothing. decode: as what to decode an image ("none": not)."""
    if payload is None:
        return ""
    crc = crc32c(payload)
    expected = int(reader.index.field_column(name, "crc32c")[index])
    if crc != expected:
        return f"field {name} is damaged: CRC32C {crc:08x}, expected {expected:08x}"
    if name == "image" and sniff(payload):
        try:
            decode_fully(payload, decode)
        except BadSampleError as error:
            return f"the image {error}"
    return ""
