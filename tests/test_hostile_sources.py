"""Damaged and malicious sources: no output escapes, no other file is read, memory is bounded, and each ends in one
error.

Every trial runs in a separate process, with 1 GiB of memory and 60 seconds.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from suites.containers import HDF5_LAYOUTS, hdf5_of, record_head, tar_of, write
from suites.layouts import PICTURES, Layout, refusal
from test_source_contract import LAYOUTS, NAMES, TREE

import packer
from cache.errors import PackerError
from packer.testing.children import end_of
from packer.testing.formats import bounded
from packer.testing.sources import Content

MEMORY_BYTES = 1 << 30
ENDS = ("packed", "refused")
SECRET = b"bytes of another file"
JPEGS = [np.frombuffer(data, np.uint8) for data in PICTURES[:4]]


def ranges(file: Any) -> None:
    HDF5_LAYOUTS["ranges"](file, PICTURES[:4], range(4))
    file["keys"] = [f"{number}.jpg" for number in range(len(JPEGS))]


def ranges_packed(file: Any) -> None:
    HDF5_LAYOUTS["ranges with lengths"](file, PICTURES[:4], range(4), chunks=(512,), compression="gzip")


def pixels(file: Any) -> None:
    file.create_dataset("train/images", data=np.zeros((4, 8, 9, 3), np.uint8), chunks=(1, 8, 9, 3), compression="gzip")
    file["train/labels"] = np.arange(4)


def items(file: Any) -> None:
    HDF5_LAYOUTS["items"](file, PICTURES[:4], range(4))


def hdf5_layout(fill: Callable[[Any], None]) -> Layout:
    """A file in HDF5's newest file format."""

    def write(folder: Path) -> Path:
        with h5py.File(folder / "x.h5", "w", libver="latest") as file:
            fill(file)
        return folder / "x.h5"

    return Layout(write, lambda root: Content({}))


