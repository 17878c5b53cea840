"""Exports made by hand for cases that no packed test set covers: a million samples, hostile names.

The colour of an image identifies its sample.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import packer.tools.view

__all__ = ["PAGE", "colour_of", "write_export"]

PAGE = Path(packer.tools.view.__file__).parent / "page"
COLOURS = 64


def colour_of(sample: int) -> tuple[int, int, int]:
    """The colour of a sample's image: one of 64, which differ by 60 or more in one channel."""
    colour = sample % COLOURS
    return (60 + 60 * (colour & 3), 60 + 60 * (colour >> 2 & 3), 60 + 60 * (colour >> 4))


def _png(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(file, "PNG")
    return file.getvalue()


def write_export(
    folder: Path, samples: int, *, keys: Sequence[str] | None = None, classes: Sequence[str] = ("cat", "dog", "fox")
) -> Path:
    """An export of `samples` samples, whose labels alternate, by class and by key; `keys` in the order of UTF-8."""
    shutil.copytree(PAGE, folder)
    columns: dict[str, np.ndarray[Any, Any]] = {}
    numbers = np.arange(samples)
    if keys is None:
        texts = np.char.zfill(numbers.astype("S"), 9)
        columns["key"], columns["key.offset"] = texts.view("u1"), np.arange(0, 9 * samples + 1, 9, dtype="<u8")
    else:
        encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
        columns["key"] = np.frombuffer(b"".join(encoded), "u1")
        columns["key.offset"] = np.cumsum([0, *map(len, encoded)]).astype("<u8")
    images = [_png(colour_of(number)) for number in range(COLOURS)]
    bounds = np.cumsum([0, *map(len, images)])
    columns["image.offset"] = bounds[numbers % COLOURS].astype("<u8")
    columns["image.length"] = np.diff(bounds)[numbers % COLOURS].astype("<u8")
    columns["shard"] = np.zeros(samples, "<u4")
    columns["label"] = (numbers % len(classes)).astype("<i8")
    (folder / "shard.bin").write_bytes(b"".join(images))
    orders: dict[str, Any] = {"stored": None}
    by_class = np.argsort(columns["label"], kind="stable").astype("<u4")
    first = np.searchsorted(columns["label"][by_class], np.arange(len(classes) + 1))
    runs = [[name, int(a), int(b - a)] for name, a, b in zip(classes, first, first[1:], strict=False)]
    for name, order in {"class": by_class, "key": numbers.astype("<u4")}.items():
        np.save(folder / f"order-{name}.npy", order)
        orders[name] = {"url": f"order-{name}.npy", "start": 128, "count": samples, "runs": []}
    orders["class"]["runs"] = runs
    documents = {}
    for name, column in columns.items():
        np.save(folder / f"{name}.npy", column)
        documents[name] = {"url": f"{name}.npy", "dtype": column.dtype.str, "length": len(column), "start": 128}
    split = {
        "samples": samples,
        "bytes": (folder / "shard.bin").stat().st_size,
        "columns": documents,
        "shards": [{"url": "shard.bin", "bytes": int(bounds[-1]), "path": "shard.bin"}],
        "orders": orders,
        "histograms": {
            "label": {"unit": "", "edges": [0, 1, 2, 3], "counts": [run[2] for run in runs[:3]], "order": "class"}
        },
    }
    view = {
        "format": 1, "name": "made by hand", "address": "a-set", "container": "hdf5", "live": False,
        "classes": list(classes), "fields": [{"name": "image", "kind": "image"}], "media": ["", "jpeg", "png"],
        "splits": {"train": split}, "can": {"where": False, "batches": False, "damaged": False},
    }  # fmt: skip
    (folder / "view.json").write_text(json.dumps(view))
    return folder
