"""Every message of docs/troubleshooting.md is provoked by a command or a call, and must match the quotation on the
page.

In a quotation "…" stands for any text, such as a path, and line ends for blanks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_jpeg, tree_of
from loader_options import grouped

import packer
import readers
from cache.files import Folder
from packer.cli.group import run
from packer.sources.folder import FolderReader, FolderSource
from readers.augment import CenterCrop, MixUp, Normalize, Resize
from readers.loader import ImageLoader
from readers.order import Sequential, Shuffled
from readers.torch import EpochSampler, ImageDataset

PAGE = Path(__file__).resolve().parent.parent / "docs/troubleshooting.md"
QUOTED = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)]
SMALL = [Resize((8, 8))]
Provoke = Callable[["Place"], object]


class Place:
    """The current directory, with `images`, and `set`, packed from it, which tests may damage."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.patch, self._capsys = root, patch, capsys
        self.closing = ExitStack()

    def packer(self, line: str) -> str:
        """The output of a command, results first."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit):
            run(line.split())
        printed = self._capsys.readouterr()
        return printed.out + printed.err

    def reader(self, **options: Any) -> readers.Reader:
        return self.closing.enter_context(readers.open("set", split="train", **options))

    def loader(self, batch_size: int = 2, **options: Any) -> ImageLoader:
        return ImageLoader(self.reader(), batch_size, **grouped({"augment": SMALL, "threads": 1, **options}))

    def shard(self) -> Path:
        return next(self.root.glob("set/train-*.h5"))

    def files(self, **files: bytes) -> None:
        tree_of(self.root / "other", {name.replace("__", "/").replace("_", "."): data for name, data in files.items()})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original")
    names = [f"{split}/{name}/{i}.jpg" for split in ("train", "val") for name in ("cat", "dog") for i in range(4)]
    tree_of(root / "images", {name: make_jpeg(i) for i, name in enumerate(names)})
    packer.convert(root / "images", to="hdf5", output=root / "set", run=packer.Run(workers=1))
    return root


@pytest.fixture
def place(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Place]:
    root = shutil.copytree(original, tmp_path / "here")
    monkeypatch.chdir(root)
    made = Place(root, monkeypatch, capsys)
    with made.closing:
        yield made


# --- installing -------------------------------------------------------------------------------------------------------
def an_extra_is_missing(place: Place) -> object:
    place.patch.setitem(sys.modules, "obstore", None)
    return readers.open("s3://bucket/set", split="train")


def no_gpu(place: Place) -> object:
    place.patch.setattr(torch.cuda, "is_available", lambda: False)
    return place.loader(device="cuda")


# --- converting -------------------------------------------------------------------------------------------------------
def nothing_there(place: Place) -> object:
    (place.root / "empty").mkdir()
    return place.packer("convert empty --to hdf5")


def a_truncated_image(place: Place) -> object:
    place.files(cat__0_jpg=make_jpeg(0), dog__1_jpg=make_jpeg(1)[:-300])
    return place.packer("convert other --to hdf5 --workers 1")


def an_unknown_image(place: Place) -> object:
    place.files(cat__0_jp2=b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40))
    return place.packer("convert other --to hdf5 --workers 1")


def an_output_that_is_not_a_set(place: Place) -> object:
    place.files(notes_txt=b"mine")
    return place.packer("convert images --to hdf5 -o other")


def an_output_in_use(place: Place) -> object:
    (place.root / "set/.packing").mkdir(exist_ok=True)
    work = place.closing.enter_context(Folder(place.root / "set/.packing"))
    place.closing.callback(work.lock("lock").release)
    return place.packer("convert images --to hdf5 -o set --overwrite")


def a_full_disk(place: Place, number: int = errno.ENOSPC) -> object:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with place.patch.context() as patch:
        patch.setattr(os, "writev", full)
        return place.packer("convert images --to tar --workers 1")


class DyingReader(FolderReader):
    def read(self, place: Any, arena: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(FolderSource):
    def open(self) -> FolderReader:
        return DyingReader(str(self.root))


class Stuck(FolderSource):
    def __reduce__(self) -> str:
        raise TypeError("cannot pickle 'sqlite3.Connection' object")


def a_name_among_numbers(place: Place) -> object:
    rows = "".join(f"images/train/cat/{i}.jpg,{i}\n" for i in range(3))
    (place.root / "list.csv").write_text(f"path,label\n{rows}images/train/dog/0.jpg,tench\n")
    return place.packer("convert list.csv --to hdf5")


def no_column_of_paths(place: Place) -> object:
    (place.root / "list.csv").write_text("photo_no,label\n1,2\n")
    return place.packer("convert list.csv --to hdf5")


def a_task_that_has_not_run(place: Place) -> object:
    place.packer("convert images --to hdf5 -o out --task 1/2 --workers 1")
    return place.packer("commit out")


def a_compressed_shard(place: Place) -> object:
    (place.root / "x.tar.gz").write_bytes(b"\x1f\x8b" + bytes(100))
    return place.packer("index x.tar.gz")


def an_index_that_would_lose_samples(place: Place) -> object:
    next(place.root.glob("set/val-*.h5")).unlink()
    return place.packer("index set")


# --- opening, reading -------------------------------------------------------------------------------------------------


def an_unfinished_conversion(place: Place) -> object:
    (place.root / "set/.packing").mkdir()
    (place.root / "set/dataset.json").unlink()
    return readers.open("set")


def _described(place: Place, change: Callable[[dict[str, Any]], object]) -> None:
    path = place.root / "set/dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def several_splits(place: Place) -> object:
    _described(place, lambda content: content["splits"].update(fold1=content["splits"].pop("train")))
    return readers.open("set")


def a_newer_set(place: Place) -> object:
    _described(place, lambda content: content.update(version=99))
    return readers.open("set")


def a_damaged_description(place: Place) -> object:
    (place.root / "set/dataset.json").write_text("{")
    return readers.open("set")


def a_shard_that_is_gone(place: Place) -> object:
    place.shard().unlink()
    return place.reader()[0]


def a_shard_of_another_size(place: Place) -> object:
    os.truncate(place.shard(), 5000)
    return place.reader()[0]


def another_shard_of_the_size(place: Place) -> object:
    place.shard().write_bytes(bytes(place.shard().stat().st_size))
    return place.reader()[0]


def a_set_that_was_replaced(place: Place) -> object:
    reader = place.reader()
    place.packer("convert images -o set --to hdf5 --label-offset 1 --overwrite --workers 1")
    return reader[0]


def _flip(place: Place) -> None:
    data = bytearray(place.shard().read_bytes())
    data[4200] ^= 255
    place.shard().write_bytes(data)


def a_damaged_sample(place: Place) -> object:
    _flip(place)
    return list(place.reader(verify=True))


def verify_finds_damage(place: Place) -> object:
    _flip(place)
    return place.packer("verify set --workers 1")


# --- training ---------------------------------------------------------------------------------------------------------
def images_of_several_sizes(place: Place) -> object:
    place.files(a_jpg=make_jpeg(1), b_png=_png())
    return next(iter(ImageLoader(readers.open_folder("other"), 2, threads=1)))


def _png() -> bytes:
    import io

    from PIL import Image

    memory = io.BytesIO()
    Image.new("RGB", (31, 17)).save(memory, "PNG")
    return memory.getvalue()


def mixing_without_labels(place: Place) -> object:
    place.files(a_jpg=make_jpeg(1))
    return ImageLoader(readers.open_folder("other"), 1, augment=[*SMALL, MixUp()], threads=1)


def a_rank_outside_the_world(place: Place) -> object:
    place.patch.setenv("RANK", "4")
    place.patch.setenv("WORLD_SIZE", "4")
    return place.loader()


def two_loops_over_one_loader(place: Place) -> object:
    loader = place.loader()
    first = iter(loader)
    next(first)
    next(iter(loader))
    return next(first)


def a_sampler_that_ran_ahead(place: Place) -> object:
    dataset = ImageDataset(place.reader(), transform=SMALL)
    sampler = EpochSampler(Shuffled(len(dataset)), dataset)
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    next(iter(torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler, **workers)))
    return sampler.state_dict()


# --- resuming ---------------------------------------------------------------------------------------------------------
def _state(place: Place, **options: Any) -> dict[str, Any]:
    loader = place.loader(**options)
    next(iter(loader))
    return dict(loader.state_dict())


def a_state_of_another_set(place: Place) -> object:
    state = _state(place)
    return ImageLoader(readers.open("set", split="val"), 2, augment=SMALL, threads=1).load_state_dict(state)


def lightning_counts_other_batches(place: Place) -> object:
    from readers.trainers import Trainer

    return Trainer("Lightning", epoch=3, batches=100).check_resume(left=150, total=200)


# --- caches, staging, addresses ---------------------------------------------------------------------------------------
def no_room_for_a_cache(place: Place) -> object:
    with pytest.warns(UserWarning) as warned:
        readers.cached(place.reader(), directory="/proc").close()
    return str(warned[0].message)


def a_target_that_is_not_local(place: Place) -> object:
    place.patch.setattr("cache.staging.session.filesystem_type", lambda path: "nfs4")
    return place.packer(f"stage set --target {place.root}")


def a_shard_that_is_damaged_while_staging(place: Place) -> object:
    _flip(place)
    return place.packer(f"stage set --target {place.root} --any-filesystem")


# Cases of a single line.
LINES: dict[str, Provoke] = {
    "a_quota": lambda place: a_full_disk(place, errno.EDQUOT),
    "a_worker_that_is_killed": lambda place: packer.convert(
        Dying("images"), "tar", "out", run=packer.Run(workers=2), shards=packer.Shards(samples=2)
    ),
    "a_source_that_does_not_pickle": lambda place: packer.convert(
        Stuck("images"), "tar", "out", run=packer.Run(workers=2), shards=packer.Shards(samples=2)
    ),
    "keys_of_two_sets": lambda place: place.packer("merge set set -o both"),
    "a_folder_that_is_not_a_set": lambda place: readers.open("images"),
    "a_shard_for_a_set": lambda place: readers.open(place.shard()),
    "no_such_directory": lambda place: readers.open("/scratch/imagenet-hdf5"),
    "an_unknown_split": lambda place: readers.open("set", split="test"),
    "an_unknown_field": lambda place: place.reader().read(0, field="mask"),
    "an_expression": lambda place: place.packer("subset set -o big --where min_side>>64"),
    "a_function_among_ops": lambda place: place.loader(augment=[lambda image: image]),
    "ops_out_of_order": lambda place: place.loader(augment=[Normalize((0.5,) * 3, (0.5,) * 3), CenterCrop(8)]),
    "normalised_bytes": lambda place: place.loader(
        augment=[*SMALL, Normalize((0.5,) * 3, (0.5,) * 3)], dtype=torch.uint8
    ),
    "a_batch_larger_than_the_set": lambda place: place.loader(64, tail="drop_last"),
    "a_state_of_another_order": lambda place: place.loader(order=Sequential(8)).load_state_dict(_state(place)),
    "what_is_not_a_state": lambda place: place.loader().load_state_dict({"model": 1}),
    "a_capacity": lambda place: readers.cached(place.reader(), capacity="lots"),
    "a_variable_that_is_not_set": lambda place: place.packer("stage set --target $NO_SUCH_DISK"),
    "a_target_without_room": lambda place: place.packer("stage set --target /proc"),
    "an_address_of_no_kind": lambda place: readers.open("ftp://host/set"),
}
PROVOKERS: dict[str, Provoke] = LINES | {
    name: value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and re.match(r"[a-z]", name)
    and name not in ("original", "place") and not isinstance(value, type)
}  # fmt: skip


@pytest.mark.parametrize("name", PROVOKERS)
def test_a_message_is_as_quoted_on_the_page(name: str, place: Place) -> None:
    """The output, or the final error, in one line."""
    try:
        output = PROVOKERS[name](place)
    except (Exception, SystemExit) as error:
        output = str(error)
    assert isinstance(output, str), f"{name} raises no error: {output!r:.200}"
    output = " ".join(output.split())
    quotations = [quoted for quoted in QUOTED if re.search(".*?".join(map(re.escape, quoted.split("…"))), output)]
    assert len(quotations) == 1, f"docs/troubleshooting.md has {quotations or 'no quotation'} for: {output}"


def test_every_quotation_is_provoked() -> None:
    """Each message has one quotation, so no quotation is left over."""
    assert len(QUOTED) == len(set(QUOTED)) == len(PROVOKERS)