def pax(folder: Path) -> Path:
    """A tar with long names, and a link."""
    link = tarfile.TarInfo("train/dog/link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, f"../../{NAMES[1]}"
    members = [(name.replace("/0.", f"/{'long' * 30}."), TREE[name]) for name in NAMES]
    return write(folder / "x.tar", tar_of(*members, link, format=tarfile.PAX_FORMAT))


FUZZED = LAYOUTS | {fill.__name__: hdf5_layout(fill) for fill in (ranges, ranges_packed, pixels, items)}
FUZZED["pax"] = Layout(pax, lambda root: Content({}))
HUGE = [(1 << 31) - 1, (1 << 32) - 1, (1 << 33) - 1, 1 << 62, (1 << 64) - 1]
NASTY = [b"../../evil", b"/etc/evil", b"\0", b"\xff\xfe", b"\n", b'"', b",", b"NaN", b"1e999", b"[" * 900, b"\x1b[2J"]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage bytes: cut short, changed bytes, huge sizes, names that lead outside, parts repeated or removed."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content) or 1)
        how = rng.randrange(8)
        if how == 0:
            del content[at:]
        elif how in (1, 2):
            content[at : at + 1] = bytes([rng.choice((0, 255, rng.randrange(256)))])
        elif how == 3:
            size = rng.choice(HUGE)
            width = rng.choice((4, 8))
            content[at : at + width] = (size & (1 << 8 * width) - 1).to_bytes(width, "little")
        elif how == 4:
            nasty = rng.choice(NASTY)
            content[at : at + rng.choice((0, len(nasty)))] = nasty
        elif how == 5:
            content[at:at] = content[at : at + rng.randrange(2000)]
        elif how == 6:
            del content[at : at + rng.randrange(600)]
        elif len(content) > 512:  # a whole tar header with a corrected checksum
            start = at // 512 * 512
            header = content[start : start + 512]
            if len(header) == 512:
                header[rng.choice((0, 124, 156, 157))] = rng.choice(b"/.0127xgLKS\x80\xff")
                header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
                content[start : start + 512] = header
    return bytes(content)


def attempt(source: Path, out: Path) -> str:
    """Convert and return the result: "packed" or "refused". Raises any other error."""
    try:
        packer.convert(source, "tar", out, run=packer.Run(workers=1, on_error="skip"))
    except PackerError as error:
        assert source.name in str(error), f"an error that does not name the source: {error}"
        return "refused"
    assert packer.verify(out, workers=1).ok, "the packed set must be intact"
    return "packed"


def everything_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def fuzz(tmp_path: Path, layout: Layout, rounds: int, seed: int) -> Counter[str]:
    """Damage a file of a source repeatedly; returns the outcomes of the conversions."""
    rng, ends = random.Random(seed), Counter[str]()
    inside, out = tmp_path / "inside", tmp_path / "inside/out"
    inside.mkdir()
    source = layout.write(inside)
    assert attempt(source, out) == "packed", "undamaged, it must pack"  # this also loads its imports
    files = {path: path.read_bytes() for path in ([source] if source.is_file() else sorted(source.rglob("*.*")))}
    before = everything_below(tmp_path)
    for trial in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        path = rng.choice(list(files))
        write(path, damaged(files[path], rng))
        end = end_of(lambda: attempt(source, out), ENDS, memory_bytes=MEMORY_BYTES)
        ends[end] += 1
        if end not in ENDS:
            kept = write(tmp_path / f"{trial}-{end}-{path.name}".replace(" ", "-"), path.read_bytes())
            before.add(kept.name)
        write(path, files[path])
        escaped = {name for name in everything_below(tmp_path) if not name.startswith("inside/out")} - before
        assert not escaped, f"trial {trial} wrote outside its output: {escaped}"
    return ends


FEW = ("tar", "pax", "tar.gz", "tar.zst", "zip stored", "csv", "jsonl", "one tfrecord", "one tfrecord.gz",
       "one hdf5 elements", "one recordio", "ranges", "ranges_packed", "pixels", "items")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rounds"),
    [*((name, 8) for name in FEW), *(pytest.param(name, 600, marks=pytest.mark.faults) for name in FUZZED)],
)
def test_damage_ends_in_an_error_that_names_the_source(tmp_path: Path, name: str, rounds: int) -> None:
    ends = fuzz(tmp_path, FUZZED[name], rounds, seed=rounds)
    print(name, dict(ends))
    assert ends["refused"] or FUZZED[name].whole, "no damage was detected, so this test proves nothing"
    assert set(ends) <= set(ENDS), f"{ends}; see {tmp_path}"


def limited(tmp_path: Path, source: Path) -> str:
    """The message of a PackerError, with which a conversion in bounded memory must end."""
    report = tmp_path / "message"

    def work() -> str:
        try:
            packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))
        except PackerError as error:
            report.write_text(str(error))
            return "refused"
        return "packed"

    assert end_of(work, ENDS, memory_bytes=MEMORY_BYTES) == "refused"
    return report.read_text()


def tar_that_claims(size: int) -> bytes:
    header = bytearray(tar_of(("a.jpg", b""))[:512])
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(header)


