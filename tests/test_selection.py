"""Selections by criteria and by expressions, compared with Python, and tables that are taken, joined and located."""

from __future__ import annotations

import fnmatch
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from hypothesis import given
from hypothesis import strategies as st
from set_cases import FORMATS

import packer
import readers
from cache.errors import SourceError, StaleIndexError, UnknownNameError
from cache.stores import Store
from packer.testing.samples import Samples
from readers.where import parse_where


@pytest.fixture(params=("shards", "folder"))
def base(request: pytest.FixtureRequest, packed: Path, tree: Path) -> Iterator[Any]:
    """36 samples, 12 in each of cat, dog, owl."""
    with readers.open(packed, "train") if request.param == "shards" else readers.open_folder(tree, "train") as reader:
        yield reader


def keys(reader: Any) -> list[str]:
    return [sample.key for sample in reader]


# --- a reader like any other --------------------------------------------------------------------------------------
INDICES = [30, 2, 2, -1, 17, 0]


def test_a_selection_of_a_selection_reads_through_both(base: Any) -> None:
    reader = base.select(indices=range(35, -1, -1)).select(indices=[35 - i % 36 for i in INDICES])
    assert reader.store is base.store and reader.table.rows.tolist() == [i % 36 for i in INDICES]
    assert repr(reader) == f"Reader(6 samples of {base.table.title})"
    for call in (reader.read_many, reader.prefetch, reader.image_info):
        with pytest.raises(IndexError, match="not all inside the samples of "):
            call([0, 6])
    with pytest.raises(IndexError, match="outside the 6 items"):
        reader.keys[6]


def test_mapped_indices_are_pickled_by_path(base: Any, tmp_path: Path) -> None:
    path = tmp_path / "indices.npy"
    np.save(path, np.tile(np.arange(36), 5000))
    indices = np.load(path, mmap_mode="r")
    reader = readers.Reader(base.table.take(indices), base.store)
    text = pickle.dumps(reader)
    again = pickle.loads(text)
    assert len(text) < 20_000 and isinstance(again.table.rows, np.memmap)
    assert again.read(40) == base.read(4) and again.fingerprint == reader.fingerprint
    part = pickle.loads(pickle.dumps(readers.Reader(base.table.take(indices[7:9]), base.store)))
    assert part.table.rows.tolist() == [7, 8], "a part of a map was taken for the whole map"
    path.unlink()
    with pytest.raises(StaleIndexError, match="indices of a selection cannot be mapped any more"):
        pickle.loads(text)


# --- criteria -----------------------------------------------------------------------------------------------------
def test_labels_keep_their_meaning(base: Any) -> None:
    for labels in ("dog", 1, ["dog"], [1], np.array([1]), ("dog", 1)):
        reader = base.select(labels=labels)
        assert set(reader.labels.tolist()) == {1} and len(reader) == 12
        assert {reader.classes[label] for label in reader.labels} == {"dog"}
    assert len(base.select(labels=["cat", 2])) == 24
    for wrong in ("bird", 3, -2):
        with pytest.raises(UnknownNameError, match=rf"no class {wrong!r}; it has 3: cat, dog, owl"):
            base.select(labels=["cat", wrong])


def test_keys_by_name_and_by_pattern(base: Any) -> None:
    assert keys(base.select(keys=["owl/owl_001", "cat/cat_003"])) == ["cat/cat_003", "owl/owl_001"]
    assert keys(base.select(keys="*_00[12]")) == [f"{c}/{c}_00{i}" for c in ("cat", "dog", "owl") for i in (1, 2)]
    assert len(base.select(labels="cat", keys="cat*")) == 12
    with pytest.raises(UnknownNameError, match=r"1 keys are not among the 36 asked: 'none'"):
        base.select(keys=["none", "cat/cat_003"])
    with pytest.raises(UnknownNameError, match=r"1 keys are not among the 12 asked: 'owl/owl_001'"):
        base.select(labels=0, keys=["owl/owl_001"])


