"""Where samples come from: one file per kind of source, chosen by what a path is.

Importing this loads little.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from packer.sources.base import Source
from packer.sources.kinds import KNOWN, kind_of, plain_name
from packer.sources.tree_layouts import LAYOUTS
from readers.errors import SourceError

__all__ = ["Source", "default_output_name", "open_source"]


def open_source(
    path: str | os.PathLike[str],
    *,
    path_column: str | None = None,
    label_column: str | None = None,
    fields: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    label_offset: int = 0,
    layout: str = "auto",
) -> Source:
    """The source at `path`: a folder, a packed set, a manifest, an archive, an HDF5 or a TFRecord file.

    path_column, label_column, fields and folder go with manifests only (`packer.sources.manifest`); image_key,
    label_key and label_offset (subtracted from the labels) with HDF5 and TFRecord files only. layout="tree" takes the
    folders of a tree, or of an archive, for classes also where they look like something else
    (`packer.sources.tree_layouts`).
    Raises SourceError where there is nothing, something of no kind we know, or an option for another kind.
    """
    root = Path(path)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if not root.exists():
        raise SourceError(f"{root}: no such file or directory")
    kind = "folder" if root.is_dir() else kind_of(root) if root.is_file() else ""
    if kind == "manifest":
        from packer.sources.manifest import ManifestSource

        return ManifestSource(root, path_column=path_column, label_column=label_column, fields=fields, folder=folder)
    if path_column is not None or label_column is not None or fields or folder is not None:
        raise SourceError(f"{root}: columns, fields and a folder of files can be named for a manifest only")
    if not kind:
        raise SourceError(f"{root}: no kind of source that packer knows: {KNOWN}")
    if kind in ("hdf5", "tfrecord"):
        return _open_records(kind, root, image_key, label_key, label_offset)
    if image_key is not None or label_key is not None or label_offset:
        raise SourceError(f"{root}: image and label keys, and a label offset, can be given for HDF5 and TFRecord only")
    return _open_kind(kind, root, layout)


def _open_records(kind: str, root: Path, image_key: str | None, label_key: str | None, label_offset: int) -> Source:
    if kind == "hdf5":
        from packer.sources.hdf5_records import HDF5Source

        return HDF5Source(root, image_key=image_key, label_key=label_key, label_offset=label_offset)
    from packer.sources.records import TFRecordSource

    return TFRecordSource(root, image_key=image_key, label_key=label_key, label_offset=label_offset)


def _open_kind(kind: str, root: Path, layout: str) -> Source:
    if kind == "archive":
        from packer.sources.archive import ArchiveSource

        return ArchiveSource(root, layout)
    from packer.sources.folder import FolderSource
    from packer.sources.packed import PackedSource

    return PackedSource(root) if PackedSource.fits(root) else FolderSource(root, layout)


def default_output_name(source: object, to: str) -> str:
    """`<source name>-<format>`, in the current directory."""
    is_path = isinstance(source, (str, os.PathLike))  # a Path has a `root` too, which is "/"
    root = Path(str(source if is_path else getattr(source, "root", source))).resolve()
    return f"{root.name if root.is_dir() else plain_name(root)}-{to}"
