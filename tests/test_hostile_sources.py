"""Archives, records and manifests that are damaged or lie: nothing escapes, memory is bounded, each ends in one error.

Every trial runs in a process of its own, with 2 GB of memory and 60 seconds.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import signal
import tarfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from conftest import limit_memory, make_jpeg
from crc32c import crc32c

import packer
from packer.formats.checksum import masked_crc
from readers.errors import PackerError

NAMES = ("a/1.jpg", "a/2.jpg", "b/3.jpg", "b/notes.txt")
MEMORY_BYTES, SECONDS = 2 << 30, 60


def contents() -> list[tuple[str, bytes]]:
    return [(name, make_jpeg(n) if name.endswith("jpg") else b"text") for n, name in enumerate(NAMES)]


def tar_file(format: int = tarfile.GNU_FORMAT) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=format) as archive:
        for name, data in contents():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("b/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "../a/1.jpg"
        archive.addfile(link)
    return memory.getvalue()


def zip_file(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        for name, data in contents():
            archive.writestr(name, data)
    return memory.getvalue()


def example(image: bytes, label: int) -> bytes:
    """A tf.train.Example of two features, by hand."""

    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    def entry(name: str, feature: bytes) -> bytes:
        return field(1, field(1, name.encode()) + field(2, feature))

    numbers = field(3, field(1, bytes([label])))
    return field(1, entry("image/encoded", field(1, field(1, image))) + entry("image/class/label", numbers))


def tfrecord_file() -> bytes:
    records = b""
    for n in range(4):
        data = example(make_jpeg(n), n)
        length = len(data).to_bytes(8, "little")
        crcs = [masked_crc(crc32c(part)).to_bytes(4, "little") for part in (length, data)]
        records += length + crcs[0] + data + crcs[1]
    return records


def csv_file() -> bytes:
    return b'path,label,split,note\na/1.jpg,0,train,"x, y"\na/2.jpg,1,train,\nb/3.jpg,2,val,z\n'


def jsonl_file() -> bytes:
    rows = [{"path": name, "label": n, "box": [1, 2.5], "mask": None} for n, name in enumerate(NAMES[:3])]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


SOURCES: dict[str, Callable[[], bytes]] = {
    "gnu.tar": tar_file,
    "pax.tar": lambda: tar_file(tarfile.PAX_FORMAT),
    "x.tar.gz": lambda: gzip.compress(tar_file(), 6, mtime=0),
    "x.tar.bz2": lambda: bz2.compress(tar_file()),
    "x.tar.xz": lambda: lzma.compress(tar_file()),
    "x.tar.zst": lambda: zstandard.ZstdCompressor(write_checksum=True).compress(tar_file()),
    "deflated.zip": zip_file,
    "stored.zip": lambda: zip_file(zipfile.ZIP_STORED),
    "x.tfrecord": tfrecord_file,
    "x.tfrecord.gz": lambda: gzip.compress(tfrecord_file(), 6, mtime=0),
    "m.csv": csv_file,
    "m.jsonl": jsonl_file,
}
HUGE = [(1 << 31) - 1, (1 << 32) - 1, (1 << 33) - 1, 1 << 62, (1 << 64) - 1]
NASTY = [b"../../evil", b"/etc/evil", b"\0", b"\xff\xfe", b"\n", b'"', b",", b"NaN", b"1e999", b"[" * 900, b"\x1b[2J"]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut short, bytes changed, sizes made huge, names made to lead out, parts repeated or taken away."""
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
        elif len(content) > 512:  # a whole header of tar, its checksum made right
            start = at // 512 * 512
            header = content[start : start + 512]
            if len(header) == 512:
                header[rng.choice((0, 124, 156, 157))] = rng.choice(b"/.0127xgLKS\x80\xff")
                header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
                content[start : start + 512] = header
    return bytes(content)


def attempt(source: Path, out: Path) -> str:
    """Convert, and look at what came of it: "packed", "refused", or raises."""
    try:
        packer.convert(source, "tar", out, workers=1, on_error="skip")
    except PackerError as error:
        assert source.name in str(error), f"an error that does not name the source: {error}"
        return "refused"
    assert packer.verify(out, workers=1).ok, "what was packed must be whole"
    return "packed"