def test_sizes_and_masks(base: Any) -> None:
    sizes = base.sizes()
    middle = int(np.median(sizes))
    assert base.select(min_bytes=middle).sizes().min() >= middle
    assert base.select(max_bytes=middle).sizes().max() <= middle
    assert len(base.select(min_bytes=middle)) + len(base.select(max_bytes=middle - 1)) == 36
    mask = np.arange(36) % 3 == 0
    assert base.select(mask=mask).table.rows.tolist() == np.flatnonzero(mask).tolist()
    assert base.select(mask=mask, indices=[9, 8, 3, 9]).table.rows.tolist() == [9, 3, 9]
    with pytest.raises(ValueError, match=r"mask must be bool \[36\], found int64 \[36\]"):
        base.select(mask=np.ones(36, np.int64))
    with pytest.raises(ValueError, match=r"mask must be bool \[36\], found bool \[3\]"):
        base.select(mask=[True, False, True])


def test_the_shorter_side(tmp_path: Path) -> None:
    for i, size in enumerate([(64, 48), (32, 200), (48, 48), (100, 47)]):
        (tmp_path / f"{i}.jpg").write_bytes(make_jpeg(i, size))
    (tmp_path / "9.jpg").write_bytes(b"no image")
    reader = readers.open_folder(tmp_path)
    assert keys(reader.select(min_side=48)) == ["0", "2"]
    info = reader.image_info([4, 0])
    assert (info.height.tolist(), info.media.tolist(), info.orientation.tolist()) == ([0, 48], [0, 1], [0, 1])


def test_only_the_files_of_a_selection_are_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = readers.open_folder(tree, "train")
    rows: list[int] = []
    read_one = type(reader.store).read_one

    def note(self: Any, row: int, *where: int) -> Any:
        rows.append(row)
        return read_one(self, row, *where)

    monkeypatch.setattr(type(reader.store), "read_one", note)
    reader.select(labels="dog", fraction=0.25).image_info([0, 1])
    assert len(rows) == 2
    reader.select(labels="dog", min_side=24)
    assert len(rows) == 14


