"""`packer.convert`: list, plan, pack in parallel, commit; and `packer.commit`, for what tasks have packed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import OutputError
from cache.messages import Silent, Watcher, parse_size
from cache.remote import is_remote
from packer.conversion.choice import Choice
from packer.conversion.conversion import Conversion
from packer.conversion.job import load_job
from packer.conversion.journal import Journal
from packer.conversion.ops import check_ops
from packer.conversion.plan import ConvertOptions, Reencode
from packer.conversion.result import ConvertResult, Summary
from packer.documents import repair_documents
from packer.output import local_output
from packer.sources import Source, default_output_name, open_source, plain_name
from packer.sources.base import SourceListing
from packer.sources.samples import DatasetSource, class_names, encoded_images
from packer.sources.several import SeveralSources
from packer.uploading import convert_to_address
from packer.workers import Workers
from packer.writing import SetWriter, convert_stream
from readers.augment.ops import Op
from readers.layout import DATASET_FILE, WORK_FOLDER, read_dataset_info

__all__ = ["commit", "convert"]


# ------------------------------------------------------------------------------
# What `packer.convert` is given, as a source: paths, data sets of a program, and samples that come one by one.


_SOURCE = ("title", "list", "open", "paths")


def as_source(source: Any, fields: Mapping[str, str] | None, classes: Sequence[str] | None) -> Source | Stream:
    if is_files(source):
        if fields is not None:
            raise ValueError("fields= is for samples of a program; for files, see packer.open_source")
        if not isinstance(source, list | tuple):
            return open_source(source) if isinstance(source, (str, os.PathLike)) else source
        sources = [open_source(one) if isinstance(one, (str, os.PathLike)) else one for one in source]
        names = [plain_name(Path(str(getattr(one, "root", "source")))) for one in sources]
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
    """Whether it is a path, a Source, or a list of these."""
    if isinstance(source, list | tuple):
        return bool(source) and all(map(is_files, source)) and not any(isinstance(one, list | tuple) for one in source)
    return isinstance(source, (str, os.PathLike)) or all(hasattr(source, name) for name in _SOURCE)


@dataclass(frozen=True)
class Stream:
    """Samples of a program that come one after the other."""

    samples: Iterable[Any]
    fields: Mapping[str, str] | None
    classes: Sequence[str] | None

    def convert(
        self, out: Path, options: ConvertOptions, choice: Choice, overwrite: bool, dry_run: bool, watcher: Watcher
    ) -> ConvertResult:
        if (
            choice != Choice(where=options.where)
            or options.shuffle is not None
            or dry_run
            or options.on_error == "quarantine"
        ):
            raise ValueError("samples that come one after the other cannot be shuffled, dealt, planned or set aside")
        started, title = time.perf_counter(), type(self.samples).__name__
        classes = class_names(self.samples) if self.classes is None else self.classes
        with SetWriter(out, options, self.fields, classes, overwrite=overwrite, made={"source": title}) as writer:
            warnings = convert_stream(self.samples, writer, on_error=options.on_error, watcher=watcher)
        info = writer.info
        assert info is not None
        remarks = tuple(map(str, info.made.get("remarks", ())))
        for remark in remarks:
            watcher.note(f"warning: {remark}")
        shards = [shard for split in info.splits.values() for shard in split.shards]
        return ConvertResult(
            output=out,
            format=options.to,
            splits={name: split.samples for name, split in info.splits.items()},
            classes=len(info.classes),
            shards=len(shards),
            samples=sum(shard.samples for shard in shards),
            payload_bytes=int(info.made["payload_bytes"]),
            shard_bytes=sum(shard.bytes for shard in shards),
            seconds=time.perf_counter() - started,
            warnings=(*warnings, *remarks),
            left_out=({"not packed": len(writer.left_out)} if writer.left_out else {}) | info.made.get("left_out", {}),
        )


def convert(
    source: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source] | Iterable[Any],
    to: str = "hdf5",
    output: str | os.PathLike[str] | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
    split: str | None = None,
    split_fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    stratify: bool = False,
    group: str | None = None,
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
    task: tuple[int, int] | None = None,
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
    stratify: every class in these shares; group: a column of the table whose values are not divided, as "patient", or
    "folder", that of the keys.
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
    task: (i, n), i from 0: pack the i-th of n shares of the shards only, as a task of an array job; `packer.commit`
    makes the set when all are packed.

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
    choice = Choice(classes if from_files else None, split_fractions, seed, stratify, where, group)
    crew = Workers(workers, engine)
    opened, watcher = as_source(source, fields, None if from_files else classes), watcher or Silent()

    def convert_to(out: Path, overwrite: bool) -> ConvertResult:
        if isinstance(opened, Stream):
            if task is not None or engine is not None:
                raise ValueError(
                    "samples that come one after the other are packed by one process: no engine=, no task="
                )
            return opened.convert(out, options, choice, overwrite, dry_run, watcher)
        conversion = Conversion(opened, out, options, choice, crew, watcher)
        return conversion.run(overwrite, dry_run) if task is None or dry_run else conversion.run_task(task, overwrite)

    if task is not None and not 0 <= task[0] < task[1]:
        raise ValueError(f"task must be (i, n) with i from 0 to n - 1, not {task}")
    if output is not None and is_remote(output):
        if task is not None:
            raise ValueError("tasks share a directory: give one as output=, commit it, and then packer.upload it")
        return convert_to_address(
            convert_to, str(output), work=work, overwrite=overwrite, dry_run=dry_run, watcher=watcher
        )
    if work is not None:
        raise ValueError("work is for an output at an address; a local output is made in its own directory")
    if output is None and not hasattr(opened, "root"):
        raise ValueError("several sources, or a program's samples, have no name for the output: give output=")
    out = Path(default_output_name(opened, options.to)) if output is None else local_output(output)
    return convert_to(out, overwrite)


def commit(output: str | os.PathLike[str], *, watcher: Watcher | None = None) -> ConvertResult:
    """Make a set of what all tasks of a conversion (task= of `convert`) have packed into a directory.

    Raises OutputError where shards are missing, with the tasks to run again, and where tasks are still running.
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
                f"{out}: holds no conversion by tasks; what another command has left here, the same command finishes"
            )
        metas = job.whole(journal)
        info = job.finish(journal, metas, watcher)
    return Summary(out, job.to, started).of_set(info, job.listing, metas)
