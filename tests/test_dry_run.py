"""What a dry run says a conversion will take: measured by packing some of its samples, and nothing is left of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import by_subject, make_jpeg, tree_of
from suites.programs import run_packer

import packer
from packer.conversion.options import Reencode


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """300 images, and an empty directory for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    files = {f"class{i % 3}/{i:03d}.jpg": make_jpeg(i, (48 + i % 40, 64)) for i in range(300)}
    return tree_of(tmp_path / "images", files)


@pytest.mark.parametrize("reencode", [None, Reencode("png"), Reencode(max_side=16)])
@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_the_expected_size_is_about_right(images: Path, tmp_path: Path, to: str, reencode: Reencode | None) -> None:
    options = {"to": to, "output": tmp_path / "out", "reencode": reencode, "workers": 1, "samples_per_shard": 100}
    planned = packer.convert(images, dry_run=True, **by_subject(options))
    assert planned.expected_bytes is not None and planned.expected_seconds is not None
    assert planned.expected_seconds > 0 and not (tmp_path / "out").exists()
    assert list((tmp_path / "temporary").iterdir()) == []
    made = packer.convert(images, **by_subject(options))
    assert planned.expected_bytes == pytest.approx(made.shard_bytes, rel=0.1)


def test_what_cannot_be_packed_does_not_end_a_dry_run(images: Path, tmp_path: Path) -> None:
    for path in images.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:100])
    planned = packer.convert(images, to="tar", output=tmp_path / "out", dry_run=True)
    assert planned.samples == 300 and planned.dry_run


def test_the_command_says_size_and_time(images: Path, tmp_path: Path) -> None:
    shown = run_packer("convert", images, "--to", "tar", "-o", tmp_path / "out", "--dry-run").stdout
    assert "would hold 300 samples" in shown and "as measured by packing some of the samples" in shown
    value = json.loads(run_packer("convert", images, "--to", "tar", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert value["expected_bytes"] > value["payload_bytes"] and value["expected_seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "temporary"]
