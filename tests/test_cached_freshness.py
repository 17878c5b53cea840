"""A cache over a folder: files may be rewritten under their names, and nobody gets pixels of another file."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg

import readers

SAMPLES = 4


def fill(folder: Path, seed: int) -> list[bytes]:
    """JPEGs with the same names and sizes for every seed, and the same old times."""
    folder.mkdir(exist_ok=True)
    images = []
    for number in range(SAMPLES):
        images.append(make_jpeg(seed + number).ljust(4000, b"\0"))
        path = folder / f"{number}.jpg"
        path.write_bytes(images[-1])
        os.utime(path, ns=(10**18, 10**18))
    return images


def images_of(reader: Any) -> list[bytes]:
    return [bytes(data) for data in reader.read_many(range(len(reader)))]


def opened(folder: Path, place: dict[str, Any], **options: Any) -> Any:
    return readers.cached(readers.open_folder(folder), **options, **place)


def test_folders_of_the_same_names_and_sizes_share_nothing(tmp_path: Path, place: dict[str, Any]) -> None:
    left, right = fill(tmp_path / "left", 1), fill(tmp_path / "right", 100)
    with opened(tmp_path / "left", place) as first, opened(tmp_path / "right", place) as second:
        assert images_of(first) == images_of(first) == left
        assert images_of(second) == images_of(second) == right, "pixels of the other folder"


def test_who_opens_a_rewritten_folder_gets_what_it_holds_now(tmp_path: Path, place: dict[str, Any]) -> None:
    """Even where the new files have the sizes and modification times of the old ones."""
    fill(tmp_path / "folder", 1)
    with opened(tmp_path / "folder", place) as before:
        images_of(before)
        now = fill(tmp_path / "folder", 100)
        with opened(tmp_path / "folder", place) as after:
            assert images_of(after) == images_of(after) == now, "pixels of files that were overwritten"


def test_one_folder_by_two_paths_is_one_cache(tmp_path: Path, place: dict[str, Any]) -> None:
    images = fill(tmp_path / "folder", 1)
    (tmp_path / "link").symlink_to("folder")
    with opened(tmp_path / "folder", place) as first, opened(tmp_path / "link", place) as second:
        assert images_of(first) == images_of(second) == images
        assert second.stats().hits == SAMPLES


@pytest.mark.parametrize("keep", ["encoded", "decoded:16"])
@pytest.mark.parametrize("over", ["folder", "selection", "pickled"])
def test_check_always_sees_a_rewritten_file(tmp_path: Path, place: dict[str, Any], keep: str, over: str) -> None:
    fill(tmp_path / "folder", 1)
    base: Any = readers.open_folder(tmp_path / "folder")
    base = base.select(indices=range(SAMPLES)) if over == "selection" else base
    with readers.cached(base, keep=keep, check="always", **place) as reader:
        seen = pickle.loads(pickle.dumps(reader)) if over == "pickled" else reader
        images_of(seen)
        expected = [bytes(seen.keep.convert(image)) for image in fill(tmp_path / "folder", 100)]
        for _ in range(3):
            assert images_of(seen) == expected and bytes(seen.read(2)) == expected[2]
        assert seen.stats().present == 0, "what is not what was listed is not kept"


def test_what_changed_since_it_was_listed_is_never_stored(tmp_path: Path, place: dict[str, Any]) -> None:
    """Or the next one to list the old files again, restored with their times, would get the new ones' pixels."""
    old = fill(tmp_path / "folder", 1)
    with opened(tmp_path / "folder", place) as reader:
        shutil.copytree(tmp_path / "folder", tmp_path / "backup")
        new = fill(tmp_path / "folder", 100)
        assert reader.prefill(threads=1) == SAMPLES and reader.stats().present == 0
        assert images_of(reader) == new and reader.stats().present == 0
        assert reader.stats().passed == SAMPLES and old != new
