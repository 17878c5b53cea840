"""Sets made by programs: `packer.writer`, and `packer.convert` of data sets and streams."""

from __future__ import annotations

import ast
import io
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg
from PIL import Image
from set_cases import FORMATS, convert, wrong

import packer
import readers
from cache.errors import BadSampleError, OutputError, SourceError
from packer.testing.children import crashes_at, in_child
from readers.decode import decode_unchanged
from readers.fields import decode_field

JPEGS = [make_jpeg(i, (24 + i, 16)) for i in range(12)]
MASK = np.arange(16 * 24, dtype=np.uint8).reshape(16, 24) % 5
WHOLE = (MASK % 2).astype(bool)
BOXES = np.array([[0, 0, 5, 6.5]], np.float32)


def sample(i: int) -> dict[str, Any]:
    return {"image": JPEGS[i], "label": i % 2, "mask": MASK + i, "boxes": BOXES * i, "caption": f"número {i}",
            "extra": {"n": i}}  # fmt: skip


def values_of(root: Path) -> list[dict[str, Any]]:
    """The fields of every sample of a set, except the image."""
    with readers.open(root) as reader:
        kinds = {name: kind for name, kind in reader.kinds.items() if name != "image"}
        return [
            {name: decode_field(kind, reader.read(i, name)) for name, kind in kinds.items() if reader.has(i, name)}
            for i in range(len(reader))
        ]


def labels_of(root: Path) -> list[int]:
    with readers.open(root) as reader:
        return list(reader.labels.tolist())


# --- writer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", FORMATS)
def test_written_samples_are_read_back(tmp_path: Path, to: str) -> None:
    root, shards = tmp_path / "set", packer.Shards(samples=5)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    with packer.writer(root, to, classes=("cat", "dog"), split="val", shards=shards) as out:
        for i in range(12):
            out.write(f"k/{i}", split="train", **sample(i))
        out.write("k/0", image=pixels, label="dog")
        out.write("b", image=Image.fromarray(pixels), label=None)
        out.write("c", image=memoryview(JPEGS[0]), label=np.int64(1))
    kinds = {"image": "image", "mask": "mask", "boxes": "boxes", "caption": "text", "json": "json"}
    assert out.info is not None and out.info.fields == kinds and wrong(root) == []
    with readers.open(root) as reader, readers.open(root, "val") as val:
        assert len(reader) == 12 and reader.classes == ("cat", "dog") and len(reader.split_info.shards) == 3
        assert list(reader.keys) == [f"k/{i}" for i in range(12)] and reader.labels.tolist() == [0, 1] * 6
        assert [bytes(reader.read(i)) for i in range(12)] == JPEGS and bytes(val.read(2)) == JPEGS[0]
        assert val.labels.tolist() == [1, -1, 1]
        assert all(np.array_equal(decode_field("image", val.read(i)), pixels) for i in (0, 1))
    for i, value in enumerate(values_of(root)):
        assert np.array_equal(value["mask"], MASK + i) and np.array_equal(value["boxes"], BOXES * i)
        assert value["caption"] == f"número {i}" and value["json"] == {"extra": {"n": i}}


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("k/0", {"image": JPEGS[1]}, "sample 'k/0': a sample with this key was written before"),
    ("../x", {"image": JPEGS[1]}, "cannot be the name of a sample"),
    ("x\ud800", {"image": JPEGS[1]}, "not UTF-8"),
    (3, {"image": JPEGS[1]}, "a key is a text, not 3"),
    ("x", {"image": JPEGS[1][:40]}, "sample 'x': .*byte"),
    ("x", {"image": b"no image"}, "sample 'x': "),
    ("x", {"mask": MASK}, "has no image"),
    ("x", {"image": JPEGS[1], "label": 2}, "its label is 2, expected a whole number from 0 to 1"),
    ("x", {"image": JPEGS[1], "label": "eel"}, "its label is 'eel', expected one of cat, dog"),
    ("x", {"image": JPEGS[1], "label": 0.5}, "its label is 0.5"),
    ("x", {"image": JPEGS[1], "depth": 3}, "has no field 'depth'; it has image, mask"),
    ("x", {"image": JPEGS[1], "boxes": [[3, 0, 1, 1]]}, "boxes: box 0 is"),
    ("x", {"image": JPEGS[1], "split": "a/b"}, "a/b"),
]


