"""HDF5 sources that are damaged, or made to harm: no other file is read, memory is bounded, each ends in one error."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import limit_memory, make_jpeg

import packer
from packer.conversion.arena import Arena
from packer.sources import open_source
from readers.errors import BadSampleError, PackerError, SourceError

SECRET = b"nobody asked for this"
JPEGS = [np.frombuffer(make_jpeg(seed), np.uint8) for seed in range(4)]


def elements(file: Any) -> None:
    data = file.create_dataset("images", (len(JPEGS),), h5py.vlen_dtype(np.uint8), chunks=(2,))
    for number, content in enumerate(JPEGS):
        data[number] = content
    file["labels"] = np.arange(len(JPEGS))


def ranges(file: Any) -> None:
    file["images"] = np.concatenate(JPEGS)
    file["offsets"] = np.cumsum([0, *map(len, JPEGS)])
    file["keys"] = [f"{number}.jpg" for number in range(len(JPEGS))]


def ranges_packed(file: Any) -> None:
    whole = np.concatenate(JPEGS)
    file.create_dataset("images", data=whole, chunks=(512,), compression="gzip")
    file["offsets"] = np.cumsum([0, *map(len, JPEGS)])[:-1]
    file["lengths"] = np.array([len(content) for content in JPEGS])


def pixels(file: Any) -> None:
    file.create_dataset("train/images", data=np.zeros((4, 8, 9, 3), np.uint8), chunks=(1, 8, 9, 3), compression="gzip")
    file["train/labels"] = np.arange(4)


def items(file: Any) -> None:
    for number, content in enumerate(JPEGS):
        item = file.create_dataset(f"class{number % 2}/{number}", data=content)
        item.attrs["label"] = number


LAYOUTS = (elements, ranges, ranges_packed, pixels, items)


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
    file.create_dataset("labels", (len(JPEGS),), np.int8, external=[(str(secret), 0, len(JPEGS))])


@pytest.mark.parametrize("command", ["convert", "index"])
@pytest.mark.parametrize("pipe", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize("make", [external_storage, external_link, link_in_a_group, virtual, external_labels])
def test_no_other_file_is_read(
    tmp_path: Path, make: Callable[[Any, Path], None], pipe: bool, command: str, deadline: None
) -> None:
    secret, path = tmp_path / "secret", tmp_path / "set.h5"
    if pipe:
        os.mkfifo(secret)
    else:
        secret.write_bytes(SECRET)
    with h5py.File(path, "w") as file:
        make(file, secret)
    with pytest.raises(PackerError, match=r"another file|external file|other files"):
        if command == "convert":
            packer.convert(path, "tar", tmp_path / "out", workers=1, on_error="quarantine")
        else:
            packer.index([path], tmp_path / "out", workers=1)
    assert not any(SECRET in found.read_bytes() for found in (tmp_path / "out").rglob("*") if found.is_file())


@pytest.fixture
def deadline() -> Any:
    """A test that hangs in the HDF5 library fails instead."""

    def late(*_: object) -> None:
        raise TimeoutError("still running after 120 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_soft_links_that_lead_in_circles_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "loop.h5", "w") as file:
        ranges(file)
        file["one"], file["two"] = h5py.SoftLink("/two"), h5py.SoftLink("/one")
    with pytest.raises(SourceError, match=r"loop\.h5: /one is a soft link that leads back to itself"):
        packer.convert(tmp_path / "loop.h5", "tar", tmp_path / "out", workers=1)


def test_soft_links_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "old.h5", "w") as file:
        ranges(file)
        file["image"] = h5py.SoftLink("/gone")
    result = packer.convert(tmp_path / "old.h5", "tar", tmp_path / "out", workers=1)
    assert (result.samples, sum(result.left_out.values())) == (4, 1)


def claim_rows(file: Any) -> None:
    file.create_dataset("images", (1 << 33, 8, 8), np.uint8, chunks=(64, 8, 8))


def claim_elements(file: Any) -> None:
    file.create_dataset("images", (1 << 33,), h5py.vlen_dtype(np.uint8), chunks=(64,))


def claim_one_large_image(file: Any) -> None:
    file.create_dataset("images", (2, 1 << 20, 1 << 20), np.uint8, chunks=(1, 64, 64))


def claim_one_large_item(file: Any) -> None:
    file.create_dataset("large", ((1 << 31) + 10,), np.uint8, chunks=(1 << 20,), fillvalue=7)


def claim_many_offsets(file: Any) -> None:
    file["images"] = np.concatenate(JPEGS)
    file.create_dataset("offsets", (1 << 33,), np.int64, chunks=(64,))


def claim_keys(file: Any) -> None:
    ranges(file)
    del file["keys"]
    file.create_dataset("keys", (len(JPEGS),), h5py.string_dtype("utf-8", 1 << 30), chunks=(1,))


@pytest.mark.parametrize(
    "make",
    [claim_rows, claim_elements, claim_one_large_image, claim_one_large_item, claim_many_offsets, claim_keys],
)
def test_small_files_that_claim_much_end_in_an_error_within_2_gb(tmp_path: Path, make: Callable[[Any], None]) -> None:
    path = tmp_path / "claims.h5"
    with h5py.File(path, "w") as file:
        make(file)
    assert path.stat().st_size < 1 << 20, "the file itself must be small"
    done = subprocess.run(
        [sys.executable, "-m", "packer", "convert", path, "--to", "tar", "-o", tmp_path / "out", "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert str(path) in last and "claims" in last and "Traceback" not in done.stderr, done.stderr


def read_all(path: Path) -> str:
    """ "read", or what kind of error of ours came out."""
    try:
        source = open_source(path)
        listing = source.list(None)
        bad = False
        arena = Arena(lambda: None)
        with source.open() as reader:
            for part in listing.splits.values():
                for place, size in zip(part.places, part.bytes, strict=True):
                    arena.begin(size + 1)
                    try:
                        reader.read(place, arena)
                    except BadSampleError:
                        bad = True
        return "bad sample" if bad else "read"
    except PackerError as error:
        assert str(path) in str(error), f"an error that does not name the file: {error}"
        return "refused"


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file cut short, or with some bytes changed; mostly near the start, where the metadata lie."""
    if rng.random() < 0.2:
        return data[: rng.randrange(len(data))]
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(content), rng.choice((800, 2500, len(content)))))
        content[at] = rng.choice((0, 255, content[at] ^ 1 << rng.randrange(8)))
    return bytes(content)


