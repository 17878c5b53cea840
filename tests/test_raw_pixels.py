"""Raw pixels: an ordinary HDF5 dataset [n, height, width, 3], which readers read like any other set."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import files_of, make_jpeg, tree_of
from remote_servers import FileServer
from set_cases import convert
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import BadSampleError, DamagedSampleError, FormatError, SourceError
from packer import Reencode
from packer.formats import format_named
from packer.formats.base import LocateOptions
from readers.augment import CenterCrop, RandomCrop, Resize
from readers.decode import decode_image
from readers.headers import sniff
from readers.loader import ImageLoader
from readers.torch import ImageDataset

COUNT, SIDE = 7, 24
OPS = [Resize(SIDE), CenterCrop(SIDE)]
RAW, RUN = Reencode("raw"), packer.Run(workers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{'cat' if i % 2 else 'dog'}/{i}.jpg": make_jpeg(i, (40 + i, 50)) for i in range(COUNT)}
    return tree_of(tmp_path_factory.mktemp("raw") / "src", files)


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return convert(source, source.parent / "set", "hdf5", ops=OPS, reencode=RAW, samples=3).output


@pytest.fixture(scope="module")
def truth(source: Path) -> list[torch.Tensor]:
    """The pixels that training gets from the original images."""
    convert(source, source.parent / "plain")
    with readers.open(source.parent / "plain") as reader:
        return [image for image, _ in (ImageDataset(reader, OPS)[i] for i in range(COUNT))]


def test_h5py_reads_the_images_by_number(packed: Path, truth: list[torch.Tensor]) -> None:
    images = []
    for path in sorted(packed.glob("*.h5")):
        with h5py.File(path) as file:
            assert file["image"].dtype == np.uint8 and file["image"].shape[1:] == (SIDE, SIDE, 3)
            assert file["image"].chunks is None and len(file["image"]) == len(file["label"]) == len(file["key"])
            images += [file["image"][i] for i in range(len(file["image"]))]
    assert all(np.array_equal(a, b.permute(1, 2, 0).numpy()) for a, b in zip(images, truth, strict=True))
    assert len(images) == COUNT


def test_readers_give_the_same_pixels_and_support_any_recipe(
    packed: Path, truth: list[torch.Tensor], place: dict[str, Any]
) -> None:
    with readers.open(packed, verify=True) as reader:
        assert reader.kinds["image"] == "pixels" and {*reader.info.height.tolist()} == {SIDE}
        assert reader.byte_range(1)[2] == 3 * SIDE * SIDE  # type: ignore[index]
        for i in range(COUNT):
            assert np.array_equal(decode_image(reader.read(i)), truth[i].permute(1, 2, 0).numpy())
        ((images, labels),) = ImageLoader(reader, COUNT, augment=[CenterCrop(SIDE)], shuffle=False)
        assert torch.equal(images, torch.stack(truth)) and labels.tolist() == reader.labels.tolist()
        with readers.cached(reader, 1.0, "encoded", **place) as cached:
            for _ in range(2):
                ((images, _),) = ImageLoader(cached, COUNT, augment=[CenterCrop(SIDE)], shuffle=False)
                assert torch.equal(images, torch.stack(truth))
            assert cached.stats().hits >= COUNT
        again = pickle.loads(pickle.dumps(reader)).select(indices=[2, 0])
        dataset = ImageDataset(again, [RandomCrop(8)])
        assert dataset[0][0].shape == (3, 8, 8)
        assert torch.equal(ImageDataset(again)[1][0], truth[0])


def test_a_set_at_an_address(
    packed: Path, truth: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read at the address, also in several processes, and staged and converted."""
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "index-cache"))
    server = FileServer(packed.parent)
    try:
        address = f"http://{server.address[0]}:{server.address[1]}/set"
        with readers.open(address) as reader:
            loader = ImageLoader(reader, COUNT, augment=[CenterCrop(SIDE)], shuffle=False)
            by_worker = DataLoader(ImageDataset(reader), batch_size=COUNT, num_workers=1)
            assert all(torch.equal(next(iter(batches))[0], torch.stack(truth)) for batches in (loader, by_worker))
        with pytest.raises(SourceError, match=r"the source is an address.*packer stage ADDRESS"):
            convert(address, tmp_path / "png")
        with readers.stage(address, target=tmp_path / "node") as copy:
            convert(copy, tmp_path / "png")
        with readers.open(tmp_path / "png") as reader:
            assert torch.equal(ImageDataset(reader)[3][0], truth[3])
    finally:
        server.close()


