"""Sets of MosaicML's streaming package: by the public layout, and as the package itself writes and reads them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from conftest import make_jpeg
from PIL import Image

import packer
from cache.errors import BadSampleError, SourceError
from packer.testing.sources import Found, SourceSuite, found
from readers.fields import decode_field

PICTURES = [make_jpeg(number, (16 + 4 * number, 24)) for number in range(9)]
COLUMNS = {"class": "int", "image": "jpeg", "note": "str", "vector": "ndarray:float32:3", "weight": "float32"}
SIZES = {"int": 8, "float32": 4, "ndarray:float32:3": 12, "uint8": 1, "int16": 2}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "zstd:7": zstandard.ZstdCompressor(level=7).compress,
    "gz": gzip.compress,
    "bz2:9": bz2.compress,
}


def sample_of(values: Sequence[bytes], columns: dict[str, str] = COLUMNS) -> bytes:
    sizes = [
        struct.pack("<I", len(value)) for value, how in zip(values, columns.values(), strict=True) if how not in SIZES
    ]
    return b"".join([*sizes, *values])


def shard_of(samples: Sequence[bytes], info: bytes = b"{}") -> bytes:
    starts = 4 * (len(samples) + 2) + len(info)
    offsets = np.cumsum([starts, *map(len, samples)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + info + b"".join(samples)


def write_mds(
    root: Path, shards: Sequence[Sequence[bytes]], columns: dict[str, str] = COLUMNS, compression: str | None = None
) -> Path:
    """A set of these samples."""
    root.mkdir(parents=True)
    infos = []
    for number, samples in enumerate(shards):
        name, data = f"shard.{number:05d}.mds", shard_of(samples)
        files = [(name, data)]
        if compression:
            files.append((f"{name}.{compression.partition(':')[0]}", PACK[compression](data)))
        (root / files[-1][0]).write_bytes(files[-1][1])
        described = [
            {"basename": name, "bytes": len(its), "hashes": {"sha1": hashlib.sha1(its).hexdigest()}}
            for name, its in files
        ]
        infos.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": [SIZES.get(how) for how in columns.values()],
                "compression": compression,
                "format": "mds",
                "hashes": ["sha1"],
                "raw_data": described[0],
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": described[1] if compression else None,
            }
        )
    (root / "index.json").write_text(json.dumps({"shards": infos, "version": 2}, sort_keys=True))
    return root


def sample(number: int) -> bytes:
    vector = np.arange(3, dtype="<f4") + number
    values = [struct.pack("<q", number % 3), PICTURES[number], f"n° {number}".encode(), vector.tobytes()]
    return sample_of([*values, struct.pack("<f", number / 4)])


@pytest.mark.parametrize("compression", [None, *PACK], ids=lambda how: str(how).partition(":")[0])
class TestMds(SourceSuite):
    """Two splits, of two shards and one."""

    damages = 300

    @pytest.fixture
    def root(self, tmp_path: Path, compression: str | None) -> Path:
        numbers = [[0, 1, 2, 3], [4, 5, 6]]
        write_mds(tmp_path / "set" / "train", [[sample(i) for i in its] for its in numbers], compression=compression)
        write_mds(tmp_path / "set" / "val", [[sample(7), sample(8)]], compression=compression)
        return tmp_path / "set"

    @pytest.fixture
    def truth(self) -> Found:
        def one(number: int) -> tuple[Any, ...]:
            memory = io.BytesIO()
            np.save(memory, np.arange(3, dtype="<f4") + number)
            record = json.dumps(
                {"note": f"n° {number}", "weight": number / 4}, ensure_ascii=False, separators=(",", ":")
            )
            return PICTURES[number], memory.getvalue(), record.encode()

        splits = {"train": range(7), "val": range(7, 9)}
        return Found(
            {
                name: [(f"{name}/{i:08d}", number % 3, one(number)) for i, number in enumerate(numbers)]
                for name, numbers in splits.items()
            },
            fields=("image", "vector", "json"),
        )

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in self.files(root) if path.name != "index.json"}


def test_encodings(tmp_path: Path) -> None:
    """Raw pixels of Pillow and NumPy become PNG; labels that are names; a mask; JSON."""
    pixels = np.random.default_rng(1).integers(0, 256, (5, 4, 3), np.uint8)
    mask = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(mask, "PNG")
    columns = {
        "box": "ndarray",
        "cls": "str",
        "extra": "json",
        "id": "str_int",
        "mask": "png",
        "raw": "bytes",
        "x": "pil",
    }
    box = bytes((66, 2 << 2, 1, 4)) + np.arange(4, dtype="<f8").tobytes()
    pil = struct.pack("<III", 4, 5, 3) + b"RGB" + pixels.tobytes()
    rows = [
        sample_of([box, name, b'{"a": [1, null]}', b"12345678901234567890", mask.getvalue(), b"any", pil], columns)
        for name in (b"dog", b"cat")
    ]
    root = write_mds(tmp_path / "set", [rows], columns)
    read = found(packer.open_source(root), "test")
    assert read.classes == ("cat", "dog") and read.fields == ("image", "box", "mask", "raw", "json")
    listing = packer.open_source(root).list(None)
    assert dict(listing.fields) == {"image": "image", "box": "array", "mask": "mask", "raw": "file", "json": "json"}
    (_, label, (image, array, of_mask, raw, record)), _ = read.splits["test"]
    assert label == 1 and np.array_equal(np.asarray(Image.open(io.BytesIO(image or b""))), pixels)
    assert np.array_equal(decode_field("array", array or b""), np.arange(4.0)[None])
    assert (of_mask, raw) == (mask.getvalue(), b"any")
    assert json.loads(record or b"") == {"extra": {"a": [1, None]}, "id": 12345678901234567890}


def damage(root: Path, **changes: Any) -> None:
    index = json.loads((root / "index.json").read_text())
    for name, value in changes.items():
        where, _, last = name.rpartition("__")
        target = index["shards"][0]
        for part in filter(None, where.split("__")):
            target = target[part]
        target[last] = value
    (root / "index.json").write_text(json.dumps(index))


def replace(root: Path, offset: int, data: bytes) -> None:
    path = next(root.glob("shard.*"))
    old = path.read_bytes()
    path.write_bytes(old[:offset] + data + old[offset + len(data) :])


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda root: damage(root, raw_data__basename="../shard.00000.mds"), "leads outside"),
        (lambda root: damage(root, raw_data__basename="/etc/passwd"), "leads outside"),
        (lambda root: damage(root, samples=5), "has 2 samples, but index.json says 5|claims"),
        (lambda root: damage(root, samples=1 << 29), "but claims 536,870,912 samples"),
        (lambda root: damage(root, raw_data__bytes=7), "has 7 bytes, but claims 2 samples"),
        (
            lambda root: damage(root, column_encodings=["pkl", *list(COLUMNS.values())[1:]]),
            "'pkl', which is pickled",
        ),
        (lambda root: damage(root, column_encodings=["int", "wav", "str", "bytes", "float32"]), "the encoding 'wav'"),
        (lambda root: damage(root, format="json"), "shards of the format 'json'"),
        (lambda root: damage(root, column_names="x"), "not an index of MDS shards"),
        (lambda root: damage(root, column_sizes=[-8, None, None, 12, 4]), "claims 2 samples"),
        (lambda root: (root / "index.json").write_text('{"shards": [{"column_' + "[" * 9999), "not an index"),
        (lambda root: replace(root, 4, struct.pack("<I", 1)), "its offsets lead outside"),
        (lambda root: replace(root, 12, struct.pack("<I", 1 << 31)), "its offsets lead outside"),
        (lambda root: replace(root, 18, struct.pack("<I", 1 << 30)), "sample 0: has .* damaged"),
    ],
)
def test_a_set_that_lies(tmp_path: Path, work: Callable[[Path], object], message: str) -> None:
    root = write_mds(tmp_path / "set", [[sample(0), sample(1)]])
    work(root)
    with pytest.raises(SourceError, match=message):
        packer.open_source(root).list(None)


def test_bytes_that_are_not_those_of_the_hash(tmp_path: Path) -> None:
    root = write_mds(tmp_path / "set", [[sample(0), sample(1)]])
    replace(root, (root / "shard.00000.mds").stat().st_size - 20, b"!")
    source: Any = packer.open_source(root)
    source.list(None)
    with source.open() as reader, pytest.raises(SourceError, match="its sha1 is not that in index"):
        reader.read((0, 14, 20), None)


def test_a_compressed_shard_that_is_a_bomb(tmp_path: Path) -> None:
    """It unpacks to more than its index says, or to less, or is compressed in a way that is not read."""
    root = write_mds(tmp_path / "set", [[sample(0)]], compression="zstd:7")
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    (root / "shard.00000.mds.zstd").write_bytes(packed)
    damage(root, zip_data__bytes=len(packed))
    with pytest.raises(SourceError, match="unpacks to more than"):
        packer.open_source(root).list(None)
    damage(root, raw_data__bytes=1 << 31)
    with pytest.raises(SourceError, match="truncated"):
        packer.open_source(root).list(None)
    damage(root, compression="snappy")
    with pytest.raises(SourceError, match="compressed with 'snappy', which is not read; unpack them"):
        packer.open_source(root).list(None)


def test_one_sample_that_is_damaged(tmp_path: Path) -> None:
    columns = {"image": "pil", "y": "int"}
    pil = struct.pack("<III", 4, 5, 3) + b"RGB" + bytes(59)
    root = write_mds(tmp_path / "set", [[sample_of([pil, struct.pack("<q", 1)], columns)]], columns)
    with pytest.raises(BadSampleError, match="59 bytes of pixels, expected 4 x 5 of RGB"):
        found(packer.open_source(root))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compression", [None, "zstd:3", "gz"])
def test_a_set_of_the_package_itself(tmp_path: Path, compression: str | None) -> None:
    """The same samples as its own reader gives."""
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming, which writes such sets, is not installed")
    columns = {"image": "jpeg", "label": "int", "caption": "str", "vector": "ndarray", "pixels": "pil"}
    out = tmp_path / "set"
    pixels = Image.fromarray(np.random.default_rng(2).integers(0, 256, (6, 5, 3), np.uint8))
    with streaming.MDSWriter(
        out=str(out), columns=columns, compression=compression, hashes=["sha1", "xxh64"], size_limit=1 << 11
    ) as writer:
        for number, picture in enumerate(PICTURES):
            writer.write(
                {
                    "image": picture,
                    "label": number % 4,
                    "caption": f"picture {number}",
                    "vector": np.arange(number + 1, dtype=np.int16),
                    "pixels": pixels,
                }
            )
    (samples,) = found(packer.open_source(out)).splits.values()
    theirs = streaming.StreamingDataset(local=str(out), shuffle=False, batch_size=1)
    assert len(samples) == len(theirs) == len(PICTURES)
    for number, (_, label, (image, caption, more, vector)) in enumerate(samples):
        its = theirs[number]
        assert (label, (caption or b"").decode()) == (its["label"], its["caption"])
        assert image == PICTURES[number] and np.array_equal(decode_field("array", vector or b""), its["vector"])
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(more or b""))), np.asarray(its["pixels"]))
