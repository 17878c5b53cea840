"""Layouts of sources as a table: how to write a small source of each, and its expected content. The contract runs on
each."""

from __future__ import annotations

import csv
import fnmatch
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_jpeg
from PIL import Image

import packer
from cache.errors import BadSampleError, SourceError
from packer.testing.sources import Content, SourceSuite, content_of
from readers.fields import decode_field

__all__ = ["PICTURES", "SIZE", "Layout", "LayoutSuite", "decoded", "pack_error", "refusal", "values", "write_table"]

SIZE = (40, 24)  # width and height of PICTURES
PICTURES = [make_jpeg(number, SIZE) for number in range(14)]


@dataclass(frozen=True)
class Layout:
    """write: makes the source below a folder and returns its path. truth: the expected content for a path.

    data: patterns of the files that hold samples; unused: files that are never read; whole: samples are whole files;
    folder: the source is all files of its folder; options: of `open_source`; inside: attributes to set on the source so
    that it is listed in this process; damages, changed_bytes: as in `SourceSuite`.
    """

    write: Callable[[Path], Path]
    truth: Callable[[Path], Content]
    data: str = "*"
    unused: tuple[str, ...] = ()
    whole: bool = False
    folder: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Any] = field(default_factory=dict)
    damages: int = 0
    changed_bytes: int | None = None


class LayoutSuite(SourceSuite):
    """The contract of a source for each layout; subclasses are parametrised by `layout`."""

    layout: Layout

    @pytest.fixture
    def root(self, layout: Layout, tmp_path: Path) -> Path:
        self.layout, self.damages, self.changed_bytes = layout, layout.damages, layout.changed_bytes
        return layout.write(tmp_path)

    @pytest.fixture
    def truth(self, layout: Layout, root: Path) -> Content:
        return layout.truth(root)

    def open(self, root: Path) -> Any:
        source = packer.open_source(root, **self.layout.options)
        for name, value in self.layout.inside.items():
            setattr(source, name, value)
        return source

    def files(self, root: Path) -> set[Path]:
        files = super().files(root.parent if self.layout.folder else root)
        return {path for path in files if not any(fnmatch.fnmatch(str(path), name) for name in self.layout.unused)}

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in self.files(root) if fnmatch.fnmatch(path.name, self.layout.data)}

    def whole_files(self, root: Path) -> bool:
        return self.layout.whole


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a table in the format of its suffix; in a CSV None is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([rows[0], *(["" if value is None else value for value in row.values()] for row in rows)])
    return path


def values(source: Any, split: str = "train") -> dict[str, dict[str, Any]]:
    """The decoded fields of each sample except the image, by key."""
    kinds = source.list(None).fields
    return {
        key: {
            name: None if data is None else decode_field(kind, data)
            for (name, kind), data in zip(kinds.items(), fields, strict=True)
            if name != "image"
        }
        for key, _, fields in content_of(source).splits[split]
    }


def decoded(data: bytes | None) -> np.ndarray:
    """The pixels of a PNG."""
    assert data is not None and data.startswith(b"\x89PNG")
    return np.asarray(Image.open(io.BytesIO(data)))


def refusal(path: Path | str, **options: Any) -> str:
    """The message of the error that listing raises."""
    with pytest.raises(SourceError) as refused:
        packer.open_source(path, **options).list(None)
    return str(refused.value)


def pack_error(path: Path, out: Path, kind: type[Exception] = BadSampleError) -> str:
    """The message of the error that a conversion raises; no set is left behind."""
    with pytest.raises(kind) as refused:
        packer.convert(path, "tar", out, run=packer.Run(workers=1))
    assert not (out / "dataset.json").exists()
    return str(refused.value)
