"""The sets that the rows of `pipeline.py` read: made once under --work, not timed, and kept.

    python pipeline_sets.py NAME TREE OUTPUT      (run by `make` with the interpreter that the set needs)

Names and folders are the same as those of `pack.py --keep`, so its output is used.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import REPOSITORY, slug
from machine import list_tree

__all__ = [
    "ARRAY_RECORD",
    "FFCV_FULL",
    "FFCV_SHORT",
    "HDF5",
    "LANCE",
    "LITDATA",
    "RECODED",
    "TAR",
    "TFRECORD",
    "IndexedFiles",
    "make",
]

HDF5, TAR, TFRECORD = "ours: hdf5", "ours: tar", "ours: tfrecord"
RECODED = "ours: hdf5, short side 256, quality 90"
FFCV_FULL, FFCV_SHORT = "FFCV jpg", "FFCV jpg, short side 256"
ARRAY_RECORD, LITDATA, LANCE = "array_record", "litdata optimize", "LanceDB"
SHORT_SIDE, QUALITY = 256, 90
_SAMPLES_PER_SHARD = 1000
_TIMEOUT_SECONDS = 3600


def make(name: str, tree: Path, work: Path, interpreters: Mapping[str, str]) -> Path:
    """The folder of a set, which is made if it does not exist. Raises CalledProcessError; KeyError (no interpreter)."""
    folder = work / slug(name)
    if not folder.is_dir():
        unfinished = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        interpreter = interpreters["ffcv" if name.startswith("FFCV") else "main"]
        command = [interpreter, os.path.abspath(__file__), name, str(tree), str(unfinished)]
        # Some writers delete folders in the temporary directory.
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            environment = {**os.environ, "TMPDIR": temporary}
            subprocess.run(command, check=True, env=environment, timeout=_TIMEOUT_SECONDS, stdout=sys.stderr)
        unfinished.rename(folder)
    if name == TFRECORD:
        for shard in folder.glob("*.tfrecord"):
            _write_record_index(shard)
    return folder


def _ours(name: str, tree: str, output: str) -> None:
    import packer

    # Enough shards for libraries that assign whole shards to workers.
    options: dict[str, Any] = {"shards": packer.Shards(samples=_SAMPLES_PER_SHARD)}
    if name == RECODED:
        options["images"] = packer.Images(reencode=packer.Reencode(resize_short=SHORT_SIDE, quality=QUALITY))
    packer.convert(tree, name.split()[1].strip(","), output, **options)


def _write_record_index(shard: Path) -> None:
    """Write `<shard>.idx` for DALI: a line "offset size" for each record."""
    path = shard.with_name(f"{shard.name}.idx")
    if path.exists():
        return
    size = shard.stat().st_size
    with open(shard, "rb") as file, open(path, "w") as index:
        start = 0
        while start < size:
            file.seek(start)
            length = int.from_bytes(file.read(8), "little") + 16
            index.write(f"{start} {length}\n")
            start += length


class IndexedFiles:
    """The input of FFCV's writer: a sequence of (image, label). load: reads the image of a path."""

    def __init__(self, tree: str, load: Callable[[str], Any]) -> None:
        self.items, self.load = list_tree(tree), load

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.items[index]
        return self.load(path), label


def _picture(path: str, short_side: int | None) -> Any:
    """short_side: resize to this short side, as packer does; None: the original size."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    factor = (short_side or min(image.size)) / min(image.size)
    size = round(image.width * factor), round(image.height * factor)
    return image.resize(size, Image.Resampling.LANCZOS) if factor < 1 else image


def _ffcv(name: str, tree: str, output: str) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    load = functools.partial(_picture, short_side=SHORT_SIDE if name == FFCV_SHORT else None)
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=QUALITY), "label": IntField()}
    writer = DatasetWriter(os.path.join(output, "a.beton"), fields, num_workers=2)
    writer.from_indexed_dataset(IndexedFiles(tree, load))


def _lance(name: str, tree: str, output: str) -> None:
    import lancedb
    import pyarrow as pa

    # No dictionary: it would store the copies of an image in the trees of make_data.py only once.
    image = pa.field("image", pa.large_binary(), metadata={"lance-encoding:dict-divisor": str(1 << 30)})
    items, schema = list_tree(tree), pa.schema([image, pa.field("label", pa.int64())])

    def batches() -> Iterator[Any]:
        for start in range(0, len(items), _SAMPLES_PER_SHARD):
            paths, labels = zip(*items[start : start + _SAMPLES_PER_SHARD], strict=True)
            yield pa.record_batch([[Path(path).read_bytes() for path in paths], labels], schema=schema)

    lancedb.connect(output).create_table("images", batches(), schema=schema)


def _packed(name: str, tree: str, output: str) -> None:
    """Write the set with the writer of pack.py."""
    import pack

    pack.CONTENDERS[name].function(tree, output)


if __name__ == "__main__":
    sys.path.append(str(REPOSITORY))
    writers = {"ours": _ours, "FFCV": _ffcv, LANCE: _lance}
    writers.get(re.split("[: ]", sys.argv[1])[0], _packed)(*sys.argv[1:])
