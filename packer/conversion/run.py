"""`packer.convert`: list, plan, pack in parallel, commit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any

from cache.errors import OutputError, SourceError
from cache.messages import Silent, Watcher, parse_size
from cache.remote import is_remote
from packer import __version__
from packer.columns import PartMeta
from packer.conversion import saved
from packer.conversion.choice import Choice
from packer.conversion.commit import commit, replaced_set
from packer.conversion.given import Stream, as_source, is_files
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.conversion.left_out import count_by_reason, left_out_of, link_warnings, refuse_nothing
from packer.conversion.ops import check_fields, check_ops
from packer.conversion.pack import ShardTask, pack_shard
from packer.conversion.plan import ConvertOptions, Plan, Reencode, check_listing, make_plan
from packer.conversion.result import ConvertResult
from packer.conversion.saved import Prepared
from packer.documents import repair_documents
from packer.formats import format_named
from packer.output import local_output
from packer.sources import Source, default_output_name
from packer.sources.base import SourceListing
from packer.uploading import convert_to_address
from packer.workers import Workers, run_shards, without_gc
from readers.augment.ops import Op
from readers.layout import DatasetInfo, read_dataset_info

__all__ = ["convert"]


def convert(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source] | Iterable[Any],
    to: str,
    output: str | os.PathLike[str] | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    split: str | None = None,
    split_fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    stratify: bool = False,
    where: str | None = None,
    shard_size: int | str | None = None,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    shuffle: int | None = None,
    on_error: str = "raise",
    check: str = "header",
    decode: str = "RGB",
    reencode: Reencode | None = None,
    ops: Sequence[Op] = (),
    label_offset: int = 0,
    checksums: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    work: str | os.PathLike[str] | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> ConvertResult:
    """Pack a source into HDF5, TFRecord or tar shards with an index.

    source: a folder of images, COCO, Pascal VOC, YOLO, ILSVRC, a manifest or a list of addresses (CSV, TSV, JSONL,
    Parquet), an archive (tar, zip), a packed set, shards made elsewhere or a folder of them, a data set of Hugging
    Face, MosaicML, FFCV, CIFAR, MNIST or NumPy, or a `Source`. Or a data set of a program: anything that has a length
    and hands out samples by number (torch, torchvision, Hugging Face, a list), which workers read in parallel; or an
    iterable of samples, which this process reads. `packer.sources.samples` says what a sample may be. Or a list of
    paths and Sources, which become one set (`packer.sources.several`).
    to: "hdf5", "tfrecord" or "tar" (or "h5", "webdataset").
    output: a directory, or an address at s3://, gs:// or az://; default `<source name>-<to>`.
    fields: of a program's samples: member -> kind, by default by what they are.
    classes: of a program's samples: the names of the labels. Of files: the only classes to take, in the order of their
    new labels.
    split: the only split to take, or the name for a source without splits.
    split_fractions: deal the samples of one split to new ones, as {"train": 0.9, "val": 0.1}; seed: of the draw;
    stratify: every class in these shares.
    where: take the samples for which this is true, as 'min_side >= 64 and class_name in ("cat", "dog")'
    (`readers.where`); what it says of images is decided while they are packed, before ops and re-encoding.
    shard_size: bytes, or "1GiB"; default 8 shards a split, each from 64 MiB to 1 GiB.
    samples_per_shard: instead of shard_size.
    workers: processes; default the CPUs this process may use. With an engine, shards at a time; default all it can.
    shuffle: seed of a random order.
    on_error: what to do with unreadable images ("raise", "skip", "quarantine").
    check: "header", or "decode" for a full decode of each image.
    decode: how readers will decode the images: "RGB", "unchanged" or "none"; others are refused.
    reencode: how to make the images smaller, or in which codec to write what `ops` make.
    ops: ops of `readers.augment` that draw nothing, as [Resize(256), CenterCrop(224)], by the code that carries them
    out in training; masks, boxes and points follow (`packer.conversion.ops`). Needs torch.
    label_offset: added to labels in the shards.
    checksums: write SHA256SUMS, for  sha256sum -c .
    overwrite: replace an existing set.
    dry_run: list and plan only.
    work: directory of a set for an address until it is uploaded; default a hidden one here, removed afterwards.
    engine: where shards are packed, if not in processes of this machine; see `packer.open_engine`.

    The bytes of the images are kept exactly unless `reencode` or `ops` are given. The output does not depend on
    `workers`. Killed at any moment, the same call resumes.

    Raises SourceError, BadSampleError, OutputError, WorkerError.
    """
    options = ConvertOptions(
        to=to,
        split=split,
        shard_bytes=parse_size(shard_size) if isinstance(shard_size, str) else shard_size,
        samples_per_shard=samples_per_shard,
        shuffle=shuffle,
        on_error=on_error,
        check=check,
        decode=decode,
        reencode=reencode,
        label_offset=label_offset,
        checksums=checksums,
        where=where,
        ops=tuple(ops),
    )
    check_ops(ops)
    from_files = is_files(source)
    choice = Choice(classes if from_files else None, split_fractions, seed, stratify, where)
    crew = Workers(workers, engine)
    opened, watcher = as_source(source, fields, None if from_files else classes), watcher or Silent()

    def convert_to(out: Path, overwrite: bool) -> ConvertResult:
        if isinstance(opened, Stream):
            return opened.convert(out, options, choice, overwrite, dry_run, watcher)
        return _Conversion(opened, out, options, choice, crew, watcher).run(overwrite, dry_run)

    if output is not None and is_remote(output):
        return convert_to_address(
            convert_to, str(output), work=work, overwrite=overwrite, dry_run=dry_run, watcher=watcher
        )
    if work is not None:
        raise ValueError("work is for an output at an address; a local output is made in its own directory")
    if output is None and not hasattr(opened, "root"):
        raise ValueError("several sources, or a program's samples, have no name for the output: give output=")
    out = Path(default_output_name(opened, options.to)) if output is None else local_output(output)
    return convert_to(out, overwrite)


class _Conversion:
    def __init__(
        self, source: Source, out: Path, options: ConvertOptions, choice: Choice, workers: Workers, watcher: Watcher
    ) -> None:
        self._source, self._out, self._options, self._choice = source, out, options, choice
        self._workers, self._watcher = workers, watcher
        self._started = time.perf_counter()

    def run(self, overwrite: bool, dry_run: bool) -> ConvertResult:
        self._check_output()
        question = saved.question_of(self._source, self._options, self._choice)
        found = None
        if not (overwrite or dry_run):
            found = saved.load(self._out, question, self._options, getattr(self._source, "root", None))
        if found is None:
            self._watcher.note(f"listing {self._source.title}")
        prepared = found or self._prepare()
        plan, listing = prepared.plan, prepared.listing
        for warning in listing.warnings:
            self._watcher.note(f"warning: {warning}")
        if dry_run:
            return self._planned(plan, listing)
        with Journal(self._out) as journal:
            if journal.unlocked:
                self._watcher.note("warning: no file locks here; make sure that no other conversion writes this output")
            finished = journal.finished_plan()
            if finished == plan.fingerprint and not overwrite:
                repair_documents(journal.place, scratch=journal.work)
                journal.remove()
                return self._result(read_dataset_info(self._out), listing, (), 0)
            if finished is not None and not overwrite:
                raise OutputError(
                    f"{self._out}: holds a set made from another source or with other options; "
                    f"pass overwrite=True to replace it, or choose another output"
                )
            old = replaced_set(journal)
            if old is not None:
                old.check(plan, prepared.paths(self._source))
                for line in old.changes(plan, listing):
                    self._watcher.note(line)
            journal.begin(plan, overwrite)
            if found is None:
                prepared = saved.save(self._out, journal.work, question, prepared)
                plan, listing = prepared.plan, prepared.listing
            metas, resumed = self._pack(journal, prepared)
            for warning in remarks_of(meta.remarks for meta in metas):
                self._watcher.note(f"warning: {warning}")
            try:
                refuse_nothing(self._source.title, getattr(self._source, "root", ""), listing, plan, metas)
            except SourceError:
                journal.remove()
                with suppress(OSError):  # it still holds the old set
                    self._out.rmdir()
                raise
            info = commit(journal, plan, metas, listing, self._options.to, self._origin(plan, metas))
        return self._result(info, listing, metas, resumed)

    def _prepare(self) -> Prepared:
        try:
            with without_gc():
                listing = self._choice.of(self._source.list(self._options.split))
        except MemoryError as error:
            raise SourceError(
                f"{self._source.title}: listing it takes more memory than there is; is it damaged, or is all that one "
                f"set? pack a part of it at a time, or free memory"
            ) from error
        listing.warnings += link_warnings(listing)
        for split in listing.splits.values():
            check_listing(split, self._source.title)
        check_fields(self._options.ops, listing.fields)
        return Prepared(make_plan(listing, self._options, format_named(self._options.to)), listing)

    def _check_output(self) -> None:
        root = getattr(self._source, "root", None)
        if root is None:
            return
        source, out = Path(root).resolve(), self._out.resolve()
        if source == out or (source.is_dir() and source in out.parents):
            raise OutputError(f"{self._out}: is inside the source {root}; choose another output")

    def _pack(self, journal: Journal, prepared: Prepared) -> tuple[list[PartMeta], int]:
        plan, listing = prepared.plan, prepared.listing
        metas: list[PartMeta | None] = [
            journal.load_whole(shard, plan, self._options.on_error) for shard in plan.shards
        ]
        missing = [number for number, meta in enumerate(metas) if meta is None]
        resumed = len(metas) - len(missing)
        if resumed:
            self._watcher.note(f"resuming: {resumed} of {len(metas)} shards are whole already")
        shards = [plan.shards[number] for number in missing]
        self._check_space(sum(shard.source_bytes for shard in shards))
        if shards:
            tasks = (self._task(journal, number, prepared) for number in missing)
            samples = sum(len(shard.indices) for shard in shards)
            size = sum(shard.source_bytes for shard in shards)
            workers, known = self._workers.at_most(listing.max_workers), (samples, size)
            done = run_shards(
                pack_shard,
                tasks,
                len(shards),
                workers,
                self._watcher,
                known,
                source=self._source,
                folder=journal.folder,
            )
            for number, meta in zip(missing, done, strict=True):
                metas[number] = meta
        return [meta for meta in metas if meta is not None], resumed

    def _task(self, journal: Journal, number: int, prepared: Prepared) -> ShardTask:
        shard = prepared.plan.shards[number]
        return ShardTask(
            source=self._source,
            spec=prepared.plan.specs[shard.split],
            samples=prepared.samples(number),
            options=self._options,
            skip_strays=prepared.listing.skip_strays,
            out=journal.out,
            shard=shard.name,
            where=prepared.listing.where,
            plan=prepared.plan.fingerprint,
        )

    def _check_space(self, needed: int) -> None:
        """Refuse before the first byte what cannot fit; re-encoding makes sizes unknowable."""
        free = shutil.disk_usage(self._out).free
        if self._options.encoding is None and needed > free:
            raise OutputError(
                f"{self._out}: needs {needed:,} bytes, {free:,} are free there; make room, or choose another output"
            )

    def _origin(self, plan: Plan, metas: Sequence[PartMeta]) -> dict[str, Any]:
        options = {name: value for name, value in self._options.to_json().items() if value is not None}
        return {
            "by": f"packer {__version__}",
            "source": self._source.title,
            "options": options,
            "plan": plan.fingerprint,
            "payload_bytes": sum(meta.payload_bytes for meta in metas),
            "left_out": left_out_of(metas),
            **({"remarks": list(remarks)} if (remarks := remarks_of(meta.remarks for meta in metas)) else {}),
        }

    def _planned(self, plan: Plan, listing: SourceListing) -> ConvertResult:
        return self._report(
            listing,
            splits={name: len(part) for name, part in listing.splits.items()},
            classes=len(listing.classes),
            shards=len(plan.shards),
            samples=plan.samples,
            payload_bytes=plan.source_bytes,
            shard_bytes=0,
            dry_run=True,
            undecided=listing.where,
        )

    def _result(
        self, info: DatasetInfo, listing: SourceListing, metas: Sequence[PartMeta], resumed: int
    ) -> ConvertResult:
        shards = [shard for split in info.splits.values() for shard in split.shards]
        return self._report(
            listing,
            metas,
            info.made,
            splits={name: split.samples for name, split in info.splits.items()},
            classes=len(info.classes),
            shards=len(shards),
            samples=sum(shard.samples for shard in shards),
            payload_bytes=int(info.made.get("payload_bytes", 0)),
            shard_bytes=sum(shard.bytes for shard in shards),
            shards_resumed=resumed,
            already_done=not metas,
        )

    def _report(
        self, listing: SourceListing, metas: Sequence[PartMeta] = (), made: Mapping[str, Any] = {}, **counts: Any
    ) -> ConvertResult:
        left_out = dict(made.get("left_out", {}))
        if listing.left_out:
            left_out["not packed"] = left_out.get("not packed", 0) + len(listing.left_out)
        if listing.not_chosen:
            left_out["not chosen"] = left_out.get("not chosen", 0) + listing.not_chosen
        return ConvertResult(
            output=self._out,
            format=self._options.to,
            seconds=time.perf_counter() - self._started,
            left_out=left_out,
            left_out_reasons=count_by_reason(listing, metas),
            warnings=(*listing.warnings, *map(str, made.get("remarks", ()))),
            **counts,
        )
