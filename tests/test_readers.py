"""The reader core: packed sets, folders, string columns, read plans, and what a node has.

Nothing here trusts what lies on the disk: a shard, an index or dataset.json that was damaged, or made to deceive,
ends in one of our errors, never in other bytes, a hang or code that runs.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suites.formats import bounded
from suites.programs import run_python

import packer
import readers
from cache.errors import (
    DamagedSampleError,
    DatasetError,
    PackerError,
    SourceError,
    StaleIndexError,
    UnknownNameError,
)
from cache.stores.ranges import plan_reads
from packer.formats import format_named
from packer.formats.base import PackedSample, ShardSpec
from readers.headers import parse_header
from readers.packed import open_packed
from readers.strings import Strings

Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    """train: 36 samples in 6 shards, val: 9 in 2; nobody may write to it."""
    return pack(tree, samples_per_shard=6)


@pytest.fixture
def mine(packed: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "set"))


@pytest.fixture(scope="module")
def images(tree: Path) -> list[bytes]:
    """The images of the split train, in order."""
    return [path.read_bytes() for path in sorted((tree / "train").rglob("*.JPEG"))]


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten samples with a mask in every second one, and no labels."""
    root = tmp_path_factory.mktemp("partial")
    writer = format_named("tar").open_writer(
        root / "train-0.tar", ShardSpec("train", {"image": "image", "mask": "file"})
    )
    for i in range(10):
        image = make_jpeg(i)
        mask = None if i % 2 else b"mask%d" % i
        writer.add(PackedSample(f"k{i}", -1, (image, mask), (f"k{i}.jpg", ""), parse_header(image)))
    writer.finish()
    packer.index([root / "train-0.tar"], workers=1)
    return root


def shard_paths(root: Path, split: str = "train") -> list[Path]:
    return [
        root / shard["path"] for shard in json.loads((root / "dataset.json").read_text())["splits"][split]["shards"]
    ]


def open_descriptors(folder: Path) -> list[str]:
    """Shards below a folder that this process has open (index columns are mapped, and close with the reader)."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    return [path for path in found if path.startswith(f"{folder}/") and path.endswith(".tar")]


# --- reading ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_where_samples_are_and_reading_them_into_memory(packed: Path, images: list[bytes], backend: Any) -> None:
    with readers.open(packed, backend=backend, verify=True) as reader:
        for i, image in enumerate(images):
            place = reader.byte_range(i)
            assert place is not None
            assert place[0].read_bytes()[place[1] : place[1] + place[2]] == image, f"byte_range({i}) lies elsewhere"
        for index in (36, -37, 10**9):
            calls: list[Callable[[], object]] = [
                lambda i=index: reader.has(i, "image"),  # type: ignore[misc]
                lambda i=index: reader.byte_range(i),  # type: ignore[misc]
            ]
            for call in calls:
                with pytest.raises(IndexError, match=rf"sample {index} is outside the 36 of .*train"):
                    call()


def test_what_a_sample_says(packed: Path) -> None:
    with readers.open(packed, "val") as reader:
        sample = reader[4]
        assert (sample.key, sample.label, list(sample.fields)) == ("dog/dog_001", 1, ["image"])
        assert (reader.name(4), reader.classes[1], reader.fields) == ("dog/dog_001.JPEG", "dog", ("image",))
        assert reader.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
        assert set(zip(reader.info.height.tolist(), reader.info.width.tolist(), strict=True)) == {(24, 32)}
        assert repr(reader) == f"Reader({packed} (val), 9 samples)"


def test_neighbours_are_fetched_together(packed: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call per shard for a whole shard, though headers lie between; one for a repeated sample."""
    calls: list[int] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with readers.open(packed) as reader:
        order = list(range(36))
        random.Random(0).shuffle(order)
        assert [bytes(view) for view in reader.read_many(order)] == [images[i] for i in order]
        assert len(calls) == 6, f"36 samples of 6 shards took {len(calls)} reads"
        calls.clear()
        reader.read_many([4] * 20)
        assert calls == [len(images[4])], "a repeated sample was read more than once"
        calls.clear()
        assert list(reader.read_many([])) == [] and calls == []


def test_distant_neighbours_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = format_named("tar").open_writer(tmp_path / "train-0.tar", ShardSpec("train", {"image": "image"}))
    payloads = [b"first", bytes(3 << 20), b"last"]
    for i, payload in enumerate(payloads):
        writer.add(PackedSample(f"k{i}", 0, (payload,), ("",), None))
    writer.finish()
    packer.index([tmp_path / "train-0.tar"], workers=1)
    calls: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(len(buffers[0])) or real(fd, buffers, at))
    with readers.open(tmp_path) as reader:
        assert [bytes(view) for view in reader.read_many([2, 0])] == [b"last", b"first"]
        assert sorted(calls) == [4, 5], "the large sample between was read too"
        assert [bytes(view) for view in reader.read_many([0, 1, 2])] == payloads


