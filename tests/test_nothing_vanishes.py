"""Files that are not packed are named and counted, and an error where they are images; no set is empty."""

from __future__ import annotations

import io
import os
import pty
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.testing.samples import make_image

AVIF = b"\0\0\0\x1cftypavif\0\0\0\0mif1miaf" + bytes(200)
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200)
JPEG_2000 = b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(200)
JPEG_XL = b"\xff\x0a" + bytes(200)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a/2.avif", AVIF, "found AVIF, an image format that is not read"),
        ("a/2.heic", HEIC, "found HEIC"),
        ("a/2.jp2", JPEG_2000, "found JPEG 2000"),
        ("a/2.jxl", JPEG_XL, "found JPEG XL"),
        ("a/2", AVIF, "found AVIF"),
        ("a/2.jpg", AVIF, "found AVIF"),
        ("a/2.jpg", b"", "is empty, 0 bytes"),
        ("a/2.avif", b"", "is empty, 0 bytes"),
        ("a/2.tga", b"no magic at all", "expected the magic of"),
    ],
)
def test_images_that_cannot_be_read_stop_a_conversion_and_are_counted_where_they_do_not(
    tmp_path: Path, name: str, data: bytes, what: str
) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1), name: data})
    with pytest.raises(BadSampleError, match=f"{name}: .*{what}"):
        packer.convert(source, "tar", tmp_path / "raise", run=packer.Run(workers=1))
    for policy, action in (("skip", "skipped"), ("quarantine", "quarantined")):
        result = packer.convert(source, "tar", tmp_path / policy, run=packer.Run(on_error=policy, workers=1))
        assert (result.samples, result.left_out) == (1, {action: 1})
        assert sum(result.left_out_reasons.values()) == 1, result.left_out_reasons
    assert (tmp_path / "quarantine/quarantine/train" / name).read_bytes() == data


def test_damaged_members_of_a_zip_stop_a_conversion(tmp_path: Path) -> None:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for number in range(2):
            archive.writestr(f"a/{number}.jpg", make_jpeg(number))
    data = bytearray(memory.getvalue())
    data[data.index(make_jpeg(1)) + 20] ^= 1
    (tmp_path / "in.zip").write_bytes(data)
    with pytest.raises(BadSampleError, match=r"in\.zip: a/1\.jpg: is damaged: its CRC-32 is"):
        packer.convert(tmp_path / "in.zip", "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_other_files_are_left_out_and_listed_by_what_they_are(tmp_path: Path) -> None:
    files = {"a/1.jpg": make_jpeg(1), "a/notes.txt": b"a caption", "b.json": b"{}", "a/done": b"", "c.bin": b"\0\1"}
    source = tree_of(tmp_path / "in", files)
    result = packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))
    reasons = ("not an image: text", "not an image: JSON", "empty, 0 bytes", "not an image")
    assert result.left_out_reasons == dict.fromkeys(reasons, 1)
    assert result.to_dict()["left_out_reasons"] == result.left_out_reasons
    shown = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "shown")
    assert "left out: 4 not packed" in shown.stdout and "    1 not an image: text" in shown.stdout
    assert "\x1b" not in shown.stdout, "colours are for terminals"


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_what_is_left_out_is_coloured_on_a_terminal_only(
    tmp_path: Path, variables: dict[str, str], coloured: bool
) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1), "a/notes.txt": b"a caption"})
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-m", "packer", "convert", source, "--to", "tar", "-o", tmp_path / "out"],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment | variables,
        timeout=120,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert ("\x1b[33m  left out: 1 not packed" in shown) == coloured, shown
    assert "left out: 1 not packed" in shown


def hdf5_file() -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["images"] = np.zeros(4, np.uint8)
    return memory.getvalue()


def npz_file() -> bytes:
    memory = io.BytesIO()
    np.savez(memory, images=np.zeros(4, np.uint8))
    return memory.getvalue()


def tar_file() -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    return memory.getvalue()


