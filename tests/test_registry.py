"""Another distribution adds a format, a source, an engine, a form, a store and a command, with an entry point each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_python

MODULE = '''
import json
from packer.formats import FormatEntry
from packer.formats.base import Format, Located, Payloads, WrittenShard
from packer.sources import SourceEntry
from packer.sources.base import ListingBuilder, SourceListing
from crc32c import crc32c
import os

class Pile(Format):
    """A magic number, then a line of JSON and an image, again and again."""

    name = "pile"

    def shard_name(self, split, number, count):
        return f"{split}-{number:03d}.pile"

    def open_writer(self, path, spec):
        return Writer(path)

    def locate(self, path, options):
        data, position = path.read_bytes(), 4
        while position < len(data):
            start = data.index(b"\\n", position) + 1
            key, label, name, length = json.loads(data[position:start])
            yield Located(key, label, {"image": (start, length)}, {"image": name} if name else {})
            position = start + length

class Writer:
    def __init__(self, path):
        self.path, self.data, self.payloads = path, bytearray(b"PILE"), Payloads()

    def add(self, sample):
        image = bytes(sample.payloads[0])
        self.data += json.dumps([sample.key, sample.label, sample.names[0], len(image)]).encode() + b"\\n"
        self.payloads.append(len(self.data), len(image), crc32c(image))
        self.data += image

    def flush(self):
        pass

    def finish(self):
        with open(self.path, "xb") as file:
            file.write(self.data)
            file.flush()
            os.fsync(file.fileno())
        return WrittenShard(len(self.data), crc32c(self.data), {"image": self.payloads})

    def abort(self):
        pass

PILE = Pile()
FORMAT = FormatEntry(name="pile", title="a pile", home="thirdparty:PILE", magic=((0, b"PILE"),), suffixes=(".pile",),
                     aliases=("heap",))

class Colours:
    """A file of colours, each of which is an image of one pixel."""

    def __init__(self, root, shade=0):
        self.root, self.shade = root, shade

    title = "colours"

    def list(self, split):
        listing = SourceListing({}, {"image": "image"})
        listing.splits["train"] = make_listing(self.root.read_text().split()[1:])
        return listing

    def open(self):
        return self

    def paths(self, listing):
        yield self.root

    def read(self, place, arena):
        from PIL import Image
        import io
        memory = io.BytesIO()
        Image.new("RGB", (8, 8), place).save(memory, "PNG")
        return (memory.getvalue(),)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

def make_listing(names):
    builder = ListingBuilder()
    for label, name in enumerate(names):
        builder.add([""], name, 100, key=name, label=label)
    return builder.build()

SOURCE = SourceEntry(name="colours", title="a file of colours", home="thirdparty:Colours", magic=((0, b"COLOURS"),),
                     options=frozenset({"shade"}))

import click
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from packer.engines import EngineEntry

@contextmanager
def open_pool(scheduler):
    with ThreadPoolExecutor(2) as pool:
        yield pool

ENGINE = EngineEntry(name="pool", title="threads", home="thirdparty:open_pool")

from readers.caching.form import Encoded

def make_plain(parameters):
    if parameters != "again":
        raise ValueError(f"plain takes again, not {parameters!r}")
    return Encoded()

from cache.errors import MissingError
from cache.remote import Facts

class Shelf:
    """The files below /HOST/PATH of this machine, as shelf://HOST/PATH."""

    def __init__(self, url, patience):
        self.root = f"/{url.host}/{url.path}"

    def read(self, span):
        with open(f"{self.root}/{span.path}", "rb") as file:
            file.seek(span.start)
            return file.read(span.stop - span.start), self.head(span.path)[0]

    def whole(self, path, most_bytes, cut=False):
        facts = self.head(path)[0]
        with open(f"{self.root}/{path}", "rb") as file:
            return file.read(most_bytes), facts

    def head(self, path):
        try:
            found = os.stat(f"{self.root}/{path}")
        except OSError as error:
            raise MissingError(f"{self.root}/{path}: no such file") from error
        return Facts(found.st_size, "", found.st_mtime), {}

