"""Write one shard, in a worker. Everything it needs is in its task, so any executor can run it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from cache.checksums import file_sha256
from cache.errors import BadSampleError, OutputError, SourceError
from cache.files import Folder
from cache.messages import Counter
from packer.columns import LeftOut, PartMeta, ShardColumns, save_part
from packer.conversion.choice import SampleWhere
from packer.conversion.images import FieldChecks, check_image, decode_fully, prepare_image
from packer.conversion.ops import OpWork, one_thread
from packer.conversion.options import ConvertOptions
from packer.formats import format_named
from packer.formats.base import Arena, PackedSample, ShardSpec
from packer.sources.base import (
    AheadReader,
    LabellingReader,
    Samples,
    Slice,
    Source,
    SourceListing,
    SourceReader,
    StrayReader,
)
from packer.sources.contents import EMPTY, is_stray, reason_of
from readers.headers import read_header
from readers.layout import PIXELS, QUARANTINE_FOLDER, WORK_FOLDER, RelativePath, ShardInfo, shortened
from readers.table import NO_LABEL, Buffer

__all__ = ["Cancelled", "ShardPacker", "ShardTask", "check_room", "disk_full", "pack_shard"]

_LARGE_BYTES = 4 << 20
_MAX_BYTES = 1 << 31
_REPORT_BYTES = 1 << 20
_REPORT_SAMPLES = 256
_KEPT = "run the same command again: complete shards are kept"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Cancelled(Exception):
    """The conversion was stopped, and the unfinished shard removed."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to write: its samples, and the set whose working folder gets the shard, its part and bad files.

    plan: its fingerprint, which the part records.
    where: samples for which it is false are left out; "" for none.
    """

    source: Source
    spec: ShardSpec
    samples: Samples
    options: ConvertOptions
    skip_strays: bool
    out: Path
    shard: str
    plan: str = ""
    where: str = ""

    @classmethod
    def of(
        cls,
        source: Source,
        listing: SourceListing,
        options: ConvertOptions,
        out: Path,
        shard: tuple[str, ShardSpec, Samples],
        plan: str = "",
    ) -> ShardTask:
        """The task for a shard, given by its name, of a source with this listing."""
        name, spec, samples = shard
        return cls(source, spec, samples, options, listing.skip_strays, out, name, plan, listing.where)

    @property
    def title(self) -> str:
        """The name of the task in the log."""
        return self.shard


def pack_shard(task: ShardTask, counter: Counter) -> PartMeta:
    """Read, check and write the samples of one shard; the part is written when the shard is on the disk.

    Raises BadSampleError (under on_error="raise"), SourceError, OutputError (disk full) and Cancelled.
    """
    place = task.out / WORK_FOLDER
    packer = None
    try:
        with Folder(task.out) as out, out.folder(WORK_FOLDER) as work, one_thread(task.options.images.ops):
            packer = ShardPacker(place, task.shard, task.spec, task.options, task.where)
            packing = _Packing(task, counter, work, packer)
            packing.run()
            return packer.finish(work, task.shard, packing.left_out, task.plan)
    except OSError as error:
        if packer is not None:
            packer.abort()
        full = disk_full(error, place / task.shard, _KEPT)
        if full is None:
            raise
        raise full from error
    except BaseException:
        if packer is not None:
            packer.abort()
        raise


def check_room(out: Path, needed: int, options: ConvertOptions | None = None) -> None:
    """Raise OutputError if the disk has less room than this; with re-encoding, sizes are unknown, so it passes."""
    free = shutil.disk_usage(out).free
    if needed > free and (options is None or options.images.encoding is None):
        raise OutputError(
            f"{out}: needs {needed:,} bytes, {free:,} are free there; free space, or choose another output"
        )


def disk_full(error: OSError, where: Path, kept: str) -> OutputError | None:
    """The error for a full disk; None for any other error. kept: advice on the work done so far."""
    if error.errno not in _FULL:
        return None
    return OutputError(error.errno, f"{where}: {os.strerror(error.errno or 0)}; free space and {kept}")


class ShardPacker:
    """Writes one shard into the working folder `place`; samples are checked and added one by one.

    where: an expression that must be true for a sample; "" for all. columns: of the samples so far.
    """

    def __init__(self, place: Path, shard: str, spec: ShardSpec, options: ConvertOptions, where: str = "") -> None:
        self._place, self._spec, self._options = place, spec, options
        self._images = images = options.images
        self._temporary = f"{shard}.{os.urandom(8).hex()}.tmp"  # unique, since a shard may be packed twice at a time
        self._remarks: dict[str, tuple[int, str]] = {}
        self._where = SampleWhere(where, spec.classes, tuple(spec.fields), spec.split) if where else None
        self._not_chosen = 0
        self._is_image = "image" in spec.fields
        self._plain = images.check == "header" and images.encoding is None
        self._ops = OpWork(images.ops, spec.fields, images.encoding) if images.encoding and images.ops else None
        self._fields = FieldChecks(spec.fields, images.check == "decode")
        self._checks_fields, self._in_pixels = bool(self._fields), self._fields.in_pixels
        self.columns = ShardColumns(list(spec.fields))
        self._writer = format_named(options.to).open_writer(place / self._temporary, spec)
        self.flush = self._writer.flush

    def add(self, key: str, label: int, payloads: Sequence[Buffer | None], names: tuple[str, ...]) -> bool:
        """Add a sample; payloads must stay unchanged until `flush` or `finish`. False if `where` excludes it.

        Raises BadSampleError.
        """
        known = len(self._spec.classes)
        if label < NO_LABEL or (known and label >= known):
            most = f" to {known - 1}" if known else ""
            raise BadSampleError(f"its label is {label}, expected 0{most}, or -1 for none")
        if self._where is not None and not self._where.is_true(key, label, payloads):
            self._not_chosen += 1
            return False
        header, image, origin = None, payloads[0] if self._is_image else None, names[0] or key
        if self._checks_fields:
            self._fields.check(payloads)
        if image is None and self._images.is_raw:
            raise BadSampleError("has no image, but raw shards need one for every sample")
        if image is not None:
            if self._ops is not None:
                header, remarks = check_image(image, self._images.decode)
                if self._images.check == "decode":
                    decode_fully(image, self._images.decode)
                payloads, names, header = self._ops.apply(key, payloads, names, header)
                remarks = remarks if payloads[0] is image else ()
            elif self._plain:
                header, remarks = check_image(image, self._images.decode)
            else:
                original = image
                image, header, name, remarks = prepare_image(image, names[0], key, self._images)
                payloads, names = (image, *payloads[1:]), (name, *names[1:])
                if self._in_pixels and image is not original:
                    payloads = self._fields.resized(payloads, read_header(original), header)
            for remark in (*remarks, *(self._fields.remarks(payloads, header) if self._in_pixels else ())):
                count, first = self._remarks.get(remark, (0, origin))
                self._remarks[remark] = (count + 1, first)
        if header is not None and header.media == PIXELS:
            self._fields.check_pixels(header, origin)
        sample = PackedSample(key, label, tuple(payloads), names, header)
        self._writer.add(sample)
        self.columns.add(sample)
        return True

    def finish(self, work: Folder, shard: str, left_out: Sequence[LeftOut] = (), plan: str = "") -> PartMeta:
        """Complete the shard under its name in `work`, on the disk, and write its part."""
        written = self._writer.finish()
        work.rename(self._temporary, shard)
        sha256 = file_sha256(self._place / shard) if self._options.shards.checksums else ""
        info = ShardInfo(shard, written.bytes, len(self.columns), written.crc32c, sha256)
        size = sum(sum(payloads.length) for payloads in written.payloads.values())
        meta = PartMeta(info, size, tuple(left_out), remarks=self._remarks, plan=plan, not_chosen=self._not_chosen)
        meta = replace(meta, targets=self._fields.targets)
        if self._where is not None:
            meta = replace(meta, asked=tuple(sorted(self._where.wanted)), seen=tuple(self._where.seen))
        save_part(self._place / f"{shard}.part", self.columns.arrays(written.payloads), meta)
        return meta

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._writer.abort()


def _name(samples: Slice, i: int) -> str:
    return samples.names[i][0] or samples.keys[i]


class _Packing:
    """The loop over the samples of one shard."""

    def __init__(self, task: ShardTask, counter: Counter, work: Folder, packer: ShardPacker) -> None:
        self._task, self._counter, self._work, self._packer = task, counter, work, packer
        self.left_out: list[LeftOut] = []

    def run(self) -> None:
        arena = Arena(self._packer.flush)
        with self._task.source.open() as reader:
            for block in self._task.samples.slices():
                self._run_block(block, reader, arena)

    def _run_block(self, samples: Slice, reader: SourceReader, arena: Arena) -> None:
        counter, packer = self._counter, self._packer
        label_of = reader.label if isinstance(reader, LabellingReader) else None
        if isinstance(reader, AheadReader):
            reader.expect(samples.places)
        pending_samples = pending_bytes = 0
        seen = len(self.left_out)
        for i, place in enumerate(samples.places):
            payloads: Sequence[Buffer | None] = ()
            try:
                if samples.bytes[i] <= _LARGE_BYTES or self._is_worth_reading(samples, i, reader):
                    arena.begin(samples.bytes[i] + 1)
                    payloads = reader.read(place, arena)
                    label = samples.labels[i] if label_of is None else label_of(place)
                    packer.add(samples.keys[i], label, payloads, samples.names[i])
            except MemoryError as error:
                raise SourceError(
                    f"{self._task.source.title}: {_name(samples, i)}: needs more memory than is free; remove it, or "
                    f"free memory (fewer workers need less)"
                ) from error
            except BadSampleError as error:
                self._leave_out(samples, i, payloads, error)
            pending_samples += 1
            pending_bytes += samples.bytes[i]
            if pending_bytes >= _REPORT_BYTES or pending_samples >= _REPORT_SAMPLES:
                counter.report(pending_samples, pending_bytes, len(self.left_out) - seen)
                pending_samples, pending_bytes, seen = 0, 0, len(self.left_out)
                if counter.stopped():
                    raise Cancelled
        counter.report(pending_samples, pending_bytes, len(self.left_out) - seen)

    def _is_worth_reading(self, samples: Slice, i: int, reader: SourceReader) -> bool:
        """Check a large file before memory is allocated for it, since a tree may contain other files than images."""
        name, size = _name(samples, i), samples.bytes[i]
        if self._task.skip_strays:
            head = cast(StrayReader, reader).head(samples.places[i])
            if is_stray(head, name):
                self.left_out.append(LeftOut(name, reason_of(head, name), ""))
                return False
        if size > _MAX_BYTES:
            raise BadSampleError(f"has {size:,} bytes, expected at most {_MAX_BYTES:,}")
        return True

    def _leave_out(self, samples: Slice, i: int, payloads: Sequence[Buffer | None], error: BadSampleError) -> None:
        task = self._task
        name = _name(samples, i)
        image = payloads[0] if payloads else None
        if task.skip_strays and image is not None and is_stray(image, name):
            self.left_out.append(LeftOut(name, reason_of(image, name), ""))
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
        self.left_out.append(LeftOut(name, str(error), "skipped" if on_error == "skip" else "quarantined"))


def _set_aside(work: Folder, split: str, name: str, payload: Buffer) -> None:
    """Write `payload` to quarantine/split/name below `work`; names in archives may be longer than file names.

    Raises BadNameError for a name that leads out, PathError if a file or folder is in the way.
    """
    place = RelativePath(shortened(name))
    folder, _, last = f"{QUARANTINE_FOLDER}/{split}/{place}".rpartition("/")
    with work.folder(folder, create=True) as opened:
        opened.write(last, payload)
