"""Sources of samples: `open_source` finds the kind of a path in `entries`; the module of a kind is imported on use.

Another package adds a source through the entry point `packer.sources` (see `packer.registry`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cache.errors import SourceError
from packer.formats import REGISTRY as FORMATS
from packer.registry import HEAD_BYTES
from packer.sources.base import Source
from packer.sources.entries import FETCH_OPTIONS, REGISTRY, SourceEntry
from packer.sources.layouts import LAYOUTS

__all__ = ["FETCH_OPTIONS", "REGISTRY", "Source", "SourceEntry", "default_output_name", "open_source", "plain_name"]

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def open_source(
    path: str | os.PathLike[str],
    *,
    path_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    fields: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    label_offset: int = 0,
    layout: str = "auto",
    **more: Any,
) -> Source:
    """The source at `path`: a folder, a packed set, a manifest, an archive, a foreign shard, …

    path_column, label_column, folder: of a manifest (`packer.sources.manifest`); the first two also of a list of
    addresses, label_column of CelebA, CIFAR-100 and sources with columns or fields (Hugging Face, MDS, FFCV), folder of
    a COCO file.
    split_column: the column with the split of each sample, in a manifest, a list of addresses, Hugging Face, MDS.
    fields: field -> column of a manifest, or key in a shard.
    image_key, label_key, label_offset (subtracted from the labels): of a shard; label_offset also of IDX files.
    layout: "tree" takes the folders of a tree, or of an archive, as classes, even if they look like another layout
    (`packer.sources.layouts`).
    more: image_sets of Pascal VOC (`packer.sources.voc`), the options of a list of addresses
    (`packer.sources.url_list.FetchOptions`), and those of sources from other packages.
    Raises SourceError for a missing or unknown file, or for an option of another kind of source.
    """
    root = Path(path)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if "://" in os.fspath(path):
        raise SourceError(
            "the source is an address, but packer converts local files: copy the set with  "
            "packer stage ADDRESS --target DIR  and convert the directory that this prints"
        )
    if not root.exists():
        raise SourceError(f"{root}: no such file or directory")
    entry = _entry_of(root, layout)
    if entry is None:
        known = ", ".join(entry.title for entry in REGISTRY)
        raise SourceError(f"{root}: not a known kind of source: {known}")
    usual: dict[str, Any] = {"label_offset": 0, "layout": "auto"}
    options = more | {
        "path_column": path_column,
        "label_column": label_column,
        "split_column": split_column,
        "fields": fields or None,
        "folder": folder,
    }
    options |= {"image_key": image_key, "label_key": label_key, "label_offset": label_offset, "layout": layout}
    chosen = {name: value for name, value in options.items() if value != usual.get(name)}
    for name in chosen.keys() - entry.options - {"layout"}:
        takers = " or ".join(other.title.partition(" (")[0] for other in REGISTRY if name in other.options)
        raise SourceError(f"{root}: {name} can be given for {takers or 'no source'} only, and this is {entry.title}")
    return cast(Source, entry.load()(root, **{name: chosen[name] for name in chosen.keys() & entry.options}))


def _entry_of(root: Path, layout: str) -> SourceEntry | None:
    """The entry that takes a path: by its `recognises`, then by the first bytes of a file, then by its name."""
    any_kind = layout != "tree" or not root.is_dir()
    entries = (entry for entry in REGISTRY if any_kind or entry.name == "folder" or not entry.is_tree)
    recognised = next((entry for entry in entries if entry.recognises is not None and entry.recognises(root)), None)
    if recognised is not None or not root.is_file():
        return recognised
    from packer.sources.streams import compression_of, unpacked_head

    compressed, head = bool(compression_of(root)), unpacked_head(root, HEAD_BYTES)
    plain = _without_compression(root.name)
    by_content = (entry for entry in REGISTRY if (entry.compressed or not compressed) and entry.is_content(head))
    named = (entry for entry in REGISTRY if (entry.compressed or plain == root.name) and not entry.is_text)
    return next(by_content, None) or next((entry for entry in named if entry.is_name(plain)), None)


def _without_compression(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return stem if stem and (dot + suffix).lower() in _COMPRESSED else name


def plain_name(path: Path) -> str:
    """The name of a source without the suffixes of its kind: x for x.tar.gz, x.csv and x.h5."""
    name = _without_compression(path.name)
    stem, dot, suffix = name.rpartition(".")
    known = (*REGISTRY.suffixes(), *FORMATS.suffixes())
    return stem if stem and (dot + suffix).lower() in known else name


def default_output_name(source: object, to: str) -> str:
    """`<source name>-<format>`, in the current directory; for a link, the name of the link."""
    is_path = isinstance(source, (str, os.PathLike))  # a Path has a `root`, too, which is "/"
    root = Path(os.path.abspath(str(source if is_path else getattr(source, "root", source))))
    return f"{root.name if root.is_dir() else plain_name(root)}-{to}"
