"""Notebook representations: images that decode, escaped names, and a word where an image cannot be shown."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
from conftest import make_jpeg
from PIL import Image

import packer
import readers
from readers.table import Sample


def pictures(shown: str) -> list[tuple[int, int]]:
    """The (width, height) of the images in some HTML, which must decode."""
    codes = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', shown)
    return [Image.open(io.BytesIO(base64.b64decode(code))).size for code in codes]


def test_a_reader_shows_classes_and_pictures(tmp_path: Path) -> None:
    for number, name in enumerate(("<cat>", "dog & co")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for image in range(6):
            (tmp_path / "images" / name / f"{image}.jpg").write_bytes(make_jpeg(10 * number + image, (200, 100)))
    packer.convert(tmp_path / "images", "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        shown = reader._repr_html_()
    assert pictures(shown) == [(96, 48)] * 8
    assert "12 samples" in shown and "&lt;cat&gt; 6, dog &amp; co 6" in shown and "<cat>" not in shown


def test_a_sample_shows_each_field() -> None:
    file = io.BytesIO()
    np.save(file, np.zeros((3, 4), np.float32))
    broken = make_jpeg(1, (64, 64))[:200]
    fields = {"image": make_jpeg(1, (600, 300)), "boxes": file.getvalue(), "caption": b"a <b>", "broken": broken}
    shown = Sample("a<b", 3, {**fields, "raw": b"\xff\x00"})._repr_html_()
    assert pictures(shown) == [(256, 128)]
    for text in ("a&lt;b</b>, label 3", "float32 [3, 4], 176 bytes", "a &lt;b&gt;  (5 bytes)", "2 bytes"):
        assert text in shown
    assert re.search(r"broken</td><td>[^<]*, 200 bytes", shown)


def test_an_image_of_too_many_pixels_is_named_and_not_decoded() -> None:
    file = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(file, "PNG")
    shown = Sample("large", None, {"image": file.getvalue()})._repr_html_()
    assert not pictures(shown) and "20000 x 10000 pixels are too many" in shown
