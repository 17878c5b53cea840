"""Samples without an image: arrays, audio and other files as the main field, from the source to the batch."""

from __future__ import annotations

import io
import itertools
import shutil
import tarfile
import wave
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import BadSampleError, SourceError, UnknownNameError
from packer.cli.group import cli
from packer.testing.samples import make_jpeg
from packer.tools.advise import advise
from packer.tools.view.samples import as_png, middle_of, sample_document, thumbnail
from readers.augment import RandomHorizontalFlip
from readers.frameworks.grain import GrainSource
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

DRAW = np.random.default_rng(0)
VOLUMES = [DRAW.normal(size=(4, 5, 6)).astype(np.float32) for _ in range(8)]


def saved(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(100))
    return out.getvalue()


def tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """volumes/{a,b}/N.npy, packed as HDF5."""
    folder = tmp_path_factory.mktemp("volumes")
    tree(folder / "tree", {f"{'ab'[i % 2]}/{i}.npy": saved(array) for i, array in enumerate(VOLUMES)})
    packer.convert(folder / "tree", "hdf5", folder / "set", run=packer.Run(workers=1))
    return folder / "set"


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_a_folder_of_arrays_comes_back_unchanged(tmp_path: Path, to: str) -> None:
    files = {f"train/{'ab'[i % 2]}/{i}.npy": saved(array) for i, array in enumerate(VOLUMES)}
    files |= {"val/a/0.npy": saved(np.array([[1, 2]], ">u2")), "val/b/x.NPY": saved(np.ones((2, 0), bool))}
    packer.convert(tree(tmp_path / "in", files), to, tmp_path / "set", run=packer.Run(workers=1))
    assert packer.verify(tmp_path / "set", deep=True).ok
    reader = readers.open(tmp_path / "set", "train")
    assert (reader.main, reader.kinds, reader.classes) == ("array", {"array": "array"}, ("a", "b"))
    for i, array in enumerate(VOLUMES):
        np.testing.assert_array_equal(reader.array(f"{'ab'[i % 2]}/{i}"), array)
    packer.extract(tmp_path / "set", tmp_path / "out")
    assert {
        str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")
    } == files


@pytest.mark.parametrize(
    ("files", "fields", "kinds", "keys", "left_out"),
    [
        ({"a.npy": saved(1), "b.npy": saved(0), "a.js": b"{}", "README": b"x"}, {}, {"array": "array"}, ["a", "b"], 2),
        ({"x/a.jpg": make_jpeg(1), "a.npy": saved(VOLUMES[0]), "b.npy": b""}, {}, {"image": "image"}, ["x/a"], 2),
        ({"image": make_jpeg(1), "a.npy": saved(VOLUMES[0])}, {}, {"image": "image"}, ["image"], 1),  # without a suffix
        ({"a.wav": wav(), "b.FLAC": b"fLaC", "c.npy": b""}, {}, {"audio": "file"}, ["a", "b"], 1),
        ({"a.las": b"A", "b.laz": b"B", "c.jpg": b""}, {"cloud:file": ".las,.laz"}, {"cloud": "file"}, ["a", "b"], 1),
        ({"a.jpg": make_jpeg(1), "a.npy": saved(VOLUMES[0])}, {"x:array": ".npy"}, {"x": "array"}, ["a"], 1),
    ],
)  # fmt: skip
def test_the_main_field_of_a_folder(
    tmp_path: Path, files: dict[str, bytes], fields: Any, kinds: Any, keys: list[str], left_out: int
) -> None:
    source = packer.open_source(tree(tmp_path / "in", files), fields=fields)
    result = packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    reader = readers.open(tmp_path / "set", "train")
    assert (reader.kinds, list(reader.keys)) == (kinds, keys)
    assert sum(result.left_out.values()) == left_out
    assert ("pass  --field array:array=.npy" in "".join(result.warnings)) == ("x/a.jpg" in files)
    assert {bytes(reader.read(i)) for i in range(len(reader))} < set(files.values())


def test_tables_and_archives_of_arrays(tmp_path: Path) -> None:
    tree(tmp_path / "in", {f"{i}.npy": saved(array) for i, array in enumerate(VOLUMES)})
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"in/{i}.npy,{i % 2}\n" for i in range(8)))
    made = {"table": tmp_path / "t.csv", "named": packer.open_source(tmp_path / "t.csv", fields={"ct:array": "path"})}
    made["tar"] = Path(shutil.make_archive(str(tmp_path / "z"), "tar", tmp_path / "in"))
    for name, source in made.items():
        packer.convert(source, "hdf5", tmp_path / name, run=packer.Run(workers=1))
        reader = readers.open(tmp_path / name, "train")
        assert reader.main == ("ct" if name == "named" else "array") and len(reader) == 8
        np.testing.assert_array_equal(reader.array(3), VOLUMES[3])


