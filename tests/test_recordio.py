"""MXNet RecordIO: located, adopted in place, converted; the reference is DALI's reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import make_jpeg

import packer
import readers
from cache.errors import FormatError, NotFlatError, PackerError, SourceError
from packer.formats import format_named
from packer.formats.base import LocateOptions

MAGIC = struct.pack("<I", 0xCED7230A)
IMAGES = [make_jpeg(number) for number in range(5)]
LABELS = [2, 0, 1, 1, 0]


def part(data: bytes, cflag: int = 0, length: int | None = None) -> bytes:
    """A frame of dmlc's recordio.h; `length` states a false length."""
    word = cflag << 29 | (len(data) if length is None else length)
    return MAGIC + struct.pack("<I", word) + data + bytes(-len(data) % 4)


def image(label: float, data: bytes, number: int = 0, flag: int = 0) -> bytes:
    """The data of an image record: an IRHeader, the labels if there are several, the image."""
    labels = struct.pack(f"<{flag}f", *[label] * flag)
    return struct.pack("<IfQQ", flag, 0.0 if flag else label, number, 0) + labels + data


def in_parts(data: bytes) -> bytes:
    """Data split at magic numbers like dmlc's writer, which looks for them at multiples of four."""
    places = [i for i in range(0, len(data) - 3, 4) if data[i : i + 4] == MAGIC]
    bounds = zip([0, *(i + 4 for i in places)], [*places, len(data)], strict=True)
    pieces = [data[first:stop] for first, stop in bounds]
    flags = [1, *[2] * (len(pieces) - 2), 3] if len(pieces) > 1 else [0]
    return b"".join(part(piece, flag) for piece, flag in zip(pieces, flags, strict=True))


def write(path: Path, records: Sequence[bytes], index: bool = True) -> Path:
    path.write_bytes(b"".join(records))
    if index:
        starts = np.cumsum([0, *map(len, records)])[:-1]
        path.with_suffix(".idx").write_text("".join(f"{i}\t{at}\n" for i, at in enumerate(starts)))
    return path


def records() -> list[bytes]:
    return [
        part(image(label, data, number, flag=number % 2))
        for number, (label, data) in enumerate(zip(LABELS, IMAGES, strict=True))
    ]


def contents(root: Path) -> list[tuple[str, int | None, bytes]]:
    with readers.open(root, verify=True) as reader:
        return [(sample.key, sample.label, bytes(sample.image)) for sample in reader]


EXPECTED = [(f"val/{n:08d}", label, data) for n, (label, data) in enumerate(zip(LABELS, IMAGES, strict=True))]


@pytest.mark.parametrize("index", [True, False])
def test_recordio_is_adopted_in_place(tmp_path: Path, index: bool) -> None:
    write(tmp_path / "val.rec", records(), index)
    result = packer.index(tmp_path, workers=1)
    assert (result.format, result.splits) == ("recordio", {"val": 5})
    assert contents(tmp_path) == EXPECTED
    assert packer.verify(tmp_path, deep=True, workers=1).ok


def test_dali_reads_the_same_samples(tmp_path: Path) -> None:
    dali = pytest.importorskip("nvidia.dali")
    shard = write(tmp_path / "val.rec", records())

    @dali.pipeline_def(batch_size=5, num_threads=1, device_id=None)
    def pipeline():  # type: ignore[no-untyped-def]
        images, labels = dali.fn.readers.mxnet(path=str(shard), index_path=str(shard.with_suffix(".idx")))
        return images, labels

    pipe = pipeline()
    pipe.build()
    images, labels = pipe.run()
    samples = [(int(labels.at(i)[0]), images.at(i).tobytes()) for i in range(5)]
    assert samples == [(label, data) for _, label, data in EXPECTED]


