"""`packer.convert`: list, plan, pack in parallel, commit; and `packer.commit`, for what tasks have packed."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cache.errors import OutputError
from cache.messages import Silent, Watcher
from cache.remote import is_remote
from packer.conversion.conversion import Conversion
from packer.conversion.job import load_job
from packer.conversion.journal import Journal
from packer.conversion.ops import check_ops
from packer.conversion.options import Choose, ConvertOptions, Images, Run, Shards, takes_old_names
from packer.conversion.result import ConvertResult, Summary
from packer.documents import repair_documents
from packer.output import local_output
from packer.sources import Source, default_output_name, open_source, plain_name
from packer.sources.base import SourceListing
from packer.sources.samples import DatasetSource, class_names, encoded_images
from packer.sources.several import SeveralSources
from packer.uploading import convert_to_address
from packer.writing import SetWriter, convert_stream
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
        self, out: Path, options: ConvertOptions, choice: Choose, overwrite: bool, dry_run: bool, watcher: Watcher
    ) -> ConvertResult:
        if (
            choice != Choose(choice.split, where=choice.where)
            or options.shards.shuffle is not None
            or dry_run
            or options.on_error == "quarantine"
        ):
            raise ValueError("samples that come one after the other cannot be shuffled, dealt, planned or set aside")
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
    Parquet), an archive (tar, zip), a packed set, shards made elsewhere or a folder of them, a data set of Hugging
    Face, MosaicML, FFCV, CIFAR, MNIST or NumPy, or a `Source`. Or a data set of a program: anything that has a length
    and hands out samples by number (torch, torchvision, Hugging Face, a list), which workers read in parallel; or an
    iterable of samples, which this process reads. `packer.sources.samples` says what a sample may be. Or a list of
    paths and Sources, which become one set (`packer.sources.several`).
    to: "hdf5", "tfrecord" or "tar" (or "h5", "webdataset").
    output: a directory, or an address at s3://, gs:// or az://; default `<source name>-<to>`.
    fields: of a program's samples: member -> kind, by default by what they are.
    classes: of a program's samples: the names of the labels.
    choose: which samples are packed, and into which splits.
    images: how they are checked, re-encoded and changed.
    shards: their sizes, order and labels.
    run: workers or an engine, what to do with unreadable images, tasks of an array job.
    overwrite: replace an existing set.
    dry_run: list and plan only.

    The bytes of the images are kept exactly unless `images` has reencode or ops. The output does not depend on the
    number of workers. Killed at any moment, the same call resumes.

    Raises SourceError, BadSampleError, OutputError, WorkerError.
    """
    check_ops(images.ops)
    opened, watcher = as_source(source, fields, classes), watcher or Silent()
    if classes is not None and is_files(source):
        warnings.warn("the only classes to take of files are choose=packer.Choose(classes=…)", DeprecationWarning, 3)
        choose = replace(choose, classes=classes)
    options = ConvertOptions(to, choose.split, choose.where, images, shards, run.on_error)

    def convert_to(out: Path, overwrite: bool) -> ConvertResult:
        if isinstance(opened, Stream):
            if run.task is not None or run.engine is not None:
                raise ValueError(
                    "samples that come one after the other are packed by one process: no engine=, no task="
                )
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