@pytest.mark.parametrize(
    ("name", "data", "size"),
    [
        ("in.tar", tar_that_claims(1 << 33), (1 << 33) + 2048),  # as large as it claims, and sparse
        ("in.tar.gz", gzip.compress(tar_that_claims(1 << 33)), 0),
        ("in.tfrecord", record_head((1 << 31) - 1), 1 << 33),
        ("in.csv", b"path,label\n", 1 << 33),  # one endless line
        ("in.jsonl", b'{"path": "', 1 << 33),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sources_that_claim_8_gib_are_refused_in_bounded_memory(
    tmp_path: Path, name: str, data: bytes, size: int
) -> None:
    os.truncate(write(tmp_path / name, data), size or len(data))
    assert name in limited(tmp_path, tmp_path / name)


# --- HDF5 ------------------------------------------------------------------------------------------------------------
def claim(name: str, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...], **options: Any) -> Callable[..., Any]:
    """A dataset that claims a huge size and stores nothing, in a file of JPEGs where it is one of their tables."""

    def fill(file: Any) -> None:
        if name in ("offsets", "keys"):
            ranges(file)
            del file[name]
        file.create_dataset(name, shape, dtype, chunks=chunks, **options)

    return fill


@pytest.mark.parametrize(
    "fill",
    [
        claim("images", (1 << 33, 8, 8), np.uint8, (64, 8, 8)),
        claim("images", (1 << 33,), h5py.vlen_dtype(np.uint8), (64,)),
        claim("images", (2, 1 << 20, 1 << 20), np.uint8, (1, 64, 64)),
        claim("large", ((1 << 31) + 10,), np.uint8, (1 << 20,), fillvalue=7),
        claim("offsets", (1 << 33,), np.int64, (64,)),
        claim("keys", (len(JPEGS),), h5py.string_dtype("utf-8", 1 << 30), (1,)),
    ],
    ids=["rows", "elements", "large image", "large item", "offsets", "keys"],
)
def test_a_small_hdf5_file_that_claims_much_is_refused_in_bounded_memory(tmp_path: Path, fill: Any) -> None:
    path = hdf5_of(tmp_path / "claims.h5", fill)
    assert path.stat().st_size < 1 << 20, "the file itself must be small"
    message = limited(tmp_path, path)
    assert str(path) in message and "claims" in message


def external_storage(file: Any, secret: Path) -> None:
    file.create_dataset("images", (len(SECRET),), np.uint8, external=[(str(secret), 0, len(SECRET))])
    file["offsets"] = np.array([0, len(SECRET)])


def external_link(file: Any, secret: Path) -> None:
    file["images"] = h5py.ExternalLink(str(secret), "/images")


def link_in_a_group(file: Any, secret: Path) -> None:
    items(file)
    file["class0/9"] = h5py.ExternalLink(str(secret), "/images")


def virtual(file: Any, secret: Path) -> None:
    layout = h5py.VirtualLayout((4, 8, 9, 3), np.uint8)
    layout[:] = h5py.VirtualSource(str(secret), "images", shape=(4, 8, 9, 3))
    file.create_virtual_dataset("images", layout)


def external_labels(file: Any, secret: Path) -> None:
    ranges(file)
    del file["labels"]
    file.create_dataset("labels", (len(JPEGS),), np.int8, external=[(str(secret), 0, len(JPEGS))])


@pytest.mark.parametrize("make", [external_storage, external_link, link_in_a_group, virtual, external_labels])
def test_no_other_file_is_read(tmp_path: Path, make: Callable[..., None]) -> None:
    """Neither when packing, from a file, nor when indexing, from a pipe."""
    secret, path = tmp_path / "secret", tmp_path / "set.h5"
    secret.write_bytes(SECRET)
    hdf5_of(path, make, secret)
    with bounded(120), pytest.raises(PackerError, match=r"another file|external file|other files"):
        packer.convert(path, "tar", tmp_path / "out", run=packer.Run(workers=1, on_error="quarantine"))
    assert not any(SECRET in file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file())
    secret.unlink()
    os.mkfifo(secret)
    with bounded(120), pytest.raises(PackerError, match=r"another file|external file|other files"):
        packer.index([path], tmp_path / "index", workers=1)


def test_circular_soft_links_are_named_and_dangling_ones_left_out(tmp_path: Path) -> None:
    def loop(file: Any) -> None:
        ranges(file)
        file["one"], file["two"] = h5py.SoftLink("/two"), h5py.SoftLink("/one")

    assert "loop.h5: /one is a soft link that leads back to itself" in refusal(hdf5_of(tmp_path / "loop.h5", loop))

    def broken(file: Any) -> None:
        ranges(file)
        file["image"] = h5py.SoftLink("/gone")

    listing = packer.open_source(hdf5_of(tmp_path / "old.h5", broken)).list(None)
    assert (len(listing.splits["train"]), len(listing.left_out)) == (4, 1)
