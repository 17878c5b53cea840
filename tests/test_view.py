"""`packer.view`: the data behind each view of the page, compared with the reader and plain numpy."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from crc32c import crc32c
from PIL import Image
from suites.programs import run_packer
from view_client import Client

import packer
import readers
from packer.testing.samples import make_image, turned_image
from readers.headers import MEDIA
from readers.table import upright_sides

EVIL = "<img src=x onerror=alert(1)>&\x07\u202e'\""
CLASSES = (EVIL, "ant")
FORMATS = ("hdf5", "tar")


def zoo_files() -> dict[str, bytes]:
    files = {f"train/{name}/{i}.jpg": make_jpeg(10 * i + j, (24 + 8 * i, 40)) for i in range(4)
             for j, name in enumerate(CLASSES)}  # fmt: skip
    files[f"train/ant/{EVIL}.png"] = make_image(99, (60, 20), "PNG")
    files["train/ant/turned.jpg"] = turned_image(6, (30, 50))
    files["train/ant/same.jpg"] = files[f"train/{EVIL}/2.jpg"]
    files["train/lone.jpg"] = make_jpeg(77)
    files["val/ant/v.jpg"] = make_jpeg(78)
    return files


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images of train in two classes and without a class, one of val; one image of a class also occurs in the
    other."""
    return tree_of(tmp_path_factory.mktemp("zoo") / "zoo", zoo_files())


