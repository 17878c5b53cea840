"""`packer.index`: make a set of shards that lie there already, without copying them; or rebuild an index.

Each shard is located by its format, every sample's checksum and image header are taken, and the columns are put
together as after a conversion. Shards stay where they are; with another output directory, links lead to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cache.node import usable_cpus
from cache.text import plural
from packer.adopted_shard import AdoptTask, locate_shard, make_keys_unique
from packer.columns import PartMeta
from packer.conversion.commit import write_dataset_info
from packer.conversion.journal import Journal
from packer.engines.local import run_shards
from packer.formats import format_named, format_of_file
from packer.formats.base import LocateOptions, ShardSpec
from packer.index_writer import write_index
from packer.output import local_output
from packer.version import VERSION
from packer.watch import Silent, Watcher
from readers.errors import BadNameError, DatasetError, FormatError, OutputError, SourceError
from readers.layout import DATASET_FILE, DatasetInfo, SplitInfo, read_dataset_info
from readers.names import FieldName, SplitName
from readers.tree import SPLIT_NAMES

__all__ = ["IndexResult", "index"]


@dataclass(frozen=True, slots=True)
class IndexResult:
    """What was adopted: splits maps names to samples; unreadable counts images whose header cannot be parsed."""

    output: Path
    format: str
    splits: dict[str, int]
    shards: int
    samples: int
    unreadable: int
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "output": str(self.output)}


def index(
    shards: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    split: str | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    fields: Mapping[str, str] | None = None,
    label_offset: int | None = None,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> IndexResult:
    """Adopt WebDataset tars, TFRecords of tf.train.Example or flat HDF5 files, or rebuild the index of a set.

    shards: files, or directories of them, or one such. output: where dataset.json and the index go; default beside
    the shards, otherwise links to the shards are made there. split: of all shards; default read off each file name.
    image_key, label_key, fields (field -> key): what the shards call things. label_offset: subtracted from their
    labels. classes: names by label. Raises FormatError (broken), NotFlatError (cannot be adopted), SourceError,
    BadNameError (of a split or field).
    """
    split = SplitName(split) if split is not None else None
    named: dict[str, str] = {FieldName(name): key for name, key in (fields or {}).items()}
    if isinstance(shards, (str, os.PathLike)):
        shards = (shards,)
    paths = _find_shards([Path(shard) for shard in shards])
    out = local_output(output) if output is not None else _common_folder(paths)
    home = next(
        (folder for folder in (out, *{path.parent for path in paths}) if (folder / DATASET_FILE).exists()),
        out,
    )
    known = _known_set(home)
    offset = label_offset if label_offset is not None else known.label_offset if known else 0
    options = LocateOptions(image_key, label_key, named, offset)
    adoption = _Adoption(paths, out, options, split, (home, known), watcher or Silent())
    return adoption.run(workers or usable_cpus(), classes)


class _Adoption:
    def __init__(
        self,
        paths: list[Path],
        out: Path,
        options: LocateOptions,
        split: str | None,
        known: tuple[Path, DatasetInfo | None],
        watcher: Watcher,
    ) -> None:
        self._paths, self._out, self._options = paths, out, options
        (self._home, self._known), self._watcher = known, watcher
        self._format = _one_format(paths)
        self._splits: dict[str, list[Path]] = {}
        for path in paths:
            self._splits.setdefault(split or self._split_of(path), []).append(path)

    def _split_of(self, path: Path) -> str:
        if self._known:
            for name, info in self._known.splits.items():
                if any((self._home / shard.path).resolve() == path.resolve() for shard in info.shards):
                    return name
        described = format_named(self._format).describe(path)
        try:
            return SplitName(described.split) if described else split_of_name(path.name)
        except BadNameError as error:
            raise FormatError(f"{path}: {error}; or name it with --split") from error

    def run(self, workers: int, classes: Sequence[str] | None) -> IndexResult:
        self._out.mkdir(parents=True, exist_ok=True)
        with Journal(self._out, beside_shards=True) as journal:
            journal.empty()
            try:
                info, metas, warnings = self._adopt(journal, workers, classes)
            finally:
                journal.remove()
        unreadable = sum(meta.unreadable for meta in metas)
        if unreadable:
            warnings.append(f"{unreadable} images have no readable header")
        return IndexResult(
            output=self._out,
            format=self._format,
            splits={name: part.samples for name, part in info.splits.items()},
            shards=len(self._paths),
            samples=sum(part.samples for part in info.splits.values()),
            unreadable=unreadable,
            warnings=tuple(warnings),
        )

    def _adopt(
        self, journal: Journal, workers: int, classes: Sequence[str] | None
    ) -> tuple[DatasetInfo, list[PartMeta], list[str]]:
        tasks = [
            AdoptTask(path, _place_in(path, self._out), self._format, self._options, journal.folder / f"{n}.part")
            for n, path in enumerate(self._paths)
        ]
        size = sum(path.stat().st_size for path in self._paths)
        metas = run_shards(locate_shard, tasks, len(tasks), workers, self._watcher, 0, size)
        if not any(meta.shard.samples for meta in metas):
            shards = plural(len(tasks), f"{self._format} shard")
            raise SourceError(f"{self._paths[0].parent}: {shards}, but not one sample in them, so no set is made")
        parts = {task.shard: task.part for task in tasks}
        warnings = []
        for split, paths in self._splits.items():
            if make_keys_unique([(path.stem, parts[path]) for path in paths]):
                warnings.append(f"{split}: shards share keys, so each key got its shard's name in front")
        info = self._commit(journal, dict(zip(self._paths, metas, strict=True)), parts, classes)
        return info, metas, warnings

    def _commit(
        self,
        journal: Journal,
        metas: Mapping[Path, PartMeta],
        parts: Mapping[Path, Path],
        classes: Sequence[str] | None,
    ) -> DatasetInfo:
        spec = format_named(self._format).describe(self._paths[0])
        kinds = self._fields(metas, spec)
        splits = {}
        for name, paths in self._splits.items():
            counts = [metas[path].shard.samples for path in paths]
            mine = [parts[path] for path in paths]
            write_index(journal.place, f"{name}.index", mine, counts, list(kinds), scratch=journal.work)
            root = self._known.splits[name].root if self._known and name in self._known.splits else ""
            infos = tuple(metas[path].shard for path in paths)
            splits[name] = SplitInfo(sum(counts), infos, f"{name}.index", root)
        for path in self._paths:
            _link(path, self._out)
        made = dict(self._known.made) if self._known else {}
        made |= {"indexed_by": f"packer {VERSION}"}
        if not self._known:
            made["source"] = "shards made elsewhere"
        info = DatasetInfo(
            format=self._format,
            fields=kinds,
            classes=self._classes(classes, metas, spec),
            splits=splits,
            label_offset=spec.label_offset if spec else self._options.label_offset,
            made=made,
        )
        write_dataset_info(journal.place, info, scratch=journal.work)
        return info

    def _fields(self, metas: Mapping[Path, PartMeta], spec: ShardSpec | None) -> dict[str, str]:
        if spec is not None:
            return dict(spec.fields)
        known = dict(self._known.fields) if self._known else {}
        found = sorted({name for meta in metas.values() for name in meta.fields} | known.keys())
        if "image" not in found and any(meta.shard.samples for meta in metas.values()):
            raise FormatError(
                f"{self._paths[0]}: no sample has an image; name it with --image-key (there are: "
                f"{', '.join(found) or 'no fields'})"
            )
        others = [name for name in found if name != "image"]
        return {"image": "image", **{name: known.get(name) or _kind(name) for name in others}}

    def _classes(
        self, classes: Sequence[str] | None, metas: Mapping[Path, PartMeta], spec: ShardSpec | None
    ) -> tuple[str, ...]:
        if classes is not None:
            return tuple(classes)
        if spec is not None:
            return spec.classes
        if self._known and self._known.classes:
            return self._known.classes
        named: dict[int, str] = {}
        for meta in metas.values():
            named |= {int(label): name for label, name in meta.class_names.items()}
        if named and sorted(named) == list(range(len(named))):
            return tuple(named[label] for label in range(len(named)))
        return ()


def split_of_name(name: str) -> str:
    """The split a shard's file name tells: train-000000.tar, imagenet_val-00001-of-00008.tfrecord; else "train"."""
    words = re.split(r"[^A-Za-z]+", name.lower())
    return next((word for word in words if word in SPLIT_NAMES), "train")