def test_a_bad_sample_does_not_change_the_writer(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "set", "tar", classes=("cat", "dog")) as out:
        out.write("k/0", **sample(0))
        for key, values, message in BAD:
            with pytest.raises(BadSampleError, match=message):
                out.write(key, **values)
            assert len(out) == 1
        out.write("last", image=JPEGS[3])
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == ["k/0", "last"] and not reader.has(1, "mask")
    assert wrong(tmp_path / "set") == []


def test_a_set_exists_only_after_a_block_without_an_error(tmp_path: Path) -> None:
    root = tmp_path / "set"

    def write(name: str, **options: Any) -> packer.SetWriter:
        with packer.writer(root, "tar", **options) as out:
            out.write(name, image=JPEGS[0])
            if name == "never":
                with pytest.raises(OutputError, match="another command is writing here"):
                    packer.writer(root, "tar", overwrite=True)
                raise RuntimeError("the program's")
        return out

    with pytest.raises(SourceError, match="no sample was written"), packer.writer(root, "tar"):
        pass
    out = packer.writer(root, "hdf5")
    with pytest.raises(BadSampleError):
        out.write("a", image=b"none")
    with pytest.raises(SourceError, match="no sample was written"):
        out.close()
    with pytest.raises(OutputError, match="was aborted"):
        out.close()
    with pytest.raises(OutputError, match="has ended"):
        out.write("b", image=JPEGS[0])
    with pytest.raises(RuntimeError, match="the program's"):
        write("never")
    assert not list(root.glob("*.tar")) and not (root / ".packing").exists()
    write("first")
    with pytest.raises(OutputError, match="pass overwrite=True"):
        write("second")
    with pytest.raises(RuntimeError):
        write("never", overwrite=True)
    with readers.open(root) as reader:
        assert list(reader.keys) == ["first"]
    write("third", overwrite=True)
    with readers.open(root) as reader:
        assert list(reader.keys) == ["third"]


def test_a_kill_at_any_step_leaves_no_set_or_the_whole_set(tmp_path: Path) -> None:
    def write(root: Path) -> None:
        with packer.writer(root, "tar", shards=packer.Shards(samples=2), overwrite=True) as out:
            for i in range(5):
                out.write(str(i), image=JPEGS[0])

    for step in itertools.count(1, 3):
        root = tmp_path / f"set{step % 2}"
        killed = crashes_at(step, partial(write, root))
        if not killed or (root / "dataset.json").exists():
            assert wrong(root) == []
            with readers.open(root) as reader:
                assert list(reader.keys) == list("01234")
        if not killed:
            break
    assert step > 12


def test_a_forked_child_neither_commits_nor_removes_files_of_a_writer(tmp_path: Path) -> None:
    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(OutputError, match=r"is written by process \d+, .* was forked from it"):
            call()

    with packer.writer(tmp_path / "set", "tar", shards=packer.Shards(samples=2)) as out:
        for i in range(5):
            out.write(str(i), image=JPEGS[0], label=i)
        end_of_block: Any = out.__exit__
        for call in (
            out.close,
            partial(out.write, "child", image=JPEGS[0], label=9),
            partial(end_of_block, *[None] * 3),
        ):
            in_child(partial(refused, call))
        in_child(out.abort)
        in_child(partial(end_of_block, SystemExit, SystemExit(0), None))
        assert not (tmp_path / "set" / "dataset.json").exists()
        out.write("last", image=JPEGS[0], label=5)
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == [*"01234", "last"] and reader.labels.tolist() == list(range(6))
    assert wrong(tmp_path / "set") == []


# --- data sets ------------------------------------------------------------------------------------------------------
class Pictures:
    """Like torchvision's data sets: a tuple of a Pillow image and its label, and `classes`."""

    classes = ("cat", "dog")

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Image.open(io.BytesIO(JPEGS[index % 12])), index % 2


