"""The exported page: self-contained with the files of the set, and served by `packer.view` as by any web server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urljoin

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from view_client import Client

import packer
import readers
from cache.errors import DatasetError, OutputError
from cache.messages import quoted
from packer.tools.view.answers import page_files
from packer.tools.view.samples import thumbnail
from readers.decode import decode_image

EVIL = "<b>&'\" #?%41"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path]) -> Path:
    """A folder with a set in each container, in folders with a strange name."""
    root = tmp_path_factory.mktemp("exports") / EVIL
    names = [f"{split}/{name}/{i}.jpg" for split in ("train", "val") for name in ("ant", EVIL) for i in range(4)]
    tree = tree_of(root / "tree", {name: make_jpeg(i, (30 + i, 24)) for i, name in enumerate(names)})
    for to in ("hdf5", "tar"):
        packer.convert(tree, to, root / to, run=packer.Run(workers=1), shards=packer.Shards(samples=3))
    return root


@pytest.fixture(params=["inside", "above"])
def exported(sets: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[packer.ViewExport, Path]]:
    """A page inside the set, and one far away."""
    to = {"inside": "hdf5", "above": "tar"}[request.param]
    page = sets / to / "page" if request.param == "inside" else tmp_path / "page"
    yield packer.export_view(sets / to, page, overwrite=True), sets / to


def test_all_files_that_the_page_reads_exist(exported: tuple[packer.ViewExport, Path]) -> None:
    """Every address in view.json leads, from the page, to a file below the served folder with the stated content."""
    result, root = exported
    home = result.serve / unquote(result.page)
    assert home == result.path and (home / "index.html").is_file()
    assert set(page_files()) <= {path.name for path in home.iterdir()}

    def file_at(url: str) -> Path:
        path = result.serve / unquote(urljoin(f"/{result.page}", url)).lstrip("/")
        assert path.resolve().is_relative_to(result.serve)
        return path

    document = json.loads((home / "view.json").read_text())
    assert document["live"] is False and document["container"] == root.name
    for name, split in document["splits"].items():
        with readers.open(root, name) as reader:
            columns = {}
            for column, described in split["columns"].items():
                data = file_at(described["url"]).read_bytes()
                columns[column] = np.frombuffer(data, described["dtype"], described["length"], described["start"])
                assert described["start"] + columns[column].nbytes == len(data), column
            for index in range(len(reader)):
                shard = file_at(split["shards"][columns["shard"][index]]["url"]).read_bytes()
                start = int(columns["image.offset"][index])
                assert shard[start : start + int(columns["image.length"][index])] == reader.read(index)
            assert np.array_equal(columns["label"], reader.labels)
        orders = split["orders"]
        assert orders.pop("stored") is None and {"class", "size", "key", "duplicates"} <= orders.keys()
        for order in orders.values():
            values = np.frombuffer(file_at(order["url"]).read_bytes(), "<u4", order["count"], order["start"])
            assert len(set(values.tolist())) == order["count"] and sum(run[2] for run in order["runs"]) <= len(values)
        assert [run[0] for run in orders["class"]["runs"]] == document["classes"]


def test_thumbnails_are_written_on_request(sets: Path, tmp_path: Path) -> None:
    """As in `packer view`; none for an image that cannot be decoded, and none of an earlier page stays."""
    page = tmp_path / "page"
    tree = tree_of(tmp_path / "in", {f"train/ant/{i}.jpg": make_jpeg(i, (400, 300)) for i in range(90)})
    broken = packer.convert(tree, "tar", tmp_path / "set", run=packer.Run(workers=1)).output
    with readers.open(broken) as reader:
        place = reader.byte_range(7)
    assert place is not None
    with open(place[0], "r+b") as shard:
        shard.seek(place[1])
        shard.write(bytes(place[2]))
    packer.export_view(broken, page)
    columns = json.loads((page / "view.json").read_text())["splits"]["train"]["columns"]
    bytes_, offsets = (np.load(page / columns[name]["url"]) for name in ("thumbnail", "thumbnail.offset"))
    assert columns["thumbnail"]["length"] == len(bytes_) == offsets[-1] and columns["thumbnail"]["start"] == 128
    with readers.open(broken) as reader:
        assert len(offsets) == len(reader) + 1
        for index in range(len(reader)):
            small = bytes_[offsets[index] : offsets[index + 1]].tobytes()
            if index == 7:
                assert not small
                continue
            assert small == thumbnail(reader, index, 200) and decode_image(small).shape == (150, 200, 3)
    with packer.view(page) as viewing, Client(viewing.url) as client:
        assert client.ask(urljoin(client.base, columns["thumbnail"]["url"]), {"Range": "bytes=0-5"}).status == 206
    packer.export_view(broken, page, overwrite=True, thumbnails=False)
    columns = json.loads((page / "view.json").read_text())["splits"]["train"]["columns"]
    assert "thumbnail" not in columns and not [*(page / "thumbnails").iterdir()]


@pytest.mark.parametrize("exported", ["inside"], indirect=True)
def test_an_exported_page_is_served_with_its_set_alone(exported: tuple[packer.ViewExport, Path]) -> None:
    result, _ = exported
    with packer.view(result.path) as viewing, Client(viewing.url) as client:
        document = client.get("view.json").json
        split = document["splits"]["val"]
        assert client.get("").headers["content-type"] == "text/html; charset=utf-8"
        assert client.ask(urljoin(client.base, "")).status == 200
        for url in (split["columns"]["label"]["url"], split["shards"][0]["url"], split["orders"]["class"]["url"]):
            reply = client.ask(urljoin(client.base, url), {"Range": "bytes=0-9"})
            assert reply.status == 206 and len(reply.body) == 10, url
        base = urljoin(client.base, split["shards"][0]["url"]).rpartition("/")[0]
        for name in ("dataset.json", "README.md", "../tree/train/ant/0.jpg", "", "../"):
            assert client.ask(f"{base}/{name}").status == 404, name
    with pytest.raises(ValueError, match="leave split out"):
        packer.view(result.path, split="val")


def test_a_page_names_the_address_of_its_set(sets: Path, tmp_path: Path) -> None:
    packer.export_view(sets / "tar", tmp_path / "page", url="https://data.example:8443/sets/few", split="val")
    document = json.loads((tmp_path / "page" / "view.json").read_text())
    assert [*document["splits"]] == ["val"] and document["address"] == "https://data.example:8443/sets/few/"
    url = document["splits"]["val"]["columns"]["label"]["url"]
    assert url == "https://data.example:8443/sets/few/val.index/label.npy"
    index = (tmp_path / "page" / "index.html").read_text()
    assert "connect-src 'self' https://data.example:8443;" in index
    with packer.view(tmp_path / "page") as viewing, Client(viewing.url) as client:
        policy = client.get("").headers["content-security-policy"]
        assert "connect-src 'self' https://data.example:8443;" in policy


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/few", "few", "https://user:secret@host/few", "https://host/few?token=1", "https://h/'; script-src *"],
)
def test_an_address_that_no_browser_reads_is_refused(sets: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(OutputError) as caught:
        packer.export_view(sets / "tar", tmp_path / "page", url=url)
    assert "secret" not in str(caught.value) and not (tmp_path / "page").exists()


def test_other_files_are_not_overwritten(sets: Path, tmp_path: Path) -> None:
    page = tmp_path / "page"
    with pytest.raises(OutputError, match="only packed sets"):
        packer.export_view(sets / "tree", page)
    tree_of(page, {"thesis.txt": b"all of it"})
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="holds other files"):
            packer.export_view(sets / "tar", page, overwrite=overwrite)
    (page / "thesis.txt").unlink()
    packer.export_view(sets / "tar", page)
    with pytest.raises(OutputError, match="holds a page already"):
        packer.export_view(sets / "tar", page)
    packer.export_view(sets / "hdf5", page, overwrite=True)
    assert json.loads((page / "view.json").read_text())["container"] == "hdf5"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "{}", '{"format": 2}', '{"format": 1, "set": "../elsewhere/"}',
     '{"format": 1, "set": "/"}', '{"format": 1, "set": "../link/"}', '{"format": 1, "set": "../../"}', "[" * 100_000],
)  # fmt: skip
def test_a_forged_page_opens_no_other_folder(tmp_path: Path, text: str) -> None:
    """A page whose document is broken, or whose set is a folder without a set or far away from the page."""
    files = {"in/page/index.html": b"", "in/page/view.json": text.encode(), "in/elsewhere/secret.npy": b"secret"}
    tree_of(tmp_path, files)
    page = tmp_path / "in" / "page"
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    (page / "link.npy").symlink_to(tmp_path / "in" / "elsewhere" / "secret.npy")
    (page / "orders").symlink_to(tmp_path / "in" / "elsewhere")
    with pytest.raises(DatasetError):
        packer.view(page).close()
    (page / "view.json").write_text('{"format": 1, "set": "../elsewhere/", "origin": "https://evil.example"}')
    with packer.view(page) as viewing, Client(viewing.url) as client:
        assert client.get("view.json").status == 200
        for path in ("../elsewhere/secret.npy", "link.npy", "elsewhere/secret.npy", "orders/secret.npy", "in/page/"):
            assert client.get(path).status == 404


def test_the_page_comes_from_this_package_not_from_the_directory(sets: Path) -> None:
    page = packer.export_view(sets / "hdf5", sets / "hostile page").path
    for name in ("index.html", "main.js", "style.css", "icon.svg", "more.js", "orders/more.html", "orders/more.js"):
        (page / name).write_bytes(b"hostile")
    with packer.view(page) as viewing, Client(viewing.url) as client:
        for name, data in page_files().items():
            assert client.get(name).body == data
        assert client.get("").body == page_files()["index.html"]
        for name in ("more.js", "orders/more.html", "orders/more.js"):
            assert client.get(name).status == 404


def test_no_link_of_a_set_is_followed_for_an_exported_page(sets: Path, tmp_path: Path) -> None:
    """Neither for a shard, nor for a column, nor for the folder of columns; the page next to them is shown."""
    root = tmp_path / "set"
    shutil.copytree(sets / "tar", root)
    page = packer.export_view(root, tmp_path / "page").path
    secret = tmp_path / "secret"
    secret.mkdir()
    shard = next(root.glob("train*.tar"))
    for path in (shard, root / "train.index" / "label.npy"):
        path.replace(secret / path.name)
        path.symlink_to(secret / path.name)
    (root / "val.index").replace(secret / "val.index")
    (root / "val.index").symlink_to(secret / "val.index")
    with packer.view(page) as viewing, Client(viewing.url) as client:
        document = client.get("view.json").json["splits"]
        links = [document["train"]["columns"]["label"]["url"], document["val"]["columns"]["label"]["url"]]
        links += [entry["url"] for entry in document["train"]["shards"] if entry["path"] == shard.name]
        assert len(links) == 3 and all(client.ask(urljoin(client.base, url)).status == 404 for url in links)
        whole = document["train"]["columns"]["width"]["url"]
        assert client.ask(urljoin(client.base, whole)).status == 200


def test_the_set_of_a_page_is_in_the_folder_of_the_page(sets: Path, tmp_path: Path) -> None:
    page = packer.export_view(sets / "tar", tmp_path / "page").path
    with pytest.raises(DatasetError, match="lets pages read only sets in") as caught:
        packer.view(page)
    assert f"packer view {quoted(sets / 'tar')}  " in str(caught.value)