TFRECORD = b"\x00\x00\x00\x00\x00\x00\x00\x00\x29\x03\x98\x07\xd8\xea\x82\xa2"  # a record without data
CONTAINERS = {
    "part.parquet": (b"PAR1" + bytes(60) + b"PAR1", "Parquet; packer convert {root}/part.parquet"),
    "data.mdb": (bytes(16) + b"\xde\xc0\xef\xbe" + bytes(100), "LMDB; packer convert "),
    "x-00000": (TFRECORD, "TFRecord; packer convert {root}/x-00000"),
    "x.h5": (hdf5_file(), "HDF5; packer convert {root}/x.h5"),
    "x.npz": (npz_file(), "NumPy; packer convert {root}/x.npz"),
    "x-0.tar": (tar_file(), "tar archive; packer convert {root}/x-0.tar"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tree_of_containers_is_no_set_and_the_command_that_takes_them_is_named(tmp_path: Path, name: str) -> None:
    data, expected = CONTAINERS[name]
    source = tree_of(tmp_path / "in", {f"sub/{name}": data, "sub/readme.txt": b"read me"})
    expected = expected.format(root=f"{source}/sub")
    done = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert f"no images, so no set is made; found\n  1 file: not an image: {expected}" in done.stderr, done.stderr
    assert "1 file: not an image: text" in done.stderr
    assert not (tmp_path / "out").exists(), "nothing may be left of a set that is none"
    with pytest.raises(SourceError, match="no images, so no set is made"):
        packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_a_tree_of_images_none_of_which_can_be_read_is_no_set_under_any_policy(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "in", {f"a/{number}.avif": AVIF for number in range(3)})
    with pytest.raises(SourceError, match="no images, so no set is made; found\n  3 files: AVIF"):
        packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1, on_error="skip"))
    with pytest.raises(BadSampleError, match=r"a/0\.avif: .* AVIF"):
        packer.convert(source, "tar", tmp_path / "out", run=packer.Run(workers=1))


def test_a_failed_replacement_leaves_the_set_that_is_there(tmp_path: Path) -> None:
    good = tree_of(tmp_path / "good", {"a/1.jpg": make_jpeg(1)})
    bad = tree_of(tmp_path / "bad", {"a/1.txt": b"text"})
    packer.convert(good, "tar", tmp_path / "out", run=packer.Run(workers=1))
    with pytest.raises(SourceError, match="no images"):
        packer.convert(bad, "tar", tmp_path / "out", run=packer.Run(workers=1), overwrite=True)
    assert packer.verify(tmp_path / "out", workers=1).ok
    assert packer.convert(good, "tar", tmp_path / "out", run=packer.Run(workers=1)).already_done


def test_an_index_of_no_samples_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "x-0.tar").write_bytes(bytes(10240))
    done = run_packer("index", tmp_path / "x-0.tar", "-o", tmp_path / "out")
    assert done.returncode == 1 and "1 tar shard without a single sample" in done.stderr, done.stderr
    assert not (tmp_path / "out/dataset.json").exists()


def test_verify_does_not_call_a_set_without_samples_whole(tree: Path, tmp_path: Path) -> None:
    packer.convert(tree, "tar", tmp_path / "out", run=packer.Run(workers=1))
    text = (tmp_path / "out/dataset.json").read_text()
    start = text.index('"splits"')
    (tmp_path / "out/dataset.json").write_text(text[:start] + '"splits": {}, "made": {}}')
    done = run_packer("verify", tmp_path / "out")
    assert done.returncode == 1 and "the set has no samples" in done.stdout, done.stdout


@pytest.mark.parametrize("suffix", [".tar", "", ".avif"])
def test_a_large_stray_is_looked_at_before_it_is_read(tmp_path: Path, suffix: str) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    with open(source / f"a/large{suffix}", "wb") as file:
        file.write(AVIF if suffix == ".avif" else tar_file())
        file.truncate(6 << 30)  # takes no room
    line = ("convert", source, "--to", "tar", "-o", tmp_path / "out", "--workers", 1)
    done = run_packer(*line, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)))
    if suffix == ".avif":
        assert done.returncode == 1 and "a/large.avif: has 6,442,450,944 bytes" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "1 not an image: tar archive" in done.stdout
    with readers.open(tmp_path / "out") as reader:
        assert list(reader.keys) == ["a/1"]


def test_a_large_stray_in_an_archive_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    large = make_image(0, (1300, 1300), "BMP")
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.jpg", make_jpeg(1))
        archive.writestr("a/2.dat", np.random.default_rng(0).bytes(5 << 20))
        archive.writestr("b/3.bmp", large)
    result = packer.convert(tmp_path / "in.zip", "tar", tmp_path / "zip", run=packer.Run(workers=1))
    assert (result.samples, result.left_out_reasons) == (2, {"not an image": 1})
    shutil.unpack_archive(tmp_path / "in.zip", tmp_path / "unpacked")
    subprocess.run(["tar", "-czf", tmp_path / "in.tgz", "-C", tmp_path / "unpacked", "."], check=True, timeout=120)
    packer.convert(tmp_path / "in.tgz", "tar", tmp_path / "tgz", run=packer.Run(workers=1))
    with readers.open(tmp_path / "tgz", verify=True) as reader:
        assert sorted(reader.keys) == ["a/1", "b/3"]
        assert large in [bytes(sample.image) for sample in reader]