def test_an_hdf5_file_of_arrays(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("ct", data=np.stack(VOLUMES).astype(">f4"), chunks=(1, 4, 5, 6), compression="gzip")
        file["label"] = np.arange(8) % 3
        file.create_dataset("huge", (1 << 20, 1 << 20), np.float64)  # a chunk that was never written
    with pytest.raises(SourceError, match="which of these holds the samples"):
        packer.convert(tmp_path / "v.h5", "tar", tmp_path / "set")
    with pytest.raises(SourceError, match=r"claims .* but 0 bytes are stored"):
        packer.convert(packer.open_source(tmp_path / "v.h5", image_key="huge"), "tar", tmp_path / "set")
    source = packer.open_source(tmp_path / "v.h5", image_key="ct")
    packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))
    reader = readers.open(tmp_path / "set", "train")
    np.testing.assert_array_equal(np.stack([reader.array(i) for i in range(8)]), np.stack(VOLUMES))
    assert reader.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("names", [("x_train", "y_train", {}), ("z", "c", {"image_key": "z", "label_key": "c"}),
                                   ("images", "labels", {"image_key": "images"})])  # fmt: skip
def test_npy_files_that_are_not_images(tmp_path: Path, names: tuple[str, str, dict[str, str]]) -> None:
    x, y, keys = names
    values = {x: np.stack(VOLUMES[:6]).astype(">f4"), y: np.arange(6) % 3}
    (tmp_path / "f").mkdir()
    np.savez_compressed(tmp_path / "a.npz", **values)
    for name, array in values.items():
        np.save(tmp_path / "f" / f"{name}.npy", array)
    places = [tmp_path / "a.npz", tmp_path / "f" / f"{x}.npy", *([] if keys else [tmp_path / "f"])]
    for number, place in enumerate(places):
        packer.convert(packer.open_source(place, **keys), "tar", tmp_path / str(number), run=packer.Run(workers=1))
        reader = readers.open(tmp_path / str(number), "train")
        assert reader.kinds == {"array": "array"} and reader.labels.tolist() == [0, 1, 2] * 2
        np.testing.assert_array_equal(np.stack([reader.array(i) for i in range(6)]), values[x])