def test_verify_extract_convert_and_index(packed: Path, truth: list[torch.Tensor], tmp_path: Path) -> None:
    packed = tree_of(tmp_path / "set", files_of(packed))
    assert packer.verify(packed, deep=True).ok
    packer.extract(packed, tmp_path / "files")
    names = [name for name in files_of(tmp_path / "files") if name.endswith(".png")]
    assert sorted(names) == sorted(f"{'cat' if i % 2 else 'dog'}/{i}.png" for i in range(COUNT))
    convert(packed, tmp_path / "png")
    before = files_of(packed)
    (packed / "dataset.json").unlink()
    packer.index(packed)
    for place in (tmp_path / "png", packed):
        with readers.open(place) as reader:
            for i in range(COUNT):
                assert np.array_equal(decode_image(reader.read(i)), truth[i].permute(1, 2, 0).numpy())
    assert packer.verify(packed, deep=True).ok
    index = {name: data for name, data in files_of(packed).items() if ".index/" in name}
    assert index == {name: data for name, data in before.items() if ".index/" in name}


def test_a_changed_set_keeps_its_pixels(packed: Path, truth: list[torch.Tensor], tmp_path: Path) -> None:
    packer.subset(packed, tmp_path / "half", lambda table: table.where("label == 'cat'"))
    with readers.open(tmp_path / "half") as reader, readers.open(packed) as whole:
        expected = [truth[whole.table.find(key)] for key in reader.keys]
        assert all(torch.equal(ImageDataset(reader)[i][0], expected[i]) for i in range(len(reader)))
    with pytest.raises(SourceError, match="its images are raw pixels, so nothing can be added"):
        packer.append(tmp_path / "half", packed, existing="skip")
    packer.reshard(packed, tmp_path / "again", to="tar", run=RUN)
    packer.append(tmp_path / "again", tree_of(tmp_path / "more", {"cat/x.jpg": make_jpeg(99, (40, 50))}), run=RUN)
    with readers.open(tmp_path / "again") as reader:
        assert reader.kinds["image"] == "image" and torch.equal(ImageDataset(reader)[0][0], truth[0])
        assert sniff(reader.read(COUNT)) == "png"  # like the other samples


def test_resharded_raw_pixels_stay_raw(packed: Path, tmp_path: Path) -> None:
    packer.reshard(packed, tmp_path / "again", shards=packer.Shards(size="2KiB"), run=RUN)
    with readers.open(packed) as before, readers.open(tmp_path / "again") as reader:
        assert reader.kinds["image"] == "pixels" and len(reader.split_info.shards) > len(before.split_info.shards)
        assert list(reader.keys) == list(before.keys)
        assert [bytes(data) for data in reader.stream()] == [bytes(data) for data in before.stream()]
    in_place = tree_of(tmp_path / "set", files_of(packed))
    packer.reshard(in_place, shards=packer.Shards(shuffle=1), run=RUN)
    packer.prune(in_place)
    assert packer.verify(tmp_path / "again", deep=True).ok and packer.verify(in_place, deep=True).ok
    packer.extract(in_place, tmp_path / "files")
    packer.extract(packed, tmp_path / "expected")
    assert files_of(tmp_path / "files") == files_of(tmp_path / "expected")


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (COUNT, 2)])
def test_sets_of_one_size_need_no_ops(tmp_path: Path, count: int, workers: int) -> None:
    pixels = [np.full((9, 11, 3), number, np.uint8) for number in range(count)]
    samples = [{"image": image, "label": 1, "mask": image[..., 0]} for image in pixels]
    convert(samples, tmp_path / "out", "hdf5", reencode=RAW, samples=2, workers=workers)
    with packer.writer(tmp_path / "by-writer", to="hdf5", images=packer.Images(reencode=RAW)) as out:
        for number, sample in enumerate(samples):
            out.write(str(number), **sample)
    for place in (tmp_path / "out", tmp_path / "by-writer"):
        assert packer.verify(place, deep=True).ok
        with readers.open(place) as reader:
            for i in range(count):
                image, mask = ImageDataset(reader, fields=("image", "mask"))[i]
                assert np.array_equal(image.permute(1, 2, 0), pixels[i]) and np.array_equal(mask, pixels[i][..., 0])