class Records(Pictures):
    """Dictionaries with encoded images; sample 7 has none."""

    def __getitem__(self, index: int) -> Any:
        image = {"bytes": None if index == 7 else JPEGS[index % 12], "path": "x.jpg"}
        label, caption = self.classes[index % 2], f"number {index}"
        return {"img": image, "label": label, "caption": caption, "weight": np.float32(index), "ids": [index, 1]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_of_a_program(tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {"to": "hdf5", "samples": 10, "workers": workers}
    result = convert(Pictures(), tmp_path / "set", **options)
    assert (result.samples, result.shards, result.classes) == (23, 3, 2)
    with readers.open(tmp_path / "set") as reader:
        assert reader.keys[7] == "07" and reader.labels.tolist() == [i % 2 for i in range(23)]
        for i in (0, 22):
            assert np.array_equal(decode_field("image", reader.read(i)), np.asarray(Pictures()[i][0]))
    assert convert(Pictures(), tmp_path / "set", **options).already_done
    with pytest.raises(OutputError, match="made from another source"):
        convert(Pictures(22), tmp_path / "set", **options)


def test_bytes_stay_and_other_members_become_json(tmp_path: Path) -> None:
    names = r"Records of 23 samples: 07: img: names the file .x.jpg., which cannot be read"
    with pytest.raises(BadSampleError, match=names):
        convert(Records(), tmp_path / "set")
    result = convert(Records(), tmp_path / "set", on_error="skip", shuffle=3, overwrite=True)
    assert result.samples == 22 and result.left_out == {"skipped": 1}
    with readers.open(tmp_path / "set") as reader:
        assert sorted(map(int, reader.keys)) == [i for i in range(23) if i != 7]
        for row, i in enumerate(map(int, reader.keys)):
            assert bytes(reader.read(row)) == JPEGS[i % 12] and reader.labels[row] == i % 2
            assert bytes(reader.read(row, "caption")).decode() == f"number {i}"
            assert json.loads(bytes(reader.read(row, "json"))) == {"weight": i, "ids": [i, 1]}


def test_a_stream_of_samples(tmp_path: Path) -> None:
    def samples() -> Iterator[Any]:
        for i in range(9):
            yield {"image": JPEGS[i] if i != 4 else b"none", "label": i % 2, "vector": np.arange(i, dtype=np.float64)}

    with pytest.raises(BadSampleError, match=r"sample '000000004': .*on_error='skip'"):
        convert(samples(), tmp_path / "set", "hdf5")
    assert not (tmp_path / "set" / "dataset.json").exists()
    result = convert(samples(), tmp_path / "set", "hdf5", on_error="skip", samples=3)
    assert (result.samples, result.shards, result.left_out) == (8, 3, {"not packed": 1})
    assert "sample 4" in (tmp_path / "set" / "left-out.jsonl").read_text()
    with readers.open(tmp_path / "set") as reader:
        assert reader.keys[4] == "000000005"
        assert decode_field("array", reader.read(4, "vector")).tolist() == [0, 1, 2, 3, 4]


NO_JSON = r"cannot be written as JSON \(which has no NaN"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (Pictures(), {"output": None}, ValueError, "give output="),
        (Pictures(0), {}, SourceError, "Pictures of 0 samples: is empty"),
        ([(JPEGS[0], 1, 2)], {}, SourceError, "a sample is a tuple of 3"),
        ([{"label": 3}], {}, SourceError, r"no member of a sample is an image, .*; it has label \(int\)"),
        ([{"image": JPEGS[0], "label": 1, "target": 2}], {}, SourceError, "label, target are labels"),
        ([{"image": JPEGS[0]}], {"fields": {"image": "picture"}}, SourceError, "'image' cannot be 'picture'"),
        ([{"image": JPEGS[0]}], {"fields": {"img": "image"}}, SourceError, "has no member 'img'"),
        ([{"image": JPEGS[0]}], {"fields": {"image": "drop"}}, SourceError, "no member of a sample is an image"),
        ([{"image": np.zeros((4, 4, 3))}], {}, SourceError, "no member of a sample is an image"),
        ([{"image": JPEGS[0], "x": x} for x in (0, 1, MASK.astype(np.int64))], {}, SourceError,
         r"sample 2: has an array as 'x'.*'x': 'array'"),
        ([{"image": JPEGS[0], "mask": MASK / 7}], {}, BadSampleError,
         "mask: a mask has whole numbers; as  fields="),
        *(([{"image": JPEGS[0], "extra": {"value": value}}], {}, BadSampleError, NO_JSON)
          for value in (float("nan"), np.float32("nan"), {"a": [float("inf")]}, np.array([1, np.nan]))),
        (iter([JPEGS[0]]), {"shuffle": 1}, ValueError, "cannot be shuffled"),
        (7, {}, TypeError, "the source is a int"),
        ({"a": 1}, {}, TypeError, "the source is a dict"),
        ("there", {"fields": {}}, ValueError, "is for samples of a program"),
        (["a", "b"], {}, SourceError, "a: no such file or directory"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_packed(tmp_path: Path, source: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        convert(source, **{"root": tmp_path / "set"} | ({"root": None} if "output" in options else options))
    assert not (tmp_path / "set" / "dataset.json").exists() and not list(tmp_path.rglob("*.tar"))


def test_images_that_rows_name(tmp_path: Path) -> None:
    """As in Hugging Face's imagefolder: the bytes of the file are packed; a file that is not an image is refused."""
    (tmp_path / "a.jpg").write_bytes(JPEGS[0])
    (tmp_path / "b.jpg").write_bytes(b"root:x:0:0")
    names = ("a.jpg", "b.jpg", "gone.jpg")
    rows = [{"image": {"bytes": None, "path": str(tmp_path / name)}, "label": 1} for name in names]
    with pytest.raises(BadSampleError, match=r"gone.jpg', which cannot be read: .*; return its bytes instead"):
        convert(rows[2:], tmp_path / "other")
    convert(rows, tmp_path / "set", on_error="skip")
    with readers.open(tmp_path / "set") as reader:
        assert len(reader) == 1 and bytes(reader.read(0)) == JPEGS[0]


class Corrected(Pictures):
    """A data set in which samples can be changed, and which may stop."""

    def __init__(self, changes: dict[int, dict[str, Any]] | None = None, stop: int | None = None) -> None:
        super().__init__(40)
        self.changes, self.stop = changes or {}, stop

    def __getitem__(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        made = {"image": JPEGS[index % 12], "label": index % 2, "caption": f"number {index}", "n": index}
        return made | self.changes.get(index, {})


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"label": 1}, "06: its label was 0 and is 1 now"),
    ({"caption": "another"}, "06: its caption has changed"),
    ({"n": 7.5}, "06: its json has changed"),
    ({"image": JPEGS[0]}, "06: its image has changed"),
    ({"image": b""}, "06: "),
]


@pytest.mark.parametrize("state", ["done", "done by processes", "stopped", "changed by ops"])
def test_a_corrected_data_set_is_not_taken_for_the_packed_one(tmp_path: Path, state: str) -> None:
    """Samples that ops have changed are compared by their labels and texts."""
    options: dict[str, Any] = {"to": "hdf5", "samples": 5, "workers": 2 if "processes" in state else 1}
    if state == "changed by ops":
        options["reencode"] = packer.Reencode(max_side=16)
    if state == "stopped":
        with pytest.raises(KeyboardInterrupt):
            convert(Corrected(stop=17), tmp_path / "set", **options)
    else:
        convert(Corrected(), tmp_path / "set", **options)
        assert convert(Corrected(), tmp_path / "set", **options).already_done
    for change, message in CHANGES[: 2 if state in ("changed by ops", "done by processes") else 5]:
        text = rf"Corrected of 40 samples has changed since that was packed: {message}.*overwrite=True"
        with pytest.raises(OutputError, match=text):
            convert(Corrected({6: change}), tmp_path / "set", **options)
    other = Corrected({34: CHANGES[0][0]})
    if state == "stopped":
        assert convert(other, tmp_path / "set", **options).shards_resumed == 3
    else:
        convert(other, tmp_path / "set", **options, overwrite=True)
    assert convert(other, tmp_path / "set", **options).already_done
    assert labels_of(tmp_path / "set") == [1 if i == 34 else i % 2 for i in range(40)]


# --- kinds of the members of samples --------------------------------------------------------------------------------
def test_members_named_by_fields(tmp_path: Path) -> None:
    samples = [{"a": JPEGS[0], "b": JPEGS[1], "y": 3, "m": Image.fromarray(MASK), "id": "x", "source": "y"}] * 2
    fields = {"b": "image", "a": "file", "y": "label", "m": "mask", "id": "drop", "captoin": "text"}
    result = convert(samples, tmp_path / "set", fields=fields)
    with readers.open(tmp_path / "set") as reader:
        assert reader.fields == ("image", "a", "m", "captoin") and reader.labels.tolist() == [3, 3]
        assert bytes(reader.read(1)) == JPEGS[1] and bytes(reader.read(1, "a")) == JPEGS[0]
        assert np.array_equal(decode_field("mask", reader.read(0, "m")), MASK)
    assert result.warnings == (
        "fields= does not name source, so it is left out; 'drop' makes that explicit",
        "fields= names captoin, which none of the examined samples has",
    )


class Listed(list[Any]):
    """A data set of a list of samples."""


@pytest.mark.parametrize("as_source", [Listed, iter])
def test_a_member_that_the_first_sample_lacks_keeps_its_kind(tmp_path: Path, as_source: Any) -> None:
    later: dict[str, Any] = {"caption": "a cat", "boxes": BOXES, "mask": MASK, "weight": 0.5}
    first: list[dict[str, Any]] = [{}, dict.fromkeys(later), later, later, {}]
    samples = [{"image": JPEGS[i], "label": i, **values} for i, values in enumerate(first)]
    convert(as_source(samples), tmp_path / "set")
    with readers.open(tmp_path / "set") as reader:
        kinds = {"image": "image", "caption": "text", "boxes": "boxes", "mask": "mask", "json": "json"}
        assert dict(reader.kinds) == kinds
    packed = values_of(tmp_path / "set")
    assert [*map(len, packed)] == [0, 0, 4, 4, 0]
    assert packed[3]["caption"] == "a cat" and packed[3]["json"] == {"weight": 0.5}
    assert np.array_equal(packed[3]["boxes"], BOXES) and np.array_equal(packed[3]["mask"], MASK)


@pytest.mark.parametrize(("on_error", "as_source", "before"), [
    ("raise", Listed, {}), ("skip", Listed, {"caption": None}), ("skip", iter, {}),
])  # fmt: skip
def test_a_member_that_first_appears_late_is_an_error_with_advice(
    tmp_path: Path, on_error: str, as_source: Any, before: dict[str, Any]
) -> None:
    late: list[dict[str, Any]] = [{"image": JPEGS[0], "label": 1, **before} for _ in range(60)]
    late[37] |= {"caption": "a cat"}
    message = r"sample .*37.*no field 'caption'; it has image\. .*'caption': 'text'\}"
    with pytest.raises(SourceError, match=message) as caught:
        convert(as_source(late), tmp_path / "set", on_error=on_error, samples=8)
    fields = ast.literal_eval(str(caught.value).partition("fields=")[2].partition("}")[0] + "}")
    convert(as_source(late), tmp_path / "set", fields=fields, overwrite=True)
    assert [number for number, row in enumerate(values_of(tmp_path / "set")) if row == {"caption": "a cat"}] == [37]
    assert labels_of(tmp_path / "set") == [1] * 60


def test_a_late_field_of_a_writer_is_an_error_with_advice(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "one", "tar") as out:
        out.write("a", image=JPEGS[0], caption=None)
        message = r"sample 'b': has no field 'caption'.*\{'image': 'image', 'caption': 'text'\}"
        with pytest.raises(BadSampleError, match=message):
            out.write("b", image=JPEGS[1], caption="a cat")
        with pytest.raises(BadSampleError, match=r"'caption': 'text', 'mask': 'mask'\}"):  # fields it would lose
            out.write("c", image=JPEGS[1], caption="a cat", mask=MASK)
    with packer.writer(tmp_path / "two", "tar", fields={"image": "image", "caption": "text"}) as out:
        out.write("a", image=JPEGS[0])
        out.write("b", image=JPEGS[1], caption="a cat", label=3)
        with pytest.raises(BadSampleError, match="has no field 'captoin'"):
            out.write("c", image=JPEGS[1], captoin="a cat")
    assert values_of(tmp_path / "two") == [{}, {"caption": "a cat"}] and labels_of(tmp_path / "two") == [-1, 3]


def test_a_data_set_of_hugging_face(tmp_path: Path) -> None:
    """Its features give the kind of a member without values, its fingerprint reveals another data set."""
    datasets = pytest.importorskip("datasets")
    image, mask = datasets.Image(), io.BytesIO()
    Image.fromarray(MASK).save(mask, "PNG")
    one_class = datasets.ClassLabel(names=["a", "b"])  # the label, whatever its name
    features = datasets.Features({"image": image, "caption": datasets.Value("string"), "seg": image,
                                  "breed": one_class, "n": datasets.Value("int64")})  # fmt: skip

    def made(label: int) -> Any:
        def late(value: Any) -> list[Any]:
            return [None] * 50 + [value] + [None] * 9

        rows = {"image": [{"bytes": JPEGS[i % 12], "path": None} for i in range(60)], "caption": late("a cat"),
                "seg": late({"bytes": mask.getvalue(), "path": None}), "breed": late(label), "n": late(7)}  # fmt: skip
        return datasets.Dataset.from_dict(rows, features=features)

    convert(made(1), tmp_path / "set")
    items = values_of(tmp_path / "set")
    assert items[50]["caption"] == "a cat" and items[50]["json"] == {"n": 7} and np.array_equal(items[50]["seg"], MASK)
    assert labels_of(tmp_path / "set") == [-1] * 50 + [1] + [-1] * 9
    with readers.open(tmp_path / "set") as reader:
        assert reader.classes == ("a", "b") and "breed" not in reader.fields
    assert convert(made(1), tmp_path / "set").already_done
    with pytest.raises(OutputError, match="made from another source"):
        convert(made(0), tmp_path / "set")


def test_integer_masks_follow_flips(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from readers.augment import RandomHorizontalFlip
    from readers.loader import ImageLoader

    below = MASK.astype(np.int32) - 1
    masks: list[tuple[Any, Any]] = [
        (MASK.astype(np.int64), MASK), (below, below), (MASK.astype(np.uint16), MASK), (WHOLE, WHOLE),
        (MASK[None], MASK), (MASK[:, :, None].astype(np.int64), MASK), (MASK.astype(np.float32), MASK),
        (torch.from_numpy(MASK).long(), MASK), (torch.from_numpy(WHOLE), WHOLE), (torch.from_numpy(MASK)[None], MASK),
    ]  # fmt: skip
    picture = make_jpeg(1, (24, 16))
    for number, (mask, expected) in enumerate(masks):
        convert([{"image": picture, "mask": mask}], tmp_path / f"{number}")
        with readers.open(tmp_path / f"{number}") as reader:
            assert reader.kinds["mask"] == "mask"
            assert np.array_equal(decode_field("mask", reader.read(0, "mask")), expected)
            loader = ImageLoader(reader, 1, augment=[RandomHorizontalFlip(1.0)], fields=("image", "mask"), threads=1)
            _, flipped = next(iter(loader))
            assert np.array_equal(np.asarray(flipped[0]), np.asarray(expected)[:, ::-1])


def test_floating_point_pillow_images_keep_every_value(tmp_path: Path) -> None:
    depth = np.linspace(-3, 5000, 16 * 24, dtype=np.float32).reshape(16, 24)
    samples: list[Any] = [{"image": Image.fromarray(depth), "label": 1}]
    with pytest.raises(BadSampleError, match=r"floating-point samples.*decode='unchanged'"):
        convert(samples, tmp_path / "set")
    convert(samples, tmp_path / "set", decode="unchanged", overwrite=True)
    with readers.open(tmp_path / "set") as reader:
        assert np.array_equal(decode_unchanged(reader.read(0)), depth)
    second: list[Any] = [{"image": JPEGS[0], "depth": Image.fromarray(depth)}]
    message = r"depth: holds floating-point.*fields=\{'image': 'image', 'depth': 'array'\}"
    with pytest.raises(BadSampleError, match=message):
        convert(second, tmp_path / "two")
    second[0] |= {"mask": MASK / 7, "masks": WHOLE[None]}
    fields = {"image": "image", **dict.fromkeys(("depth", "mask", "masks"), "array")}
    convert(second, tmp_path / "two", fields=fields, overwrite=True)
    (values,) = values_of(tmp_path / "two")
    assert np.array_equal(values["depth"], depth) and np.array_equal(values["mask"], MASK / 7)


@pytest.mark.parametrize("as_source", [Listed, iter])
def test_boxes_without_area_or_beyond_the_image_are_a_warning(tmp_path: Path, as_source: Any) -> None:
    boxes = [[3, 3, 3, 9], [0, 0, 30, 9], [-4, 0, 3, 9], [0, 0, 24, 16], [0, 0, 24.6, 16]]
    samples = [{"image": JPEGS[0], "boxes": np.array([[0, 0, 5, 6], box])} for box in boxes]
    samples.append({"image": JPEGS[0], "boxes": np.zeros((0, 4))})
    result = convert(as_source(samples), tmp_path / "set", "hdf5")
    first, second = ("000000000", "000000001") if as_source is iter else ("0", "1")
    assert sorted(result.warnings) == [
        f"1 image with boxes without area (the first: {first}): packed as they are; detectors refuse them",
        f"2 images with boxes that reach beyond the image (the first: {second}): packed as they are",
    ]
    assert np.array_equal(values_of(tmp_path / "set")[2]["boxes"][1], np.array(boxes[2], np.float32))
