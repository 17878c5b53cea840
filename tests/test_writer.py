"""Sets made by programs: `packer.writer`, and `packer.convert` of data sets and streams."""

from __future__ import annotations

import ast
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import by_subject, make_jpeg
from PIL import Image

import packer
import readers
from cache.errors import BadSampleError, OutputError, SourceError
from readers.decode import decode_unchanged
from readers.fields import decode_field

FORMATS = ("hdf5", "tfrecord", "tar")
JPEGS = [make_jpeg(i, (24 + i, 16)) for i in range(12)]
MASK = np.arange(16 * 24, dtype=np.uint8).reshape(16, 24) % 5
BOXES = np.array([[0, 0, 5, 6.5]], np.float32)


def write_some(out: packer.SetWriter, count: int = 12) -> None:
    for i in range(count):
        out.write(
            f"k/{i}", image=JPEGS[i], label=i % 2, mask=MASK + i, boxes=BOXES * i, caption=f"número {i}", extra={"n": i}
        )


# --- writer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", FORMATS)
def test_what_is_written_is_read(tmp_path: Path, to: str) -> None:
    with packer.writer(tmp_path / "set", to, classes=("cat", "dog"), shards=packer.Shards(samples=5)) as out:
        write_some(out)
    assert out.info is not None and out.info.fields == {
        "image": "image", "mask": "mask", "boxes": "boxes", "caption": "text", "json": "json",
    }  # fmt: skip
    assert packer.verify(tmp_path / "set", deep=True).ok
    with readers.open(tmp_path / "set") as reader:
        assert len(reader) == 12 and reader.classes == ("cat", "dog") and len(reader.split_info.shards) == 3
        assert list(reader.keys) == [f"k/{i}" for i in range(12)] and reader.labels.tolist() == [0, 1] * 6
        for i in range(12):
            value = {
                name: decode_field(kind, reader.read(i, name))
                for name, kind in out.info.fields.items()
                if name != "image"
            }
            assert bytes(reader.read(i)) == JPEGS[i] and np.array_equal(value["mask"], MASK + i)
            assert np.array_equal(value["boxes"], BOXES * i) and value["caption"] == f"número {i}"
            assert value["json"] == {"extra": {"n": i}}


def test_splits_labels_by_name_and_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    with packer.writer(tmp_path / "set", "hdf5", classes=("cat", "dog"), split="val") as out:
        out.write("a", image=pixels, label="dog")
        out.write("a", image=Image.fromarray(pixels), label=None, split="train")
        out.write("b", image=memoryview(JPEGS[0]), label=np.int64(1), split="train")
    assert {name: split.samples for name, split in out.info.splits.items()} == {"val": 1, "train": 2}  # type: ignore[union-attr]
    for split, labels in (("val", [1]), ("train", [-1, 1])):
        with readers.open(tmp_path / "set", split) as reader:
            assert reader.labels.tolist() == labels
            assert np.array_equal(decode_field("image", reader.read(0)), pixels)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
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
    ],
)
def test_a_bad_sample_leaves_the_writer_as_it_was(
    tmp_path: Path, key: Any, values: dict[str, Any], message: str
) -> None:
    with packer.writer(tmp_path / "set", "tar", classes=("cat", "dog")) as out:
        write_some(out, 2)
        with pytest.raises(BadSampleError, match=message):
            out.write(key, **values)
        assert len(out) == 2
        out.write("last", image=JPEGS[3])
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == ["k/0", "k/1", "last"] and not reader.has(2, "mask")
    assert packer.verify(tmp_path / "set", deep=True).ok


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the program's"), packer.writer(tmp_path / "set", "hdf5") as out:
        out.write("a", image=JPEGS[0])
        raise RuntimeError("the program's")
    assert not list(tmp_path.rglob("*.h5")) and not (tmp_path / "set" / ".packing").exists()
    with pytest.raises(OutputError, match="was aborted"):
        out.close()
    with pytest.raises(OutputError, match="has ended"):
        out.write("b", image=JPEGS[0])


