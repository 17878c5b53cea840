"""Write one shard, in a worker. Everything it needs is in its task, so any executor can run it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cache.errors import BadSampleError, OutputError, SourceError
from cache.files import Folder
from cache.messages import Counter
from packer.columns import LeftOut, PartMeta, ShardColumns, save_part
from packer.conversion.images import check_image, prepare_image
from packer.conversion.plan import ConvertOptions
from packer.formats import format_named
from packer.formats.base import Arena, PackedSample, ShardSpec, ShardWriter, WrittenShard
from packer.sources.base import AheadReader, Slice, SomeSamples, Source, SourceReader, StrayReader
from packer.sources.contents import EMPTY, is_stray, reason_of
from readers.layout import ShardInfo
from readers.names import QUARANTINE_FOLDER, WORK_FOLDER, RelativePath, shortened
from readers.sample import Buffer

__all__ = ["Cancelled", "ShardTask", "pack_shard"]

_LARGE_BYTES = 4 << 20
_MAX_BYTES = 1 << 31
_REPORT_BYTES = 1 << 20
_REPORT_SAMPLES = 256
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Cancelled(Exception):
    """The conversion was stopped, and the unfinished shard removed."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to write: the samples, and the set in whose working folder the shard, its part and bad files go."""

    source: Source
    spec: ShardSpec
    samples: SomeSamples
    options: ConvertOptions
    skip_strays: bool
    out: Path
    shard: str


def pack_shard(task: ShardTask, counter: Counter) -> PartMeta:
    """Read, check and write the samples of one shard; the part is written when the shard is on the disk.

    Raises BadSampleError (under on_error="raise"), SourceError, OutputError (disk full) and Cancelled.
    """
    place = task.out / WORK_FOLDER
    writer = None
    try:
        with Folder(task.out) as out, out.folder(WORK_FOLDER) as work:
            packing = _Packing(task, counter, work)
            temporary = f"{task.shard}.tmp"
            writer = format_named(task.options.to).open_writer(place / temporary, task.spec)
            packing.run(writer)
            written = writer.finish()
            work.rename(temporary, task.shard)
            meta = packing.meta(written)
            save_part(place / f"{task.shard}.part", packing.columns.arrays(written.payloads), meta)
    except OSError as error:
        _abort(writer)
        if error.errno in _FULL:
            raise OutputError(
                error.errno,
                f"{place / task.shard}: {os.strerror(error.errno or 0)}; make room and run the same command again: the "
                f"shards that are whole are kept",
            ) from error
        raise
    except BaseException:
        _abort(writer)
        raise
    return meta


def _name(samples: Slice, i: int) -> str:
    return samples.names[i][0] or samples.keys[i]


def _abort(writer: ShardWriter | None) -> None:
    if writer is not None:
        writer.abort()