def test_other_sizes_are_refused_with_advice(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cat/3\.jpg: has 50 x 43 pixels, expected 50 x 41 pixels .*--op Resize"):
        convert(source, tmp_path / "out", "hdf5", reencode=RAW, on_error="skip")
    with pytest.raises(SourceError, match=r"images in .* have 50 x 43 pixels, those in .* 50 x 41 .*--op Resize"):
        convert(source, tmp_path / "two", "hdf5", reencode=RAW, samples=1)
    assert not (tmp_path / "two" / "dataset.json").exists()
    with pytest.raises(ValueError, match="raw pixels are for HDF5 shards, not for tar"):
        convert(source, tmp_path / "tar", reencode=RAW)
    with pytest.raises(ValueError, match="resize and crop them by ops"):
        Reencode("raw", max_side=9)
    lacking = [{"image": make_jpeg(1, (9, 9))}, {"image": None}]
    with pytest.raises(BadSampleError, match="no image"):
        convert(lacking, tmp_path / "none", "hdf5", reencode=RAW)


@pytest.mark.parametrize("change", ["shape", "size of the index", "a pixel"])
def test_damage_is_named(packed: Path, tmp_path: Path, change: str) -> None:
    copy = tree_of(tmp_path / "copy", files_of(packed))
    shard = min(copy.glob("*.h5"))
    if change == "shape":
        with h5py.File(shard, "r+") as file:
            del file["image"]
            file["image"] = np.zeros((3, SIDE, SIDE, 1), np.uint8)
        with pytest.raises(FormatError, match=r"expected uint8 \[3, height, width, 3\]"):
            list(format_named("hdf5").locate(shard, LocateOptions()))
    elif change == "a pixel":
        with h5py.File(shard, "r+") as file:
            file["image"][1, 2, 3, 0] ^= 1
        assert "CRC32C" in str(packer.verify(copy).problems)
    else:
        heights = np.load(copy / "train.index" / "height.npy")
        np.save(copy / "train.index" / "height.npy", heights + 1)
        with readers.open(copy) as reader, pytest.raises(DamagedSampleError, match="expected 3 x 25 x 24 by"):
            reader.read(0)


def test_staged_and_described(packed: Path, tmp_path: Path, truth: list[torch.Tensor]) -> None:
    with readers.stage(packed, tmp_path / "here") as local, readers.open(local) as reader:
        assert torch.equal(ImageDataset(reader)[3][0], truth[3])
    assert packer.inspect(packed).to_dict()["fields"] == {"image": "pixels"}
    assert "data set `image`, [samples, height, width, 3]" in (packed / "README.md").read_text()


def test_tasks_of_an_array_make_the_same_set(source: Path, packed: Path, tmp_path: Path) -> None:
    for number in range(2):
        convert(source, tmp_path / "out", "hdf5", ops=OPS, reencode=RAW, samples=3, task=(number, 2))
    packer.commit(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(packed)
