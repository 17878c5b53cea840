"""Write the golden files next to this script: sets, resume tokens and orders, as the current packer writes them.

    python tests/golden/make.py

Existing files are left unchanged: files of earlier versions must stay readable, so they are never written again. A new
version of a format adds files under the new number; tests/test_golden.py reads all files.

    source.tar.xz           the source of the sets: images of three kinds, masks, captions, a manifest
    set-<version>-<name>.tar.xz   packed sets; version: that of dataset.json
    resume-<version>.json   tokens of loaders, samplers and orders, each with the samples that come after it
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

import packer
import readers
from readers.layout import DATASET_FILE
from readers.order import (
    BlockShuffled,
    Bucketed,
    ClassBalanced,
    Mixed,
    NodeLocal,
    Order,
    Sequential,
    Shuffled,
    Weighted,
)
from readers.torch import EpochBatchSampler

HERE = Path(__file__).parent
MANY = 1000


def write_source(root: Path) -> None:
    """Eight small images with masks, captions and more columns, in two splits; one image has no label, one no mask."""
    from PIL import Image

    root.mkdir()
    rows = ["path,label,split,mask,caption,weight"]
    for number, (kind, label) in enumerate(
        zip(["jpg", "png", "webp", "jpg", "jpg", "png", "jpg", "jpg"], "aabbaab-", strict=True)
    ):
        draw = np.random.default_rng(number)
        image = Image.fromarray(draw.integers(0, 256, (6, 8, 3), np.uint8).repeat(2, 0).repeat(2, 1))
        name = f"{'é' if number == 2 else 'image'}-{number}.{kind}"
        image.save(root / name, **({"lossless": True} if kind == "webp" else {}))
        if number != 3:
            Image.fromarray(draw.integers(0, 3, (12, 16), np.uint8)).save(root / f"mask-{number}.png")
        mask = "" if number == 3 else f"mask-{number}.png"
        label = {"a": "cat", "b": "dog", "-": ""}[label]
        rows.append(f"{name},{label},{'train' if number < 6 else 'val'},{mask},picture {number},{number / 4}")
    (root / "images.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def convert(to: str) -> Path:
    """Pack a set as one container, from the folder `source` in the current directory."""
    options: dict[str, Any] = {"shards": packer.Shards(samples=4, checksums=True), "run": packer.Run(workers=1)}
    opened = packer.open_source(
        "source/images.csv", split_column="split", fields={"mask:mask": "mask", "caption:text": "caption"}
    )
    return packer.convert(opened, to, f"set-{to}", **options).output


def convert_raw() -> Path:
    """Pack pixels without a codec."""
    opened = packer.open_source("source/images.csv", split_column="split")
    raw = packer.Reencode("raw")
    return packer.convert(
        opened,
        "hdf5",
        "set-raw",
        run=packer.Run(workers=1),
        images=packer.Images(reencode=raw),
        shards=packer.Shards(checksums=True),
    ).output


WRITERS: dict[str, Callable[[], Path]] = {
    "hdf5": lambda: convert("hdf5"),
    "tfrecord": lambda: convert("tfrecord"),
    "tar": lambda: convert("tar"),
    "raw": convert_raw,
}


def edit() -> Path:
    """Edited sets; the shards are copies of the shards of `set-tar`."""
    shutil.copytree("set-tar", "set-edited")
    packer.relabel("set-edited", names={"cat": "felis"})
    packer.drop("set-edited", keys=["image-0"])
    return Path("set-edited")


def separate() -> Path:
    """A set with a field in separate shards."""
    shutil.copytree("set-hdf5", "set-separate")
    Path("more").mkdir()
    Path("more/image-1.txt").write_text("more of it")
    packer.add_field("set-separate", "more", "note", kind="text", run=packer.Run(workers=1))
    packer.prune("set-separate")
    return Path("set-separate")


def adopt() -> Path:
    """Write the index of a tar file from another program."""
    Path("set-adopted").mkdir()
    with tarfile.open("set-adopted/train-000000.tar", "w", format=tarfile.USTAR_FORMAT) as file:
        for number in (0, 4):
            for suffix, data in (("jpg", Path(f"source/image-{number}.jpg").read_bytes()), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return packer.index("set-adopted", workers=1).output


def orders(samples: int) -> dict[str, Order]:
    """An order of each kind, over MANY samples."""
    numbers = np.arange(samples)
    return {
        "sequential": Sequential(samples),
        "shuffled": Shuffled(samples, seed=7),
        "block": BlockShuffled(np.arange(0, samples + 1, 2), window=2, seed=7),
        "node-local": NodeLocal(samples, 2, exchange_every=2, seed=7),
        "weighted": Weighted(1.0 + numbers % 4, seed=7),
        "class-balanced": ClassBalanced(numbers % 3, seed=7),
        "mixed": Mixed([samples // 2, samples - samples // 2], [0.75, 0.25], seed=7),
        "bucketed": Bucketed(numbers % 2, 2, seed=7),
    }


def describe_orders() -> dict[str, Any]:
    """The result of each order for MANY samples: the first entries, and the CRC32C of all entries of three epochs as
    int64."""
    described = {}
    for name, order in orders(MANY).items():
        epochs = [order.indices(epoch, np.arange(len(order))) for epoch in range(3)]
        whole = np.concatenate(epochs).astype("<i8")
        described[name] = {"first": whole[:8].tolist(), "crc32c": f"{crc32c(whole.tobytes()):08x}"}
    return described


def sampler_of(order: Order, reader: readers.Reader) -> EpochBatchSampler:
    """The batches of one rank: of one sample each, or as the order groups them."""
    return EpochBatchSampler(order, reader, None if isinstance(order, Bucketed) else 1, rank=0, world_size=1)


def tokens(reader: readers.Reader) -> dict[str, Any]:
    """The token after two batches of epoch 1 of each order, and the following batches of two epochs."""
    recorded = {}
    for name, order in orders(len(reader)).items():
        sampler = sampler_of(order, reader)
        sampler.set_epoch(1)
        coming = iter(sampler)
        done = [next(coming), next(coming)]
        token = coming.state_dict()
        recorded[name] = {"token": token, "done": done, "rest": rest_of(order, reader, token)}
    return recorded


def rest_of(order: Order, reader: readers.Reader, token: Any) -> list[list[list[int]]]:
    """The batches after a token: those of its epoch, and those of the next one."""
    sampler = sampler_of(order, reader)
    sampler.load_state_dict(token)
    return [list(sampler) for _ in range(2)]


CHANGES: dict[str, Callable[[], Path]] = {"edited": edit, "separate": separate, "adopted": adopt}


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def pack_up(folder: Path, archive: Path) -> None:
    """Pack a folder into an archive whose bytes depend on its content alone."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as file:
        for path in sorted(folder.rglob("*")):
            file.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)


def unpack(archive: Path, folder: Path) -> Path:
    """Extract an archive; returns the folder."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder


def main() -> None:
    """Write the missing files."""
    with tempfile.TemporaryDirectory() as scratch, inside(Path(scratch)):
        if not (HERE / "source.tar.xz").exists():
            write_source(Path("made"))
            pack_up(Path("made"), HERE / "source.tar.xz")
        unpack(HERE / "source.tar.xz", Path("source"))
        for name, write in (WRITERS | CHANGES).items():
            made = write()
            archive = HERE / f"set-{json.loads((made / DATASET_FILE).read_text())['version']}-{name}.tar.xz"
            if not archive.exists():
                pack_up(made, archive)
                print(f"{archive}: {archive.stat().st_size:,} bytes")
        with readers.open("set-tar", "train") as reader:
            recorded = tokens(reader)
        archive = HERE / f"resume-{recorded['shuffled']['token']['version']}.json"
        if not archive.exists():
            archive.write_text(json.dumps({"orders": describe_orders(), "tokens": recorded}, indent=1) + "\n")
            print(f"{archive}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
