"""Expressions over what is known of samples: the same samples as Python itself finds, and clear errors."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of

import readers
from packer.testing.samples import Samples
from readers.where import parse_where


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


def test_the_samples_are_those_that_python_finds(reader: Any) -> None:
    """Python evaluates the same text sample by sample, with the label as a number or as the name of its class."""
    names = [names_of(reader, i) for i in range(len(reader))]
    for text in EXPRESSIONS:
        expected = [
            key for key, one in zip(reader.keys, names, strict=True) if eval(text.strip(), {"__builtins__": {}}, one)
        ]
        if expected:
            assert list(reader.select(where=text).keys) == expected, text
        else:
            with pytest.raises(readers.SourceError, match="nothing is selected"):
                reader.select(where=text)


class Label(int):
    """A class number that is equal to the name of its class, too."""

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
    ("label is 3", r"is not a comparison that is known here"),
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


def test_errors_say_where_and_what_is_expected(reader: Any) -> None:
    for text, message in WRONG:
        with pytest.raises(ValueError, match=message):
            parse_where(text)
        with pytest.raises(ValueError, match=message):
            reader.select(where=text)
    for text, message in UNKNOWN:  # of names that the set does not have
        parse_where(text)
        with pytest.raises(readers.UnknownNameError, match=message):
            reader.select(where=text)


def test_what_is_not_known_compares_false(tmp_path: Path) -> None:
    tree_of(tmp_path, {"good.jpg": make_jpeg(1, (40, 24)), "bad.jpg": make_jpeg(2)[:9]})
    with readers.open_folder(tmp_path) as folder:
        assert list(folder.select(where="width < 64").keys) == ["good"]
        assert list(folder.select(where="not width < 64").keys) == ["bad"]
        for text in ("width != 3", "3 != width", "width not in (3, 4)", "width != max_side or width == 40"):
            assert list(folder.select(where=text).keys) == ["good"]
        assert list(folder.select(where="aspect > 1 or width == 0").keys) == ["good"]


def test_which_columns_an_expression_needs() -> None:
    assert parse_where('min_side > 3 and matches(key, "a") or has("mask")').names == {"min_side", "key", "has"}


def test_expressions_with_other_criteria(reader: Any) -> None:
    chosen = reader.select(labels="cat", where="width == 40", indices=np.arange(20))
    assert [key[:3] for key in chosen.keys] == ["cat"] * len(chosen) and set(chosen.info.width.tolist()) == {40}