@given(a=st.floats(0.01, 1), b=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_fractions(tree: Path, a: float, b: float, seed: int) -> None:
    reader = readers.open_folder(tree, "train")
    small, large = sorted((a, b))
    few, many = reader.select(fraction=small, seed=seed), reader.select(fraction=large, seed=seed)
    assert len(few) == max(1, round(36 * small)) and set(few.table.rows.tolist()) <= set(many.table.rows.tolist())
    assert (np.diff(few.table.rows) > 0).all(), "not in the stored order"


def test_selections_of_all_and_of_no_samples(base: Any) -> None:
    assert base.select().table.rows.tolist() == list(range(36))
    with pytest.raises(SourceError, match=r"nothing is selected: none of the 36 samples of .* has labels='cat', min_b"):
        base.select(labels="cat", min_bytes=10**9)
    with pytest.raises(SourceError, match="has indices=\\[\\]"):
        base.select(indices=[])
    with pytest.raises(IndexError, match="not all inside the samples of"):
        base.select(indices=[36])
    for wrong in ([0.5], [[1]], [True]):
        with pytest.raises(ValueError, match="indices must be integers in one dimension"):
            base.select(indices=wrong)
    for fraction in (0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="expected more than 0 and at most 1"):
            base.select(fraction=fraction)


# --- fingerprints -------------------------------------------------------------------------------------------------
def test_the_same_samples_have_one_fingerprint(base: Any) -> None:
    same = [base.select(labels=0), base.select(indices=range(12)), base.select(labels=[0, 1]).select(labels=0)]
    assert (
        len({reader.fingerprint for reader in same}) == 1 and base.select(labels=1).fingerprint != same[0].fingerprint
    )


def test_changes_of_a_fingerprint(packed: Path, tree: Path, tmp_path: Path) -> None:
    train, val = readers.open(packed, "train"), readers.open(packed, "val")
    assert train.fingerprint == f"{train.dataset.fingerprint()}/train" != val.fingerprint
    assert readers.open_folder(tree, "train").fingerprint != readers.open_folder(tree, "val").fingerprint
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(make_jpeg(number))
    before = readers.open_folder(tmp_path).fingerprint
    assert readers.open_folder(tmp_path).fingerprint == before
    (tmp_path / "2.jpg").write_bytes(b"")
    assert readers.open_folder(tmp_path).fingerprint != before


@pytest.fixture
def reader(samples: Samples) -> Any:
    with readers.open(samples.packed(), "train") as reader:
        yield reader


EXPRESSIONS = [
    "min_side >= 32",
    "width == 24 or height == 24",
    "32 <= max_side < 40 and not width > 32",
    "label == 1",
    'label == "dog"',
    'label in ("cat", 2)',
    "label not in (0, 1)",
    "label < 0",
    "label != 0 and label != -1",
    'class_name in ["owl", "cat"]',
    'class_name == ""',
    'key == "cat/03"',
    'key in {"cat/03", "owl/20", "no such"}',
    'matches(key, "*/1?")',
    'not matches(class_name, "[cd]*")',
    'medium == "png"',
    'medium != "png" and bytes > 700',
    "aspect > 1",
    "0.5 < aspect",
    "orientation == 6",
    "pixels >= 1000 and components == 3",
    'split == "train"',
    'split in ("val", "test")',
    'has("mask") and label == 0',
    'folder == "cat" or matches(folder, "o?l")',
    "  ( width>0 ) ",
    "64 > width",
    "bytes in (1, 2, 3)",
]


def test_expressions_select_the_samples_that_python_selects(reader: Any) -> None:
    """Python evaluates the same text for each sample, with the label as a number or as the name of its class."""
    names = [names_of(reader, i) for i in range(len(reader))]
    for text in EXPRESSIONS:
        expected = [
            key for key, row in zip(reader.keys, names, strict=True) if eval(text.strip(), {"__builtins__": {}}, row)
        ]
        if expected:
            assert list(reader.select(where=text).keys) == expected, text
        else:
            with pytest.raises(readers.SourceError, match="nothing is selected"):
                reader.select(where=text)


class Label(int):
    """A class number that also equals the name of its class."""

    name = ""

    def __eq__(self, other: object) -> bool:
        return self.name == other if isinstance(other, str) else int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def names_of(reader: Any, i: int) -> dict[str, Any]:
    label = Label(reader.labels[i])
    label.name = reader.classes[label] if label >= 0 else ""
    image, turned = reader.info, int(reader.info.orientation[i]) >= 5
    height, width = (int(image.width[i]), int(image.height[i]))[:: 1 if turned else -1]
    return {
        "label": label,
        "class_name": label.name,
        "key": reader.keys[i],
        "folder": reader.keys[i].rpartition("/")[0],
        "split": "train",
        "width": width,
        "height": height,
        "min_side": min(width, height),
        "max_side": max(width, height),
        "pixels": width * height,
        "aspect": width / height,
        "bytes": len(reader.read(i)),
        "medium": "png" if bytes(reader.read(i))[:4] == b"\x89PNG" else "jpeg",
        "orientation": int(image.orientation[i]),
        "components": int(image.components[i]),
        "has": lambda field: reader.has(i, field),
        "matches": fnmatch.fnmatchcase,
    }


WRONG: list[tuple[str, str]] = [
    ("width > 3)", r"cannot be read at character 10"),
    ('class == "cat"', r"the class of a sample is label or class_name here"),
    ("width >", r"cannot be read"),
    ("", r"cannot be read"),
    ("width", r"at character 1: 'width' is neither a comparison"),
    ("3 < 4 and 'a'", r"'a'.* is neither a comparison"),
    ('width == "a"', r"cannot compare a number with a text"),
    ('width in ("a", 3)', r"cannot compare a number with texts"),
    ('key < "b"', r"cannot order a text and a text"),
    ("key == 3", r"cannot compare a text with a number"),
    ("medium in (1, 2)", r"cannot compare a text with numbers"),
    ("width in 3", r"expected a column in a list"),
    ("3 in (3, 4)", r"expected a column in a list"),
    ("label is 3", r"is not a supported comparison"),
    ("width + 1 > 3", r"'width \+ 1' is neither the name of a column nor a number nor a text"),
    ("width > True", r"'True' is neither the name"),
    ("width > 1e400", r"is neither the name"),
    ('__import__("os").system("true")', r"is not a function that is known here"),
    ("key.__class__ == 3", r"'key.__class__' is neither"),
    ('matches(key, "a*", x=1)', r"is not a function"),
    ('matches(width, "a*")', r"is not a function"),
    ('open("x") == 3', r"'open\(\"x\"\)' is neither"),
    ("[x for x in key] == 3", r"is neither"),
    ("(lambda: 3)() == 3", r"is neither"),
    ("width > 3\nor height ==\x00 3", r"cannot be read"),
    ("width > 3 or 'é' != key and key > 3", r"at character 29: 'key > 3' cannot order"),
    ("(" * 300 + "width > 3" + ")" * 300, r"cannot be read"),
    ("not " * 5000 + "width > 3", r"cannot be read|nested too deeply"),
    ("width > 3 or " * 9000 + "width > 3", r"characters, expected at most"),
]
UNKNOWN: list[tuple[str, str]] = [
    ('label == "fox"', r"no class 'fox'; there are 3: cat, dog, owl"),
    ('has("depth")', r"no field 'depth'"),
    ("widht > 3", r"at character 1: 'widht' is not known; there are label, key.* json: none; did you mean width\?"),
    ("width > 3 and colour == 1", r"at character 15: 'colour' is not known"),
    ("é == 3 or wïdth > 3", r"at character 1: 'é' is not known"),
    ("width > 3 or 'é' != key and wrong > 3", r"at character 29: 'wrong'"),
]


def test_errors_name_the_position_and_the_expected_text(reader: Any) -> None:
    for text, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parse_where(text)
        with pytest.raises(ValueError, match=message):
            reader.select(where=text)
    for text, message in UNKNOWN:  # names that the set does not have
        parse_where(text)
        with pytest.raises(readers.UnknownNameError, match=message):
            reader.select(where=text)


def test_unknown_values_compare_false(tmp_path: Path) -> None:
    tree_of(tmp_path, {"good.jpg": make_jpeg(1, (40, 24)), "bad.jpg": make_jpeg(2)[:9]})
    with readers.open_folder(tmp_path) as folder:
        assert list(folder.select(where="width < 64").keys) == ["good"]
        assert list(folder.select(where="not width < 64").keys) == ["bad"]
        for text in ("width != 3", "3 != width", "width not in (3, 4)", "width != max_side or width == 40"):
            assert list(folder.select(where=text).keys) == ["good"]
        assert list(folder.select(where="aspect > 1 or width == 0").keys) == ["good"]


def test_the_columns_of_an_expression() -> None:
    assert parse_where('min_side > 3 and matches(key, "a") or has("mask")').names == {"min_side", "key", "has"}


def test_expressions_with_other_criteria(reader: Any) -> None:
    chosen = reader.select(labels="cat", where="width == 40", indices=np.arange(20))
    assert [key[:3] for key in chosen.keys] == ["cat"] * len(chosen) and set(chosen.info.width.tolist()) == {40}


@pytest.fixture(scope="module")
def sets(tree: Path, pack: Callable[..., Path]) -> dict[str, Path]:
    return {to: pack(tree, to, samples_per_shard=6) for to in FORMATS}


def everything(reader: Any) -> list[tuple[str, str, bytes]]:
    return [(s.key, reader.classes[s.label], bytes(s.image)) for s in reader]


def test_concatenated_readers(sets: dict[str, Path], tree: Path) -> None:
    parts = [
        readers.open(sets["tar"], "val").select(labels=["owl", "cat"]),
        readers.open(sets["hdf5"], "train").select(indices=[30, 2, 2, 17]),
        readers.open_folder(tree, "val"),
    ]
    both = readers.concat(parts)
    expected = [sample for part in parts for sample in everything(part)]
    assert everything(both) == expected and len(both) == sum(map(len, parts))
    order = np.random.default_rng(1).permutation(len(both))
    assert [bytes(data) for data in both.read_many(order)] == [expected[i][2] for i in order]
    assert everything(pickle.loads(pickle.dumps(both))) == expected
    assert [both.name(i) for i in (0, 7)] == [parts[0].name(0), parts[1].name(1)]
    assert both.fingerprint != readers.concat(parts[::-1]).fingerprint
    both.close()


def test_concatenated_readers_unify_classes_by_name(sets: dict[str, Path]) -> None:
    class Bytes(Store):
        def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
            return b"x%d" % row

    other = readers.Reader(readers.Table.of(["a", "b", "c"], [0, 1, -1], ["zebra", "owl"]), Bytes())
    both = readers.concat([readers.open(sets["tar"], "val"), other])
    assert both.classes == ("cat", "dog", "owl", "zebra") and both.labels[-3:].tolist() == [3, 2, -1]
    assert both.class_to_idx["zebra"] == 3 and bytes(both.read(-2)) == b"x1"
    with pytest.raises(ValueError, match="the same fields"):
        readers.concat([other, readers.Reader(readers.Table.of(["a"], sizes={"mask": [1]}), Bytes())])


def test_a_cache_under_a_selection_serves_the_whole_set(sets: dict[str, Path], place: dict[str, Any]) -> None:
    """Also a cache over a cache: in memory over one on a disk."""
    with readers.open(sets["tar"], "train") as base:
        expected = [bytes(data) for data in base.read_many(range(36))]
        slow = readers.cached(base, **place)
        disk = {**place, "directory": place["directory"].parent / "disk"}
        disk["directory"].mkdir()
        below = readers.cached(base, **disk)
        above = readers.cached(below, **place)
        few = above.select(indices=[5, 30, 5])
        assert [bytes(data) for data in few.read_many(range(3))] == [expected[i] for i in (5, 30, 5)]
        assert (above.stats().present, below.stats().present) == (2, 2)
        again = readers.cached(below.select(indices=[30, 5]), **{**place, "job": "another"})
        assert [bytes(again.read(i)) for i in (0, 1)] == [expected[30], expected[5]]
        assert below.stats().hits >= 2, "samples of the first tier were read again"
        for reader in (slow, again, above):
            reader.close()
        assert [bytes(data) for data in base.read_many(range(36))] == expected
        assert list(disk["directory"].iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_a_shard_is_read_without_an_index(sets: dict[str, Path], to: str) -> None:
    with readers.open(sets[to], "train") as packed:
        first = packed.split_info.shards[0]
        with packer.open_shard(sets[to] / first.path) as shard:
            assert [(s.key, s.label, bytes(s.image)) for s in shard] == [
                (s.key, s.label, bytes(s.image)) for s in packed[: first.samples]
            ]
            few = shard.select(labels=[0])
            assert len(few) > 0 and set(few.labels.tolist()) == {0}
            assert [bytes(d) for d in pickle.loads(pickle.dumps(few)).stream()] == [bytes(d) for d in few.stream()]
    with pytest.raises(readers.SourceError, match=r"not a file; .*readers\.open"):
        packer.open_shard(sets[to])


def test_the_words_of_torchvision(sets: dict[str, Path]) -> None:
    pytest.importorskip("torch")
    from readers.augment import CenterCrop
    from readers.loader import ImageLoader
    from readers.torch import ImageDataset

    with readers.open(sets["tar"], "train") as reader:
        numbers = {"cat": 0, "dog": 1, "owl": 2}
        assert reader.class_to_idx == numbers == ImageDataset(reader).class_to_idx
        loader = ImageLoader(reader, 4, augment=[CenterCrop(16)])
        assert loader.dataset is reader and len(loader.dataset) == 36
        assert loader.dataset.class_to_idx == numbers and loader.dataset[0].key == reader.keys[0]
