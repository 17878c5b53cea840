"""Files that are not packed are named and counted, and are an error where they are images; no set is empty."""

from __future__ import annotations

import io
import os
import pty
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import convert, make_jpeg, tree_of
from suites.containers import record, tar_of
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
    ("name", "data", "why"),
    [
        ("a/2.avif", AVIF, "avif image"),
        ("a/2.heic", HEIC, "heif image"),
        ("a/2.jp2", JPEG_2000, "found JPEG 2000, an unsupported image format"),
        ("a/2.dcm", bytes(128) + b"DICM", "found DICOM, .*; write its pixels as an array:  numpy.save"),
        ("a/2.jxl", JPEG_XL, "jxl image: "),
        ("a/2", JPEG_2000, "found JPEG 2000"),
        ("a/2.jpg", AVIF, "avif image"),
        ("a/2.avif", b"", "is empty, 0 bytes"),
        ("a/2.tga", b"no magic at all", "expected the magic of"),
    ],
)
def test_unreadable_images_stop_a_conversion_or_are_counted(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1), name: data})
    with pytest.raises(BadSampleError, match=f"{name}: .*{why}"):
        convert(source, tmp_path / "raise")
    for policy, action in (("skip", "skipped"), ("quarantine", "quarantined")):
        result = convert(source, tmp_path / policy, on_error=policy)
        assert (result.samples, result.left_out) == (1, {action: 1})
        assert sum(result.left_out_reasons.values()) == 1, result.left_out_reasons
    assert (tmp_path / "quarantine/quarantine/train" / name).read_bytes() == data


def test_other_files_are_left_out_and_listed_by_kind(tmp_path: Path) -> None:
    files = {"a/1.jpg": make_jpeg(1), "a/notes.txt": b"a caption", "b.json": b"{}", "a/done": b"", "c.bin": b"\0\1"}
    source = tree_of(tmp_path / "in", files)
    result = convert(source, tmp_path / "out")
    reasons = ("not an image: text", "not an image: JSON", "empty, 0 bytes", "not an image")
    assert result.left_out_reasons == dict.fromkeys(reasons, 1)
    assert result.to_dict()["left_out_reasons"] == result.left_out_reasons
    shown = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "shown")
    assert "left out: 4 not packed" in shown.stdout and "    1 not an image: text" in shown.stdout
    assert "\x1b" not in shown.stdout, "colours outside a terminal"
    for variables in ({}, {"NO_COLOR": "1"}):
        on_terminal = shown_on_a_terminal(source, tmp_path / f"terminal{len(variables)}", variables)
        assert ("\x1b[33m  left out: 4 not packed" in on_terminal) == (not variables), on_terminal
        assert "left out: 4 not packed" in on_terminal


def shown_on_a_terminal(source: Path, out: Path, variables: dict[str, str]) -> str:
    parent, child = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "packer", "convert", source, "--to", "tar", "-o", out]
    errors, environment = subprocess.DEVNULL, environment | variables
    subprocess.run(command, stdout=child, stderr=errors, env=environment, timeout=120, check=True)
    os.close(child)
    shown = os.read(parent, 1 << 16).decode()
    os.close(parent)
    return shown


def hdf5_file() -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["images"] = np.zeros(4, np.uint8)
    return memory.getvalue()


def npz_file() -> bytes:
    memory = io.BytesIO()
    np.savez(memory, images=np.zeros(4, np.uint8))
    return memory.getvalue()


CONTAINERS = {
    "part.parquet": (b"PAR1" + bytes(60) + b"PAR1", "Parquet; packer convert {root}/part.parquet"),
    "data.mdb": (bytes(16) + b"\xde\xc0\xef\xbe" + bytes(100), "LMDB; packer convert "),
    "x-00000": (record(b""), "TFRecord; packer convert {root}/x-00000"),
    "x.h5": (hdf5_file(), "HDF5; packer convert {root}/x.h5"),
    "x.npz": (npz_file(), "NumPy; packer convert {root}/x.npz"),
    "x.nii.gz": (b"\x1f\x8b" + bytes(60), "NIfTI; write arrays, and convert their folder:  numpy.save"),
    "x-0.tar": (tar_of(("a.jpg", b"")), "tar archive; packer convert {root}/x-0.tar"),
}


