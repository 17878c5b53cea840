"""Ops at pack time give the same results as in training: pixels, masks, boxes and points."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import convert, files_of, make_jpeg, tree_of
from image_cases import encoded, exif_blob, picture
from PIL import Image
from suites.programs import run_packer

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError, SourceError
from packer import Reencode
from packer.conversion.ops import DETERMINISTIC, parse_op
from readers.augment import CenterCrop, Crop, Normalize, Op, RandomCrop, RandomHorizontalFlip, Resize
from readers.decode import decode_image
from readers.headers import read_header
from readers.torch import ImageDataset

LISTS: dict[str, list[Op]] = {
    "shrunk and cropped": [Resize(48), CenterCrop(40)],
    "cropped and enlarged": [Crop(5, 7, 30, 40), Resize((90, 120), "bicubic")],
    "cropped": [CenterCrop((33, 47))],
}


def pictures() -> dict[str, bytes]:
    """JPEGs large enough to be scaled in the DCT, rotated, grey; PNGs with alpha, with a palette."""
    turned = picture(120, 90)
    grey, colours = Image.fromarray(np.asarray(picture(100, 80))[..., 0]), picture(64, 99).convert("P")
    return {
        "a.jpg": make_jpeg(1, (300, 400)),
        "b.jpg": encoded(turned, "JPEG", exif=exif_blob(6), quality=95),
        "c.jpg": encoded(grey, "JPEG"),
        "d.png": encoded(picture(80, 77), "PNG"),
        "e.png": encoded(colours, "PNG"),
    }


@pytest.mark.parametrize("ops", LISTS.values(), ids=LISTS)
def test_pixels_equal_those_of_training(tmp_path: Path, ops: list[Op]) -> None:
    source = tree_of(tmp_path / "src", pictures())
    convert(source, tmp_path / "plain", "hdf5")
    assert convert(source, tmp_path / "out", "hdf5", ops=ops, reencode=Reencode("png"), samples=2).samples == 5
    if len(ops) == 1:
        convert(source, tmp_path / "by 2", "hdf5", ops=ops, reencode=Reencode("png"), samples=2, workers=2)
        assert files_of(tmp_path / "out") == files_of(tmp_path / "by 2")
    info = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert info["made"]["options"]["ops"] == [repr(op) for op in ops]
    with readers.open(tmp_path / "plain") as before, readers.open(tmp_path / "out") as after:
        expected = ImageDataset(before, ops)
        for i in range(len(after)):
            assert after.keys[i] == before.keys[i]
            pixels = decode_image(after.read(i))
            assert torch.equal(torch.from_numpy(pixels).permute(2, 0, 1), expected[i][0]), after.keys[i]
        assert {*after.info.media.tolist()} == {2} and {*after.info.orientation.tolist()} == {1}
        assert [after.info.components.tolist()[i] for i in (0, 2)] == [3, 1], "a grey image became colour"


def test_images_that_ops_do_not_change_keep_their_bytes(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "src", {"a.jpg": make_jpeg(1, (40, 40)), "b.jpg": make_jpeg(2, (40, 60))})
    convert(source, tmp_path / "out", ops=[CenterCrop(40)])
    with readers.open(tmp_path / "out") as reader:
        assert bytes(reader.read(0)) == (source / "a.jpg").read_bytes()
        header = read_header(reader.read(1))
        assert (header.media, header.height, header.width) == ("jpeg", 40, 40)
    convert(source, tmp_path / "out", ops=[CenterCrop(40)], reencode=Reencode(quality=30), overwrite=True)
    with readers.open(tmp_path / "out") as reader:
        assert bytes(reader.read(0)) != (source / "a.jpg").read_bytes()


def sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    corners = np.sort(rng.uniform(0, 60, (5, 2, 2)), axis=1)
    return {
        "image": np.asarray(picture(64 + number, 80)),
        "mask": rng.integers(0, 200, (64 + number, 80)).astype(np.uint8),
        "boxes": corners.reshape(5, 4).astype(np.float32),
        "box_labels": rng.integers(0, 9, 5),
        "points": rng.uniform(0, 80, (3, 2)).astype(np.float32),
        "caption": f"number {number}",
        "label": number,
    }


@pytest.mark.parametrize("indexed", [True, False], ids=["workers", "writer"])
@pytest.mark.parametrize("ops", LISTS.values(), ids=LISTS)
def test_masks_boxes_and_points_follow(tmp_path: Path, ops: list[Op], indexed: bool) -> None:
    samples = [sample(i) for i in range(3)]
    convert(samples, tmp_path / "plain", "tfrecord")
    convert(samples if indexed else iter(samples), tmp_path / "out", "tfrecord", ops=ops, reencode=Reencode("png"))
    assert packer.verify(tmp_path / "out", deep=True).ok
    fields = ("image", "mask", "boxes", "box_labels", "points", "caption", "label")
    with readers.open(tmp_path / "plain") as before, readers.open(tmp_path / "out") as after:
        trained, made = ImageDataset(before, ops, fields=fields), ImageDataset(after, fields=fields)
        for i in range(3):
            for name, expected, other in zip(fields, trained[i], made[i], strict=True):
                assert torch.equal(expected, other) if isinstance(expected, torch.Tensor) else expected == other, name


def test_a_mask_from_a_file_keeps_its_numbers_and_gets_a_matching_name(tmp_path: Path) -> None:
    mask = np.arange(64 * 80, dtype=np.int32).reshape(64, 80).astype(np.uint8)
    files = {"a.png": encoded(picture(64, 80), "PNG"), "m.bmp": encoded(Image.fromarray(mask), "BMP")}
    source = tree_of(tmp_path, files | {"t.csv": b"path,mask\na.png,m.bmp\n"})
    opened = packer.open_source(source / "t.csv", fields={"mask:mask": "mask"})
    convert(opened, tmp_path / "out", ops=[CenterCrop(32)])
    with readers.open(tmp_path / "out") as reader:
        assert reader.table.name(0, "mask") == "m.png"
        packed = np.asarray(Image.open(io.BytesIO(bytes(reader.read(0, "mask")))))
        assert np.array_equal(packed, mask[16:48, 24:56])


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("CenterCrop:256", CenterCrop(256)),
        ("Resize:256x320", Resize((256, 320))),
        ("Resize:256,interpolation=bicubic", Resize(256, "bicubic")),
        ("Crop:40,15,148,148", Crop(40, 15, 148, 148)),
        ("RandomCrop:32", "draws at random.*: at pack time there are CenterCrop, Crop, Resize"),
        ("Rotate:3", "'Rotate' is not an op"),
        ("Resize", "missing 1 required positional argument: 'size'"),
        ("Resize:big", "a size is one or two whole numbers"),
        ("Resize:8,filter=box", "unexpected keyword argument 'filter'"),
    ],
)
def test_the_text_of_an_op(text: str, op: Any) -> None:
    assert DETERMINISTIC == ("CenterCrop", "Crop", "Resize")
    if isinstance(op, Op):
        assert parse_op(text) == op
    else:
        with pytest.raises(ValueError, match=op):
            parse_op(text)


def test_ops_by_the_command_line(tmp_path: Path) -> None:
    source = tree_of(tmp_path / "src", pictures())
    more = ("--to", "tar", "-o", tmp_path / "out")
    ended = run_packer("convert", source, *more, "--op", "Resize:32", "--op", "CenterCrop:32", "--reencode", "webp")
    assert ended.returncode == 0, ended.stderr
    with readers.open(tmp_path / "out") as reader:
        assert {*reader.info.media.tolist()} == {3} and {*reader.info.height.tolist()} == {32}
        assert reader.table.name(0) == "a.webp"
    ended = run_packer("convert", source, *more, "--op", "RandomCrop:32")
    assert ended.returncode == 2 and "CenterCrop, Crop, Resize" in ended.stderr


@pytest.mark.parametrize(
    ("ops", "options", "error", "message"),
    [
        ([RandomCrop(8)], {}, ValueError, "RandomCrop.* draws at random: at pack time there are CenterCrop"),
        ([RandomHorizontalFlip()], {}, ValueError, "draws at random"),
        ([Normalize((0.5,) * 3, (0.5,) * 3)], {}, ValueError, "does not turn one image into another"),
        ([Resize(8), Resize(4)], {}, ValueError, "second resize"),
        ([Resize(8)], {"reencode": Reencode(max_side=4)}, ValueError, "leave one of them out"),
        ([Resize(8)], {"decode": "unchanged"}, ValueError, "decode='RGB'"),
        ([CenterCrop(90)], {}, BadSampleError, r"b\.jpg: CenterCrop.* does not fit into the 60 x 40"),
    ],
)
def test_ops_that_cannot_be_packed(tmp_path: Path, ops: Any, options: Any, error: Any, message: str) -> None:
    source = tree_of(tmp_path / "src", {"b.jpg": make_jpeg(2, (40, 60))})
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", ops=ops, **options)


def test_a_second_image_is_refused(tmp_path: Path) -> None:
    twice = [{"image": make_jpeg(1, (9, 9)), "depth": make_jpeg(2, (9, 9))}]
    with pytest.raises(SourceError, match="depth is another image of the sample"):
        convert(twice, tmp_path / "out", ops=[Resize(8)])


def test_without_torch_the_error_names_the_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tree_of(tmp_path / "src", {"b.jpg": make_jpeg(2)})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"changing images by ops needs torch: .*pip install .*\[torch\]"):
        convert(source, tmp_path / "out", ops=[Resize(8)])
    assert not (tmp_path / "out").exists()