@click.command("tidy")
@click.option("--twice", is_flag=True)
def tidy(twice):
    """Put things away."""
    print("tidy\\ntidy" if twice else "tidy")
'''
SCRIPT = """
import sys
from pathlib import Path
import packer, readers

folder = Path(sys.argv[1])
images = [folder.joinpath(f"in/{n}.jpg").read_bytes() for n in range(3)]
assert packer.convert(folder / "in", "heap", folder / "out", run=packer.Run(workers=1)).format == "pile"
with readers.open(folder / "out", verify=True) as reader:
    assert [bytes(reader.read(i)) for i in range(3)] == images
assert packer.verify(folder / "out", workers=1).ok
(folder / "out/dataset.json").unlink()
assert packer.index(folder / "out", workers=1).samples == 3
assert packer.convert(next(folder.glob("out/*.pile")), "tar", folder / "tar", run=packer.Run(workers=1)).samples == 3

(folder / "colours.txt").write_text("COLOURS red green")
assert packer.convert(folder / "colours.txt", "pile", folder / "two", run=packer.Run(workers=1)).samples == 2
packer.open_source(folder / "colours.txt", shade=2)
for wrong in ({"shade": 1}, {"path_column": "x"}):
    try:
        packer.open_source(folder / "in", **wrong)
    except readers.SourceError as error:
        print(error)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with a distribution of one module."""
    entry_points = "[packer.formats]\npile = thirdparty:FORMAT\n[packer.sources]\ncolours = thirdparty:SOURCE\n"
    entry_points += "[packer.forms]\nplain = thirdparty:make_plain\n[packer.stores]\nshelf = thirdparty:Shelf\n"
    entry_points += "[packer.engines]\npool = thirdparty:ENGINE\n[packer.commands]\ntidy = thirdparty:tidy\n"
    files = {
        "thirdparty.py": MODULE,
        "thirdparty-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n",
        "thirdparty-1.0.dist-info/entry_points.txt": entry_points,
    }
    return tree_of(tmp_path / "site", {name: text.encode() for name, text in files.items()})


def python(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    paths = f"{site}:{Path(__file__).resolve().parent.parent}"
    return run_python(*arguments, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"})


def test_a_package_adds_a_format_and_a_source(tmp_path: Path, installed: Path) -> None:
    tree_of(tmp_path / "in", {f"{number}.jpg": make_jpeg(number) for number in range(3)})
    done = python(installed, "-c", SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shade can be given for a file of colours only, and this is an image folder" in done.stdout
    assert "path_column can be given for a list of addresses of images or a manifest only" in done.stdout


def test_the_command_line_takes_it(tmp_path: Path, installed: Path) -> None:
    assert "hdf5|tfrecord|tar|pile" in python(installed, "-m", "packer", "convert", "--help").stdout.replace("\n", "")
    (tmp_path / "colours.txt").write_text("COLOURS red green")
    arguments = ("convert", tmp_path / "colours.txt", "--to", "pile", "-o", tmp_path / "out")
    done = python(installed, "-m", "packer", *arguments)
    assert done.returncode == 0 and "in 1 pile shard" in done.stdout, done.stderr
    shard = tmp_path / "out/train-000.pile"
    done = python(installed, "-m", "packer", "index", shard, "-o", tmp_path / "again")
    assert done.returncode == 0 and "2 samples" in done.stdout, done.stderr


def test_a_set_of_a_format_that_is_not_installed_can_be_read(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "colours.txt").write_text("COLOURS red green")
    script = "import sys, packer; packer.convert(sys.argv[1], 'pile', sys.argv[2], run=packer.Run(workers=1))"
    assert python(installed, "-c", script, tmp_path / "colours.txt", tmp_path / "out").returncode == 0
    script = "import sys, readers; print(len(readers.open(sys.argv[1], verify=True).read_many([0, 1])))"
    assert python(tmp_path / "nothing", "-c", script, tmp_path / "out").stdout == "2\n"
    done = python(tmp_path / "nothing", "-m", "packer", "verify", tmp_path / "out")
    assert "no format 'pile'" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_its_commands_are_listed_and_run(installed: Path) -> None:
    assert re.search("Of other packages:\n +tidy +Put things away", python(installed, "-m", "packer", "--help").stdout)
    assert python(installed, "-m", "packer", "tidy", "--twice").stdout == "tidy\ntidy\n"


def test_its_engine_runs_tasks(tmp_path: Path, installed: Path) -> None:
    tree_of(tmp_path / "in", {f"{number}.jpg": make_jpeg(number) for number in range(3)})
    arguments = ("convert", tmp_path / "in", "--to", "tar", "-o", tmp_path / "out", "--engine", "pool")
    done = python(installed, "-m", "packer", *arguments)
    assert done.returncode == 0 and "3 samples" in done.stdout, done.stdout + done.stderr


def test_its_store_and_its_form_are_read_and_kept(tmp_path: Path, installed: Path) -> None:
    tree_of(tmp_path / "in", {f"{number}.jpg": make_jpeg(number) for number in range(3)})
    assert python(installed, "-m", "packer", "convert", tmp_path / "in", "-o", tmp_path / "set").returncode == 0
    script = (
        "import sys, readers; from readers.caching.form import as_form\n"
        "with readers.open(sys.argv[1]) as near, readers.open('shelf:/' + sys.argv[1]) as far:\n"
        "    assert [bytes(far.read(i)) for i in range(3)] == [bytes(near.read(i)) for i in range(3)]\n"
        "    with readers.cached(far, 1.0, 'plain:again', directory=sys.argv[2], job='a') as kept:\n"
        "        assert bytes(kept.read(1)) == bytes(near.read(1))\n"
        "for wrong in ('plain:no', 'gold'):\n"
        "    try: as_form(wrong)\n"
        "    except ValueError as error: print(error)\n"
    )
    (tmp_path / "memory").mkdir()
    done = python(installed, "-c", script, tmp_path / "set", tmp_path / "memory")
    assert done.returncode == 0, done.stderr
    assert "plain takes again" in done.stdout and "decoded:SIDE, plain or coefficients, not 'gold'" in done.stdout
    done = python(tmp_path / "nothing", "-m", "packer", "inspect", f"shelf:/{tmp_path}/set")
    assert done.returncode == 2 and "is not an address of the kinds s3://" in done.stderr, done.stderr


def test_what_is_broken_is_one_warning(tmp_path: Path, installed: Path) -> None:
    """It names the distribution, the entry point and the error; the rest works. A built-in name is not replaced."""
    (installed / "thirdparty.py").write_text("raise RuntimeError('not today')")
    points = installed / "thirdparty-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text() + "convert = thirdparty:tidy\n")
    tree_of(tmp_path / "in", {"a.jpg": make_jpeg(1)})
    done = python(installed, "-m", "packer", "convert", tmp_path / "in", "--to", "tar", "-o", tmp_path / "out")
    assert done.returncode == 0 and "1 sample" in done.stdout, done.stderr
    (tmp_path / "x.bin").write_bytes(b"nothing known")
    done = python(installed, "-m", "packer", "convert", tmp_path / "x.bin", "--to", "tar")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("thirdparty: the entry point colours = ") == 1 and "not today" in done.stderr
    done = python(installed, "-m", "packer", "--help")
    assert done.returncode == 0 and "Pack a source" in done.stdout and "Of other packages" not in done.stdout
    assert done.stderr.count("thirdparty: the entry point tidy = ") == 1
    assert "the entry point convert = 'thirdparty:tidy' of packer.commands is left out" in done.stderr
    assert "the name is taken by packer" in done.stderr
