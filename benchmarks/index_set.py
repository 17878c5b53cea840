"""Packed sets of any number of samples, made in seconds: an index over shards that are holes, one image or links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["CLASSES", "KEY_DIGITS", "MEAN_BYTES", "build_index", "join_parts", "synthetic_columns"]

SHARDS = 100
CLASSES = 1000
MEAN_BYTES = 110_000
KEY_DIGITS = 12


def synthetic_columns(samples: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(offset, length, label) of consecutive samples."""
    import numpy as np

    lengths = np.random.default_rng(seed).integers(MEAN_BYTES // 2, MEAN_BYTES * 3 // 2, samples)
    return np.cumsum(lengths) - lengths, lengths, np.arange(samples) % CLASSES


def build_index(folder: Path, samples: int, image: bytes | None = None) -> None:
    """Make a set in an empty folder. image: the JPEG of every sample; without it, shards are holes."""
    from packer.columns import PartMeta, save_part
    from readers.layout import ShardInfo

    counts = [samples * (k + 1) // SHARDS - samples * k // SHARDS for k in range(SHARDS)]
    parts, shards = [], []
    for number, count in enumerate(counts):
        columns = _part(sum(counts[:number]), count)
        size = int(columns["image.length"].sum()) if image is None else len(image)
        if image is not None:
            _same_image(columns, image)
        shards.append(ShardInfo(f"train-{number:05d}.bin", size, count, 0))
        parts.append(folder / f"{number}.part")
        save_part(parts[-1], columns, PartMeta(shards[-1], size))
        with open(folder / shards[-1].path, "wb") as file:
            file.write(image or b"")
            file.truncate(size)
    classes = [f"class {number}" for number in range(CLASSES)]
    join_parts(folder, "hdf5", parts, shards, classes, has_checksums=False)
    for part in parts:
        part.unlink()


def join_parts(
    folder: Path, container: str, parts: list[Path], shards: list[Any], classes: list[str], has_checksums: bool = True
) -> None:
    """Write the index of a split "train" from the parts of its shards, and dataset.json, as a commit does.
    has_checksums: write the checksums of the index files."""
    from cache.files import Folder
    from packer.columns import write_index
    from packer.documents import write_dataset_info
    from readers.layout import DatasetInfo, SplitInfo

    counts = [shard.samples for shard in shards]
    with Folder(folder, create=True) as place:
        files = write_index(place, "train.index", parts, counts, ["image"], scratch=place)
        split = SplitInfo(sum(counts), tuple(shards), "train.index", "", files if has_checksums else {})
        info = DatasetInfo(container, {"image": "image"}, tuple(classes), {"train": split})
        write_dataset_info(place, info, scratch=place)


def _part(first: int, samples: int) -> dict[str, Any]:
    """The index columns of one shard, with the keys "000000000000", "000000000001", …"""
    import numpy as np

    offset, length, label = synthetic_columns(samples, first)
    digits = (np.arange(first, first + samples)[:, None] // 10 ** np.arange(KEY_DIGITS - 1, -1, -1)) % 10 + ord("0")
    suffix = b"+.jpg"
    return {
        "label": label.astype("<i8"),
        "height": np.full(samples, 375, "<u4"),
        "width": np.full(samples, 500, "<u4"),
        "components": np.full(samples, 3, "u1"),
        "process": np.full(samples, 0xC0, "u1"),
        "orientation": np.full(samples, 1, "u1"),
        "media": np.full(samples, 1, "u1"),
        "key": digits.astype("u1").ravel(),
        "key.offset": np.arange(samples + 1, dtype="<u8") * KEY_DIGITS,
        "image.offset": offset.astype("<u8"),
        "image.length": length.astype("<u8"),
        "image.crc32c": np.arange(samples, dtype="<u4"),
        "image.name": np.tile(np.frombuffer(suffix, "u1"), samples),
        "image.name.offset": np.arange(samples + 1, dtype="<u8") * len(suffix),
    }


def _same_image(columns: dict[str, Any], image: bytes) -> None:
    """Point all samples of a part to the image at the start of the shard."""
    from crc32c import crc32c

    from readers.headers import MEDIA, parse_header

    header = parse_header(image)
    values = {
        "height": header.height,
        "width": header.width,
        "components": header.components,
        "process": header.process,
        "orientation": header.orientation,
        "media": MEDIA.index(header.media),
        "image.offset": 0,
        "image.length": len(image),
        "image.crc32c": crc32c(image),
    }
    for name, value in values.items():
        columns[name][:] = value
