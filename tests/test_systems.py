"""Windows and macOS, simulated on Linux without the calls that they lack: sets are read, the other functions say why
not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_python

import packer
import readers
from packer.conversion.options import Run

SCRIPT = """
import json, sys
import readers
from packer.cli import main
from readers.augment import Resize
from readers.loader import ImageLoader

def command(*arguments):
    try:
        main(list(map(str, arguments)))
    except SystemExit as end:
        print(end.code, flush=True)

*sets, folder = sys.argv[1:]
for place in sets:
    for backend in ("pread", "mmap"):
        with readers.open(place, backend=backend) as reader:
            one, many = [bytes(reader.read(row)) for row in range(len(reader))], reader.read_many(range(len(reader)))
            assert one == [*map(bytes, many)] and [reader[2].label, reader.keys[2]] == [1, "b/0"], place
            images, labels = next(iter(ImageLoader(reader, len(reader), augment=[Resize((8, 8))], threads=2)))
            assert images.shape == (4, 3, 8, 8) and sorted(labels.tolist()) == [0, 0, 1, 1]
            print(json.dumps([data.hex() for data in one]))
    command("inspect", place)
    command("verify", place, "--workers", 1)
print(json.dumps([bytes(readers.open_folder(folder).read(row)).hex() for row in range(4)]))
for refused in (lambda: readers.cached(reader), lambda: readers.stage(place, folder + "-staged").__enter__()):
    try:
        refused()
    except readers.PackerError as error:
        print(error)
command("--help")
command("cache", "ls")
command("convert", folder, "-o", folder + "-again")
"""


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_sets_are_read_without_posix_and_other_functions_are_refused_in_one_line(tmp_path: Path, system: str) -> None:
    images = {f"{name}/{number}.jpg": make_jpeg(number, (40, 32)) for name in "ab" for number in range(2)}
    folder = tree_of(tmp_path / "images", images)
    sets = [tmp_path / name for name in ("hdf5", "tfrecord", "tar")]
    for place in sets:
        packer.convert(folder, place.name, place, run=Run(workers=1))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    suite = Path(__file__).parent / "suites" / "foreign_system.py"
    done = run_python(suite, system, script, *sets, folder)
    assert not done.returncode, done.stderr
    with readers.open(sets[0]) as reader:
        expected = json.dumps([bytes(reader.read(row)).hex() for row in range(4)])
    assert done.stdout.splitlines().count(expected) == 7, done.stdout
    assert done.stdout.count("OK: 4 samples") == 3 and "Traceback" not in done.stderr, done.stderr
    assert (done.stdout + done.stderr).count("needs Linux, and this system is") == (4 if system == "win32" else 2)
