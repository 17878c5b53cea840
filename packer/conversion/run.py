"""One conversion of a source into a directory: all of it, or the share of one task of several.

    whole     list and plan, or load the saved listing; pack missing shards; commit
    task i    the first task lists, plans and saves both, while the others wait; pack shards i, i + n, i + 2n, …
    commit    `packer.conversion.saved`, when the shards of all tasks are complete

Tasks may run at any time, on any node, in any order, even twice at the same time: the shards follow from the plan, and
a shard gets its name when it is complete. Tasks share the lock of the working folder, which a conversion, a commit and
a change of the set take exclusively; a second lock lets one task at a time list and plan.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import readers
from cache.checksums import crc32c
from cache.errors import BadSampleError, OutputError, PackerError, SourceError
from cache.files import BusyError
from cache.messages import Counter, Silent, Watcher, human_bytes, human_seconds, listed, plural
from cache.node import usable_cpus
from cache.remote import is_remote
from packer.columns import PartMeta, load_part
from packer.conversion import saved
from packer.conversion.choice import choose
from packer.conversion.commit import replaced_set
from packer.conversion.journal import Journal
from packer.conversion.ops import check_fields, check_ops
from packer.conversion.options import Choose, ConvertOptions, Images, Run, Shards, takes_old_names
from packer.conversion.pack import Cancelled, ShardTask, check_room, pack_shard
from packer.conversion.plan import check_listing, make_plan
from packer.conversion.result import ConvertResult, Summary, link_warnings
from packer.conversion.saved import JOB_FILE, Job, Prepared, load_job
from packer.documents import repair_documents
from packer.formats import format_named
from packer.formats.base import Arena
from packer.output import local_output
from packer.sources import default_output_name, open_source, plain_name
from packer.sources.base import LabellingReader, Samples, SomeSamples, Source, SourceListing
from packer.sources.samples import DatasetSource, class_names, encoded_images
from packer.sources.several import SeveralSources
from packer.uploading import convert_to_address
from packer.workers import TaskCounter, Workers, run_shards, without_gc
from packer.writing import SetWriter, convert_stream
from readers.layout import DATASET_FILE, WORK_FOLDER, read_dataset_info
from readers.table import ABSENT, Strings

__all__ = [
    "Conversion",
    "commit",
    "convert",
]


# ------------------------------------------------------------------------------
# Check that packed samples are those that a program's data set returns now: they are read again and compared.
#
# The listing of such a data set has its length and little more (`SourceListing.sampled`). So before a set, or the
# shards of an interrupted conversion, are accepted for this one, workers compare labels and payloads with them, by key
# and checksum: images, and the fields transformed with them, only if they are packed unchanged. Samples that were left
# out are not compared.

AS_GIVEN = ("text", "json", "array", "target", "file")
"""Kinds of fields that neither ops nor re-encoding change."""
_REPORT_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class PackedTask:
    """Samples of a source, and where they are packed: in a complete shard, or in a set.

    fields: all fields of the source; compared: fields whose payloads are packed unchanged.
    part: of the shard; None: the samples are these rows, (first, stop), of this split of the set at `root`.
    """

    source: Source
    samples: Samples
    fields: tuple[str, ...]
    compared: frozenset[str]
    root: Path
    split: str
    part: Path | None = None
    rows: tuple[int, int] = (0, 0)

    def packed(self) -> dict[str, tuple[int, list[int | None]]]:
        """Label, and checksum of each payload, by key."""
        if self.part is not None:
            with load_part(self.part) as part:
                keys = Strings(part["key"], part["key.offset"])
                columns = [(part[f"{name}.offset"], part[f"{name}.crc32c"]) for name in self.fields]
                return _by_key(keys, part["label"], columns)
        with readers.open(self.root, self.split) as reader:
            rows, table = slice(*self.rows), reader.table
            columns = [
                (table.field_column(name, "offset")[rows], table.field_column(name, "crc32c")[rows])
                for name in self.fields
            ]
            return _by_key(reader.keys[rows], reader.labels[rows], columns)


def _by_key(
    keys: Sequence[str], labels: npt.NDArray[Any], columns: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> dict[str, tuple[int, list[int | None]]]:
    checksums = [
        [None if offset == ABSENT else crc for offset, crc in zip(offsets.tolist(), crcs.tolist(), strict=True)]
        for offsets, crcs in columns
    ]
    rows = zip(labels.tolist(), zip(*checksums, strict=True), strict=True)
    return {key: (label, list(checksums_of_key)) for key, (label, checksums_of_key) in zip(keys, rows, strict=True)}


def first_difference(task: PackedTask, counter: Counter) -> str:
    """A description of the first sample that differs between source and shard; "" if there is none."""
    packed, arena = task.packed(), Arena(lambda: None)
    with task.source.open() as reader:
        for block in task.samples.slices():
            for i, place in enumerate(block.places):
                key = block.keys[i]
                if key in packed:
                    try:
                        payloads = reader.read(place, arena)
                        label = reader.label(place) if isinstance(reader, LabellingReader) else block.labels[i]
                    except BadSampleError as error:
                        return f"{key}: {error}"
                    was, checksums = packed[key]
                    if label != was:
                        return f"{key}: its label was {was} and is {label} now"
                    for name, payload, known in zip(task.fields, payloads, checksums, strict=True):
                        if name in task.compared and (None if payload is None else crc32c(payload)) != known:
                            return f"{key}: its {name} has changed"
                if i % _REPORT_SAMPLES == _REPORT_SAMPLES - 1 and counter.stopped():
                    raise Cancelled
            counter.report(len(block.places), 0)
    return ""


# ------------------------------------------------------------------------------
# Estimating the size and time of a conversion: some of its samples are packed into a temporary directory.


_FIRST, _MOST = 8, 128
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of packing `tried` samples. seconds: of one process, for all samples. shard_bytes: of all shards."""

    tried: int
    seconds: float
    shard_bytes: int


