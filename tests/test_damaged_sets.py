"""Damaged and hostile sets: a damaged or forged shard, index or dataset.json ends in an error of this project, never in
wrong bytes, a hang or executed code."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from set_cases import FORMATS, convert, damage

import packer
import readers
from cache.errors import DamagedSampleError, DatasetError, StaleIndexError
from packer.cli import main
from packer.testing.formats import bounded
from readers.layout import parse_dataset_info
from readers.table import Index, Strings

BACKENDS = pytest.mark.parametrize("backend", ["pread", "mmap"])


@pytest.fixture(scope="module")
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    """train: 36 samples in 6 shards, val: 9 in 2; read-only."""
    return pack(tree, samples_per_shard=6)


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return Path(shutil.copytree(packed, tmp_path / "set"))


@pytest.fixture(scope="module")
def images(tree: Path) -> list[bytes]:
    """The images of the split train, in order."""
    return [path.read_bytes() for path in sorted((tree / "train").rglob("*.JPEG"))]


def shard_path(root: Path, number: int) -> Path:
    return root / readers.open(root).split_info.shards[number].path


def ways_to_read(reader: Any, index: int) -> list[Callable[[], object]]:
    """Every way to read one sample."""
    return [
        lambda: reader.read(index),
        lambda: reader[index],
        lambda: reader.read_many([index]),
        lambda: reader.read_many([0, index, 30]),
        lambda: list(reader.stream([35, index])),
    ]


# --- shards -------------------------------------------------------------------------------------------------------
@BACKENDS
def test_verify_names_the_damaged_sample(damaged: Path, images: list[bytes], backend: Any) -> None:
    damage(damaged, 7)
    with readers.open(damaged, backend=backend) as careless:
        assert bytes(careless.read(7)) != images[7], "the test damaged nothing"
    with readers.open(damaged, backend=backend, verify=True) as reader:
        for call in ways_to_read(reader, 7):
            with pytest.raises(DamagedSampleError, match=r"sample 7 \(key 'cat/cat_007'.* run  packer verify"):
                call()
        assert bytes(reader.read(6)) == images[6], "a neighbour of the damaged sample cannot be read"


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(512))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": grow,
    "missing": Path.unlink,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a loop": lambda path: (path.unlink(), path.symlink_to(path)),
}


@BACKENDS
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_other_than_the_indexed_one(damaged: Path, images: list[bytes], backend: Any, damage: str) -> None:
    path = shard_path(damaged, 2)  # samples 12 to 17
    before = path.stat().st_size
    DAMAGES[damage](path)
    reader = readers.open(damaged, backend=backend)
    for call in [*ways_to_read(reader, 12), lambda: reader.prefetch([12]), lambda: reader.store.check(2)]:
        with bounded(), pytest.raises(StaleIndexError, match=str(path)) as caught:
            call()
        assert isinstance(caught.value, OSError)
        if path.is_file():
            sizes = (str(before), str(path.stat().st_size))
            assert all(size in str(caught.value) for size in sizes), f"both sizes must be named: {caught.value}"
    assert bytes(reader.read(11)) == images[11] and bytes(reader.read(18)) == images[18], "other shards are affected"


def test_a_shard_truncated_while_it_is_open(damaged: Path, images: list[bytes]) -> None:
    reader = readers.open(damaged)
    assert reader.read(0) == images[0]
    path, offset, length = reader.byte_range(3)  # type: ignore[misc]
    before, after = path.stat().st_size, offset + length - 1
    os.truncate(path, after)  # sample 3 loses its last byte
    assert [bytes(view) for view in reader.read_many([0, 1, 2])] == images[:3], "samples before the cut are damaged"
    for call in [*ways_to_read(reader, 3), lambda: reader.read_many(range(6)), lambda: reader.read(5)]:
        with pytest.raises(StaleIndexError, match=f"shrank from {before} to {after} bytes"):
            call()


# --- dataset.json -------------------------------------------------------------------------------------------------
NAMES = ("../image", "a/b", ".image", "a b", "a\0b", "a\nb", "\u202e", "")
PATHS = ("", "/etc/passwd", "..", "../x", "a/../../x", "a\0", 5, None, ".", "\udc80")
COUNTS = (-1, 7, "6", 6.0, None, True, 1 << 63, 10**30)
SHARD = "splits.train.shards.0"
RETIRED = {"path": "train.index", "since": "2026-01-01T00:00:00Z"}
NOT_RETIRED: list[dict[str, Any]] = [{"since": since} for since in ("yesterday", "2026-02-30T00:00:00Z")]
NOT_RETIRED += [{"path": path} for path in ("../x", "/x", "dataset.json", ".packing/lock", 5)]
WRONG: dict[str, tuple[Any, ...]] = {  # by member; Ellipsis: the member is missing
    "kind": (..., "other", None, 5, ["packer-dataset"]),
    "version": (..., 0, 3, -1, "1", 1.0, True, None, 10**30),
    "format": (..., "", None, 5, ["tar"], "../tar"),
    "fields": (..., {}, [], "image", {"image": "movie"}, {"image": 5}, {"image": {}}, *({n: "image"} for n in NAMES)),
    "classes": (..., {}, "cat", [5], [None], ["cat", ["dog"]]),
    "label_offset": (..., "0", 0.5, None, True, 10**30, -(10**30)),
    "edited": ("labels", {}, [5], ["colours"], None),
    "separate": ("image", {}, [5], ["depth"], None),
    "retired": ({}, ["train.index"], [{"path": "train.index"}], *([RETIRED | change] for change in NOT_RETIRED)),
    "splits": (..., [], "train", {"train": []}, {"train": None}, {"train": "x"}),
    "splits.train.samples": (..., *COUNTS, 35, 37),
    "splits.train.index": (..., *PATHS),
    "splits.train.root": (..., 5, None, []),
    "splits.train.shards": (..., {}, "x", [5], [[]], [None], [{}], []),
    f"{SHARD}.path": (..., *PATHS),
    f"{SHARD}.bytes": (..., *(count for count in COUNTS if count != 7)),
    f"{SHARD}.samples": (..., *COUNTS),
    f"{SHARD}.crc32c": (..., 5, None, "", "xyz", "123", "123456789", "-1234567", "0x123456", "1_234567"),
}


def check_refused(content: object) -> None:
    with pytest.raises(DatasetError, match=r"dataset\.json"):
        parse_dataset_info(json.dumps(content).encode(), "dataset.json")


@pytest.mark.parametrize("member", WRONG)
def test_dataset_json_with_a_wrong_member(packed: Path, member: str) -> None:
    *parents, last = member.split(".")
    for value in WRONG[member]:
        content = json.loads((packed / "dataset.json").read_text())
        place: Any = content
        for name in parents:
            place = place[int(name) if name.isdigit() else name]
        place[last] = value
        if value is ...:
            del place[last]
        check_refused(content)


def test_splits_with_names_that_are_not_valid(packed: Path) -> None:
    for name in ("../up", "a/b", "", ".hidden", "a b", "a\0", "\ud800"):
        content = json.loads((packed / "dataset.json").read_text())
        content["splits"][name] = content["splits"]["val"]
        check_refused(content)


TEXTS = [b"", b"{", b"null", b"[]", b"5", b'"packer-dataset"', b"{}", b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b"\x80"]
TEXTS += [b"{} {}", b"{'kind': 1}", b"[" * 200_000, b'{"a":' * 200_000, b'{"version": ' + b"9" * 10_000 + b"}"]
TEXTS += [b'{"kind": "packer-dataset", "version": %s}' % value for value in (b"NaN", b"1e999")] + [b"\0" * 100]


def test_an_invalid_dataset_json(damaged: Path) -> None:
    for text in TEXTS:
        (damaged / "dataset.json").write_bytes(text)
        with pytest.raises(DatasetError, match=r"dataset\.json"):
            readers.open(damaged)


def test_unknown_members_of_dataset_json_are_ignored(damaged: Path) -> None:
    """Later versions may add members; "made" is never interpreted."""
    content = json.loads((damaged / "dataset.json").read_text())
    content |= {"made": "by hand", "licence": {"name": "CC0"}}
    content["splits"]["train"]["colour"] = "red"
    (damaged / "dataset.json").write_text(json.dumps(content))
    reader = readers.open(damaged)
    assert len(reader) == 36 and reader.dataset.made == {}


def test_paths_that_are_not_sets(tmp_path: Path, packed: Path) -> None:
    with pytest.raises(DatasetError, match="no such directory"):
        readers.open(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"not a packed set .*packer convert  or  packer index"):
        readers.open(tmp_path)
    with pytest.raises(DatasetError, match=r"is a file, not a packed set.*packer index"):
        readers.open(shard_path(packed, 0))
    (tmp_path / ".packing").mkdir()
    with pytest.raises(DatasetError, match=r"unfinished conversion .*run the\s+same  packer convert  again"):
        readers.open(tmp_path)
    (tmp_path / "dataset.json").mkdir()
    with pytest.raises(DatasetError, match=r"dataset.json"):
        readers.open(tmp_path)


# --- the index ----------------------------------------------------------------------------------------------------
class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.path, 0o777, True)


GOOD = b"{'descr': '<u8', 'fortran_order': False, 'shape': (36,), }"
SHAPES = [b"(6, 6)", b"()", b"36", b"('36',)", b"(-36,)", b"(%d,)" % 10**30, b"(%d,)" % (2**61 + 36), b"(35,)",
          b"(37,)"]  # fmt: skip
KINDS = [b"'\xff\xfe\xfd'", b"'zzz'", b"{}", b"'>u8'", b"'<i8'", b"'<f8'", b"'<u4'", b"'|O'", b"[('a', '<u8')]"]
EDITS = [(b")", b" "), (b"}", b"'x': 1}"), (b", 'shape': (36,)", b""), (b"False", b"True")]
EDITS += [*((b"'<u8'", kind) for kind in KINDS), *((b"(36,)", shape) for shape in SHAPES)]
HEADERS = [GOOD[:30], b"{'descr': '<u8", b"(" * 9000, b"[" * 3000 + b"]" * 3000, b"__import__('os').getpid()",
           b"[1, 2]"]  # fmt: skip
HEADERS += [b"\0" * 100, *(GOOD.replace(old, new) for old, new in EDITS)]


def npy(header: bytes, data: bytes = bytes(288), version: bytes = b"\x01\x00") -> bytes:
    """An .npy file with an arbitrary header."""
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


COLUMNS = [b"", bytes(400), b"0\n1\n2\n", b"\x93NUMPY\x01\x00\xff\xff" + GOOD, *map(npy, HEADERS)]
COLUMNS += [npy(GOOD, version=version) for version in (b"\x02\x00", b"\x09\x00")]
COLUMNS += [npy(GOOD, bytes(286)), npy(GOOD, bytes(289))]
COLUMNS += [npy(GOOD.replace(b"36", b"35"), bytes(280)), npy(GOOD.replace(b"36", b"37"), bytes(296))]
COLUMNS += [npy(GOOD.replace(b"<u8", b"<u4"), bytes(144)), npy(GOOD.replace(b"(36,)", b"()"), bytes(8))]


def test_files_that_are_not_index_columns(tmp_path: Path) -> None:
    path = tmp_path / "image.offset.npy"
    path.write_bytes(npy(GOOD + b"\n"))
    assert Index(tmp_path, 36).field_column("image", "offset").tolist() == [0] * 36, "a valid column cannot be read"
    for content in COLUMNS:
        path.write_bytes(content.replace(b"}", b"}\n", 1))
        with pytest.raises(DatasetError, match=r"image\.offset\.npy"):
            Index(tmp_path, 36).field_column("image", "offset")


def test_index_columns_are_never_unpickled(damaged: Path) -> None:
    trap = damaged / "sprung"
    array = np.array([Trap(str(trap)) for _ in range(36)], object)
    for column in ("image.offset", "shard", "key", "key.offset", "image.name", "label", "image.crc32c"):
        path = damaged / "train.index" / f"{column}.npy"
        data = path.read_bytes()
        np.save(path, array, allow_pickle=True)
        with pytest.raises(DatasetError, match=column):
            readers.open(damaged, verify=True).table.columns.check()
        assert not trap.exists(), "a column was unpickled: opening a set ran its code"
        np.load(path, allow_pickle=True)
        assert trap.exists(), "the trap does not work, so this test proves nothing"
        trap.rmdir()
        path.write_bytes(data)


def test_every_missing_and_every_truncated_column_is_detected(damaged: Path) -> None:
    columns = sorted((damaged / "train.index").iterdir())
    assert len(columns) == 15
    for path in columns:
        data = path.read_bytes()
        for size in {0, 1, 9, 40, len(data) - 1}:
            path.write_bytes(data[:size])
            with pytest.raises(DatasetError, match=path.name):
                readers.open(damaged).table.columns.check()
        path.unlink()
        with pytest.raises(DatasetError, match=f"{path.name}.*missing index column.*packer index"):
            readers.open(damaged).table.columns.check()
        path.write_bytes(data)
    readers.open(damaged).table.columns.check()


def edit_column(root: Path, name: str, index: int, value: int) -> None:
    path = root / "train.index" / f"{name}.npy"
    array = np.load(path)
    array[index] = value
    np.save(path, array)


@BACKENDS
def test_extents_outside_the_shard(damaged: Path, images: list[bytes], backend: Any) -> None:
    """An index is not trusted, not even sums that wrap and huge lengths. No byte is read, and no memory is
    allocated."""
    size = shard_path(damaged, 0).stat().st_size
    offsets = (size - 1, size, size + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2)
    lengths = (size, 1 << 40, 1 << 63, (1 << 64) - 1)
    for column, values in (("image.offset", offsets), ("image.length", lengths)):
        before = (damaged / "train.index" / f"{column}.npy").read_bytes()
        for value in values:
            edit_column(damaged, column, 2, value)
            with readers.open(damaged, backend=backend) as reader:
                for call in [*ways_to_read(reader, 2), lambda: reader.prefetch([2])]:
                    with pytest.raises(StaleIndexError, match=r"sample 2 .*but the shard has .*packer index"):
                        call()
                assert bytes(reader.read(1)) == images[1], "a neighbour cannot be read"
        (damaged / "train.index" / f"{column}.npy").write_bytes(before)


@BACKENDS
def test_shard_numbers_outside_the_split(damaged: Path, backend: Any) -> None:
    for number in (6, 7, 1 << 31, (1 << 32) - 1):
        edit_column(damaged, "shard", 2, number)
        with readers.open(damaged, backend=backend) as reader:
            for call in [*ways_to_read(reader, 2), lambda: reader.prefetch([2]), lambda: reader.byte_range(2)]:
                with pytest.raises(DatasetError, match=f"names shard {number}, the split has 6; .*packer index"):
                    call()


@pytest.mark.parametrize(
    ("index", "value", "everything"),
    [(0, 1, True), (36, 5, True), (36, 1 << 63, True), (5, 1 << 40, False), (5, 0, False)],
)
def test_wrong_key_offsets(damaged: Path, index: int, value: int, everything: bool) -> None:
    edit_column(damaged, "key.offset", index, value)
    reader = readers.open(damaged)
    with pytest.raises(DatasetError):
        list(reader.keys)
    if everything:
        with pytest.raises(DatasetError, match=r"key\.npy.*string offsets must run from 0"):
            reader.keys[20]
    else:
        with pytest.raises(DatasetError, match="string 4 has the offsets"):
            reader.keys[4]
        assert reader.keys[20] == "dog/dog_008"


@pytest.mark.parametrize(("column", "count"), [("key", 35), ("image.name", 37)])
def test_string_columns_of_another_length(damaged: Path, column: str, count: int) -> None:
    """Valid columns, but not for this split."""
    strings = Strings.of(f"k{i}" for i in range(count))
    np.save(damaged / "train.index" / f"{column}.npy", strings.blob)
    np.save(damaged / "train.index" / f"{column}.offset.npy", strings.offsets)
    with pytest.raises(DatasetError, match=rf"{column}\.offset\.npy: {count + 1} entries, expected 37"):
        readers.open(damaged).table.columns.check()


def test_keys_that_are_not_utf8(damaged: Path) -> None:
    edit_column(damaged, "key", 0, 0xFF)
    reader = readers.open(damaged)
    with pytest.raises(DatasetError, match="string 0 is not UTF-8"):
        reader.keys[0]
    with pytest.raises(DatasetError, match="not UTF-8"):
        list(reader.keys)
    assert reader.keys[1] == "cat/cat_001"


def test_file_names_that_are_not_valid(damaged: Path) -> None:
    edit_column(damaged, "image.name", 0, ord("?"))
    with pytest.raises(DatasetError, match=r"stored file name .* starts with neither"):
        readers.open(damaged).name(0)


TRIALS = int(os.environ.get("TRIALS", "1000"))
SEED = int(os.environ.get("SEED", "0"))
VALUES: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, float("nan"), "", "x", "../x", "\0", "\ud800"]
VALUES += [[], [1], ["a"], {}, {"a": 1}, "a" * 5000, [[[]]]]
HOSTILE_MADE: list[Any] = [{"left_out": 5}, {"left_out": {"a": "b"}}, {"payload_bytes": "x"}, {"options": 7}]
HOSTILE_MADE += [{"options": {"split": 3}}, {"plan": []}, {"by": {}, "source": ["x"]}]
VALUES += HOSTILE_MADE
REPORTS = [b"[]\n", b"{}\n", b"null\n", b"\xff\xfe\n", b"[" * 100_000]
COLUMN_BYTES = [b"\xff" * 8, b"\0" * 8, b"\x01" + b"\0" * 7]


@pytest.fixture(scope="module")
def sets(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A set of each format; read-only."""
    root = tmp_path_factory.mktemp("hostile")
    return {to: convert(tree / "val", root / to, to).output for to in FORMATS}


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def forget_checksums(content: dict[str, Any]) -> None:
    for split in content["splits"].values():
        split.pop("columns", None)