class _Packing:
    """The loop over the samples of one shard."""

    def __init__(self, task: ShardTask, counter: Counter, work: Folder) -> None:
        self._task, self._counter, self._work = task, counter, work
        self.columns = ShardColumns(list(task.spec.fields))
        self._left_out: list[LeftOut] = []
        self._remarks: dict[str, tuple[int, str]] = {}
        self._is_image = "image" in task.spec.fields
        self._plain = task.options.check == "header" and task.options.reencode is None

    def run(self, writer: ShardWriter) -> None:
        arena = Arena(writer.flush)
        with self._task.source.open() as reader:
            for block in self._task.samples.slices():
                self._run_block(block, reader, arena, writer)

    def _run_block(self, samples: Slice, reader: SourceReader, arena: Arena, writer: ShardWriter) -> None:
        counter = self._counter
        if isinstance(reader, AheadReader):
            reader.expect(samples.places)
        pending_samples = pending_bytes = 0
        for i, place in enumerate(samples.places):
            payloads: Sequence[Buffer | None] = ()
            try:
                if samples.bytes[i] <= _LARGE_BYTES or self._is_worth_reading(samples, i, reader):
                    arena.begin(samples.bytes[i] + 1)
                    payloads = reader.read(place, arena)
                    self._add(samples, i, payloads, writer)
            except MemoryError as error:
                raise SourceError(
                    f"{self._task.source.title}: {_name(samples, i)}: takes more memory than there is; remove it, or "
                    f"free memory (fewer workers need less)"
                ) from error
            except BadSampleError as error:
                self._leave_out(samples, i, payloads, error)
            pending_samples += 1
            pending_bytes += samples.bytes[i]
            if pending_bytes >= _REPORT_BYTES or pending_samples >= _REPORT_SAMPLES:
                counter.report(pending_samples, pending_bytes)
                pending_samples = pending_bytes = 0
                if counter.stopped():
                    raise Cancelled
        counter.report(pending_samples, pending_bytes)

    def _is_worth_reading(self, samples: Slice, i: int, reader: SourceReader) -> bool:
        """Check a large file before memory is allocated for it: a tree may hold other files than images."""
        name, size = _name(samples, i), samples.bytes[i]
        if self._task.skip_strays:
            head = cast(StrayReader, reader).head(samples.places[i])
            if is_stray(head, name):
                self._left_out.append(LeftOut(name, reason_of(head, name), ""))
                return False
        if size > _MAX_BYTES:
            raise BadSampleError(f"has {size:,} bytes, expected at most {_MAX_BYTES:,}")
        return True

    def _add(self, samples: Slice, i: int, payloads: Sequence[Buffer | None], writer: ShardWriter) -> None:
        names, header = samples.names[i], None
        image = payloads[0]
        if image is not None and self._is_image:
            if self._plain:
                header, remarks = check_image(image, self._task.options.decode)
            else:
                image, header, name, remarks = prepare_image(image, names[0], samples.keys[i], self._task.options)
                payloads, names = (image, *payloads[1:]), (name, *names[1:])
            for remark in remarks:
                count, first = self._remarks.get(remark, (0, _name(samples, i)))
                self._remarks[remark] = (count + 1, first)
        sample = PackedSample(samples.keys[i], samples.labels[i], tuple(payloads), names, header)
        writer.add(sample)
        self.columns.add(sample)

    def _leave_out(self, samples: Slice, i: int, payloads: Sequence[Buffer | None], error: BadSampleError) -> None:
        task = self._task
        name = _name(samples, i)
        image = payloads[0] if payloads else None
        if task.skip_strays and image is not None and is_stray(image, name):
            self._left_out.append(LeftOut(name, reason_of(image, name), ""))
            return
        if image is not None and not len(image):
            error = BadSampleError(f"is {EMPTY}")
        on_error = task.options.on_error
        if on_error == "raise":
            raise BadSampleError(
                f"{task.source.title}: {name}: {error}; repair or remove it, or leave such files out with "
                f"on_error='skip' or on_error='quarantine'"
            ) from error
        if on_error == "quarantine" and image is not None:
            _set_aside(self._work, task.spec.split, name, image)
        self._left_out.append(LeftOut(name, str(error), "skipped" if on_error == "skip" else "quarantined"))

    def meta(self, written: WrittenShard) -> PartMeta:
        info = ShardInfo(self._task.shard, written.bytes, len(self.columns), written.crc32c)
        size = sum(sum(payloads.length) for payloads in written.payloads.values())
        return PartMeta(info, size, tuple(self._left_out), remarks=self._remarks)


def _set_aside(work: Folder, split: str, name: str, payload: Buffer) -> None:
    """Write `payload` to quarantine/split/name below `work`; names in archives may be longer than those of files.

    Raises BadNameError for a name that leads out, PathError where something is in the way.
    """
    place = RelativePath(shortened(name))
    folder, _, last = f"{QUARANTINE_FOLDER}/{split}/{place}".rpartition("/")
    with work.folder(folder, create=True) as opened:
        opened.write(last, payload)
