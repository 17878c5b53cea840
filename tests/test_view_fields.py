"""`packer.view` with more than images: masks, boxes, texts, raw pixels, and sets at addresses."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import make_jpeg
from PIL import Image
from view_client import Client

import packer
import readers
from packer.testing.samples import make_image
from packer.tools.view.document import same_bytes
from readers.fields import encode_field

SIZE = (20, 30)
CAPTION = "</script><script>alert(1)</script>\u202e"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two samples with all kinds of fields, and one with only an image."""
    root = tmp_path_factory.mktemp("fields") / "set"
    kinds = {"image": "image", "mask": "mask", "boxes": "boxes", "caption": "text", "json": "json"}
    with packer.writer(root, to="tar", fields=kinds, classes=["a"]) as writer:
        for number in range(2):
            writer.write(
                f"k{number}",
                image=make_jpeg(number, SIZE[::-1]),
                label=0,
                mask=np.full(SIZE, 7 + 1000 * number, np.uint16),
                boxes=np.array([[1, 2, 3, 4.5]], np.float32),
                caption=CAPTION,
                json={"x": CAPTION},
            )
        writer.write("plain", image=make_image(5, (8, 8), "TIFF"))
    with packer.view(root) as viewing, Client(viewing.url) as client:
        yield client


def test_fields_are_sent_as_stored(client: Client) -> None:
    document = client.get("sample/train/1.json").json
    fields = {field["name"]: field for field in document["fields"]}
    assert {name: field["kind"] for name, field in fields.items()} == {
        "image": "image", "mask": "mask", "boxes": "boxes", "caption": "text", "json": "json"
    }  # fmt: skip
    assert all(field["crc32c"] == field["computed"] for field in fields.values()) and "error" not in document
    boxes = client.get("sample/train/1/boxes")
    assert boxes.body == bytes(encode_field("boxes", np.array([[1, 2, 3, 4.5]], np.float32)))
    caption = client.get("sample/train/1/caption")
    assert caption.body.decode() == CAPTION
    for reply in (boxes, caption, client.get("sample/train/1/json")):  # a browser does not interpret it as a page
        assert reply.headers["content-type"] == "application/octet-stream"


def test_masks_keep_their_numbers(client: Client) -> None:
    for index, number in ((0, 7), (1, 1007)):
        shown = np.asarray(Image.open(io.BytesIO(client.get(f"sample/train/{index}/mask?as=png").body)))
        assert shown.shape == SIZE and (shown == number).all()


def test_a_sample_may_lack_fields(client: Client) -> None:
    document = client.get("sample/train/2.json").json
    assert [field["name"] for field in document["fields"]] == ["image"] and document["label"] is None
    assert client.get("sample/train/2/mask").status == 404
    assert client.get("sample/train/2/image").headers["content-type"] == "image/tiff"
    assert Image.open(io.BytesIO(client.get("sample/train/2/image?as=png").body)).format == "PNG"
    assert client.where("train", 'has("mask")').json["count"] == 2


def test_raw_pixels_are_sent_as_png(tmp_path: Path) -> None:
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    with packer.writer(tmp_path / "set", to="hdf5", images=packer.Images(reencode=packer.Reencode("raw"))) as writer:
        writer.write("one", image=pixels)
    with packer.view(tmp_path / "set") as viewing, Client(viewing.url) as client:
        reply = client.get("sample/train/0/image")
        assert reply.headers["content-type"] == "image/png"
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(reply.body))), pixels)
        assert "error" not in client.get("sample/train/0.json").json
        assert len(client.order("order/train/damaged.json")[0]) == 0


def test_a_remote_set_is_shown(address: str, packed: Path) -> None:
    with packer.view(address) as viewing, Client(viewing.url) as client, readers.open(packed, "train") as local:
        document = client.get("view.json").json
        assert document["address"] == address and document["container"] == "tar"
        train = document["splits"]["train"]
        assert np.array_equal(client.column(train["columns"]["label"]), local.labels)
        assert client.get("sample/train/9/image").body == local.read(9)
        assert client.get("thumb/train/9").status == 200
        assert len(client.order(train["orders"]["damaged"]["document"])[0]) == 0


def test_the_runs_of_many_duplicates_stay_short() -> None:
    sizes = np.repeat(np.arange(1, 12_001), 2)
    order = same_bytes(sizes, np.zeros(len(sizes), np.uint32), [str(i) for i in range(len(sizes))])
    assert len(order.values) == len(sizes) and len(order.runs) == 10_001
    assert order.runs[-1] == ("2,000 more groups", 20_000, 4_000)
    assert order.runs[1] == ("2", 2, 2)