def test_a_record_in_parts_converts_and_is_not_adopted(tmp_path: Path) -> None:
    magic = bytes(range(8)) + MAGIC + b"middle.." + MAGIC + b"end"
    whole = IMAGES[0] + bytes(-len(IMAGES[0]) % 4) + magic  # any bytes may follow a JPEG
    shard = write(tmp_path / "val.rec", [in_parts(image(7, whole)), *records()])
    assert shard.read_bytes()[7] >> 5 == 1, "the test record is not in parts"
    with pytest.raises(NotFlatError, match=rf"record at byte 0 is in 3 parts.* packer convert {shard} --to"):
        packer.index([shard], workers=1)
    out = packer.convert(shard, "tar", tmp_path / "out", run=packer.Run(workers=1)).output
    samples = contents(out)
    assert samples[0] == ("val/00000000", 7, whole)
    assert [sample[1:] for sample in samples[1:]] == [sample[1:] for sample in EXPECTED]


def faces(*, head_first: bool = True, images: int | None = None) -> list[bytes]:
    """A set as InsightFace's face2rec2.py writes it: images with several labels, the head, a range for each
    identity."""

    def without_image(first: float, end: float, number: int = 0) -> bytes:
        return part(struct.pack("<IfQQff", 2, 0, number, 0, first, end))

    stored = [
        part(struct.pack("<IfQQff", 2, 0, number, 0, label, 1) + data)
        for number, (label, data) in enumerate(zip(LABELS, IMAGES, strict=True), 1)
    ]
    head = without_image(1 + (len(IMAGES) if images is None else images), 9)
    ranges = [without_image(first, end, 6 + i) for i, (first, end) in enumerate([(1, 2), (2, 3), (3, 5), (5, 6)])]
    return [head, *stored, *ranges] if head_first else [*stored, head, *ranges]


def write_faces(path: Path, parts: Sequence[bytes], numbers: Sequence[int]) -> Path:
    write(path, parts)
    positions = [line.split("\t")[1] for line in path.with_suffix(".idx").read_text().splitlines()]
    lines = [f"{number}\t{at}\n" for number, at in zip(numbers, positions, strict=True)]
    path.with_suffix(".idx").write_text("".join(lines))
    return path


@pytest.mark.parametrize("head_first", [True, False])
def test_a_set_of_insightface_is_adopted_and_converted(tmp_path: Path, head_first: bool) -> None:
    numbers = [0, *range(1, 10)] if head_first else [*range(1, 6), 0, *range(6, 10)]
    folder = tmp_path / "faces"
    folder.mkdir()
    shard = write_faces(folder / "train.rec", faces(head_first=head_first), numbers)
    (folder / "property").write_text("3,112,112")
    (folder / "lfw.bin").write_bytes(b"\x80\x04")
    converted = packer.convert(shard, "tar", tmp_path / "out", run=packer.Run(workers=1)).output
    assert packer.index(folder, workers=1).splits == {"train": 5}
    assert packer.verify(folder, deep=True, workers=1).ok
    expected = list(zip(LABELS, IMAGES, strict=True))
    assert [sample[1:] for sample in contents(folder)] == [sample[1:] for sample in contents(converted)] == expected


def test_a_set_of_insightface_without_its_idx(tmp_path: Path) -> None:
    """The head is recognised as the first record; elsewhere the labels are refused, and the message names the .idx."""
    recordio, options = format_named("recordio"), LocateOptions()
    write(tmp_path / "a.rec", faces(), index=False)
    assert [record.label for record in recordio.locate(tmp_path / "a.rec", options)] == LABELS
    write(tmp_path / "b.rec", faces(head_first=False), index=False)
    with pytest.raises(FormatError, match=r"has 2 labels, expected one: .* InsightFace is, with its \.idx"):
        list(recordio.locate(tmp_path / "b.rec", options))