def test_a_tree_of_containers_is_refused_with_the_commands_for_them(tmp_path: Path) -> None:
    for number, (name, (data, expected)) in enumerate(CONTAINERS.items()):
        source = tree_of(tmp_path / f"in{number}", {f"sub/{name}": data, "sub/readme.txt": b"read me"})
        message = f"no images, so no set is made; found\n  1 file: not an image: {expected}"
        with pytest.raises(SourceError) as caught:
            convert(source, tmp_path / "out")
        assert message.format(root=f"{source}/sub") in str(caught.value)
        assert "1 file: not an image: text" in str(caught.value)
        assert not (tmp_path / "out").exists(), "files of the refused set are left"
    done = run_packer("convert", source, "--to", "tar", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (1, "") and str(caught.value) in done.stderr


def test_a_tree_of_unreadable_images_is_refused_under_every_policy(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "in", {f"a/{number}.jp2": JPEG_2000 for number in range(3)})
    with pytest.raises(SourceError, match="no images, so no set is made; found\n  3 files: JPEG 2000"):
        convert(source, tmp_path / "out", on_error="skip")
    with pytest.raises(BadSampleError, match=r"a/0\.jp2: .* JPEG 2000"):
        convert(source, tmp_path / "out")


def test_a_failed_replacement_leaves_the_existing_set(tmp_path: Path) -> None:
    good = tree_of(tmp_path / "good", {"a/1.jpg": make_jpeg(1)})
    bad = tree_of(tmp_path / "bad", {"a/1.txt": b"text"})
    convert(good, tmp_path / "out")
    with pytest.raises(SourceError, match="no images"):
        convert(bad, tmp_path / "out", overwrite=True)
    assert packer.verify(tmp_path / "out", workers=1).ok
    assert convert(good, tmp_path / "out").already_done


def test_an_index_or_a_set_of_no_samples_is_a_failure(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "x-0.tar").write_bytes(bytes(10240))
    done = run_packer("index", tmp_path / "x-0.tar", "-o", tmp_path / "out")
    assert done.returncode == 1 and "1 tar shard without a single sample" in done.stderr, done.stderr
    assert not (tmp_path / "out/dataset.json").exists()
    convert(tree, tmp_path / "set")
    text = (tmp_path / "set/dataset.json").read_text()
    (tmp_path / "set/dataset.json").write_text(text[: text.index('"splits"')] + '"splits": {}, "made": {}}')
    done = run_packer("verify", tmp_path / "set")
    assert done.returncode == 1 and "the set has no samples" in done.stdout, done.stdout


@pytest.mark.parametrize("suffix", [".tar", ".avif"])
def test_a_large_stray_file_is_recognised_by_its_first_bytes(tmp_path: Path, suffix: str) -> None:
    source = tree_of(tmp_path / "in", {"a/1.jpg": make_jpeg(1)})
    with open(source / f"a/large{suffix}", "wb") as file:
        file.write(AVIF if suffix == ".avif" else tar_of(("a.jpg", b"")))
        file.truncate(6 << 30)  # a sparse file
    line = ("convert", source, "--to", "tar", "-o", tmp_path / "out", "--workers", 1)
    done = run_packer(*line, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)))
    if suffix == ".avif":
        assert done.returncode == 1 and "a/large.avif: has 6,442,450,944 bytes" in done.stderr, done.stderr
        return
    assert done.returncode == 0 and "1 not an image: tar archive" in done.stdout, done.stderr
    with readers.open(tmp_path / "out") as reader:
        assert list(reader.keys) == ["a/1"]


def test_a_large_stray_member_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    large = make_image(0, (1300, 1300), "BMP")
    with zipfile.ZipFile(tmp_path / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.jpg", make_jpeg(1))
        archive.writestr("a/2.dat", np.random.default_rng(0).bytes(5 << 20))
        archive.writestr("b/3.bmp", large)
    result = convert(tmp_path / "in.zip", tmp_path / "zip")
    assert (result.samples, result.left_out_reasons) == (2, {"not an image": 1})
    shutil.unpack_archive(tmp_path / "in.zip", tmp_path / "unpacked")
    subprocess.run(["tar", "-czf", tmp_path / "in.tgz", "-C", tmp_path / "unpacked", "."], check=True, timeout=120)
    convert(tmp_path / "in.tgz", tmp_path / "tgz")
    with readers.open(tmp_path / "tgz", verify=True) as reader:
        assert sorted(reader.keys) == ["a/1", "b/3"]
        assert large in [bytes(sample.image) for sample in reader]