def test_few_shards_open_at_a_time(packed: Path, images: list[bytes]) -> None:
    reader = open_packed(packed, open_shards=1)
    order = [i % 36 for i in range(0, 36 * 7, 7)]
    assert [reader.read(i) for i in order] == [images[i] for i in order]
    assert len(open_descriptors(packed)) == 1, "more shards are open than asked for"
    assert [bytes(view) for view in reader.read_many(order)] == [images[i] for i in order]
    assert len(open_descriptors(packed)) == 1
    reader.close()
    assert open_descriptors(packed) == [], "close() left descriptors open"
    assert reader.read(0) == images[0]
    del reader
    gc.collect()
    assert open_descriptors(packed) == [], "a dropped reader left descriptors open"


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_more_shards_than_files_may_be_open(packed: Path, images: list[bytes], backend: str) -> None:
    """In a process that may hardly open any: shards opened first make room, and the bytes are the same."""
    script = (
        "import resource, sys, readers, crc32c, os\n"
        f"reader = readers.open({str(packed)!r}, backend={backend!r}, verify=True)\n"
        "reader.table.columns.index.check(reader.fields); reader.keys\n"
        "used = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))\n"
        "print([crc32c.crc32c(reader.read(i * 7 % 36)) for i in range(36)])\n"
        "print([crc32c.crc32c(view) for i in range(36) for view in reader.read_many([i, i])])\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    singly, together = map(json.loads, done.stdout.splitlines())
    assert singly == [crc32c(images[i * 7 % 36]) for i in range(36)]
    assert together == [crc32c(image) for image in images for _ in range(2)]


def test_where_absent_fields_are(partial: Path) -> None:
    with readers.open(partial) as reader:
        assert reader.has(4, "mask") and not reader.has(5, "mask") and reader.byte_range(5, "mask") is None
        with pytest.raises(UnknownNameError, match=r"sample 5 of .* has no field 'mask'"):
            reader.read(5, "mask")
        with pytest.raises(UnknownNameError, match="no field 'depth'; it has image, mask"):
            reader.read(0, "depth")


def test_an_unknown_backend(packed: Path) -> None:
    with pytest.raises(ValueError, match="backend must be 'pread' or 'mmap', not 'magic'"):
        readers.open(packed, backend="magic")  # type: ignore[arg-type]


def test_an_empty_split(tmp_path: Path) -> None:
    format_named("tfrecord").open_writer(tmp_path / "train.tfrecord", ShardSpec("train", {"image": "image"})).finish()
    content = {
        "kind": "packer-dataset",
        "version": 1,
        "format": "tfrecord",
        "fields": {"image": "image"},
        "classes": [],
        "label_offset": 0,
        "splits": {"train": {"samples": 0, "root": "", "index": "train.index", "shards": []}},
    }
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    (tmp_path / "train.index").mkdir()
    for name, kind in (
        ("shard", "<u4"),
        ("label", "<i8"),
        ("image.offset", "<u8"),
        ("image.length", "<u8"),
        ("key", "u1"),
    ):
        np.save(tmp_path / "train.index" / f"{name}.npy", np.zeros(0, kind))
    np.save(tmp_path / "train.index" / "key.offset.npy", np.zeros(1, "<u8"))
    with readers.open(tmp_path) as reader:
        assert (len(reader), list(reader), list(reader.keys), list(reader.stream())) == (0, [], [], [])
        assert reader.read_many([]) == []
        with pytest.raises(IndexError, match="sample 0 is outside the 0 of"):
            reader.read(0)


# --- splits -------------------------------------------------------------------------------------------------------
def renamed_split(root: Path, old: str, new: str) -> None:
    content = json.loads((root / "dataset.json").read_text())
    content["splits"] = {new if name == old else name: split for name, split in content["splits"].items()}
    (root / "dataset.json").write_text(json.dumps(content))


def test_split_names(mine: Path) -> None:
    assert (len(readers.open(mine)), len(readers.open(mine, "train"))) == (36, 36)
    for stored in ("val", "valid", "validation"):
        for asked in ("val", "valid", "validation"):
            reader = readers.open(mine, asked)
            assert (reader.split, len(reader)) == (stored, 9), f"{asked} asked for, {stored} stored"
        renamed_split(mine, stored, {"val": "valid", "valid": "validation"}.get(stored, "test"))
    with pytest.raises(UnknownNameError, match="no split 'val'; it has train, test"):
        readers.open(mine, "val")
    renamed_split(mine, "train", "first")
    with pytest.raises(UnknownNameError, match="say which split you want: first, test") as caught:
        readers.open(mine)
    assert isinstance(caught.value, LookupError) and isinstance(caught.value, DatasetError)


def test_the_only_split_needs_no_name(mine: Path) -> None:
    content = json.loads((mine / "dataset.json").read_text())
    del content["splits"]["train"]
    (mine / "dataset.json").write_text(json.dumps(content))
    assert readers.open(mine).split == "val"


# --- damage: shards -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_verify_names_the_damaged_sample(mine: Path, images: list[bytes], backend: Any) -> None:
    place = readers.open(mine).byte_range(7)
    assert place is not None
    with open(place[0], "r+b") as file:
        file.seek(place[1] + place[2] // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with readers.open(mine, backend=backend) as careless:
        assert bytes(careless.read(7)) != images[7], "the test damaged nothing"
    with readers.open(mine, backend=backend, verify=True) as reader:
        calls: list[Callable[[], object]] = [
            lambda: reader.read(7),
            lambda: reader[7],
            lambda: reader.read_many([6, 7, 8]),
            lambda: list(reader.stream()),
        ]
        for call in calls:
            with pytest.raises(DamagedSampleError, match=r"sample 7 \(key 'cat/cat_007'.* run  packer verify"):
                call()
        assert bytes(reader.read(6)) == images[6], "a neighbour of the damaged sample cannot be read"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(512))


def remove(path: Path) -> None:
    path.unlink()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("backend", ["pread", "mmap"])
@pytest.mark.parametrize("damage", [truncate, empty, grow, remove, replace_by_pipe, replace_by_folder, replace_by_loop])
def test_a_shard_that_is_not_the_one_indexed(mine: Path, images: list[bytes], backend: Any, damage: Edit) -> None:
    path = shard_paths(mine)[2]  # samples 12 to 17
    before = path.stat().st_size
    damage(path)
    reader = readers.open(mine, backend=backend)
    calls: list[Callable[[], object]] = [
        lambda: reader.read(12),
        lambda: reader[-20],
        lambda: reader.read_many([0, 17]),
        lambda: reader.prefetch([12]),
        lambda: list(reader.stream()),
        lambda: reader.store.check(2),
    ]
    for call in calls:
        with bounded(), pytest.raises(StaleIndexError, match=str(path)) as caught:
            call()
        assert isinstance(caught.value, OSError)
        if path.is_file():
            assert str(before) in str(caught.value) and str(path.stat().st_size) in str(caught.value), (
                f"both sizes must be named: {caught.value}"
            )
    assert bytes(reader.read(11)) == images[11] and bytes(reader.read(18)) == images[18], "other shards are affected"


def test_a_shard_truncated_while_it_is_open(mine: Path, images: list[bytes]) -> None:
    reader = readers.open(mine)
    assert reader.read(0) == images[0]
    place = reader.byte_range(3)
    assert place is not None
    before = place[0].stat().st_size
    os.truncate(place[0], place[1] + place[2] - 1)  # sample 3 loses its last byte
    assert [bytes(view) for view in reader.read_many([0, 1, 2])] == images[:3], "samples before the cut are still whole"
    calls: list[Callable[[], object]] = [
        lambda: reader.read(3),
        lambda: reader.read(5),
        lambda: reader.read_many([2, 3]),
        lambda: reader.read_many(range(6)),
        lambda: list(reader.stream()),
    ]
    for call in calls:
        with pytest.raises(StaleIndexError, match=f"shrank from {before} to {place[1] + place[2] - 1} bytes"):
            call()


# --- damage: dataset.json -----------------------------------------------------------------------------------------
def at(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set a member, by a path such as "splits.train.samples"; Ellipsis removes it."""

    def edit(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = content
        for name in parents:
            place = place[int(name) if name.isdigit() else name]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return edit


def called(name: str) -> Callable[[dict[str, Any]], None]:
    """Another split, good but for its name."""

    def edit(content: dict[str, Any]) -> None:
        content["splits"][name] = content["splits"]["val"]

    return edit


SHARD = "splits.train.shards.0"
WRONG = [
    *(at(name, ...) for name in ("kind", "version", "format", "fields", "classes", "label_offset", "splits")),
    *(at(f"splits.train.{name}", ...) for name in ("samples", "root", "index", "shards")),
    *(at(f"{SHARD}.{name}", ...) for name in ("path", "bytes", "samples", "crc32c")),
    *(at("kind", value) for value in ("other", None, 5, ["packer-dataset"])),
    *(at("version", value) for value in (0, 2, -1, "1", 1.0, True, None, 10**30)),
    *(at("format", value) for value in ("", None, 5, ["tar"], "../tar")),
    *(
        at("fields", value)
        for value in ({}, [], "image", {"image": "movie"}, {"image": 5}, {"image": {}}, {"": "image"})
    ),
    *(at("fields", {name: "image"}) for name in ("../image", "a/b", ".image", "a b", "a\0b", "a\nb", "\u202e")),
    *(at("classes", value) for value in ({}, "cat", [5], [None], ["cat", ["dog"]])),
    *(at("label_offset", value) for value in ("0", 0.5, None, True, 10**30, -(10**30))),
    *(at("splits", value) for value in ([], "train", {"train": []}, {"train": None}, {"train": "x"})),
    *(called(name) for name in ("../up", "a/b", "", ".hidden", "a b", "a\0", "\ud800")),
    *(at("splits.train.samples", value) for value in (-1, 35, 37, "36", 36.0, None, True, 10**30, 1 << 63)),
    *(
        at("splits.train.index", value)
        for value in ("", "/etc", "..", "../x", "a/../../x", "a\0b", 5, None, ".", "\ud800")
    ),
    *(at("splits.train.root", value) for value in (5, None, [])),
    *(at("splits.train.shards", value) for value in ({}, "x", [5], [[]], [None], [{}], [])),
    *(
        at(f"{SHARD}.path", value)
        for value in ("", "/etc/passwd", "..", "../x", "a/../../x", "a\0", 5, None, ".", "\udc80")
    ),
    *(at(f"{SHARD}.bytes", value) for value in (-1, "1", 1.5, None, True, 1 << 63, 10**30)),
    *(at(f"{SHARD}.samples", value) for value in (-1, 7, "6", 6.0, None, True, 1 << 63)),
    *(
        at(f"{SHARD}.crc32c", value)
        for value in (5, None, "", "xyz", "123", "123456789", "-1234567", "0x123456", "1_234567")
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_dataset_json_with_a_wrong_member(mine: Path, number: int) -> None:
    content = json.loads((mine / "dataset.json").read_text())
    WRONG[number](content)
    (mine / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"dataset.json"):
        readers.open(mine, "train")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"5",
        b'"packer-dataset"',
        b"{}",
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b"\x80",
        b"{} {}",
        b"{'kind': 1}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"version": ' + b"9" * 10_000 + b"}",
        b'{"kind": "packer-dataset", "version": NaN}',
        b'{"kind": "packer-dataset", "version": 1e999}',
        b"\0" * 100,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_dataset_json_that_is_none(mine: Path, text: bytes) -> None:
    (mine / "dataset.json").write_bytes(text)
    with pytest.raises(DatasetError, match=r"dataset.json"):
        readers.open(mine)


def test_dataset_json_may_hold_more_than_we_know(mine: Path) -> None:
    """Later versions may add members; "made" is never interpreted."""
    content = json.loads((mine / "dataset.json").read_text())
    content |= {"made": "by hand", "licence": {"name": "CC0"}}
    content["splits"]["train"]["colour"] = "red"
    (mine / "dataset.json").write_text(json.dumps(content))
    reader = readers.open(mine)
    assert len(reader) == 36 and reader.dataset.made == {}


def test_what_is_no_set(tmp_path: Path, packed: Path) -> None:
    with pytest.raises(DatasetError, match="no such directory"):
        readers.open(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"not a packed set .*packer convert  or  packer index"):
        readers.open(tmp_path)
    with pytest.raises(DatasetError, match=r"is a file, not a packed set.*packer index"):
        readers.open(shard_paths(packed)[0])
    (tmp_path / ".packing").mkdir()
    with pytest.raises(DatasetError, match=r"unfinished conversion .*run the\s+same  packer convert  again"):
        readers.open(tmp_path)
    (tmp_path / "dataset.json").mkdir()
    with pytest.raises(DatasetError, match=r"dataset.json"):
        readers.open(tmp_path)


@pytest.mark.parametrize("name", ["to_json", "fingerprint"])
def test_dataset_info_is_reproducible(packed: Path, name: str) -> None:
    first, second = (readers.open(packed).dataset for _ in range(2))
    assert getattr(first, name)() == getattr(second, name)()
    assert first.to_json() == (packed / "dataset.json").read_text(encoding="utf-8")


# --- damage: the index --------------------------------------------------------------------------------------------
def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """An .npy with any header at all."""
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.path, 0o777, True)


GOOD = "{'descr': '<u8', 'fortran_order': False, 'shape': (36,), }"
BAD_COLUMNS: dict[str, bytes] = {
    "empty": b"",
    "no magic": bytes(400),
    "text": b"0\n1\n2\n",
    "version 2": npy(GOOD.encode(), bytes(288), b"\x02\x00"),
    "version 9": npy(GOOD.encode(), bytes(288), b"\x09\x00"),
    "header longer than the file": b"\x93NUMPY\x01\x00\xff\xff" + GOOD.encode(),
    "header cut off": npy(GOOD.encode()[:30], bytes(288)),
    "header with a bracket open": npy(GOOD.encode().replace(b")", b" "), bytes(288)),
    "header with a string open": npy(b"{'descr': '<u8", bytes(288)),
    "header of brackets": npy(b"(" * 9000, bytes(288)),
    "header of lists": npy(b"[" * 3000 + b"]" * 3000, bytes(288)),
    "header is code": npy(b"__import__('os').getpid()", bytes(288)),
    "header is no dict": npy(b"[1, 2]", bytes(288)),
    "header without shape": npy(b"{'descr': '<u8', 'fortran_order': False}", bytes(288)),
    "header with more": npy(GOOD.encode().replace(b"}", b"'x': 1}"), bytes(288)),
    "header in latin-1": npy(GOOD.encode().replace(b"<u8", b"\xff\xfe\xfd"), bytes(288)),
    "header with a NUL": npy(b"\0" * 100, bytes(288)),
    "unknown dtype": npy(GOOD.encode().replace(b"<u8", b"zzz"), bytes(288)),
    "dtype is a dict": npy(GOOD.encode().replace(b"'<u8'", b"{}"), bytes(288)),
    "big-endian": npy(GOOD.encode().replace(b"<u8", b">u8"), bytes(288)),
    "signed": npy(GOOD.encode().replace(b"<u8", b"<i8"), bytes(288)),
    "floats": npy(GOOD.encode().replace(b"<u8", b"<f8"), bytes(288)),
    "narrow": npy(GOOD.encode().replace(b"<u8", b"<u4"), bytes(144)),
    "objects": npy(GOOD.encode().replace(b"<u8", b"|O"), bytes(288)),
    "records": npy(GOOD.encode().replace(b"'<u8'", b"[('a', '<u8')]"), bytes(288)),
    "two dimensions": npy(GOOD.encode().replace(b"(36,)", b"(6, 6)"), bytes(288)),
    "no dimension": npy(GOOD.encode().replace(b"(36,)", b"()"), bytes(8)),
    "shape is a number": npy(GOOD.encode().replace(b"(36,)", b"36"), bytes(288)),
    "shape is text": npy(GOOD.encode().replace(b"(36,)", b"('36',)"), bytes(288)),
    "negative shape": npy(GOOD.encode().replace(b"(36,)", b"(-36,)"), bytes(288)),
    "huge shape": npy(GOOD.encode().replace(b"(36,)", b"(%d,)" % 10**30), bytes(288)),
    "overflowing shape": npy(GOOD.encode().replace(b"(36,)", b"(%d,)" % (2**61 + 36)), bytes(288)),
    "fewer bytes": npy(GOOD.encode(), bytes(287)),
    "more bytes": npy(GOOD.encode(), bytes(289)),
    "fewer entries": npy(GOOD.encode().replace(b"36", b"35"), bytes(280)),
    "more entries": npy(GOOD.encode().replace(b"36", b"37"), bytes(296)),
    "Fortran order": npy(GOOD.encode().replace(b"False", b"True"), bytes(288)),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_index_columns_that_are_none(mine: Path, name: str) -> None:
    (mine / "train.index" / "image.offset.npy").write_bytes(BAD_COLUMNS[name])
    with pytest.raises(DatasetError, match=r"image\.offset\.npy"):
        readers.open(mine).read(0)


@pytest.mark.parametrize(
    "column", ["image.offset", "shard", "key", "key.offset", "image.name", "label", "image.crc32c"]
)
def test_index_columns_are_never_unpickled(mine: Path, column: str) -> None:
    trap = mine / "sprung"
    array = np.array([Trap(str(trap)) for _ in range(36)], object)
    np.save(mine / "train.index" / f"{column}.npy", array, allow_pickle=True)
    with pytest.raises(DatasetError, match=column):
        reader = readers.open(mine, verify=True)
        reader.table.columns.index.check(reader.fields)
    assert not trap.exists(), "a column was unpickled: opening a set ran its code"
    np.load(mine / "train.index" / f"{column}.npy", allow_pickle=True)
    assert trap.exists(), "the trap does not work, so this test shows nothing"


def test_every_column_is_missed_and_every_cut_is_noticed(mine: Path) -> None:
    columns = sorted((mine / "train.index").iterdir())
    assert len(columns) == 15
    for path in columns:
        data = path.read_bytes()
        for size in {0, 1, 9, 40, len(data) - 1}:
            path.write_bytes(data[:size])
            with pytest.raises(DatasetError, match=path.name):
                readers.open(mine).table.columns.index.check(["image"])
        path.unlink()
        with pytest.raises(DatasetError, match=f"{path.name}.*missing index column.*packer index"):
            readers.open(mine).table.columns.index.check(["image"])
        path.write_bytes(data)
    readers.open(mine).table.columns.index.check(["image"])


def edit_column(root: Path, name: str, index: int, value: int) -> None:
    path = root / "train.index" / f"{name}.npy"
    array = np.load(path)
    array[index] = value
    np.save(path, array)


@pytest.mark.parametrize("backend", ["pread", "mmap"])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("image.offset", -1),  # relative to the size of the shard
        ("image.offset", 0),
        ("image.offset", 1),
        ("image.offset", 1 << 62),
        ("image.offset", (1 << 63) - 1),
        ("image.offset", 1 << 63),
        ("image.offset", (1 << 64) - 2),
        ("image.length", 0),
        ("image.length", 1 << 40),
        ("image.length", 1 << 63),
        ("image.length", (1 << 64) - 1),
    ],
)
def test_ranges_outside_the_shard(mine: Path, images: list[bytes], backend: Any, column: str, value: int) -> None:
    """An index is not trusted: wrapping sums and huge lengths included. Nothing is read, and no memory is taken."""
    size = shard_paths(mine)[0].stat().st_size
    edit_column(mine, column, 2, value + size if value in (-1, 0, 1) else value)
    with readers.open(mine, backend=backend) as reader:
        calls: list[Callable[[], object]] = [
            lambda: reader.read(2),
            lambda: reader[2],
            lambda: reader.read_many([2]),
            lambda: reader.read_many([0, 1, 2, 30]),
            lambda: reader.prefetch([2]),
            lambda: list(reader.stream([1, 2])),
        ]
        for call in calls:
            with pytest.raises(StaleIndexError, match=r"sample 2 .*but the shard has .*packer index"):
                call()
        assert bytes(reader.read(1)) == images[1], "a neighbour cannot be read"


@pytest.mark.parametrize("backend", ["pread", "mmap"])
@pytest.mark.parametrize("number", [6, 7, 1 << 31, (1 << 32) - 1])
def test_shard_numbers_outside_the_split(mine: Path, backend: Any, number: int) -> None:
    edit_column(mine, "shard", 2, number)
    with readers.open(mine, backend=backend) as reader:
        calls: list[Callable[[], object]] = [
            lambda: reader.read(2),
            lambda: reader.read_many([0, 2]),
            lambda: reader.prefetch([2]),
            lambda: list(reader.stream([2])),
            lambda: reader.byte_range(2),
        ]
        for call in calls:
            with pytest.raises(DatasetError, match=f"names shard {number}, the split has 6; .*packer index"):
                call()


@pytest.mark.parametrize(
    ("index", "value", "everything"),
    [(0, 1, True), (36, 5, True), (36, 1 << 63, True), (5, 1 << 40, False), (5, 0, False)],
)
def test_key_offsets_that_lie(mine: Path, index: int, value: int, everything: bool) -> None:
    edit_column(mine, "key.offset", index, value)
    reader = readers.open(mine)
    with pytest.raises(DatasetError):
        list(reader.keys)
    if everything:
        with pytest.raises(DatasetError, match=r"key\.npy.*string offsets must run from 0"):
            reader.keys[20]
    else:
        with pytest.raises(DatasetError, match="string 4 has the offsets"):
            reader.keys[4]
        assert reader.keys[20] == "dog/dog_008"


@pytest.mark.parametrize("column", ["key", "image.name"])
@pytest.mark.parametrize("count", [35, 37])
def test_string_columns_of_another_length(mine: Path, column: str, count: int) -> None:
    """Good in themselves, but not for this split."""
    strings = Strings.of(f"k{i}" for i in range(count))
    np.save(mine / "train.index" / f"{column}.npy", strings.blob)
    np.save(mine / "train.index" / f"{column}.offset.npy", strings.offsets)
    with pytest.raises(DatasetError, match=rf"{column}\.offset\.npy: {count + 1} entries, expected 37"):
        readers.open(mine).table.columns.index.check(["image"])


def test_keys_that_are_not_utf8(mine: Path) -> None:
    edit_column(mine, "key", 0, 0xFF)
    reader = readers.open(mine)
    with pytest.raises(DatasetError, match="string 0 is not UTF-8"):
        reader.keys[0]
    with pytest.raises(DatasetError, match="not UTF-8"):
        list(reader.keys)
    assert reader.keys[1] == "cat/cat_001"


def test_names_that_lie(mine: Path) -> None:
    edit_column(mine, "image.name", 0, ord("?"))
    with pytest.raises(DatasetError, match=r"stored file name .* starts with neither"):
        readers.open(mine).name(0)


# --- processes and threads ----------------------------------------------------------------------------------------


def test_pickle_carries_paths_not_descriptors(packed: Path) -> None:
    reader = open_packed(packed, "val", backend="mmap", verify=True, open_shards=3)
    reader.read(0)
    text = pickle.dumps(reader)
    assert len(text) < 4000, f"{len(text)} bytes: the pickle carries data"
    reader.close()
    again = pickle.loads(text)
    files = again.store.source
    assert (again.split, files.mapped, files.open_shards) == ("val", True, 3)
    assert open_descriptors(packed) == [], "unpickling opened a shard"
    assert [sample.key for sample in again] == [sample.key for sample in reader]


@pytest.mark.parametrize("open_shards", [1, 512])
@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_eight_threads(packed: Path, images: list[bytes], backend: Any, open_shards: int) -> None:
    """Shards are opened, evicted and closed under the threads' feet; no read may see another file."""
    reader = open_packed(packed, backend=backend, open_shards=open_shards)
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        order = [random.Random(seed).randrange(36) for _ in range(300)]
        start.wait(timeout=30)
        wrong = 0
        for step, i in enumerate(order):
            wrong += bytes(reader.read(i)) != images[i]
            if step % 50 == seed:
                reader.close()
            if step % 25 == 0:
                part = order[step : step + 10]
                wrong += [bytes(view) for view in reader.read_many(part)] != [images[j] for j in part]
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert [future.result(timeout=60) for future in [pool.submit(work, seed) for seed in range(8)]] == [0] * 8
    reader.close()
    gc.collect()
    assert open_descriptors(packed) == [], "threads left descriptors open"


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(make_jpeg(number))
    reader = readers.open_folder(tmp_path)
    assert [(sample.key, sample.label) for sample in reader] == [("0", None), ("1", None), ("2", None)]
    assert (reader.labels.tolist(), tuple(reader.classes), reader.split) == ([-1, -1, -1], (), "train")


def test_folder_faults(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    reader = pickle.loads(pickle.dumps(readers.open_folder(tmp_path / "tree", "val")))
    assert len(reader) == 9
    with pytest.raises(IndexError, match="sample 9 is outside the 9 of "):
        reader.read(9)
    with pytest.raises(IndexError):
        reader[-10]
    with pytest.raises(UnknownNameError, match="no field 'mask'; it has image"):
        reader.read(0, "mask")
    (tmp_path / "tree" / "val" / reader.name(2)).unlink()
    reader.prefetch([2])
    with pytest.raises(StaleIndexError, match=rf"{reader.name(2)}: cannot be read any more"):
        reader.read_many([1, 2])
    with pytest.raises(SourceError, match="no split 'test'; it has train, val"):
        readers.open_folder(tmp_path / "tree", "test")
    with pytest.raises(SourceError, match="not a directory"):
        readers.open_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no image files found"):
        readers.open_folder(tmp_path / "empty")


def test_errors_are_also_builtins() -> None:
    for name in readers.__all__:
        error = getattr(readers, name)
        if isinstance(error, type) and issubclass(error, Exception) and error is not PackerError:
            assert issubclass(error, PackerError), f"{name} is outside the tree"
            builtin = {kind for kind in error.__mro__ if kind.__module__ == "builtins"} - {
                Exception,
                BaseException,
                object,
            }
            assert builtin, f"{name} is no builtin error"


# --- string columns -----------------------------------------------------------------------------------------------
TEXTS = st.lists(st.text(max_size=12), max_size=30)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=TEXTS, data=st.data())
def test_string_columns_behave_like_lists(texts: list[str], data: st.DataObject) -> None:
    column = Strings.of(texts)
    assert len(column) == len(texts) and list(column) == texts and column == texts
    assert column.blob.tobytes() == "".join(texts).encode() and column.offsets.dtype == np.uint64
    part = data.draw(st.slices(len(texts)))
    assert column[part] == texts[part]
    for i in range(-len(texts), len(texts)):
        assert column[i] == texts[i]
    for i in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError, match=f"index {i} is outside the {len(texts)} strings"):
            column[i]
    assert list(reversed(column)) == texts[::-1]
    if texts:
        picked = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert column.take(np.array(picked, np.int64)) == [texts[i] for i in picked]
        assert texts[0] in column and column.index(texts[-1]) == texts.index(texts[-1])
    other = data.draw(TEXTS)
    assert (column == Strings.of(other)) == (texts == other) == (column == other)
    assert column != "".join(texts)


def test_string_columns_longer_than_a_block() -> None:
    texts = [str(i) for i in range(70_000)]
    column = Strings.of(texts)
    assert list(column) == texts and column[69_999] == "69999"


def test_string_columns_that_lie() -> None:
    blob = np.frombuffer(b"abcdef", np.uint8)

    def column(*offsets: int) -> Strings:
        return Strings(blob, np.array(offsets, np.uint64))

    for offsets in ((), (0, 5), (1, 6), (0, 7), (0, 2**64 - 1)):
        with pytest.raises(DatasetError, match="offset"):
            column(*offsets)
    falling = column(0, 4, 2, 6)
    with pytest.raises(DatasetError, match="fall instead of rising"):
        list(falling)
    with pytest.raises(DatasetError, match="string 1 has the offsets 4 to 2"):
        falling[1]
    with pytest.raises(DatasetError, match="string 0 has the offsets 0 to 99"):
        column(0, 99, 6)[0]
    with pytest.raises(UnicodeEncodeError):
        Strings.of(["\ud800"])


# --- read plans ---------------------------------------------------------------------------------------------------
SIZE = 200
RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, SIZE), st.integers(0, 60)).map(
        lambda r: (r[0], r[1], min(r[2], SIZE - r[1]))
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=300)
@given(wanted=RANGES, gap=st.integers(0, 40), limit=st.integers(1, 120), repeat=st.booleans())
def test_read_plans(wanted: list[tuple[int, int, int]], gap: int, limit: int, repeat: bool) -> None:
    """Carry a plan out on random bytes: every wanted range must be where the plan says."""
    wanted = wanted * 2 if repeat else wanted
    shards = [np.random.default_rng(number).bytes(SIZE) for number in range(3)]
    shard, offset, length = np.array(wanted, np.int64).reshape(-1, 3).T
    plan = plan_reads(shard.astype(np.uint32), offset, length, gap, limit)
    runs = list(zip(plan.run_shard.tolist(), plan.run_offset.tolist(), plan.run_length.tolist(), strict=True))
    buffer = bytearray(plan.total_bytes)
    for (s, o, n), place in zip(runs, plan.run_place.tolist(), strict=True):
        assert 0 <= o <= o + n <= SIZE and 0 <= place <= place + n <= len(buffer), (
            "a run leaves its shard or the buffer"
        )
        buffer[place : place + n] = shards[s][o : o + n]
    for (s, o, n), place in zip(wanted, plan.place.tolist(), strict=True):
        assert buffer[place : place + n] == shards[s][o : o + n], f"range {(s, o, n)} is not at {place}"
    assert len(buffer) == sum(n for _, _, n in runs), "the buffer is not filled exactly"
    assert runs == sorted(runs), "runs are not in the order of the disk"
    for (s, o, n), (t, p, _) in itertools.pairwise(runs):
        assert s < t or o + n <= p, "bytes are read twice"
    for s, o, n in runs:
        spare = widest_gap([(p, p + m) for t, p, m in wanted if t == s and o <= p <= p + m <= o + n])
        assert spare <= gap, f"a run bridges {spare} bytes that nobody wants"
        if n > limit:
            check_not_cuttable(s, o, n, wanted, limit)