def _find_shards(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES or "tfrecord" in p.name)
        elif path.is_file():
            found.append(path)
        else:
            raise SourceError(f"{path}: no such file or directory")
    if not found:
        raise SourceError(f"{', '.join(map(str, paths))}: no shards found (files ending in {', '.join(_SUFFIXES)})")
    return found


_SUFFIXES = (".tar", ".tfrecord", ".tfrecords", ".h5", ".hdf5")


def _one_format(paths: Sequence[Path]) -> str:
    names = {path: format_of_file(path).name for path in paths}
    first = names[paths[0]]
    for path, name in names.items():
        if name != first:
            raise SourceError(f"{path} is {name}, {paths[0]} is {first}; index one format at a time")
    return first


def _common_folder(paths: Sequence[Path]) -> Path:
    folders = {path.parent for path in paths}
    if len(folders) > 1:
        raise SourceError("the shards lie in several folders; say with -o where the index goes")
    return folders.pop()


def _known_set(out: Path) -> DatasetInfo | None:
    if not (out / DATASET_FILE).exists():
        return None
    try:
        return read_dataset_info(out)
    except DatasetError:
        return None


def _place_in(path: Path, out: Path) -> str:
    """The path of a shard relative to the set: inside it as it is, otherwise the name of its link."""
    resolved, folder = path.absolute(), out.absolute()
    return resolved.relative_to(folder).as_posix() if folder in resolved.parents else path.name


def _link(path: Path, out: Path) -> None:
    target = out / _place_in(path, out)
    if target.absolute() == path.absolute():
        return
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        raise OutputError(f"{target}: is in the way of a link to {path}")
    target.symlink_to(path.resolve())


def _kind(name: str) -> str:
    return "json" if name == "json" else "file"