def test_no_sample_is_no_set(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no sample was written"), packer.writer(tmp_path / "set", "hdf5"):
        pass
    out = packer.writer(tmp_path / "set", "hdf5")
    with pytest.raises(BadSampleError):
        out.write("a", image=b"none")
    with pytest.raises(SourceError, match="no sample was written"):
        out.close()


def test_a_set_is_replaced_only_on_request_and_at_the_end(tmp_path: Path) -> None:
    def write(name: str, **options: Any) -> None:
        with packer.writer(tmp_path / "set", "tar", **options) as out:
            out.write(name, image=JPEGS[0])
            if name == "never":
                raise RuntimeError

    write("first")
    with pytest.raises(OutputError, match="pass overwrite=True"):
        write("second")
    with pytest.raises(RuntimeError):
        write("never", overwrite=True)
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == ["first"]
    write("third", overwrite=True)
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == ["third"]
    with packer.writer(tmp_path / "other", "tar") as one:
        one.write("a", image=JPEGS[0])
        with pytest.raises(OutputError, match="another command is writing here"):
            packer.writer(tmp_path / "other", "tar")


KILLED = """
import os, signal, sys, packer
from cache.files import Folder
count, at = [0], int(sys.argv[2])
def counted(name):
    original = getattr(Folder, name)
    def call(*arguments, **options):
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(Folder, name, call)
for name in ("rename", "write", "sync"):
    counted(name)
with packer.writer(sys.argv[1], "tar", shards=packer.Shards(samples=2), overwrite=True) as out:
    for i in range(5):
        out.write(str(i), image=open(sys.argv[3], "rb").read())
print("done")
"""


def test_a_kill_at_any_step_leaves_no_set_or_the_whole(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(JPEGS[0])
    at, done = 1, False
    while not done:
        command = [sys.executable, "-c", KILLED, tmp_path / f"set{at % 2}", str(at), tmp_path / "image.jpg"]
        ended = subprocess.run(command, capture_output=True, text=True)
        done = ended.stdout == "done\n"
        assert done or ended.returncode == -signal.SIGKILL, ended.stderr
        if done or (tmp_path / f"set{at % 2}" / "dataset.json").exists():
            assert packer.verify(tmp_path / f"set{at % 2}", deep=True).ok
        at += 3
    assert at > 20
    with readers.open(tmp_path / f"set{(at - 3) % 2}") as reader:
        assert list(reader.keys) == list("01234")


# --- data sets ------------------------------------------------------------------------------------------------------
class Pictures:
    """As torchvision's data sets: a tuple of an image of Pillow and its label, and `classes`."""

    classes = ("cat", "dog")

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Image.open(io.BytesIO(JPEGS[index % 12])), index % 2


class Records(Pictures):
    """Dictionaries, with encoded images; sample 7 has none."""

    def __getitem__(self, index: int) -> Any:
        return {
            "img": {"bytes": None if index == 7 else JPEGS[index % 12], "path": "x.jpg"},
            "label": self.classes[index % 2],
            "caption": f"number {index}",
            "weight": np.float32(index),
            "ids": [index, index + 1],
        }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_of_a_program(tmp_path: Path, workers: int) -> None:
    result = packer.convert(
        Pictures(), "hdf5", tmp_path / "set", shards=packer.Shards(samples=10), run=packer.Run(workers=workers)
    )
    assert (result.samples, result.shards, result.classes) == (23, 3, 2)
    with readers.open(tmp_path / "set") as reader:
        assert reader.keys[7] == "07" and reader.labels.tolist() == [i % 2 for i in range(23)]
        for i in (0, 22):
            assert np.array_equal(decode_field("image", reader.read(i)), np.asarray(Pictures()[i][0]))
    assert packer.convert(
        Pictures(), "hdf5", tmp_path / "set", shards=packer.Shards(samples=10), run=packer.Run(workers=workers)
    ).already_done
    with pytest.raises(OutputError, match="made from another source"):
        packer.convert(Pictures(22), "hdf5", tmp_path / "set", shards=packer.Shards(samples=10))


def test_bytes_stay_and_the_rest_is_json(tmp_path: Path) -> None:
    with pytest.raises(
        BadSampleError, match=r"Records of 23 samples: 07: img: names the file .x.jpg., which cannot be read"
    ):
        packer.convert(Records(), "tar", tmp_path / "set", run=packer.Run(workers=1))
    result = packer.convert(
        Records(),
        "tar",
        tmp_path / "set",
        run=packer.Run(on_error="skip", workers=1),
        shards=packer.Shards(shuffle=3),
        overwrite=True,
    )
    assert result.samples == 22 and result.left_out == {"skipped": 1}
    with readers.open(tmp_path / "set") as reader:
        assert sorted(map(int, reader.keys)) == [i for i in range(23) if i != 7]
        for row, key in enumerate(reader.keys):
            i = int(key)
            assert bytes(reader.read(row)) == JPEGS[i % 12] and reader.labels[row] == i % 2
            assert bytes(reader.read(row, "caption")).decode() == f"number {i}"
            assert json.loads(bytes(reader.read(row, "json"))) == {"weight": i, "ids": [i, i + 1]}


def test_a_stream_of_samples(tmp_path: Path) -> None:
    def samples() -> Iterator[Any]:
        for i in range(9):
            yield {"image": JPEGS[i] if i != 4 else b"none", "label": i % 2, "vector": np.arange(i, dtype=np.float64)}

    with pytest.raises(BadSampleError, match=r"sample '000000004': .*on_error='skip'"):
        packer.convert(samples(), "hdf5", tmp_path / "set")
    assert not (tmp_path / "set" / "dataset.json").exists()
    result = packer.convert(
        samples(), "hdf5", tmp_path / "set", run=packer.Run(on_error="skip"), shards=packer.Shards(samples=3)
    )
    assert (result.samples, result.shards, result.left_out) == (8, 3, {"not packed": 1})
    assert "sample 4" in (tmp_path / "set" / "left-out.jsonl").read_text()
    with readers.open(tmp_path / "set") as reader:
        assert reader.keys[4] == "000000005"
        assert decode_field("array", reader.read(4, "vector")).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (Pictures(), {"output": None}, ValueError, "give output="),
        (Pictures(0), {}, SourceError, "Pictures of 0 samples: is empty"),
        ([(JPEGS[0], 1, 2)], {}, SourceError, "a sample is a tuple of 3"),
        ([{"label": 3}], {}, SourceError, r"no member of a sample is an image; it has label \(int\)"),
        ([{"image": JPEGS[0], "label": 1, "target": 2}], {}, SourceError, "label, target are called one"),
        ([{"image": JPEGS[0]}], {"fields": {"image": "picture"}}, SourceError, "'image' cannot be 'picture'"),
        ([{"image": JPEGS[0]}], {"fields": {"img": "image"}}, SourceError, "has no member 'img'"),
        ([{"image": JPEGS[0]}], {"fields": {"image": "drop"}}, SourceError, "no member of a sample is an image"),
        ([{"image": np.zeros((4, 4, 3))}], {}, SourceError, "no member of a sample is an image"),
        (iter([JPEGS[0]]), {"shuffle": 1}, ValueError, "cannot be shuffled"),
        (7, {}, TypeError, "the source is a int"),
        ({"a": 1}, {}, TypeError, "the source is a dict"),
        ("there", {"fields": {}}, ValueError, "is for samples of a program"),
        (["a", "b"], {}, SourceError, "a: no such file or directory"),
    ],
)
def test_what_cannot_be_packed(tmp_path: Path, source: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        packer.convert(source, "tar", **by_subject(options, output=tmp_path / "set", workers=1))
    assert not (tmp_path / "set").exists() or not list((tmp_path / "set").iterdir())


def test_images_that_rows_name(tmp_path: Path) -> None:
    """As those of Hugging Face's imagefolder: the file's own bytes are packed; what is not an image is refused."""
    (tmp_path / "a.jpg").write_bytes(JPEGS[0])
    (tmp_path / "b.jpg").write_bytes(b"root:x:0:0")
    rows = [{"image": {"bytes": None, "path": str(tmp_path / name)}, "label": 1} for name in ("a.jpg", "b.jpg")]
    rows.append({"image": {"bytes": None, "path": str(tmp_path / "gone.jpg")}, "label": 1})
    with pytest.raises(BadSampleError, match=r"gone.jpg', which cannot be read: .*; hand its bytes out"):
        packer.convert(rows[2:], "tar", tmp_path / "other", run=packer.Run(workers=1))
    packer.convert(rows, "tar", tmp_path / "set", run=packer.Run(workers=1, on_error="skip"))
    with readers.open(tmp_path / "set") as reader:
        assert len(reader) == 1 and bytes(reader.read(0)) == JPEGS[0]


def test_the_members_that_fields_name(tmp_path: Path) -> None:
    samples = [{"a": JPEGS[0], "b": JPEGS[1], "y": 3, "m": Image.fromarray(MASK), "id": "x"}] * 2
    fields = {"b": "image", "a": "file", "y": "label", "m": "mask"}
    packer.convert(samples, "tar", tmp_path / "set", fields=fields, run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        assert reader.fields == ("image", "a", "m") and reader.labels.tolist() == [3, 3]
        assert bytes(reader.read(1)) == JPEGS[1] and bytes(reader.read(1, "a")) == JPEGS[0]
        assert np.array_equal(decode_field("mask", reader.read(0, "m")), MASK)


class Corrected(Pictures):
    """A data set of which some samples can be changed, and which may stop."""

    stop = 1 << 20

    def __init__(self, changes: dict[int, dict[str, Any]] | None = None) -> None:
        super().__init__(40)
        self.changes = changes or {}

    def __getitem__(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        sample = {"image": JPEGS[index % 12], "label": index % 2, "caption": f"number {index}", "n": index}
        return sample | self.changes.get(index, {})


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"label": 1}, "06: its label was 0 and is 1 now"),
    ({"caption": "another"}, "06: its caption is another one now"),
    ({"n": 7.5}, "06: its json is another one now"),
    ({"image": JPEGS[0]}, "06: its image is another one now"),
    ({"image": b""}, "06: "),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_data_set_that_was_corrected_is_not_taken_for_the_one_that_is_packed(
    tmp_path: Path, change: dict[str, Any], message: str, workers: int
) -> None:
    def convert(changes: dict[int, dict[str, Any]], **options: Any) -> packer.ConvertResult:
        return packer.convert(
            Corrected(changes), "hdf5", tmp_path / "set", **by_subject(options, samples=5, workers=workers)
        )

    convert({})
    assert convert({}).already_done
    with pytest.raises(OutputError, match=rf"Corrected of 40 samples is not what it was .*: {message}.*overwrite=True"):
        convert({6: change})
    if change.get("image") != b"":
        convert({6: change}, overwrite=True)
        assert convert({6: change}).already_done


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_stopped_conversion_goes_on_with_the_same_samples_only(
    tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(changes: dict[int, dict[str, Any]]) -> packer.ConvertResult:
        return packer.convert(
            Corrected(changes), "hdf5", tmp_path / "set", shards=packer.Shards(samples=5), run=packer.Run(workers=1)
        )

    monkeypatch.setattr(Corrected, "stop", 17)
    with pytest.raises(KeyboardInterrupt):
        convert({})
    monkeypatch.undo()
    with pytest.raises(OutputError, match=rf"Corrected of 40 samples is not what it was .*: {message}.*overwrite=True"):
        convert({6: change})
    assert convert({34: {"label": 1, "caption": "another"}}).shards_resumed == 3
    with readers.open(tmp_path / "set") as reader:
        assert reader.labels.tolist() == [1 if i == 34 else i % 2 for i in range(40)]


def test_samples_that_ops_have_changed_are_compared_by_their_labels_and_texts(tmp_path: Path) -> None:
    from packer import Reencode

    def convert(changes: dict[int, dict[str, Any]]) -> packer.ConvertResult:
        options = by_subject({}, reencode=Reencode(max_side=16), workers=1)
        return packer.convert(Corrected(changes), "tar", tmp_path / "set", **options)

    convert({})
    assert convert({}).already_done
    with pytest.raises(OutputError, match="06: its label was 0 and is 1 now"):
        convert({6: {"label": 1}})


def test_a_data_set_of_hugging_face_is_known_by_its_fingerprint(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": JPEGS[i % 12], "path": None} for i in range(40)], "label": [0] * 40}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    data = datasets.Dataset.from_dict(rows, features=features)
    other = datasets.Dataset.from_dict(rows | {"label": [0] * 6 + [1] + [0] * 33}, features=features)
    packer.convert(data, "tar", tmp_path / "set", run=packer.Run(workers=1))
    assert packer.convert(data, "tar", tmp_path / "set", run=packer.Run(workers=1)).already_done
    with pytest.raises(OutputError, match="made from another source"):
        packer.convert(other, "tar", tmp_path / "set", run=packer.Run(workers=1))


@pytest.mark.parametrize("how", ["close", "exit", "abort", "write", "end of the block"])
def test_a_forked_child_neither_commits_nor_removes_what_a_writer_has_written(tmp_path: Path, how: str) -> None:
    script = f"""
import os, sys
import packer
from cache.errors import OutputError
jpeg = open({str(tmp_path / "a.jpg")!r}, "rb").read()
with packer.writer({str(tmp_path / "set")!r}, "tar", shards=packer.Shards(samples=2)) as out:
    for i in range(5):
        out.write(str(i), image=jpeg, label=i)
    if not os.fork():
        how = {how!r}
        try:
            if how == "close":
                out.close()
            elif how == "abort":
                out.abort()
            elif how == "write":
                out.write("child", image=jpeg, label=9)
            elif how == "exit":
                out.__exit__(None, None, None)
            else:
                sys.exit(0)
        except OutputError as error:
            print(error, file=sys.stderr)
        os._exit(0)
    os.wait()
    assert not os.path.exists({str(tmp_path / "set" / "dataset.json")!r})
    out.write("last", image=jpeg, label=5)
"""
    (tmp_path / "a.jpg").write_bytes(JPEGS[0])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if how in ("close", "write", "exit"):
        assert re.search(r"is written by process \d+, .* was forked from it", done.stderr)
    with readers.open(tmp_path / "set") as reader:
        assert list(reader.keys) == [*"01234", "last"] and reader.labels.tolist() == list(range(6))
    assert packer.verify(tmp_path / "set", deep=True).ok


# --- what the members of samples are --------------------------------------------------------------------------------
class Listed(list[Any]):
    """A data set of samples that are there; `features` as Hugging Face has them."""

    features: Any = None


def values_of(root: Path) -> list[dict[str, Any]]:
    """What every sample of a set holds besides its image."""
    with readers.open(root) as reader:
        return [
            {
                n: decode_field(k, reader.read(i, n))
                for n, k in reader.kinds.items()
                if n != "image" and reader.has(i, n)
            }
            for i in range(len(reader))
        ]


@pytest.mark.parametrize("as_source", [Listed, iter])
@pytest.mark.parametrize("first", [{}, {"caption": None, "boxes": None, "mask": None, "weight": None}])
def test_a_member_that_the_first_sample_lacks_is_packed_as_what_it_is(
    tmp_path: Path, first: dict[str, Any], as_source: Any
) -> None:
    later = {"caption": "a cat", "boxes": BOXES, "mask": MASK, "weight": 0.5}
    samples = [{"image": JPEGS[i], "label": i, **(later if i in (2, 3) else first)} for i in range(5)]
    packer.convert(as_source(samples), "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        assert dict(reader.kinds) == {
            "image": "image", "caption": "text", "boxes": "boxes", "mask": "mask", "json": "json",
        }  # fmt: skip
    found = values_of(tmp_path / "set")
    assert [*map(len, found)] == [0, 0, 4, 4, 0]
    assert found[3]["caption"] == "a cat" and found[3]["json"] == {"weight": 0.5}
    assert np.array_equal(found[3]["boxes"], BOXES) and np.array_equal(found[3]["mask"], MASK)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("before", [{}, {"caption": None}])
def test_a_member_that_is_first_seen_late_is_an_error_that_says_what_to_do(
    tmp_path: Path, before: dict[str, Any], is_stream: bool, on_error: str
) -> None:
    late = [{"image": JPEGS[0], "label": 1, **before} for _ in range(60)]
    late[37] |= {"caption": "a cat"}
    source: Any = (sample for sample in late) if is_stream else Listed(late)
    with pytest.raises(
        SourceError, match=r"sample .*37.*no field 'caption'; it has image\. .*'caption': 'text'\}"
    ) as got:
        packer.convert(
            source,
            "hdf5",
            tmp_path / "set",
            run=packer.Run(workers=1, on_error=on_error),
            shards=packer.Shards(samples=8),
        )
    fields = ast.literal_eval(str(got.value).partition("fields=")[2].partition("}")[0] + "}")
    source = (sample for sample in late) if is_stream else Listed(late)
    packer.convert(source, "hdf5", tmp_path / "set", run=packer.Run(workers=1), fields=fields, overwrite=True)
    assert [number for number, one in enumerate(values_of(tmp_path / "set")) if one == {"caption": "a cat"}] == [37]
    with readers.open(tmp_path / "set") as reader:
        assert reader.labels.tolist() == [1] * 60


def test_a_writer_says_what_to_do_where_a_field_comes_late(tmp_path: Path) -> None:
    with packer.writer(tmp_path / "one", "tar") as out:
        out.write("a", image=JPEGS[0], caption=None)
        with pytest.raises(
            BadSampleError, match=r"sample 'b': has no field 'caption'.*\{'image': 'image', 'caption': 'text'\}"
        ):
            out.write("b", image=JPEGS[1], caption="a cat")
        with pytest.raises(BadSampleError, match=r"'caption': 'text', 'mask': 'mask'\}"):  # all that it would lose
            out.write("c", image=JPEGS[1], caption="a cat", mask=MASK)
    with packer.writer(tmp_path / "two", "tar", fields={"image": "image", "caption": "text"}) as out:
        out.write("a", image=JPEGS[0])
        out.write("b", image=JPEGS[1], caption="a cat", label=3)
        with pytest.raises(BadSampleError, match="has no field 'captoin'"):
            out.write("c", image=JPEGS[1], captoin="a cat")
    assert values_of(tmp_path / "two") == [{}, {"caption": "a cat"}]
    with readers.open(tmp_path / "two") as reader:
        assert reader.labels.tolist() == [-1, 3]


def test_an_array_among_json_is_refused(tmp_path: Path) -> None:
    samples: list[Any] = [{"image": JPEGS[0], "extent": extent} for extent in (0, 1, np.zeros((16, 24), np.int64))]
    with pytest.raises(SourceError, match=r"sample 2: has an array as 'extent'.*'extent': 'array'"):
        packer.convert(samples, "tar", tmp_path / "set", run=packer.Run(workers=1))


def test_features_say_what_a_member_is_that_has_no_value(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "caption": datasets.Value("string"), "seg": datasets.Image(),
         "label": datasets.ClassLabel(names=["a", "b"]), "n": datasets.Value("int64")}
    )  # fmt: skip
    mask = io.BytesIO()
    Image.fromarray(MASK).save(mask, "PNG")
    rows = {
        "image": [{"bytes": JPEGS[i % 12], "path": None} for i in range(100)],
        "caption": [None] * 50 + ["a cat"] + [None] * 49,
        "seg": [None] * 50 + [{"bytes": mask.getvalue(), "path": None}] + [None] * 49,
        "label": [None] * 50 + [1] + [None] * 49,
        "n": [None] * 50 + [7] + [None] * 49,
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    packer.convert(data, "tar", tmp_path / "set", run=packer.Run(workers=1))
    found = values_of(tmp_path / "set")
    assert found[50]["caption"] == "a cat" and found[50]["json"] == {"n": 7} and np.array_equal(found[50]["seg"], MASK)
    with readers.open(tmp_path / "set") as reader:
        assert reader.labels.tolist() == [-1] * 50 + [1] + [-1] * 49


def test_the_one_class_label_of_hugging_face_is_the_label_whatever_it_is_called(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["a", "b"])
    rows = {"image": [{"bytes": JPEGS[i], "path": None} for i in range(3)], "breed": [1, None, 0]}
    features = datasets.Features({"image": datasets.Image(), "breed": names})
    packer.convert(
        datasets.Dataset.from_dict(rows, features=features), "tar", tmp_path / "set", run=packer.Run(workers=1)
    )
    with readers.open(tmp_path / "set") as reader:
        assert reader.fields == ("image",) and reader.labels.tolist() == [1, -1, 0] and reader.classes == ("a", "b")


def test_members_that_fields_leaves_out_or_names_in_vain_are_a_warning(tmp_path: Path) -> None:
    samples = [{"image": JPEGS[0], "label": 1, "id": "x", "source": "y"}] * 3
    fields = {"image": "image", "label": "label", "id": "drop", "captoin": "text"}
    result = packer.convert(samples, "tar", tmp_path / "set", run=packer.Run(workers=1), fields=fields)
    assert result.warnings == (
        "fields= does not name source, so that is left out ('drop' says so)",
        "fields= names captoin, which no sample has that was looked at",
    )


WHOLE = (MASK % 2).astype(bool)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (MASK.astype(np.int64), MASK),
        (MASK.astype(np.int32) - 1, MASK.astype(np.int32) - 1),
        (MASK.astype(np.uint16), MASK),
        (WHOLE, WHOLE),
        (MASK[None], MASK),
        (MASK[:, :, None].astype(np.int64), MASK),
        (MASK.astype(np.float32), MASK),
        ("long", MASK),
        ("bool", WHOLE),
        ("[1, h, w]", MASK),
    ],
)
def test_masks_of_any_whole_numbers_follow_flips(tmp_path: Path, mask: Any, expected: Any) -> None:
    torch = pytest.importorskip("torch")
    from readers.augment import RandomHorizontalFlip
    from readers.loader import ImageLoader

    tensors = {"long": torch.from_numpy(MASK).long(), "bool": torch.from_numpy(WHOLE),
               "[1, h, w]": torch.from_numpy(MASK)[None]}  # fmt: skip
    mask = tensors[mask] if isinstance(mask, str) else mask
    picture = make_jpeg(1, (24, 16))
    packer.convert([{"image": picture, "mask": mask}] * 2, "tar", tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set") as reader:
        assert reader.kinds["mask"] == "mask"
        assert np.array_equal(decode_field("mask", reader.read(0, "mask")), expected)
        loader = ImageLoader(reader, 2, augment=[RandomHorizontalFlip(1.0)], fields=("image", "mask"), threads=1)
        _, masks = next(iter(loader))
        assert np.array_equal(np.asarray(masks[0]), np.asarray(expected)[:, ::-1])


def test_a_mask_of_fractions_is_refused_and_an_array_of_another_name_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadSampleError, match="mask: a mask is of whole numbers; as  fields="):
        packer.convert([{"image": JPEGS[0], "mask": MASK / 7}], "tar", tmp_path / "set", run=packer.Run(workers=1))
    samples = [
        {"image": JPEGS[0], "mask": MASK / 7, "depth": MASK.astype(np.int64), "masks": np.zeros((3, 16, 24), "u1")}
    ]
    fields = {"image": "image", "mask": "array", "depth": "array", "masks": "array"}
    packer.convert(samples, "tar", tmp_path / "set", run=packer.Run(workers=1), fields=fields, overwrite=True)
    assert np.array_equal(values_of(tmp_path / "set")[0]["mask"], MASK / 7)


def test_floating_point_images_of_pillow_keep_every_value(tmp_path: Path) -> None:
    depth = np.linspace(-3, 5000, 16 * 24, dtype=np.float32).reshape(16, 24)
    samples = [{"image": Image.fromarray(depth), "label": 1}] * 2
    with pytest.raises(BadSampleError, match=r"floating-point samples.*decode='unchanged'"):
        packer.convert(samples, "tar", tmp_path / "set", run=packer.Run(workers=1))
    packer.convert(
        samples,
        "tar",
        tmp_path / "set",
        run=packer.Run(workers=1),
        images=packer.Images(decode="unchanged"),
        overwrite=True,
    )
    with readers.open(tmp_path / "set") as reader:
        assert np.array_equal(decode_unchanged(reader.read(0)), depth)
    second = [{"image": JPEGS[0], "depth": Image.fromarray(depth)}] * 2
    with pytest.raises(
        BadSampleError, match=r"depth: holds floating-point.*fields=\{'image': 'image', 'depth': 'array'\}"
    ):
        packer.convert(second, "tar", tmp_path / "two", run=packer.Run(workers=1))
    fields = {"image": "image", "depth": "array"}
    packer.convert(second, "tar", tmp_path / "two", run=packer.Run(workers=1), fields=fields, overwrite=True)
    assert np.array_equal(values_of(tmp_path / "two")[1]["depth"], depth)


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), {"a": [float("inf")]}, np.array([1, np.nan])])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, value: Any) -> None:
    source = [{"image": JPEGS[0], "extra": {"value": value}}]
    with pytest.raises(BadSampleError, match="cannot be written as JSON, which has no NaN"):
        packer.convert(source, "tar", tmp_path / "set", run=packer.Run(workers=1))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([3, 3, 3, 9], "1 image with boxes without area (the first: {}): packed as they are; detectors refuse them"),
        ([0, 0, 30, 9], "1 image with boxes that reach beyond the image (the first: {}): packed as they are"),
        ([-4, 0, 3, 9], "1 image with boxes that reach beyond the image (the first: {}): packed as they are"),
        ([0, 0, 24, 16], ""),
        ([0, 0, 24.6, 16], ""),
    ],
)
def test_boxes_without_area_or_beyond_the_image_are_a_warning(
    tmp_path: Path, box: list[float], words: str, is_stream: bool
) -> None:
    good = {"image": JPEGS[0], "boxes": np.array([[0, 0, 5, 6], [1, 1, 24, 16]])}
    samples = [good, {**good, "boxes": np.array([[0, 0, 5, 6], box])}, {"image": JPEGS[0], "boxes": np.zeros((0, 4))}]
    result = packer.convert(
        iter(samples) if is_stream else samples, "hdf5", tmp_path / "set", run=packer.Run(workers=1)
    )
    assert result.warnings == ((words.format("000000001" if is_stream else "1"),) if words else ())
    assert np.array_equal(values_of(tmp_path / "set")[1]["boxes"][1], np.array(box, np.float32))