def try_out(source: Source, options: ConvertOptions, prepared: Prepared) -> Trial | None:
    """Pack up to 128 samples of the largest split, for about two seconds; None if that fails.

    They are spread over the split, or are its first ones if a source is read from front to back.
    """
    splits = prepared.listing.splits
    largest = max(splits, key=lambda name: len(splits[name]), default=None)
    if largest is None or not len(splits[largest]):
        return None
    count, trial = min(_FIRST, len(splits[largest])), None
    with suppress(PackerError, OSError):
        while True:
            spent, size = _pack(source, options, prepared, largest, count)
            share = prepared.plan.samples / count
            trial = Trial(count, spent * share, math.ceil(size * share))
            more = min(_MOST, len(splits[largest]), int(count * _SECONDS / max(spent, 1e-9)))
            if more < 2 * count:
                break
            count = more
    return trial


def _pack(source: Source, options: ConvertOptions, prepared: Prepared, split: str, count: int) -> tuple[float, int]:
    """(seconds, bytes of the shard) of packing some samples."""
    listing = prepared.listing
    rows = np.arange(count) * (len(listing.splits[split]) // count if listing.shuffles else 1)
    with tempfile.TemporaryDirectory(prefix="packer-dry-run-") as folder:
        Path(folder, WORK_FOLDER).mkdir()
        shard = (
            prepared.plan.shards[0].name,
            prepared.plan.specs[split],
            SomeSamples(listing.splits[split], rows),
        )
        task = ShardTask.of(source, listing, replace(options, on_error="skip"), Path(folder), shard)
        started = time.perf_counter()
        meta = pack_shard(task, TaskCounter(None, 0))
        return time.perf_counter() - started, meta.shard.bytes


_log = logging.getLogger(__name__)
_PATIENCE_SECONDS, _WAIT_SECONDS = 1.0, 600.0  # for a commit, or a conversion that is starting


class Conversion:
    """A conversion of `source` into the directory `out`."""

    def __init__(
        self, source: Source, out: Path, options: ConvertOptions, choice: Choose, workers: Workers, watcher: Watcher
    ) -> None:
        self._source, self._out, self._options, self._choice = source, out, options, choice
        self._workers, self._watcher = workers, watcher
        self._summary = Summary(out, options.to, time.perf_counter())
        self._question = saved.question_of(source, options, choice)

    def run(self, overwrite: bool, dry_run: bool) -> ConvertResult:
        """Convert the whole source."""
        self._check_output()
        known = None if overwrite or dry_run else self._saved()
        prepared = known or self._prepare()
        if dry_run:
            return self._planned(prepared)
        with Journal(self._out) as journal:
            self._warn(journal)
            done = self._finished(journal, prepared, overwrite)
            if done is not None:
                repair_documents(journal.place, scratch=journal.work)
                journal.remove()
                return done
            self._check_replaced(journal, prepared)
            journal.begin(prepared.plan, overwrite)
            if known is None:
                prepared = saved.save(self._out, journal.work, self._question, prepared)
            metas, resumed = self._pack(journal, prepared, range(len(prepared.plan.shards)))
            info = Job.of(self._source, self._options, prepared).finish(journal, metas, self._watcher)
        return self._summary.of_set(info, prepared.listing, metas, resumed)

    def run_task(self, task: tuple[int, int], overwrite: bool) -> ConvertResult:
        """Pack the shards of task i of n; `packer.conversion.saved` makes the set."""
        self._check_output()
        number, count = task
        with self._shared_journal() as journal:
            self._warn(journal)
            prepared, done = self._joined(journal, count, overwrite)
            if done is not None:
                return replace(done, task=task)
            shards = range(number, len(prepared.plan.shards), count)
            metas, resumed = self._pack(journal, prepared, shards)
        return self._summary.of(
            prepared.listing,
            metas,
            splits=_samples_by_split([prepared.plan.shards[i].split for i in shards], metas),
            classes=len(prepared.listing.classes),
            shards=len(metas),
            samples=sum(meta.shard.samples for meta in metas),
            payload_bytes=sum(meta.payload_bytes for meta in metas),
            shard_bytes=sum(meta.shard.bytes for meta in metas),
            shards_resumed=resumed,
            task=task,
        )

    def _shared_journal(self) -> Journal:
        try:
            return Journal(self._out, shared=True, wait_seconds=_PATIENCE_SECONDS)
        except OutputError as error:
            if not isinstance(error.__cause__, BusyError):
                raise
        self._watcher.note(f"waiting for another command that writes {self._out}")
        return Journal(self._out, shared=True, wait_seconds=_WAIT_SECONDS)

    def _joined(self, journal: Journal, tasks: int, overwrite: bool) -> tuple[Prepared, ConvertResult | None]:
        """The plan of all tasks, made by the first of them; and the result if the set exists."""

        def wait() -> None:
            self._watcher.note("waiting for the task that lists the source for all")

        if self._question:
            with journal.planning(wait):
                known = self._saved()
                if known is not None or not journal.unfinished:
                    return self._join(journal, known or self._prepare(), tasks, overwrite)
        prepared = self._prepare()  # a listing that cannot be saved is made by each task, without waiting
        with journal.planning(wait):
            return self._join(journal, prepared, tasks, overwrite)

    def _join(
        self, journal: Journal, prepared: Prepared, tasks: int, overwrite: bool
    ) -> tuple[Prepared, ConvertResult | None]:
        done = self._finished(journal, prepared, overwrite)
        if done is None:
            begins = journal.join(prepared.plan, overwrite, lambda: self._check_replaced(journal, prepared))
            if begins or not journal.work.kind(JOB_FILE):  # the first task may have been killed before it wrote that
                job = Job.of(self._source, self._options, prepared, tasks)
                prepared = saved.save(self._out, journal.work, self._question, prepared)
                job.save(journal.work)
        return prepared, done

    def _saved(self) -> Prepared | None:
        known = saved.load(self._out, self._question, self._options, getattr(self._source, "root", None))
        if known is not None:
            self._show_warnings(known.listing)
        return known

    def _show_warnings(self, listing: SourceListing) -> None:
        for warning in listing.warnings:
            self._watcher.note(f"warning: {warning}")

    def _warn(self, journal: Journal) -> None:
        if journal.unlocked:
            self._watcher.note("warning: no file locks here; make sure that no other conversion writes this output")

    def _finished(self, journal: Journal, prepared: Prepared, overwrite: bool) -> ConvertResult | None:
        """The result if the set exists. Raises OutputError if another set does."""
        finished = journal.finished_plan()
        if finished == prepared.plan.fingerprint and not overwrite:
            if prepared.listing.sampled:
                self._compare(journal, prepared, range(len(prepared.plan.shards)), is_set=True)
            return self._summary.of_set(read_dataset_info(self._out), prepared.listing)
        if finished is not None and not overwrite:
            raise OutputError(
                f"{self._out}: has a set made from another source or with other options; "
                f"pass overwrite=True to replace it, or choose another output"
            )
        return None

    def _check_replaced(self, journal: Journal, prepared: Prepared) -> None:
        """Refuse to replace a set that must be kept, and report the replacement."""
        old = replaced_set(journal)
        if old is not None:
            old.check(prepared.plan, prepared.paths(self._source))
            for line in old.changes(prepared.plan, prepared.listing):
                self._watcher.note(line)

    @without_gc()
    def _prepare(self) -> Prepared:
        """List and plan."""
        self._watcher.note(f"listing {self._source.title}")
        started = time.perf_counter()
        try:
            listing = choose(self._source.list(self._options.split), self._choice)
        except MemoryError as error:
            raise SourceError(
                f"{self._source.title}: listing it needs more memory than is free; is it damaged, or does it contain "
                f"several sets? pack a part of it at a time, or free memory"
            ) from error
        listing.warnings += link_warnings(listing)
        for split in listing.splits.values():
            check_listing(split, self._source.title)
        check_fields(self._options.images.ops, listing.fields)
        self._watcher.note(_listed(listing, time.perf_counter() - started))
        self._show_warnings(listing)
        return Prepared(make_plan(listing, self._options, format_named(self._options.to)), listing)

    def _check_output(self) -> None:
        root = getattr(self._source, "root", None)
        if root is None:
            return
        source, out = Path(root).resolve(), self._out.resolve()
        if source == out or (source.is_dir() and source in out.parents):
            raise OutputError(f"{self._out}: is inside the source {root}; choose another output")

    def _pack(self, journal: Journal, prepared: Prepared, numbers: Sequence[int]) -> tuple[list[PartMeta], int]:
        """Pack the missing shards of the plan; returns the facts of all, and how many existed."""
        plan, listing = prepared.plan, prepared.listing
        metas = {i: journal.load_whole(plan.shards[i], plan, self._options.on_error) for i in numbers}
        missing = [number for number, meta in metas.items() if meta is None]
        resumed = len(metas) - len(missing)
        if resumed:
            self._watcher.note(f"resuming: {resumed} of {len(metas)} shards are complete already")
        if resumed and listing.sampled:
            self._compare(journal, prepared, [number for number, meta in metas.items() if meta is not None])
        shards = [plan.shards[number] for number in missing]
        _log.info(
            "%s of %s planned, about %s each",
            plural(len(metas), "shard"),
            self._options.to,
            human_bytes(sum(plan.shards[number].source_bytes for number in numbers) / max(1, len(metas))),
        )
        size = sum(shard.source_bytes for shard in shards)
        check_room(self._out, size, self._options)
        done = run_shards(
            pack_shard,
            (
                ShardTask.of(
                    self._source,
                    listing,
                    self._options,
                    journal.out,
                    (plan.shards[number].name, plan.specs[plan.shards[number].split], prepared.samples(number)),
                    plan.fingerprint,
                )
                for number in missing
            ),
            len(shards),
            self._workers.at_most(listing.max_workers),
            self._watcher,
            (sum(len(shard.indices) for shard in shards), size),
            source=self._source,
            folder=journal.folder,
        )
        metas |= zip(missing, done, strict=True)
        return [meta for meta in metas.values() if meta is not None], resumed

    def _compare(self, journal: Journal, prepared: Prepared, numbers: Sequence[int], *, is_set: bool = False) -> None:
        """Refuse shards, or the set, if they were packed from another state of the source.

        numbers: of the shards in the plan; for a set, all of them.
        """
        plan, fields = prepared.plan, prepared.listing.fields
        compared = frozenset(
            name for name, kind in fields.items() if self._options.images.encoding is None or kind in AS_GIVEN
        )
        known = read_dataset_info(self._out).splits if is_set else {}
        tasks, first = [], dict.fromkeys(known, 0)
        for number in numbers:
            shard = plan.shards[number]
            whole = PackedTask(self._source, prepared.samples(number), tuple(fields), compared, self._out, shard.split)
            if not is_set:
                tasks.append(replace(whole, part=journal.part_path(shard)))
                continue
            start = first[shard.split]
            packed = {info.path: info.samples for info in known[shard.split].shards}
            first[shard.split] = start + packed[shard.name]
            tasks.append(replace(whole, rows=(start, first[shard.split])))
        samples = sum(len(plan.shards[number].indices) for number in numbers)
        self._watcher.note(f"comparing {plural(samples, 'sample')} with those that are packed")
        problems = run_shards(
            first_difference,
            tasks,
            len(tasks),
            self._workers.at_most(prepared.listing.max_workers),
            self._watcher,
            (samples, 0),
            source=self._source,
            folder=journal.folder,
        )
        wrong = next(filter(None, problems), "")
        if wrong:
            raise OutputError(
                f"{self._out}: {self._source.title} has changed since that was packed: {wrong}; pass "
                f"overwrite=True to pack all of it again, or choose another output"
            )

    def _planned(self, prepared: Prepared) -> ConvertResult:
        plan, listing = prepared.plan, prepared.listing
        trial = try_out(self._source, self._options, prepared)
        workers = min(self._workers.at_most(listing.max_workers).count or usable_cpus(), len(plan.shards))
        return self._summary.of(
            listing,
            splits={name: len(part) for name, part in listing.splits.items()},
            classes=len(listing.classes),
            shards=len(plan.shards),
            samples=plan.samples,
            payload_bytes=plan.source_bytes,
            shard_bytes=0,
            dry_run=True,
            undecided=listing.where,
            expected_bytes=trial.shard_bytes if trial else None,
            expected_seconds=trial.seconds / max(1, workers) if trial else None,
        )


def _listed(listing: SourceListing, seconds: float) -> str:
    """A line with the samples that were listed, and the files that are left out."""
    samples = plural(sum(map(len, listing.splits.values())), "sample")
    splits = ", ".join(f"{name} {len(part):,}" for name, part in listing.splits.items())
    size = sum(int(part.bytes.sum()) for part in listing.splits.values())
    text = f"listed {samples} ({splits}), {plural(len(listing.classes), 'class')}"
    text += f", {human_bytes(size)}" if size else ""
    text += f" in {human_seconds(seconds)}"
    if listing.left_out:
        reasons = collections.Counter(reason for _, reason in listing.left_out).most_common()
        text += f"; left out {plural(len(listing.left_out), 'file')}: "
        text += listed([f"{count:,} {reason}" for reason, count in reasons])
    return text


def _samples_by_split(splits: Sequence[str], metas: Sequence[PartMeta]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for split, meta in zip(splits, metas, strict=True):
        counts[split] = counts.get(split, 0) + meta.shard.samples
    return counts


# `packer.convert`: list, plan, pack in parallel, commit; and `packer.commit`, for the shards of tasks.


# ------------------------------------------------------------------------------
# The argument of `packer.convert` as a source: paths, data sets of a program, and samples that come one by one.


_SOURCE = ("title", "list", "open", "paths")


def as_source(source: Any, fields: Mapping[str, str] | None, classes: Sequence[str] | None) -> Source | Stream:
    if is_files(source):
        if fields is not None:
            raise ValueError("fields= is for samples of a program; for files, see packer.open_source")
        if not isinstance(source, list | tuple):
            return open_source(source) if isinstance(source, (str, os.PathLike)) else source
        sources = [open_source(item) if isinstance(item, (str, os.PathLike)) else item for item in source]
        names = [plain_name(Path(str(getattr(item, "root", "source")))) for item in sources]
        return SeveralSources(sources, names) if len(sources) > 1 else sources[0]
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (bytes, Mapping)):
        return DatasetSource(source, fields, classes)
    if isinstance(source, Iterable) and not isinstance(source, (bytes, Mapping)):
        return Stream(encoded_images(source), fields, classes)
    raise TypeError(
        f"the source is a {type(source).__name__}, expected a path, a Source as packer.open_source gives, a data set "
        f"with a length, or an iterable of samples"
    )


def is_files(source: Any) -> bool:
    """Whether the argument is a path, a Source, or a list of these."""
    if isinstance(source, list | tuple):
        return (
            bool(source) and all(map(is_files, source)) and not any(isinstance(item, list | tuple) for item in source)
        )
    return isinstance(source, (str, os.PathLike)) or all(hasattr(source, name) for name in _SOURCE)


@dataclass(frozen=True)
class Stream:
    """Samples of a program that arrive one by one."""

    samples: Iterable[Any]
    fields: Mapping[str, str] | None
    classes: Sequence[str] | None

    def convert(
        self, out: Path, options: ConvertOptions, choice: Choose, overwrite: bool, dry_run: bool, watcher: Watcher
    ) -> ConvertResult:
        if (
            choice != Choose(choice.split, where=choice.where)
            or options.shards.shuffle is not None
            or dry_run
            or options.on_error == "quarantine"
        ):
            raise ValueError("samples of an iterable cannot be shuffled, divided, planned or quarantined")
        summary = Summary(out, options.to, time.perf_counter())
        classes = class_names(self.samples) if self.classes is None else self.classes
        title = type(self.samples).__name__
        with SetWriter(
            out, options, self.fields, classes, overwrite=overwrite, source=title, watcher=watcher
        ) as writer:
            convert_stream(self.samples, writer, on_error=options.on_error, watcher=watcher)
        assert writer.info is not None
        return summary.of_set(writer.info, writer.listing, writer.metas)


@takes_old_names
def convert(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source] | Iterable[Any],
    to: str = "hdf5",
    output: str | os.PathLike[str] | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    choose: Choose = Choose(),
    images: Images = Images(),
    shards: Shards = Shards(),
    run: Run = Run(),
    overwrite: bool = False,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> ConvertResult:
    """Pack a source into HDF5, TFRecord or tar shards with an index.

    source: a folder of images, COCO, Pascal VOC, YOLO, ILSVRC, a manifest or a list of addresses (CSV, TSV, JSONL,
    Parquet), an archive (tar, zip), a packed set, foreign shards or a folder of them, a data set of Hugging Face,
    MosaicML, FFCV, CIFAR, MNIST or NumPy, or a `Source`. Or a data set of a program: an object with a length and
    samples by number (torch, torchvision, Hugging Face, a list), read in parallel by workers; or an iterable of
    samples, read by this process. `packer.sources.samples` describes samples. Or a list of paths and Sources, which
    become one set (`packer.sources.several`).
    to: "hdf5", "tfrecord" or "tar" (or "h5", "webdataset").
    output: a directory, or an address at s3://, gs:// or az://; default `<source name>-<to>`.
    fields: of a program's samples: member -> kind, by default recognised by the values.
    classes: of a program's samples: the names of the labels.
    choose: the samples to pack, and their splits.
    images: how they are checked, re-encoded and changed.
    shards: their sizes, order and labels.
    run: workers or an engine, treatment of unreadable images, tasks of an array job.
    overwrite: replace an existing set.
    dry_run: list and plan only.

    Image bytes are kept exactly unless `images` has reencode or ops. The output does not depend on the number of
    workers. After a kill, the same call resumes.

    Raises SourceError, BadSampleError, OutputError, WorkerError.
    """
    check_ops(images.ops)
    opened, watcher = as_source(source, fields, classes), watcher or Silent()
    if classes is not None and is_files(source):
        warnings.warn("to choose classes of files, pass choose=packer.Choose(classes=…)", DeprecationWarning, 3)
        choose = replace(choose, classes=classes)
    options = ConvertOptions(to, choose.split, choose.where, images, shards, run.on_error)

    def convert_to(out: Path, overwrite: bool) -> ConvertResult:
        if isinstance(opened, Stream):
            if run.task is not None or run.engine is not None:
                raise ValueError("samples of an iterable are packed by one process: no engine=, no task=")
            return opened.convert(out, options, choose, overwrite, dry_run, watcher)
        conversion = Conversion(opened, out, options, choose, run.crew, watcher)
        if run.task is None or dry_run:
            return conversion.run(overwrite, dry_run)
        return conversion.run_task(run.task, overwrite)

    if output is not None and is_remote(output):
        if run.task is not None:
            raise ValueError("tasks share a directory: give one as output=, commit it, and then packer.upload it")
        return convert_to_address(
            convert_to, str(output), work=run.work, overwrite=overwrite, dry_run=dry_run, watcher=watcher
        )
    if run.work is not None:
        raise ValueError("work is for an output at an address; a local output is made in place")
    if output is None and not hasattr(opened, "root"):
        raise ValueError("several sources, or a program's samples, have no name for the output; give output=")
    out = Path(default_output_name(opened, options.to)) if output is None else local_output(output)
    return convert_to(out, overwrite)


def commit(output: str | os.PathLike[str], *, watcher: Watcher | None = None) -> ConvertResult:
    """Make a set of the shards that all tasks of a conversion (task= of `convert`) have packed into a directory.

    Raises OutputError if shards are missing, with the tasks to run again, and if tasks are still running.
    """
    out, started, watcher = local_output(output), time.perf_counter(), watcher or Silent()
    if not (out / WORK_FOLDER).is_dir() and not (out / DATASET_FILE).is_file():
        raise OutputError(f"{out}: no task has packed anything here; run  packer convert … --task i/n  first")
    with Journal(out) as journal:
        if journal.is_committed:
            repair_documents(journal.place, scratch=journal.work)
            journal.remove()
            info = read_dataset_info(out)
            return Summary(out, info.format, started).of_set(info, SourceListing({}, info.fields, info.classes))
        job = load_job(journal.work)
        if job is None:
            raise OutputError(
                f"{out}: has no conversion by tasks; run the command again that left its working files here"
            )
        metas = job.whole(journal)
        info = job.finish(journal, metas, watcher)
    return Summary(out, job.to, started).of_set(info, job.listing, metas)
