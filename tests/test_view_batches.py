"""The preview of batches: the samples, random parameters and pixels of a training job."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from PIL import Image
from view_client import Client

import packer
import readers
from readers import Decode, Ranks
from readers.augment import ColorJitter, MixUp, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.augment.ops import Op, RandAugment, RandomErasing
from readers.loader import ImageLoader
from readers.order import ClassBalanced, Sequential, Shuffled, block_shuffled


@pytest.fixture(scope="module")
def root(photos: Path, pack: Callable[..., Path]) -> Path:
    return pack(photos, samples_per_shard=10)


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with packer.view(root) as viewing, Client(viewing.url) as client:
        yield client


def asked(**options: Any) -> str:
    return "batches.json?" + urlencode({"split": "train", **options}, doseq=True)


@pytest.mark.parametrize(
    ("texts", "ops"),
    [
        (
            ["RandomResizedCrop:24,scale=0.2x1", "RandomHorizontalFlip"],
            [RandomResizedCrop(24, scale=(0.2, 1.0)), RandomHorizontalFlip()],
        ),
        (["Resize:30x20", "ColorJitter:0.4,0.4"], [Resize((30, 20)), ColorJitter(0.4, 0.4)]),
        (
            ["RandAugment", "RandomResizedCrop:20x16", "RandomErasing:p=1"],
            [RandAugment(), RandomResizedCrop((20, 16)), RandomErasing(p=1)],
        ),
        (["Resize:24x24", "MixUp:0.2"], [Resize((24, 24)), MixUp(0.2)]),
    ],
)
def test_pixels_equal_those_of_the_loader(client: Client, root: Path, texts: list[str], ops: list[Op]) -> None:
    """Batch 2 of epoch 3 on rank 1 of 2, bit for bit, though the preview skips the earlier batches."""
    with readers.open(root, "train") as reader:
        options: Any = {"ranks": Ranks(rank=1, world_size=2), "decode": Decode(layout="NHWC"), "seed": 9}
        loader = ImageLoader(reader, 5, augment=ops, fields=("image", "index"), **options)
        for _ in range(3):
            for _ in loader:
                break
        images, index = [(images, index) for images, index in loader][2]
    document = client.get(asked(seed=9, epoch=3, batch=2, batch_size=5, ranks=2, rank=1, op=texts)).json
    assert [sample["index"] for sample in document["samples"]] == index.tolist()
    for sample, expected in zip(document["samples"], images.numpy(), strict=True):
        picture = client.get(sample["image"])
        assert picture.status == 200, picture.body
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.body))), expected)


@pytest.mark.parametrize("name", ["shuffled", "block", "stored", "balanced"])
def test_samples_follow_the_order(client: Client, root: Path, name: str) -> None:
    with readers.open(root, "train") as reader:
        orders = {
            "shuffled": Shuffled(len(reader), 4),
            "block": block_shuffled(reader, 4),
            "stored": Sequential(len(reader)),
            "balanced": ClassBalanced(reader.labels, seed=4),
        }
        expected = orders[name].indices(1, np.arange(8, 16))
        keys = [reader.keys[i] for i in expected]
    document = client.get(asked(order=name, seed=4, epoch=1, batch=1, batch_size=8)).json
    assert [sample["index"] for sample in document["samples"]] == expected.tolist()
    assert [sample["key"] for sample in document["samples"]] == keys
    assert [sample["position"] for sample in document["samples"]] == list(range(8, 16))
    assert document["batches"] == (6 if name == "stored" else 5)


def test_pixels_of_a_folder_that_is_not_packed(photos: Path) -> None:
    with packer.view(photos) as viewing, Client(viewing.url) as client:
        samples = client.get(asked(seed=9, batch=1, batch_size=4, op=["RandomResizedCrop:24"])).json["samples"]
        pictures = [np.asarray(Image.open(io.BytesIO(client.get(sample["image"]).body))) for sample in samples]
    with readers.open_folder(photos, "train") as reader:
        decode = Decode(layout="NHWC")
        loader = ImageLoader(reader, 4, augment=[RandomResizedCrop(24)], fields=("image", "key"), seed=9, decode=decode)
        images, keys = list(loader)[1]
    assert [sample["key"] for sample in samples] == list(keys)
    assert np.array_equal(np.stack(pictures), images.numpy())


def test_random_parameters_are_described_in_words(client: Client) -> None:
    texts = ["RandomResizedCrop:24", "RandomHorizontalFlip", "ColorJitter:0.4"]
    samples = client.get(asked(batch_size=16, op=texts)).json["samples"]
    for sample in samples:
        crop, flip, jitter = sample["draws"]
        assert crop.startswith("RandomResizedCrop: box ") and crop.endswith("resized to 24×24")
        left, top = crop.removeprefix("RandomResizedCrop: box ").split()[0].split(",")
        width, height = crop.split()[3].rstrip(";").split("×")
        x, y = int(left), int(top)
        assert sample["box"] == [x, y, x + int(width), y + int(height)]
        picture = Image.open(io.BytesIO(client.get(f"sample/train/{sample['index']}/image?as=png").body))
        assert x + int(width) <= picture.width and y + int(height) <= picture.height
        assert flip in ("RandomHorizontalFlip: flipped left to right", "RandomHorizontalFlip: not flipped")
        assert jitter.startswith("ColorJitter: ")
    assert len({sample["draws"][1] for sample in samples}) == 2
    centre = client.get(asked(batch_size=1, op=["Resize:40x40", "CenterCrop:20"])).json["samples"][0]
    assert centre["draws"] == ["Resize: resized to 40×40", "CenterCrop: crop 10,10 20×20"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"op": "Rotate"}, 400, "not an op"),
        ({"op": "Normalize"}, 400, "cannot be shown"),
        ({"op": "RandomResizedCrop:many"}, 400, "many"),
        ({"op": "RandomResizedCrop:24,sides=3"}, 400, "sides"),
        ({"order": "sorted"}, 400, "order is one of"),
        ({"batch": 99}, 404, "no batch 99"),
        ({"rank": 2}, 400, "rank is 2"),
        ({"batch_size": 0}, 400, "batch_size is 0"),
        ({"seed": "x"}, 400, "seed is 'x'"),
        ({"seed": 1 << 60}, 400, "expected"),
    ],
)
def test_previews_that_cannot_be_shown_are_reported(
    client: Client, options: dict[str, Any], status: int, message: str
) -> None:
    reply = client.get(asked(**{"batch_size": 8, **options}))
    assert reply.status == status and message in reply.error


def test_images_that_do_not_form_a_batch_are_reported(client: Client) -> None:
    sample = client.get(asked(batch_size=8)).json["samples"][0]
    reply = client.get(sample["image"])
    assert reply.status == 415 and "differ in size" in reply.error
    large = client.get(asked(batch_size=4, op="Resize:16384x16384")).json["samples"][0]
    assert client.get(large["image"]).status == 400