def in_a_child(work: Callable[[], str], outcomes: tuple[str, ...]) -> str:
    """How `work` ends: one of the outcomes, "traceback", or a signal."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            limit_memory(MEMORY_BYTES)
            status = outcomes.index(work())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return outcomes[code] if 0 <= code < len(outcomes) else "traceback" if code == 99 else f"signal {-code}"


def everything_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def fuzz(tmp_path: Path, name: str, rounds: int, seed: int) -> Counter[str]:
    rng, ends = random.Random(seed), Counter[str]()
    whole = SOURCES[name]()
    inside = tmp_path / "inside"
    inside.mkdir()
    for path, data in contents():
        (inside / path).parent.mkdir(exist_ok=True)
        (inside / path).write_bytes(data)
    source, out = inside / name, inside / "out"
    assert attempt(_written(source, whole), out) == "packed", "undamaged, it must pack"  # and loads what it takes
    before = everything_below(tmp_path) - {path for path in everything_below(tmp_path) if "/out" in path}
    for trial in range(rounds):
        _remove(out)
        _written(source, damaged(whole, rng))
        end = in_a_child(lambda: attempt(source, out), ("packed", "refused"))
        ends[end] += 1
        if end not in ("packed", "refused"):
            (tmp_path / f"{trial}-{end}-{name}".replace(" ", "-")).write_bytes(source.read_bytes())
            before.add(f"{trial}-{end}-{name}".replace(" ", "-"))
        escaped = {path for path in everything_below(tmp_path) if not path.startswith("inside/out")} - before
        assert not escaped, f"trial {trial} wrote outside its output: {escaped}"
    return ends


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", SOURCES)
def test_damage_ends_in_an_error_that_names_the_source(tmp_path: Path, name: str) -> None:
    ends = fuzz(tmp_path, name, 20, seed=1)
    assert set(ends) <= {"packed", "refused"}, f"{ends}; see {tmp_path}"


@pytest.mark.faults
@pytest.mark.parametrize("name", SOURCES)
def test_much_damage_ends_in_an_error_that_names_the_source(tmp_path: Path, name: str) -> None:
    ends = fuzz(tmp_path, name, 600, seed=2)
    print(name, dict(ends))
    assert set(ends) <= {"packed", "refused"}, f"{ends}; see {tmp_path}"


def limited(tmp_path: Path, source: Path) -> str:
    """The message with which a conversion within 2 GB ends; it must be an error of ours."""
    report = tmp_path / "message"

    def work() -> str:
        try:
            packer.convert(source, "tar", tmp_path / "out", workers=1)
        except PackerError as error:
            report.write_text(str(error))
            return "refused"
        return "packed"

    assert in_a_child(work, ("packed", "refused")) == "refused"
    return report.read_text()


def tar_that_claims(size: int) -> bytes:
    header = bytearray(tar_file()[:512])
    header[124:136] = b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    return bytes(header)


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_member_that_claims_8_gib_is_refused_within_2_gb(tmp_path: Path, suffix: str) -> None:
    data = tar_that_claims(1 << 33)
    source = tmp_path / f"in.{suffix}"
    with open(source, "wb") as file:
        file.write(data if suffix == "tar" else gzip.compress(data))
        if suffix == "tar":
            file.truncate((1 << 33) + 2048)  # it is there, and takes no room
    assert f"in.{suffix}" in limited(tmp_path, source)


def test_a_record_that_claims_much_is_refused_within_2_gb(tmp_path: Path) -> None:
    length = ((1 << 31) - 1).to_bytes(8, "little")
    with open(tmp_path / "in.tfrecord", "wb") as file:
        file.write(length + masked_crc(crc32c(length)).to_bytes(4, "little"))
        file.truncate(1 << 33)
    assert "in.tfrecord" in limited(tmp_path, tmp_path / "in.tfrecord")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_manifest_of_one_endless_line_is_refused_within_2_gb(tmp_path: Path, suffix: str) -> None:
    with open(tmp_path / f"in.{suffix}", "wb") as file:
        file.write(b"path,label\n" if suffix == "csv" else b'{"path": "')
        file.truncate(1 << 33)
    assert f"in.{suffix}" in limited(tmp_path, tmp_path / f"in.{suffix}")