def widest_gap(ranges: list[tuple[int, int]]) -> int:
    """Between neighbours, an empty range being one as well."""
    widest, reach = 0, min(start for start, _ in ranges)
    for start, stop in sorted(ranges):
        widest, reach = max(widest, start - reach), max(reach, stop)
    return widest


def check_not_cuttable(shard: int, begin: int, length: int, wanted: list[tuple[int, int, int]], limit: int) -> None:
    """A run over the limit may have no place to cut, beyond the limit, that splits no wanted range."""
    inside = sorted((o, o + n) for s, o, n in wanted if s == shard and begin <= o < begin + length)
    for o in {o for o, _ in inside if o > begin}:
        splits_none = all(end <= o for p, end in inside if p < o)
        beyond = all(end - begin > limit for p, end in inside if p == o)
        assert not (splits_none and beyond), f"[{begin}, {begin + length}) could be cut at {o}"


def test_a_plan_of_nothing() -> None:
    empty_column = np.zeros(0, np.int64)
    plan = plan_reads(empty_column, empty_column, empty_column)
    assert plan.total_bytes == 0 and all(len(part) == 0 for part in plan[:-1])


@pytest.mark.parametrize(("gap", "runs"), [(9, 2), (10, 1), (11, 1)])
def test_the_widest_gap_that_is_bridged(gap: int, runs: int) -> None:
    plan = plan_reads(np.zeros(2, np.uint32), np.array([0, 15], np.int64), np.array([5, 5], np.int64), gap)
    assert len(plan.run_offset) == runs, f"a gap of 10 bytes, {gap} allowed"


@pytest.mark.parametrize(("limit", "runs"), [(19, 2), (20, 1)])
def test_the_longest_run(limit: int, runs: int) -> None:
    plan = plan_reads(np.zeros(2, np.uint32), np.array([0, 15], np.int64), np.array([5, 5], np.int64), 10, limit)
    assert len(plan.run_offset) == runs, f"20 bytes in a run, {limit} allowed"


def test_plans_of_large_offsets() -> None:
    offset = np.array([1 << 45, 5, (1 << 45) + 100], np.int64)
    plan = plan_reads(np.zeros(3, np.uint32), offset, np.array([100, 7, 50], np.int64))
    assert plan.run_offset.tolist() == [5, 1 << 45] and plan.run_length.tolist() == [7, 150]
    assert plan.place.tolist() == [7, 0, 107]
