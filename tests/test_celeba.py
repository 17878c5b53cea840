"""CelebA's folder, and imagenette's table of noisy labels, in the format of the real files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_jpeg, tree_of

import packer
import readers
from cache.errors import BadSampleError, SourceError
from packer.testing.sources import Found, SourceSuite, found

NAMES = [f"{number:06d}.jpg" for number in range(1, 7)]
ATTRIBUTES = ("5_o_Clock_Shadow", "Bald", "Smiling", "Young")
IMAGES = {name: make_jpeg(number) for number, name in enumerate(NAMES)}
SMILES = [1, -1, 1, 1, -1, -1]
PARTS = [0, 0, 0, 1, 2, 2]
SPLITS = ("train", "val", "test")


def values(number: int) -> list[int]:
    return [-1, 1 if number == 3 else -1, SMILES[number], 1]


PARTITION = "".join(f"{name} {part}\n" for name, part in zip(NAMES, PARTS, strict=True))
# The real list pads -1 and 1 to two characters, and ends each line with a space or not.
LIST = f"{len(NAMES)}\n{' '.join(ATTRIBUTES)} \n" + "".join(
    f"{name} {' '.join(f'{value:2d}' for value in values(number))}\n" for number, name in enumerate(NAMES)
)
IDENTITIES = "".join(f"{name} {2880 + number // 2}\n" for number, name in enumerate(NAMES))
LISTS = {"list_eval_partition.txt": PARTITION, "list_attr_celeba.txt": LIST, "identity_CelebA.txt": IDENTITIES}
PUBLISHED = {"list_eval_partition.txt": "Eval/", "list_attr_celeba.txt": "Anno/", "identity_CelebA.txt": "Anno/"}


def celeba(root: Path, *, published: bool = False, **changed: str | None) -> Path:
    """changed: lists by the first word of their names; None: without it."""
    files = {f"{'Img/' if published else ''}img_align_celeba/{name}": data for name, data in IMAGES.items()}
    for name, text in LISTS.items():
        text = changed.get(next((key for key in changed if key in name), ""), text)
        if text is not None:
            files[(PUBLISHED[name] if published else "") + name] = text.encode()
    return tree_of(root, files)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return celeba(tmp_path / "celeba")


@pytest.mark.parametrize("published", [False, True], ids=["together", "as-published"])
class TestCelebA(SourceSuite):
    @pytest.fixture
    def root(self, tmp_path: Path, published: bool) -> Path:
        return celeba(tmp_path / "celeba", published=published)

    @pytest.fixture
    def truth(self) -> Found:
        splits: dict[str, Any] = {name: [] for name in SPLITS}
        for number, name in enumerate(NAMES):
            facts = json.dumps(dict(zip(ATTRIBUTES, values(number), strict=True)), separators=(",", ":")).encode()
            splits[SPLITS[PARTS[number]]].append((name[:-4], -1, (IMAGES[name], facts)))
        return Found(splits, (), ("image", "json"))

    def data_files(self, root: Path) -> set[Path]:
        return set(root.rglob("*.jpg"))

    def whole_files(self, root: Path) -> bool:
        return True


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (None, [-1] * 6),
        ("identity", [2880, 2880, 2881, 2881, 2882, 2882]),
        ("Smiling", [1, 0, 1, 1, 0, 0]),
    ],
)
def test_labels_are_given_on_request(column: str | None, expected: list[int], root: Path, tmp_path: Path) -> None:
    packer.convert(packer.open_source(root, label_column=column), "tar", tmp_path / "set", run=packer.Run(workers=1))
    labels = [label for split in SPLITS for label in readers.open(tmp_path / "set", split).labels.tolist()]
    assert labels == expected
    with readers.open(tmp_path / "set", "val") as reader:
        assert json.loads(bytes(reader.read(0, "json"))) == dict(zip(ATTRIBUTES, values(3), strict=True))


def test_only_the_partition_is_needed(tmp_path: Path) -> None:
    root = celeba(tmp_path / "celeba", attr=None, identity=None)
    assert packer.open_source(root).list(None).fields == {"image": "image"}
    with pytest.raises(SourceError, match=r"no labels called 'Smiling'.*have none"):
        packer.open_source(root, label_column="Smiling").list(None)


def test_what_the_partition_lacks_is_left_out(root: Path) -> None:
    (root / "img_align_celeba" / "999999.jpg").write_bytes(b"")
    assert packer.open_source(root).list(None).left_out == [("999999.jpg", "not in list_eval_partition.txt")]


def test_the_folders_can_be_taken_for_classes(root: Path) -> None:
    assert packer.open_source(root, layout="tree").list(None).classes == ("img_align_celeba",)
    with pytest.raises(SourceError, match="label_column can be given for CelebA's folder"):
        packer.open_source(root, layout="tree", label_column="identity")
    (root / "list_eval_partition.txt").unlink()
    assert packer.open_source(root).list(None).warnings  # of a single class


def test_a_missing_image_is_a_bad_sample(root: Path, tmp_path: Path) -> None:
    (root / "img_align_celeba" / NAMES[1]).unlink()
    with pytest.raises(BadSampleError, match=NAMES[1]):
        packer.convert(root, "tar", tmp_path / "set", run=packer.Run(workers=1))
    packer.convert(root, "tar", tmp_path / "other", run=packer.Run(workers=1, on_error="skip"))
    assert len(readers.open(tmp_path / "other", "train")) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"partition": PARTITION + "../secret.jpg 0\n"}, "line 7: '../secret.jpg' is not the name"),
        ({"partition": PARTITION + "/etc/passwd 0\n"}, "line 7: '/etc/passwd' is not the name"),
        ({"partition": PARTITION + ".. 0\n"}, "line 7: '..' is not the name"),
        ({"partition": PARTITION + f"{NAMES[0]} 1\n"}, "line 7: '000001.jpg' for the second time"),
        ({"partition": PARTITION.replace(" 2", " 3", 1)}, "line 5: '3' is not a part"),
        ({"partition": PARTITION.replace(" 1\n", "\n")}, "line 4: 1 words"),
        ({"partition": ""}, "no rows"),
        ({"partition": "x" * 100_000}, "line 1: longer than"),
        ({"partition": PARTITION + "\udcff"}, "not UTF-8"),
        ({"attr": LIST + f"000009.jpg {' 1' * 4}\n"}, "line 9: '000009.jpg' is not in the partition"),
        ({"attr": LIST.replace(NAMES[5], NAMES[4])}, "line 8: '000005.jpg' for the second time"),
        ({"attr": "\n".join(LIST.splitlines()[:-2])}, "no line for '000005.jpg'; 2 images"),
        ({"attr": LIST.replace(" 1\n", "\n", 1)}, "line 3: 4 words, expected a name and 4"),
        ({"attr": LIST.replace(" 1\n", " 7\n", 1)}, "line 3: attributes are -1 or 1"),
        ({"attr": ""}, "line 2: expected the number of images"),
        ({"attr": "6\nBald Bald\n"}, "line 2: expected"),
        ({"identity": IDENTITIES.replace("2881", "-4")}, "line 3: '-4' is not the number"),
    ],
)
def test_lists_that_lie_are_refused(changed: dict[str, str], words: str, tmp_path: Path) -> None:
    root = celeba(tmp_path / "celeba")
    for key, text in changed.items():
        name = next(name for name in LISTS if key in name)
        (root / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SourceError, match=words.replace("..", r"\.\.")):
        packer.open_source(root, label_column="identity").list(None)


def test_a_pipe_in_place_of_a_list_is_not_waited_for(root: Path, hanging: Callable[..., None]) -> None:
    (root / "list_attr_celeba.txt").unlink()
    os.mkfifo(root / "list_attr_celeba.txt")

    def work() -> None:
        with pytest.raises(SourceError, match=r"list_attr_celeba\.txt"):
            packer.open_source(root).list(None)

    hanging(work, 20)


# --- imagenette ------------------------------------------------------------------------------------------------------
HEADER = "path,noisy_labels_0,noisy_labels_1,noisy_labels_5,noisy_labels_25,noisy_labels_50,is_valid\n"


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """noisy_imagenette.csv next to train and val: of the image in train half of the labels are wrong."""
    cat, dog = "n02979186", "n03417042"
    rows = [f"{part}/{own}/{own}_{part}.JPEG" for part in ("train", "val") for own in (cat, dog)]
    text = HEADER
    for number, path in enumerate(rows):
        own = path.split("/")[1]
        wrong = dog if number == 0 else own
        text += f"{path},{own},{own},{own},{wrong},{wrong},{path.startswith('val')}\n"
    files = {path: make_jpeg(number) for number, path in enumerate(rows)}
    return tree_of(tmp_path / "imagenette2", {**files, "noisy_imagenette.csv": text.encode()}) / "noisy_imagenette.csv"


@pytest.mark.parametrize(
    ("column", "labels"),
    [(None, [0, 1]), ("noisy_labels_0", [0, 1]), ("noisy_labels_25", [1, 1])],
)
def test_the_noisy_labels_of_imagenette(column: str | None, labels: list[int], noisy: Path) -> None:
    there = found(packer.open_source(noisy, label_column=column))
    assert {name: len(samples) for name, samples in there.splits.items()} == {"train": 2, "val": 2}
    assert there.classes == ("n02979186", "n03417042")
    assert [int(label) for _, label, _ in there.splits["train"]] == labels
    facts = json.loads(there.splits["train"][0][2][1] or b"")
    assert facts["noisy_labels_50"] == "n03417042" and "is_valid" not in facts


def test_is_valid_is_true_or_false(noisy: Path) -> None:
    noisy.write_text(noisy.read_text().replace(",True\n", ",maybe\n"))
    with pytest.raises(SourceError, match="line 4: 'is_valid' is 'maybe', expected True or False"):
        packer.open_source(noisy).list(None)
    plain = noisy.with_name("plain.csv")
    plain.write_text("path,is_valid\ntrain/n02979186/n02979186_train.JPEG,True\n")
    assert list(packer.open_source(plain).list(None).splits) == ["train"], "elsewhere is_valid means something else"
