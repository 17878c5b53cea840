"""Files of earlier versions: every set opens, verifies and extracts, every token resumes.

Files of later versions are refused with a clear message.

tests/golden/make.py writes the files once and never again. docs/versions.md states the promise.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

import packer
import readers
from cache.errors import PackerError, ResumeError
from readers.layout import DATASET_FILE, EDITED_VERSION, VERSION
from readers.order import ResumeToken

GOLDEN = Path(__file__).parent / "golden"
SETS = sorted(GOLDEN.glob("set-*.tar.xz"))
TOKENS = sorted(GOLDEN.glob("resume-*.json"))
HDF5_OF_BYTES = "2.0.0"  # another version of the library writes other bytes around the images

_spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
assert _spec is not None and _spec.loader is not None
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The folder of an archive; tests may not write to it."""
    made: dict[Path, Path] = {}

    def unpack(archive: Path) -> Path:
        if archive not in made:
            made[archive] = make.unpack(archive, tmp_path_factory.mktemp("golden") / archive.name.partition(".")[0])
        return made[archive]

    return unpack


@pytest.fixture(scope="module")
def source(unpacked: Callable[[Path], Path]) -> Path:
    return unpacked(GOLDEN / "source.tar.xz")


def name_of(archive: Path) -> str:
    return archive.name.removesuffix(".tar.xz")


def test_there_are_sets_of_every_version_and_container() -> None:
    names = {name_of(archive) for archive in SETS}
    assert {f"set-{VERSION}-{name}" for name in ("hdf5", "tfrecord", "tar", "raw", "adopted")} <= names
    assert {f"set-{EDITED_VERSION}-{name}" for name in ("edited", "separate")} <= names and TOKENS
    assert sum(path.stat().st_size for path in GOLDEN.iterdir() if path.is_file()) < 200_000


@pytest.mark.parametrize("archive", SETS, ids=name_of)
def test_a_set_opens_verifies_and_extracts(
    archive: Path, source: Path, unpacked: Callable[[Path], Path], tmp_path: Path
) -> None:
    place, kind = unpacked(archive), name_of(archive).rpartition("-")[2]
    result = packer.verify(place, deep=True, workers=1)
    assert result.ok, result.problems
    originals = {path.name: path.read_bytes() for path in source.iterdir()}
    extracted = packer.extract(place, tmp_path / "out", workers=1)
    back = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert extracted.files == len(back) - bool(extracted.labels_file)
    images = {name for name in originals if not name.startswith(("mask", "images"))}
    if kind in ("hdf5", "tfrecord", "tar", "separate"):
        assert images <= set(back) and {f"mask-{n}.png" for n in range(8) if n != 3} <= set(back)
        assert all(back[name] == originals[name] for name in set(back) & set(originals))
        assert b"picture 5" in back.values()
    elif kind == "edited":
        assert images - set(back) == {"image-0.jpg"} and readers.open(place, "train").classes == ("felis", "dog")
    if kind == "separate":
        with readers.open(place, "train") as reader:
            index = list(reader.keys).index("image-1")
            assert bytes(reader.read(index, "note")) == b"more of it" and not reader.has(0, "note")
    elif kind == "adopted":
        with readers.open(place) as reader:
            assert reader.labels.tolist() == [0, 4] and bytes(reader.read(1)) == originals["image-4.jpg"]
        return
    rows = [line.split(",") for line in originals["images.csv"].decode().splitlines()[1:]]
    for split in ("train", "val"):
        expected = [row for row in rows if row[2] == split and (kind != "edited" or row[0] != "image-0.jpg")]
        with readers.open(place, split) as reader:
            count = range(len(reader))
            if kind != "raw":
                assert [reader.name(i) for i in count] == [row[0] for row in expected]
            names = [reader.classes[label] if label >= 0 else "" for label in reader.labels]
            assert [name.replace("felis", "cat") for name in names] == [row[1] for row in expected]
            assert all(reader.image_info(count).width == 16)
            if "caption" in reader.fields:
                assert [bytes(reader.read(i, "caption")).decode() for i in count] == [row[4] for row in expected]


@pytest.mark.parametrize("name", make.WRITERS)
def test_the_same_source_gives_the_same_bytes(
    name: str, source: Path, unpacked: Callable[[Path], Path], tmp_path: Path
) -> None:
    """If this fails, raise the version of the format, and add golden files of it to the existing ones."""
    if name in ("hdf5", "raw") and h5py.version.hdf5_version != HDF5_OF_BYTES:
        pytest.skip(f"the golden bytes are those of HDF5 {HDF5_OF_BYTES}")
    shutil.copytree(source, tmp_path / "source")
    with make.inside(tmp_path):
        now, then = make.WRITERS[name]().absolute(), unpacked(GOLDEN / f"set-{VERSION}-{name}.tar.xz")
    texts = {"README.md", "SHA256SUMS", DATASET_FILE}
    names = {str(path.relative_to(then)) for path in then.rglob("*") if path.is_file()}
    assert {str(path.relative_to(now)) for path in now.rglob("*") if path.is_file()} == names
    differ = [path for path in sorted(names - texts) if (now / path).read_bytes() != (then / path).read_bytes()]
    assert differ == []
    infos = [json.loads((place / DATASET_FILE).read_text()) for place in (now, then)]
    for info in infos:
        info["made"].pop("by")
        info["made"]["options"].pop("checksums", None)  # recorded since checksums are optional
    assert infos[0] == infos[1]