@pytest.fixture(scope="module")
def places(zoo: Path, pack: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images in every form."""
    archive = tmp_path_factory.mktemp("zip") / "zoo.zip"
    packed = {name: pack(zoo, name) for name in FORMATS}
    with zipfile.ZipFile(archive, "w") as file, readers.open(packed["tar"], "train") as reader:
        for index in range(len(reader)):  # archives keep their order
            file.writestr(f"train/{reader.name(index)}", reader.read(index))
        file.writestr("val/ant/v.jpg", zoo_files()["val/ant/v.jpg"])
    return packed | {"folder": zoo, "zip": archive}


@pytest.fixture(scope="module")
def truth(places: dict[str, Path]) -> Iterator[readers.Reader]:
    with readers.open(places["tar"], "train") as reader:
        yield reader


@pytest.fixture(scope="module", params=[*FORMATS, "folder", "zip"])
def client(places: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Client]:
    with packer.view(places[request.param]) as viewing, Client(viewing.url) as client:
        yield client


def test_the_document_agrees_with_the_reader(client: Client, truth: readers.Reader) -> None:
    document = client.get("view.json").json
    train = document["splits"]["train"]
    assert document["classes"] == list(CLASSES) and [*document["splits"]] == ["train", "val"]
    assert train["samples"] == len(truth) and train["bytes"] == int(truth.sizes().sum())
    assert document["fields"] == [{"name": "image", "kind": "image"}] and document["media"] == list(MEDIA)
    assert np.array_equal(client.column(train["columns"]["label"]), truth.labels)
    bounds, blob = (client.column(train["columns"][name]) for name in ("key.offset", "key"))
    keys = [bytes(blob[a:b]).decode() for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    assert keys == list(truth.keys)
    for name in ("height", "width", "media", "orientation"):  # for a set: its index
        if name in train["columns"]:
            assert np.array_equal(client.column(train["columns"][name]), getattr(truth.info, name))


def test_orders_equal_numpy_sorts(client: Client, truth: readers.Reader) -> None:
    orders = client.get("view.json").json["splits"]["train"]["orders"]
    assert orders.pop("stored") is None
    received = {name: client.order(order["document"]) for name, order in orders.items()}
    heights, widths = upright_sides(truth.info)
    numbers = {
        "bytes": truth.sizes(),
        "size": heights * widths,
        "side": np.minimum(heights, widths),
        "aspect": widths / heights,
    }
    for name, values in numbers.items():
        assert np.array_equal(received[name][0], np.argsort(values, kind="stable")), name
    labels = np.where(truth.labels < 0, 9, truth.labels)
    assert np.array_equal(received["class"][0], np.argsort(labels, kind="stable"))
    assert received["class"][1] == [[EVIL, 0, 4], ["ant", 4, 7], ["", 11, 1]]
    assert received["media"][1] == [["jpeg", 0, 11], ["png", 11, 1]]
    keys = list(truth.keys)
    assert [keys[i] for i in received["key"][0]] == sorted(keys, key=str.encode)
    assert [keys[i] for i in received["unlabelled"][0]] == ["lone"]
    assert [keys[i] for i in received["duplicates"][0]] == [f"{EVIL}/2", "ant/same"]
    assert not len(received["damaged"][0])


def test_bars_are_runs(client: Client, truth: readers.Reader) -> None:
    orders = client.get("view.json").json["splits"]["train"]["orders"]
    client.order(orders["damaged"]["document"])  # for a folder: its headers have been read
    histograms = client.get("view.json").json["splits"]["train"]["histograms"]
    assert histograms.keys() == {"bytes", "size", "side", "aspect", "media", "class"}
    for name, histogram in histograms.items():
        _, runs = client.order(orders[histogram["order"]]["document"])
        bars = [run[2] for run in runs if run[0]]
        assert bars == histogram["counts"], name
        if "edges" in histogram:
            assert len(histogram["edges"]) == len(bars) + 1 and sum(bars) == len(truth)
            assert np.all(np.diff(histogram["edges"]) > 0)


def test_a_sample_is_described_and_sent(client: Client, truth: readers.Reader) -> None:
    index = list(truth.keys).index(f"ant/{EVIL}")
    shown = client.get(f"sample/train/{index}.json").json
    assert (shown["key"], shown["label"], shown["class"]) == (f"ant/{EVIL}", 1, "ant") and "error" not in shown
    (field,) = shown["fields"]
    data = bytes(truth.read(index))
    assert field["file"] == f"ant/{EVIL}.png" and field["bytes"] == len(data)
    assert field["computed"] == f"{crc32c(data):08x}" and field.get("crc32c", field["computed"]) == field["computed"]
    assert (shown["header"]["width"], shown["header"]["height"], shown["header"]["media"]) == (60, 20, "png")
    reply = client.get(f"sample/train/{index}/image")
    assert reply.body == data and reply.headers["content-type"] == "image/png"
    part = client.get(f"sample/train/{index}/image", Range="bytes=-5")
    assert part.status == 206 and part.body == data[-5:]


def test_thumbnails_are_upright_and_small(client: Client, truth: readers.Reader) -> None:
    index = list(truth.keys).index("ant/turned")
    height, width = (int(side[index]) for side in upright_sides(truth.info))
    assert truth.info.orientation[index] >= 5 and (height, width) != (truth.info.height[index], truth.info.width[index])
    png = Image.open(io.BytesIO(client.get(f"sample/train/{index}/image?as=png").body))
    assert png.format == "PNG" and png.size == (width, height)
    thumb = Image.open(io.BytesIO(client.get(f"thumb/train/{index}?side=20").body))
    assert thumb.format == "JPEG" and max(thumb.size) == 20


def test_expressions_choose_samples(client: Client, truth: readers.Reader) -> None:
    client.order(client.get("view.json").json["splits"]["train"]["orders"]["damaged"]["document"])
    for text in ('label == "ant" and width > 40', 'matches(key, "ant*")', "width < 1"):
        reply = client.where("train", text).json
        values = np.frombuffer(client.get(reply["url"]).body, "<u4", offset=reply["start"])
        expected = [] if text == "width < 1" else list(truth.select(where=text).keys)
        assert [truth.keys[i] for i in values] == expected
    wrong = client.where("train", "wdth > 40")
    assert wrong.status == 400 and "wdth" in wrong.error
    assert client.where("train", 'label == "cow"').status == 400
    assert client.where("none", "width > 1").status == 404


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images with a caption and three columns of a table."""
    folder = tmp_path_factory.mktemp("captioned") / "set"
    fields = {"image": "image", "caption": "text", "json": "json"}
    with packer.writer(folder, "tar", fields=fields, classes=["Ant", "bee"]) as out:
        for number in range(6):
            about = {"camera": "Canon" if number % 2 else "Z\u00fcrich", "year": 2000 + 8 * (number % 3)}
            more = {} if number < 5 else {"json": {**about, "note": "rare"}}
            texts: dict[str, Any] = {"caption": f"Picture {number}", "json": about, **more}
            out.write(f"k/{number}", label=number % 2, image=make_jpeg(number, (20, 16)), **texts)
    return folder


def test_texts_are_searched_and_columns_are_orders(captioned: Path) -> None:
    with packer.view(captioned) as viewing, Client(viewing.url) as client:
        orders = client.get("view.json").json["splits"]["train"]["orders"]
        assert [orders[f"column-{number}"]["title"] for number in range(3)] == ["camera", "year", "note"]
        values, runs = client.order("order/train/column-1.json")
        assert values.tolist() == [0, 3, 1, 4, 2, 5] and runs == [["2000", 0, 2], ["2008", 2, 2], ["2016", 4, 2]]
        assert client.order("order/train/column-2.json")[1] == [["rare", 0, 1], ["", 1, 5]]

        def chosen(**query: str) -> tuple[list[int], Any]:
            reply = client.get("where.json?" + urlencode({"split": "train", **query})).json
            return np.frombuffer(client.get(reply["url"]).body, "<u4", offset=reply["start"]).tolist(), reply["runs"]

        cases = {"ant": [0, 2, 4], "PICTURE 3": [3], "z\u00dcrich": [0, 2, 4], "k/5": [5], "rare": [5], "none": []}
        assert {text: chosen(search=text)[0] for text in cases} == cases
        assert chosen(search="bee", where="year > 2000", order="column-1") == (
            [1, 5], [["2000", 0, 0], ["2008", 0, 1], ["2016", 1, 1]]
        )  # fmt: skip


def test_predictions_are_sorted_worst_first(captioned: Path, tmp_path: Path) -> None:
    table = tmp_path / "model.csv"
    table.write_text("Filename,pred,confidence\nk/0,Ant,.9\nk/1,0,0.2\nk/2,bee,0.4\nk/3,Ant,.7\nk/4,0,.3\nno,0,1\n")
    with packer.view(captioned, predictions=table) as viewing, Client(viewing.url) as client:
        assert client.get("view.json").json["predictions"] == {"unknown": 1}
        values, runs = client.order("order/train/mistakes.json")
        assert (values.tolist(), runs) == ([3, 2, 1, 4, 0, 5], [["wrong", 0, 3], ["right", 3, 2], ["unknown", 5, 1]])
        values, runs = client.order("order/train/confusion.json")
        assert (values.tolist(), runs) == ([3, 1, 2], [["bee → Ant", 0, 2], ["Ant → bee", 2, 1]])
    table.write_text("key,predicted,loss\nk/0,Ant,.9\nk/1,0,0.2\nk/2,bee,0.4\n")
    with packer.view(captioned, predictions=table) as viewing, Client(viewing.url) as client:
        assert client.order("order/train/mistakes.json")[0].tolist()[:3] == [2, 1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,predicted\nk/0,Ant\n", "has no column 'key'"),
        ("key,predicted\nk/0,cow\n", "line 2: no class 'cow'; expected a number below 2 or one of"),
        ("key,predicted\nk/0,2\n", "line 2: no class '2'"),
        ("key,predicted\nk/0,0\nk/0,1\n", "line 3: 'k/0' has a prediction already"),
        ("key,predicted,score\nk/0,0,high\n", "line 2: 'high' is not a number"),
        ("key,predicted\nk/0\n", "line 2: has 1 values, expected 2"),
        ("key,predicted\nx,0\n", "none of its 1 rows names a sample"),
        ('key,predicted\n"k', "cannot be read as CSV"),
    ],
)
def test_predictions_that_do_not_fit(captioned: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "model.csv").write_text(text)
    done = run_packer("view", captioned, "--no-browser", "--predictions", tmp_path / "model.csv")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_damage_is_found_and_reported(places: dict[str, Path], tmp_path: Path) -> None:
    packer.convert(places["folder"], "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set", "train") as reader:
        path, offset, length = reader.byte_range(3) or (Path(), 0, 0)
    with open(path, "r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)
        file.seek(offset + length // 2)
        file.write(bytes([byte[0] ^ 1]))
    with packer.view(tmp_path / "set", split="train") as viewing, Client(viewing.url) as client:
        values, _ = client.order("order/train/damaged.json")
        assert values.tolist() == [3]
        assert "CRC32C" in client.get("sample/train/3.json").json["error"]
        assert "error" not in client.get("sample/train/2.json").json


def test_samples_without_a_picture_are_reported(tmp_path: Path, zoo: Path) -> None:
    files = {"a/0.jpg": make_jpeg(1), "a/1.jpg": b"no image", "a/2.png": bomb()}
    with packer.view(tree_of(tmp_path / "tree", files)) as viewing, Client(viewing.url) as client:
        for index, message in ((1, "cannot be read"), (2, "")):
            document = client.get(f"sample/train/{index}.json").json
            assert message in document.get("error", "")
            for path in (f"thumb/train/{index}", f"sample/train/{index}/image?as=png"):
                reply = client.get(path)
                assert reply.status == 415 and reply.error
        assert "too many" in client.get("thumb/train/2").error
        assert client.order("order/train/damaged.json")[0].tolist() == [1]
        assert client.order("order/train/side.json")[1][-1] == ["unknown", 2, 1]


def bomb() -> bytes:
    """A small PNG that claims 30,000 x 30,000 pixels."""
    data = make_image(1, (8, 8), "PNG")
    head = b"IHDR" + struct.pack(">II", 30_000, 30_000) + data[24:29]
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
