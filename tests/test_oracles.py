"""Random packer sets, read by h5py, the tfrecord package with protobuf, webdataset, tarfile and GNU tar.

These readers must return the written bytes exactly, also after the sets were changed.

TRIALS (default 1000) is the number of sets in `make test-faults`; SEED makes a run repeatable.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import h5py
import pytest
from conftest import make_jpeg
from test_interop import read_with_webdataset

import packer
import readers
from readers.layout import read_dataset_info

tfrecord = pytest.importorskip("tfrecord")

TRIALS, SEED = int(os.environ.get("TRIALS", "1000")), int(os.environ.get("SEED", "0"))
FORMATS = ("hdf5", "tfrecord", "tar")
CLASSES = ("cat", "dog", "big owl")
SUFFIXES = {"image": "jpg", "blob": "blob.bin", "note": "note.txt"}
SIZES = (0, 1, 2, 7, 8, 9, 127, 128, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 16383, 16384, 65537)
LETTERS = "abAB019-_.. /%+'\"\\*?[]{}:;=#\n\tßé日\U0001f600"
JPEG = make_jpeg(3, (16, 16))
Sample = tuple[str, int, tuple[tuple[str, bytes], ...]]
"""(key, label or -1, (field, bytes) for each field that it has)."""
Shown = tuple[str, int | None, dict[str, bytes]]
"""(key, label with the offset of the set, bytes by field)."""


def random_sample(draw: random.Random, number: int, fields: tuple[str, ...]) -> Sample:
    text = "".join(draw.choices(LETTERS, k=draw.choice((0, 1, 3, 8, 30, 120)))).replace("..", ".").lstrip("/")
    size = {field: draw.choice((*SIZES, draw.randrange(3000))) for field in fields}
    payloads = {
        "image": lambda: (
            JPEG[:2]
            + b"\xff\xfe%c%c" % divmod(size["image"] % 65533 + 2, 256)
            + bytes(size["image"] % 65533)
            + JPEG[2:]
        ),
        "blob": lambda: draw.randbytes(size["blob"]),
        "note": lambda: ("é" * size["note"]).encode(),
    }
    shown = [field for field in fields if field == fields[0] or draw.random() < 0.8]
    return f"{text}{number}", draw.randrange(-1, 3), tuple((field, payloads[field]()) for field in shown)


def write(
    root: Path, samples: list[tuple[str, Sample]], to: str, fields: tuple[str, ...], shards: packer.Shards
) -> None:
    kinds = {"image": "image", "blob": "file", "note": "text"}
    field_kinds = {field: kinds[field] for field in fields}
    with packer.writer(root, to, fields=field_kinds, classes=CLASSES, shards=shards) as out:
        for split, (key, label, values) in samples:
            out.write(key, split=split, label=None if label < 0 else label, **dict(values))


# --- the readers ----------------------------------------------------------------------------------------------------
def by_h5py(shards: list[Path]) -> Iterator[Shown]:
    for shard in shards:
        with h5py.File(shard) as file:
            fields = {name: file[name] for name in SUFFIXES if name in file}
            for row, (key, label) in enumerate(zip(file["key"].asstr()[:], file["label"][:].tolist(), strict=True)):
                places = {
                    name: (int(field["offset"][row]), int(field["length"][row])) for name, field in fields.items()
                }
                yield (
                    key,
                    None if label < 0 else label,
                    {
                        name: fields[name]["data"][start : start + count].tobytes()
                        for name, (start, count) in places.items()
                        if start != 2**64 - 1
                    },
                )


def by_tfrecord(shards: list[Path]) -> Iterator[Shown]:
    named = {f"{field}/encoded": field for field in SUFFIXES}
    for shard in map(str, shards):
        parsed = tfrecord.reader.tfrecord_loader(shard, None)
        for record, arrays in zip(tfrecord.reader.tfrecord_iterator(shard), parsed, strict=True):
            features = tfrecord.example_pb2.Example.FromString(bytes(record)).features.feature
            data = {field: features[name].bytes_list.value[0] for name, field in named.items() if name in features}
            assert all(bytes(arrays[f"{field}/encoded"]) == payload for field, payload in data.items() if payload)
            labels = features["image/class/label"].int64_list.value
            yield features["image/key"].bytes_list.value[0].decode(), next(iter(labels), None), data


def of_members(stem: str, parts: Mapping[str, bytes]) -> Shown:
    key = json.loads(parts["__name__"])["key"] if "__name__" in parts else stem
    label = int(parts["cls"]) if "cls" in parts else None
    return key, label, {field: parts[suffix] for field, suffix in SUFFIXES.items() if suffix in parts}


def by_webdataset(shards: list[Path]) -> Iterator[Shown]:
    for sample in read_with_webdataset([*map(str, shards)]):
        yield of_members(sample["__key__"], sample)


def by_tarfile(shards: list[Path]) -> Iterator[Shown]:
    """GNU tar gives the same bytes for all members together as tarfile for each."""
    for shard in shards:
        members: dict[str, dict[str, bytes]] = {}
        with tarfile.open(shard) as archive:
            for member in archive:
                suffix = member.name.rpartition("/")[2].partition(".")[2]
                opened = archive.extractfile(member)
                parts = members.setdefault(member.name.removesuffix(f".{suffix}"), {})
                assert suffix and opened and suffix not in parts, member.name
                parts[suffix] = opened.read()
        everything = b"".join(data for parts in members.values() for data in parts.values())
        assert subprocess.run(["tar", "-xOf", shard], capture_output=True, timeout=60, check=True).stdout == everything
        yield from itertools.starmap(of_members, members.items())


ORACLES: dict[str, tuple[Callable[[list[Path]], Iterator[Shown]], ...]] = {
    "hdf5": (by_h5py,),
    "tfrecord": (by_tfrecord,),
    "tar": (by_webdataset, *([by_tarfile] if shutil.which("tar") else [])),
}


# --- random sets, and changes of them -------------------------------------------------------------------------------
def check(root: Path, live: list[tuple[str, Sample]], dropped: list[tuple[str, Sample]]) -> None:
    """Every reader returns each sample of the set once, and besides them only samples that were dropped from the
    index."""
    info = read_dataset_info(root)
    assert {name: split.samples for name, split in info.splits.items()} == Counter(split for split, _ in live)
    for name, split in info.splits.items():
        expected, gone = (Counter(sample for at, sample in some if at == name) for some in (live, dropped))
        for oracle in ORACLES[info.format]:
            shown = Counter(
                (key, -1 if label is None else label - info.label_offset, tuple(data.items()))
                for key, label, data in oracle([root / shard.path for shard in split.shards])
            )
            assert not expected - shown, f"{oracle.__name__} does not show {expected - shown}"
            assert not shown - expected - gone, f"{oracle.__name__} shows {shown - expected - gone} in addition"
        with readers.open(root, name, verify=True) as reader:
            parts = (
                (s.key, s.label, tuple((f, bytes(s.fields[f])) for f in SUFFIXES if f in s.fields)) for s in reader
            )
            assert Counter((key, -1 if label is None else label, data) for key, label, data in parts) == expected


def trial(folder: Path, seed: int) -> str:
    """One random set; returns its format, and the changes made to it."""
    draw = random.Random(seed)
    to, fields = draw.choice(FORMATS), draw.choice((("image",), ("blob",), ("image", "blob", "note"), ("blob", "note")))
    shards = packer.Shards(samples=draw.choice((1, 2, 5, 1000)), label_offset=draw.choice((0, 0, 1)))
    root, done, numbers = folder / "set", [to], iter(range(10**6))

    def some(most: int) -> list[tuple[str, Sample]]:
        count = draw.randint(1, most)
        return [(draw.choice(("train", "val")), random_sample(draw, next(numbers), fields)) for _ in range(count)]

    live, dropped = some(12), list[tuple[str, Sample]]()
    write(root, live, to, fields, shards)
    check(root, live, dropped)
    for change in draw.sample(("append", "drop", "erase", "reshard"), k=draw.randrange(4)):
        done.append(change)
        if change == "append":
            more, other = some(5), folder / "other"
            write(other, more, draw.choice((to, *FORMATS)), fields, packer.Shards(samples=2))
            packer.append(root, other, run=packer.Run(workers=1))
            live += more
        elif change == "reshard":
            to = draw.choice(FORMATS)
            packer.reshard(
                root, to=to, shards=packer.Shards(samples=draw.choice((1, 3, 1000))), run=packer.Run(workers=1)
            )
            dropped = []
        else:
            split = live[0][0]
            there = [entry for entry in live if entry[0] == split]
            left_out = draw.sample(there, k=len(there) // 2)
            if not left_out:
                continue
            keys = [key for _, (key, _, _) in left_out]
            getattr(packer, change)(root, keys=keys, split=split, **({"workers": 1} if change == "erase" else {}))
            live = [entry for entry in live if entry not in left_out]
            dropped += left_out if change == "drop" else []
        check(root, live, dropped)
    shutil.rmtree(folder)
    return ", ".join(done)


@pytest.mark.parametrize("trials", [8, pytest.param(TRIALS, marks=pytest.mark.faults)], ids=["some", "many"])
def test_third_party_readers_return_the_written_samples(tmp_path: Path, trials: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + trials):
        try:
            counts[trial(tmp_path / str(seed), seed).partition(",")[0]] += 1
        except Exception as error:
            raise AssertionError(f"SEED={seed} TRIALS=1") from error
    print(f"\n{trials} sets: {dict(counts)}")