# --- orders and resume ----------------------------------------------------------------------------------------------
ORDERS = sorted(make.orders(6))


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_stays_the_same(name: str) -> None:
    """Otherwise a resumed run would lose some samples and repeat others."""
    assert make.describe_orders()[name] == json.loads(TOKENS[-1].read_text())["orders"][name]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("path", TOKENS, ids=lambda path: path.stem)
def test_a_token_resumes_where_it_was_taken(path: Path, name: str, unpacked: Callable[[Path], Path]) -> None:
    known = json.loads(path.read_text())["tokens"][name]
    with readers.open(unpacked(GOLDEN / "set-1-tar.tar.xz"), "train") as reader:
        assert make.rest_of(make.orders(len(reader))[name], reader, known["token"]) == known["rest"]
        today = make.tokens(reader)[name]
        assert today["token"].pop("run") and today["token"].pop("made", None) is None  # they do not affect resuming
        assert today == known, "the token of this version differs: raise the version"


def test_a_loader_takes_the_token_of_a_sampler(unpacked: Callable[[Path], Path]) -> None:
    from readers.loader import ImageLoader

    known = json.loads(TOKENS[0].read_text())["tokens"]["shuffled"]
    with readers.open(unpacked(GOLDEN / "set-1-tar.tar.xz"), "train") as reader:
        loader = ImageLoader(reader, 1, order=make.orders(len(reader))["shuffled"], threads=1)
        loader.load_state_dict(known["token"])
        labels = [int(batch[1][0]) for batch in loader]
        assert labels == [int(reader.labels[sample]) for (sample,) in known["rest"][0]]


# --- files of a later version -----------------------------------------------------------------------------------------
@pytest.fixture
def newer(unpacked: Callable[[Path], Path], tmp_path: Path) -> Path:
    """A set as packer 9.0 might write it."""
    place = shutil.copytree(unpacked(GOLDEN / "set-1-tar.tar.xz"), tmp_path / "newer")
    info = json.loads((place / DATASET_FILE).read_text())
    info["version"], info["made"]["by"] = EDITED_VERSION + 1, "packer 9.0"
    (place / DATASET_FILE).write_text(json.dumps(info))
    return place


@pytest.mark.parametrize(
    "use",
    [
        lambda place: readers.open(place, "train"),
        lambda place: packer.verify(place, workers=1),
        lambda place: packer.inspect(place),
        lambda place: packer.extract(place, place.parent / "out", workers=1),
        lambda place: packer.drop(place, keys=["image-0"]),
        lambda place: packer.append(place, place, run=packer.Run(workers=1)),
        lambda place: readers.stage(place, place.parent / "copy", any_filesystem=True).__enter__(),
    ],
    ids=["open", "verify", "inspect", "extract", "drop", "append", "stage"],
)
def test_a_set_of_a_later_version_is_refused_and_left_alone(use: Callable[[Path], Any], newer: Path) -> None:
    before = {path: path.read_bytes() for path in newer.rglob("*") if path.is_file()}
    with pytest.raises(PackerError, match=r"version 3, written by packer 9\.0; this packer reads .* upgrade packer"):
        use(newer)
    assert {path: path.read_bytes() for path in newer.rglob("*") if path.is_file()} == before
    assert not (newer.parent / "out").exists()


def test_a_token_of_a_later_version_is_refused() -> None:
    token = json.loads(TOKENS[0].read_text())["tokens"]["shuffled"]["token"]
    with pytest.raises(ResumeError, match=r"version 2, this packer reads version 1; upgrade packer"):
        ResumeToken.from_dict({**token, "version": 2})
    assert ResumeToken.from_dict({**token, "later": 1}).to_dict() == token


def test_a_set_with_an_index_of_the_rows_of_its_jpegs_opens(unpacked: Callable[[Path], Path], tmp_path: Path) -> None:
    """Early versions added three more files to an index on request, and listed them with the columns."""
    path = next(unpacked(GOLDEN / "set-1-tar.tar.xz").rglob(DATASET_FILE)).parent
    copy = shutil.copytree(path, tmp_path / "set")
    content = json.loads((copy / DATASET_FILE).read_text())
    for split in content["splits"].values():
        for name in ("image.rows.npy", "image.rows.offset.npy", "image.rows.head.npy"):
            (copy / split["index"] / name).write_bytes(b"rows")
            split["columns"][name] = {"bytes": 4, "crc32c": "00000000"}
    (copy / DATASET_FILE).write_text(json.dumps(content))
    with readers.open(copy, "train") as reader, readers.open(path, "train") as before:
        assert reader.fingerprint == before.fingerprint and reader.read(0) == before.read(0)
    packer.drop(copy, keys=[str(before.keys[0])])  # writes dataset.json and the documents of the set
    assert packer.verify(copy).ok
