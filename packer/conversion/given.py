"""What `packer.convert` is given, as a source: paths, data sets of a program, and samples that come one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.messages import Watcher
from packer.conversion.choice import Choice
from packer.conversion.plan import ConvertOptions
from packer.conversion.result import ConvertResult
from packer.sources import Source, open_source, plain_name
from packer.sources.samples import DatasetSource, class_names, encoded_images
from packer.sources.several import SeveralSources
from packer.writing import SetWriter, convert_stream

__all__ = ["Stream", "as_source", "is_files"]

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