def commands(root: Path, tree: Path, scratch: Path, to: str) -> dict[str, Callable[[], object]]:
    """The operations of users on a set."""
    return {
        "inspect": lambda: packer.inspect(root).to_dict(),
        "inspect, as text": lambda: run_cli("inspect", str(root)),
        "verify": lambda: packer.verify(root, workers=1, deep=True),
        "verify against": lambda: packer.verify(root, against=tree, workers=1),
        "extract": lambda: packer.extract(root, scratch / "tree"),
        "convert from": lambda: convert(root, scratch / "set"),
        "convert again": lambda: convert(tree, root, to),
        "select": lambda: list(readers.open(root).select(indices=range(2)).keys),
        "index": lambda: packer.index([root], workers=1),
    }


def run_cli(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert end.value.code in (0, 1), f"status {end.value.code}"


def outcomes(root: Path, tree: Path, scratch: Path, to: str) -> dict[str, str]:
    """The outcome of each command; any error that is not a PackerError is raised."""
    ends = {}
    for name, command in commands(root, tree, scratch, to).items():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            command()
            ends[name] = "ok"
        except readers.PackerError as error:
            ends[name] = type(error).__name__
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    return ends


def test_hostile_members_of_made_are_ignored(
    sets: dict[str, Path], tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    for made in (*HOSTILE_MADE, 7):
        edit(root, lambda content, made=made: content.update(made=made))  # type: ignore[misc]
        ends = outcomes(root, tree / "val", tmp_path / "scratch", "tar")
        assert ends.pop("convert again") == "OutputError", "a foreign set was taken for the set of this conversion"
        assert set(ends.values()) == {"ok"}, ends


@pytest.mark.parametrize("name", ["key", "image.name"])
def test_decreasing_string_offsets(sets: dict[str, Path], tree: Path, tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(sets["hdf5"], tmp_path / "set"))
    edit(root, forget_checksums)
    (path,) = root.glob(f"*.index/{name}.offset.npy")
    offsets = np.load(path)
    offsets[1:-1] = offsets[1:-1][::-1]
    np.save(path, offsets)
    assert not packer.verify(root, workers=1).ok
    ends = outcomes(root, tree / "val", tmp_path / "scratch", "hdf5")
    assert ends["extract"] == ends["convert from"] == "DatasetError", ends


def test_a_hostile_report(sets: dict[str, Path], tree: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    for report in REPORTS:
        (root / "left-out.jsonl").write_bytes(report)
        with pytest.raises(readers.DatasetError, match=r"left-out\.jsonl"):
            packer.verify(root, against=tree / "val", workers=1)


def members(content: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every member, however deep."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [place for key, value in items for place in [(content, key), *members(value)]]


def spoil_json(text: str, choice: random.Random) -> str:
    content = json.loads(text)
    for _ in range(choice.randint(1, 3)):
        places = members(content)
        inside_made = [place for place in places if place[1] == "made"]
        container, key = choice.choice(inside_made if inside_made and choice.random() < 0.2 else places)
        if isinstance(container, dict) and choice.random() < 0.15:
            del container[key]
        else:
            container[key] = copy.deepcopy(choice.choice(VALUES))
    return json.dumps(content)


def spoil_bytes(data: bytes, choice: random.Random) -> bytes:
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(data) + 1)
        flipped = bytes(byte ^ 1 << choice.randrange(8) for byte in data[at : at + 1])
        changes = [flipped + data[at + 1 :], choice.choice(COLUMN_BYTES) + data[at + 8 :], b"zz" + data[at:], b""]
        data = data[:at] + choice.choices(changes, [5, 2, 2, 1])[0]
    return data


def spoil(root: Path, choice: random.Random) -> str:
    """Damage one file of a set; returns which one."""
    if choice.random() < 0.5:
        edit(root, forget_checksums)  # the checksums are updated, so that the damage of a column itself is detected
    description, report = root / "dataset.json", root / "left-out.jsonl"
    path = choice.choice([description] * 5 + [report] + choice.sample(sorted(root.glob("*.index/*.npy")), 4))
    if path == report:
        path.write_bytes(choice.choice(REPORTS))
    elif path == description and choice.random() < 0.8:
        path.write_text(spoil_json(path.read_text(), choice))
    else:
        path.write_bytes(spoil_bytes(path.read_bytes(), choice))
    return path.name


def test_a_label_outside_the_classes_is_refused_by_name(sets: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(sets["tar"], tmp_path / "set"))
    edit(root, forget_checksums)
    column = root / "train.index/label.npy"
    labels = np.load(column)
    for label in (3, -2, 1 << 40):
        labels[-1] = label
        np.save(column, labels)
        message = rf"\('owl/owl_002'\) has the label {label}, expected 0 to 2, or -1 for none"
        for use in (lambda a: a.labels, lambda a: a[0].label, lambda a: a.select([0]).labels):
            with pytest.raises(DatasetError, match=message), readers.open(root) as reader:
                use(reader)
        assert not packer.verify(root, workers=1).ok


@pytest.mark.faults
def test_any_damage_is_a_packer_error_or_harmless(
    sets: dict[str, Path], tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = random.Random(SEED)
    counts: Counter[str] = Counter()
    for trial in range(TRIALS):
        to = FORMATS[trial % 3]
        root = Path(shutil.copytree(sets[to], tmp_path / "set"))
        where = spoil(root, choice)
        try:
            counts.update(outcomes(root, tree / "val", tmp_path / "scratch", to).values())
        except AssertionError as error:
            raise AssertionError(f"trial {trial} ({to}, {where}): {error}") from error
        shutil.rmtree(root)
        capsys.readouterr()
    with capsys.disabled():
        print(f"\n{TRIALS} sets spoiled, each under 9 commands: {dict(counts)}")
    assert counts["ok"] and counts["DatasetError"], f"all trials ended alike: {counts}"