def fuzz(tmp_path: Path, make: Callable[[Any], None], rounds: int, seed: int) -> Counter[str]:
    """How reading damaged copies of a file ends, each in a process of its own with 3 GB and 60 seconds."""
    whole, path = tmp_path / "whole.h5", tmp_path / "damaged.h5"
    rng, ends = random.Random(seed), Counter[str]()
    for libver in ("earliest", "latest"):
        whole.unlink(missing_ok=True)
        with h5py.File(whole, "w", libver=libver) as file:
            make(file)
        for _ in range(rounds // 2):
            path.write_bytes(damaged(whole.read_bytes(), rng))
            child = os.fork()
            if child == 0:
                status = 99
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(60)
                    limit_memory(2 << 30)
                    status = ("read", "bad sample", "refused").index(read_all(path))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            end = {0: "read", 1: "bad sample", 2: "refused", 99: "traceback"}.get(code, f"signal {-code}")
            ends[end] += 1
            if end not in ("read", "bad sample", "refused"):
                path.rename(tmp_path / f"{libver}-{sum(ends.values())}-{end}.h5".replace(" ", "-"))
    return ends


@pytest.mark.parametrize("make", LAYOUTS)
def test_damage_ends_in_an_error_that_names_the_file(tmp_path: Path, make: Callable[[Any], None]) -> None:
    ends = fuzz(tmp_path, make, 40, seed=1)
    assert set(ends) <= {"read", "bad sample", "refused"}, f"{ends}; see {tmp_path}"
    assert ends["refused"], "damage that nothing notices tests nothing"


@pytest.mark.faults
@pytest.mark.parametrize("make", LAYOUTS)
def test_much_damage_ends_in_an_error_that_names_the_file(tmp_path: Path, make: Callable[[Any], None]) -> None:
    ends = fuzz(tmp_path, make, 1000, seed=2)
    print(make.__name__, dict(ends))
    assert set(ends) <= {"read", "bad sample", "refused"}, f"{ends}; see {tmp_path}"