@pytest.mark.parametrize(
    ("files", "kinds", "label"),
    [
        ({"wav": wav(), "cls": b"1"}, {"audio": "file"}, 1),
        ({"flac": b"fLaC", "json": b"{}", "txt": b"a"}, {"audio": "file", "json": "json", "txt": "file"}, -1),
        ({"npy": saved(VOLUMES[0]), "cls": b"0"}, {"array": "array"}, 0),
        ({"jpg": make_jpeg(1), "npy": saved(VOLUMES[0]), "wav": wav()}, {"image": "image"}, -1),
    ],
)
def test_webdataset_tars_made_elsewhere(tmp_path: Path, files: dict[str, bytes], kinds: Any, label: int) -> None:
    """One tar file, and a folder of shards; where a sample has an image, the image stays the main field."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        with tarfile.open(tmp_path / "in" / f"a-{number:06}.tar", "w") as archive:
            for i, (ending, data) in itertools.product(range(3), files.items()):
                member = tarfile.TarInfo(f"{number}{i}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    for source, count in ((tmp_path / "in", 6), (tmp_path / "in" / "a-000000.tar", 3)):
        packer.convert(source, "hdf5", tmp_path / str(count), run=packer.Run(workers=1))
        reader = readers.open(tmp_path / str(count), "train")
        assert len(reader) == count and kinds.items() <= reader.kinds.items()
        assert set(reader.labels.tolist()) == {label} and bytes(reader.read(0)) == next(iter(files.values()))


def test_advise_without_images(tmp_path: Path) -> None:
    tree(tmp_path / "in", {"a.npy": saved(VOLUMES[0]), "b.npy": saved(VOLUMES[1])})
    with pytest.raises(SourceError, match=f"packed as they are:  packer convert {tmp_path / 'in'} --to hdf5"):
        advise(tmp_path / "in")


BAD = {
    "objects": saved(np.array([{}], object), allow_pickle=True),
    "truncated": saved(VOLUMES[0])[:-1],
    "empty": b"",
    "no array": wav(),
    "2^60 values": saved(np.zeros((2, 2), "f4")).replace(b"(2, 2), }    ", b"(1073741824,),}"[:13].ljust(13)),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_bad_arrays_are_named_or_left_out(tmp_path: Path, data: bytes) -> None:
    tree(tmp_path / "in", {"good.npy": saved(VOLUMES[0]), "bad.npy": data})
    with pytest.raises(BadSampleError, match=r"bad\.npy: .*(not an array in \.npy form: found|empty)"):
        packer.convert(tmp_path / "in", "tar", tmp_path / "set")
    result = packer.convert(tmp_path / "in", "tar", tmp_path / "set", run=packer.Run(on_error="skip"))
    assert list(readers.open(tmp_path / "set", "train").keys) == ["good"] and sum(result.left_out.values()) == 1


def test_an_array_is_a_view_where_it_can_be(tmp_path: Path) -> None:
    arrays = {"f4": VOLUMES[0], "u1": np.arange(3, dtype="u1"), ">i2": np.arange(3, dtype=">i2"),
              "F": np.asfortranarray(VOLUMES[1]), "bool": np.array([True, False])}  # fmt: skip
    with packer.writer(tmp_path / "set", "hdf5") as out:
        for key, array in arrays.items():
            out.write(key, array=array, note=f"of {key}", raw=key.encode())
    reader = readers.open(tmp_path / "set", "train")
    assert reader.kinds == {"array": "array", "note": "text", "raw": "file"}
    for key, array in arrays.items():
        values = reader.array(key)
        np.testing.assert_array_equal(values, array)
        assert values.dtype.isnative and (key == "bool" or not values.flags.owndata or values.flags.writeable)
    assert not reader.array("f4").flags.writeable, "not a view of the bytes read"
    with pytest.raises(BadSampleError, match=r"sample 0 \(f4\): field note: not an array"):
        reader.array("f4", "note")
    assert reader.read(0) == reader.read(0, "array") and reader.sizes().tolist() == reader.sizes("array").tolist()


@pytest.mark.parametrize(
    ("samples", "kinds"),
    [
        ([(VOLUMES[0], 1)], {"array": "array"}),
        ([(b"abc", 1)], {"file": "file"}),
        ([{"ct": VOLUMES[0], "label": 1, "age": 3}], {"ct": "array", "json": "json"}),
        ([{"id": "x", "sound": wav(), "label": 1}], {"sound": "file", "id": "text"}),
        ([{"array": np.zeros((4, 4), "u1"), "label": 1}], {"array": "array"}),
        ([{"image": np.zeros((4, 4), "u1"), "array": VOLUMES[0], "label": 1}], {"image": "image", "array": "array"}),
    ],
)
def test_arrays_from_a_writer(tmp_path: Path, samples: list[Any], kinds: dict[str, str]) -> None:
    packer.convert(iter(samples), "tar", tmp_path / "set")
    reader = readers.open(tmp_path / "set", "train")
    assert reader.kinds == kinds and reader.main == next(iter(kinds)) and reader.labels.tolist() == [1]


def test_batches_of_arrays(volumes: Path) -> None:
    reader = readers.open(volumes, "train")
    dataset = ImageDataset(reader, fields=packer_fields())
    sampler = EpochSampler(Shuffled(8, 1), dataset, rank=0, world_size=1)
    stream = ImageStream(dataset, sampler, 3, drop_last=False)
    for loader in (DataLoader(dataset, 3, sampler=sampler, num_workers=2), DataLoader(stream, None, num_workers=2)):
        batches = list(loader)
        assert [list(batch["x"].shape) for batch in batches] == [[3, 4, 5, 6], [3, 4, 5, 6], [2, 4, 5, 6]]
        for batch in batches:
            for x, key, label in zip(batch["x"], batch["key"], batch["label"].tolist(), strict=True):
                np.testing.assert_array_equal(x.numpy(), reader.array(key))
                assert reader.classes[label] == key[0]
        sampler.set_epoch(1)
    cropped = ImageDataset(reader, lambda array: array[:2, None], output="numpy")[0]
    assert cropped[0].shape == (2, 1, 5, 6) and cropped[1] in (0, 1)
    assert ImageDataset(reader, decode=None)[0][0] == bytes(reader.read(0))
    grain = GrainSource(reader)[2]
    np.testing.assert_array_equal(grain["array"], reader.array(2))


def packer_fields() -> dict[str, str]:
    return {"x": "array", "label": "label", "key": "key"}


def test_arrays_that_do_not_form_a_batch_are_named(tmp_path: Path, volumes: Path) -> None:
    with packer.writer(tmp_path / "set", "hdf5") as out:
        for side in (2, 3):
            out.write(str(side), array=np.zeros((side, 2), "f4"))
    dataset = ImageDataset(readers.open(tmp_path / "set", "train"))
    with pytest.raises(ValueError, match=r"the arrays of one batch have the shapes \[\[2, 2\], \[3, 2\]\]"):
        dataset.collate([dataset[0], dataset[1]])
    assert [len(x) for x, _ in next(iter(DataLoader(dataset, 2, collate_fn=list)))] == [2, 3]
    reader = readers.open(volumes, "train")
    for make in (lambda: ImageLoader(reader, 2), lambda: GrainSource(reader, ["image"])):
        with pytest.raises(UnknownNameError, match=r"no field 'image': .* take  readers\.torch\.ImageDataset"):
            make()
    with pytest.raises(ValueError, match="ops change images, and this set has none"):
        ImageDataset(reader, [RandomHorizontalFlip()])


def test_a_bad_array_is_replaced_or_named(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "set", "hdf5", fields={"array": "file"}) as out:
        for i in range(4):
            out.write(str(i), array=b"no array" if i == 1 else saved(VOLUMES[i]))
    reader = readers.open(tmp_path / "set", "train").with_kinds({"array": "array"})
    with pytest.raises(BadSampleError, match=r"sample 1 \(1\): .*not an array in \.npy form"):
        ImageDataset(reader)[1]
    dataset = ImageDataset(reader, on_error="skip")
    assert len(dataset.__getitems__([0, 1, 2])) == 2 and dataset.bad_samples == 1


def test_sets_of_arrays_are_edited_cached_and_staged(tmp_path: Path, volumes: Path, place: dict[str, Any]) -> None:
    packer.reshard(volumes, tmp_path / "again", to="tar")
    packer.append(tmp_path / "again", tree(tmp_path / "more", {"a/new.npy": saved(VOLUMES[0])}))
    run = CliRunner().invoke
    staged = run(cli, ["stage", str(tmp_path / "again"), "--target", str(tmp_path / "node")]).stdout.split()[-1]
    whole = readers.open(staged, "train")
    with readers.cached(whole, **place) as reader:
        for _ in range(2):
            assert len(reader) == 9 and np.array_equal(reader.array("a/new"), VOLUMES[0])
            assert len(list(reader.stream())) == 9
        assert reader.stats().hits > 9
    with pytest.raises(ValueError, match="keep='decoded:16' is for images"):
        readers.cached(whole, keep="decoded:16", **place)
    with pytest.raises(SourceError, match="near compares images"):
        packer.dedup(tmp_path / "again", near=2)
    with pytest.raises(SourceError, match="only images can be resized"):
        packer.convert(
            tmp_path / "more", "tar", tmp_path / "no", images=packer.Images(reencode=packer.Reencode(resize_short=2))
        )
    shown = run(cli, ["inspect", str(tmp_path / "again")])
    assert "arrays  float32 [4, 5, 6]  (in 9 samples examined)" in shown.output and "images" not in shown.output
    assert packer.inspect(volumes).splits["train"].media == {}
    assert (volumes / "README.md").read_text().splitlines()[1].startswith("# 8 samples in")


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (VOLUMES[0], (5, 6)),
        (np.zeros((7, 8, 3), "u1"), (7, 8)),
        (np.full((2, 3), np.nan), (2, 3)),
        (np.array([True, False]), (1, 2)),
        (np.array([[[1e308 + 1e308j] * 5, [0] * 5]]), (2, 5)),
        (np.array([[-np.inf, np.inf, 0]]), (1, 3)),
    ],
)
def test_the_viewer_shows_the_middle_of_an_array(tmp_path: Path, array: Any, shape: tuple[int, int]) -> None:
    with packer.writer(tmp_path / "set", "hdf5") as out:
        out.write("a", array=array, label=1)
    reader = readers.open(tmp_path / "set", "train")
    assert middle_of(reader.array(0)).shape == shape
    assert Image.open(io.BytesIO(as_png(reader, 0, "array"))).size == shape[::-1]
    assert Image.open(io.BytesIO(thumbnail(reader, 0, 4))).size <= (4, 4)
    (field,) = sample_document(reader, 0)["fields"]
    assert field["array"] == f"{np.asarray(array).dtype} {list(np.shape(array))}"
    exported = packer.export_view(tmp_path / "set", tmp_path / "page")
    assert exported.samples == 1


def test_the_viewer_names_invalid_arrays(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "set", "hdf5", fields={"array": "file"}) as out:
        out.write("a", array=b"no array")
    reader = readers.open(tmp_path / "set", "train").with_kinds({"array": "array"})
    assert "the field array cannot be read: not an array in .npy form" in sample_document(reader, 0)["error"]
    with pytest.raises(BadSampleError, match="not an array"):
        thumbnail(reader, 0, 8)
