"""Small image trees that most tests start from."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest_plugins = ["fake_cache"]


def make_jpeg(seed: int, size: tuple[int, int] = (32, 24), **options: object) -> bytes:
    """A small JPEG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(out, "JPEG", **options)
    return out.getvalue()


@pytest.fixture
def jpeg() -> Callable[..., bytes]:
    return make_jpeg


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train and val with three classes each, 12 and 3 images a class; nobody may write to it."""
    root = tmp_path_factory.mktemp("tree") / "images"
    seed = 0
    for split, count in (("train", 12), ("val", 3)):
        for name in ("cat", "dog", "owl"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                seed += 1
                (folder / f"{name}_{number:03d}.JPEG").write_bytes(make_jpeg(seed))
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Where a test keeps a cache: its own folder."""
    request.getfixturevalue("fake_cache")
    return {"directory": tmp_path, "job": "test"}


@pytest.fixture
def no_room(fake_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cache, "room", 10)


@pytest.fixture
def spoil() -> Any:
    """Flips a byte of a sample in a cache."""

    def spoil(reader: Any, index: int, at: int = -1) -> None:
        shelf = reader._shelf
        slot = shelf.slots.first("image") + index
        data, crc = shelf.store.data[slot]
        changed = bytearray(data)
        changed[at] ^= 1
        shelf.store.data[slot] = (bytes(changed), crc)

    return spoil
