"""Images of one size are resized together, with the same pixels as one by one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_jpeg
from PIL import Image

import readers
from readers.augment import CenterCrop, ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, cpu
from readers.headers import parse_header
from readers.loader import Decode, ImageLoader

SIZE = (89, 109)  # width, height
FACES: list[Any] = [CenterCrop(74), Resize((32, 32)), RandomHorizontalFlip()]
COUNT = 24


@pytest.fixture
def faces(tmp_path: Path) -> Path:
    for i in range(COUNT):
        (tmp_path / f"{i:02d}.jpg").write_bytes(make_jpeg(i, SIZE))
    return tmp_path


def turned(seed: int) -> bytes:
    """A JPEG that is upright at SIZE after its EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return make_jpeg(seed, SIZE[::-1], exif=exif)


def converted(kind: str, **options: Any) -> Callable[[int], bytes]:
    def make(seed: int) -> bytes:
        memory = io.BytesIO()
        Image.open(io.BytesIO(make_jpeg(seed, SIZE))).save(memory, kind, **options)
        return memory.getvalue()

    return make


ODD_ONES: dict[str, Callable[[int], bytes]] = {
    "turned": turned,
    "progressive": converted("JPEG", progressive=True),
    "png": converted("PNG"),
    "other size": lambda seed: make_jpeg(seed, (100, 90)),
}


def batches(folder: Path, **options: Any) -> list[torch.Tensor]:
    """By libjpeg: the codec resizes each image in the call that decodes it."""
    options = {"augment": FACES, "seed": 3, "decode": Decode(decoder="cpu"), **options}
    return [images.clone() for images, _ in ImageLoader(readers.open_folder(folder), 12, **options)]


def one_by_one(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> list[torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "alike", lambda jobs, sizes: False)
        return batches(folder, **options)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call resizes, from now on."""
    calls: list[int] = []
    resize = cpu._resize_into

    def counted(image: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        calls.append(len(image))
        return resize(image, *arguments, **named)

    monkeypatch.setattr(cpu, "_resize_into", counted)
    return calls


@pytest.mark.parametrize(
    "augment",
    [
        FACES,
        [Resize((16, 20))],
        [Resize(32), CenterCrop(24), RandomHorizontalFlip()],
        [CenterCrop(64)],
        [*FACES, Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))],
        [*FACES, ColorJitter(0.4, 0.4, 0.4)],
        [RandomResizedCrop(24), RandomHorizontalFlip()],
        [],
    ],
    ids=["faces", "reduced", "cropped after", "not resized", "floats", "colours", "random boxes", "as they are"],
)
def test_the_same_pixels(monkeypatch: pytest.MonkeyPatch, faces: Path, augment: list[Any], threads: int = 3) -> None:
    expected = one_by_one(monkeypatch, faces, augment=augment, threads=threads)
    assert all(map(torch.equal, batches(faces, augment=augment, threads=threads), expected)) and len(expected) == 2


def test_one_call_for_many(monkeypatch: pytest.MonkeyPatch, faces: Path) -> None:
    calls = count_calls(monkeypatch)
    batches(faces, threads=1)
    assert calls == [12, 12]
    calls.clear()
    monkeypatch.setattr(cpu, "MAX_STACK_BYTES", 5 * SIZE[0] * SIZE[1] * 3)
    batches(faces, threads=1)
    assert calls == [5, 5, 2] * 2
    calls.clear()
    monkeypatch.setattr(cpu, "MAX_STACK_BYTES", 2 * SIZE[0] * SIZE[1] * 3 - 1)
    batches(faces, threads=1)
    assert calls == [1] * COUNT


@pytest.mark.parametrize("kind", ODD_ONES)
def test_an_odd_one_among_them(monkeypatch: pytest.MonkeyPatch, faces: Path, kind: str) -> None:
    for number in (0, 7, 13):
        (faces / f"{number:02d}.jpg").write_bytes(ODD_ONES[kind](100 + number))
    assert all(map(torch.equal, batches(faces), one_by_one(monkeypatch, faces)))


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_bad_one_among_them(monkeypatch: pytest.MonkeyPatch, faces: Path, on_error: str) -> None:
    """The header is whole and so is its size; the pixels are another matter."""
    data = bytearray(make_jpeg(5, SIZE))
    header = parse_header(bytes(data))
    (faces / "05.jpg").write_bytes(b"\xff\xd8" + data[2:].replace(b"\xff\xda", b"\xff\xdc", 1))
    (faces / "11.jpg").write_bytes(b"not an image")
    assert (header.width, header.height) == SIZE
    with pytest.warns(UserWarning, match="2 bad samples"):
        expected = one_by_one(monkeypatch, faces, on_error=on_error)
    with pytest.warns(UserWarning, match="2 bad samples"):
        found = batches(faces, on_error=on_error)
    assert [len(images) for images in found] == [len(images) for images in expected]
    assert all(map(torch.equal, found, expected))