@pytest.mark.parametrize("present", [faces(images=6), faces()[:-5]])
def test_a_set_of_insightface_that_lacks_images_is_refused(tmp_path: Path, present: list[bytes]) -> None:
    write(tmp_path / "train.rec", present, index=False)
    with pytest.raises(FormatError, match=r"record 0 announces \d images, the file has \d: truncated"):
        packer.index(tmp_path, workers=1)


def test_labels(tmp_path: Path) -> None:
    labels = [-1.0, 0.0, 999.0]
    shard = write(tmp_path / "x.rec", [part(image(label, IMAGES[0])) for label in labels])
    options = LocateOptions(label_offset=0)
    assert [record.label for record in format_named("recordio").locate(shard, options)] == [-1, 0, 999]
    for label in (0.5, float("nan"), float("inf"), 1e30):
        write(shard, [part(image(label, IMAGES[0]))])
        with pytest.raises(FormatError, match="expected a whole number"):
            list(format_named("recordio").locate(shard, options))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\n\x23\xd7\xce", "ends inside the record at byte 0"),
        (part(b"x" * 40, length=41), "truncated"),
        (part(b"x" * 40, length=(1 << 29) - 1), "truncated"),
        (part(b"x" * 40)[:-9], "truncated"),
        (part(image(1, b"i")) + b"\0" * 8, "no record at byte 36"),
        (part(b"x" * 10), "too few for the header"),
        (part(image(1, b"i"), cflag=2), "no first part"),
        (part(image(1, b"i"), cflag=3), "no first part"),
        (part(image(1, b"i"), cflag=5), "the flag 5"),
        (part(image(1, b"i"), cflag=1), "ends inside the record at byte 36"),
        (part(image(1, b"i"), cflag=1) + part(image(1, b"i")), "no last part"),
        (part(struct.pack("<IfQQ", 1 << 31, 0, 0, 0) + b"x"), "claims 2147483648 labels"),
        (part(image(1, b"i", flag=5)), "has 5 labels, expected one"),
    ],
)
def test_false_claims_are_refused_by_both_commands(tmp_path: Path, data: bytes, match: str) -> None:
    shard = write(tmp_path / "x.rec", [data], index=False)
    with pytest.raises(FormatError, match=match):
        packer.index([shard], workers=1)
    with pytest.raises(SourceError, match=match):
        packer.convert(shard, "tar", tmp_path / "out", run=packer.Run(workers=1))


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (b"0\t0\n", "names 1 records, the file has|not in x.idx"),
        (b"0\t0\n1\t99999999999\n", "line 2 names byte 99999999999, but the .rec has"),
        (b"0\t0\n1\t4\n", "not in x.idx"),
        (b"0\t-5\n", "line 1 is"),
        (b"garbage", "line 1 is"),
        (b"0\t0\n0\t0\n", "two lines name one position"),
        (b"", "not in x.idx"),
        (b"0\t" + b"9" * 5000, "line 1 is"),
    ],
)
def test_a_false_idx_is_named(tmp_path: Path, index: bytes, match: str) -> None:
    shard = write(tmp_path / "x.rec", records())
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(FormatError, match=match):
        packer.index([shard], workers=1)


def test_every_cut_and_every_flip_is_an_error_or_harmless(tmp_path: Path) -> None:
    shard = write(tmp_path / "x.rec", [part(image(n, b"image %d" % n)) for n in range(3)], index=False)
    data, recordio = shard.read_bytes(), format_named("recordio")
    truth = list(recordio.locate(shard, LocateOptions()))
    for size in range(len(data)):
        shard.write_bytes(data[:size])
        try:
            located = list(recordio.locate(shard, LocateOptions()))
        except PackerError as error:
            assert str(shard) in str(error)
            continue
        assert located == truth[: len(located)], f"cut at {size}"
    for i in range(len(data)):
        shard.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
        try:
            located = list(recordio.locate(shard, LocateOptions()))
        except PackerError:
            continue
        for sample in located:
            for at, length in sample.ranges.values():
                assert 0 <= at <= at + length <= len(data), f"byte {i} flipped"
