"""The cost of each step per sample, from the listing to the order of an epoch: CPU time, wall time, memory.

    python benchmarks/scale.py --work DIR [--samples 100000] [--per-folder 1000] [--shuffle] [--only list,plan]
    python benchmarks/scale.py --work DIR --samples 10000000 --cold       # as root: the page cache is emptied first
    python benchmarks/scale.py --work DIR --index 100000000               # an index of 100 million samples, and opening

Makes a tree of tiny JPEGs, DIR/tree-SAMPLES, and keeps it: a thousand images, and hard links to them for all other
files, so that ten million names take half a gigabyte of the disk and no inodes. (`--inodes`: an empty file for each
name; that tree is only listed and planned.) Each step runs in a new process. Memory is the peak of that process less
its memory after the imports, and the peak of the largest process that it started.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import REPOSITORY, Benchmark, Contender, contender, keep_rows, main, make_once
from index_set import join_parts
from machine import chill, cpu_seconds, memory_of_self, peak_memory, reset_peak
from report import Column

_LINKS = 20_000  # hard links per file; ext4 allows 65,000
_PART = 10_000  # samples of a shard: 1.1 GB
_TASKS = 4
_CONVERTING = ("convert", "tasks", "commit", "verify")
# Imports are not timed: only the first sample of a process pays for them.
_IMPORTS = "packer.conversion.run packer.conversion.saved packer.formats.hdf5 packer.sources.folder packer.verification"


def step(name: str, note: str) -> Any:
    """Register a step. Its function returns the number of samples that it handled, or None for all of them."""
    return contender(name, imports=f"{_IMPORTS} readers.order", note=note)


def _packer(*words: object) -> subprocess.Popen[bytes]:
    command, environment = (sys.executable, "-m", "packer"), {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([*command, *map(str, words)], stdout=sys.stderr, env=environment)


# --- the tree -----------------------------------------------------------------------------------------------------
def make_tree(root: Path, files: int, per_folder: int, inodes: bool) -> None:
    """Make files train/n00000001/n00000001_123.JPEG …, whose names are as long as ImageNet's."""
    from PIL import Image

    (root / "images").mkdir()
    images = []
    for i in range(1 if inodes else max(1000, -(-files // _LINKS))):
        memory = io.BytesIO()
        Image.fromarray(np.full((8, 8), i % 256, np.uint8)).save(memory, "JPEG", comment=str(i).encode())
        images.append(root / f"images/{i}.jpg")
        images[-1].write_bytes(memory.getvalue())
    for number, first in enumerate(range(0, files, per_folder)):
        folder = root / f"tree/train/n{number:08d}"
        folder.mkdir(parents=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for i in range(first, min(first + per_folder, files)):
            name = f"n{number:08d}_{i * 7919 % 100_000}.JPEG" if per_folder <= 10_000 else f"{i:09d}.JPEG"
            if inodes:
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=descriptor))
            else:
                os.link(images[i % len(images)], name, dst_dir_fd=descriptor)
        os.close(descriptor)


def _place(arguments: argparse.Namespace) -> Path:
    more = f"-{arguments.per_folder}" * (arguments.per_folder != 1000) + "-inodes" * arguments.inodes
    return Path(arguments.work) / f"tree-{arguments.samples}{more}"


def _tree(arguments: argparse.Namespace) -> str:
    return str(_place(arguments) / "tree")


def _set(arguments: argparse.Namespace) -> Path:
    return _place(arguments) / "set"


# --- the steps ----------------------------------------------------------------------------------------------------
def _options(arguments: argparse.Namespace) -> Any:
    from packer.conversion.options import ConvertOptions, Shards

    per_shard = max(1, -(-arguments.samples // 64))
    return ConvertOptions("hdf5", shards=Shards(samples=per_shard, shuffle=0 if arguments.shuffle else None))


def _prepare(arguments: argparse.Namespace) -> Any:
    from packer.conversion.plan import check_listing, make_plan
    from packer.conversion.saved import Prepared
    from packer.formats import format_named
    from packer.sources.folder import FolderSource
    from packer.workers import without_gc

    with without_gc():
        listing = FolderSource(_tree(arguments)).list(None)
        for part in listing.splits.values():
            check_listing(part, "")
        return Prepared(make_plan(listing, _options(arguments), format_named("hdf5")), listing)


@step("scan", "walk the tree: names, sizes, times; one process")
def _scan(arguments: argparse.Namespace) -> None:
    from readers.opening.tree import scan

    scan(_tree(arguments), [], 1)


@step("list", "the same on all CPUs, sorted into splits and classes, with unique keys, layout recognised")
def _list(arguments: argparse.Namespace) -> None:
    from packer.sources.folder import FolderSource
    from packer.workers import without_gc

    with without_gc():
        FolderSource(_tree(arguments)).list(None)


@step("plan", "list, check keys, cut shards, fingerprint")
def _plan(arguments: argparse.Namespace) -> None:
    _prepare(arguments)


@step("save", "list, plan, write the listing into the working folder")
def _save(arguments: argparse.Namespace) -> None:
    from cache.files import Folder
    from packer.conversion.saved import save

    out = _saved(arguments)
    shutil.rmtree(out, ignore_errors=True)
    with Folder(out / ".packing", create=True) as work:
        save(out, work, _question(arguments), _prepare(arguments))


@step("load", "a resumed conversion or a task does this instead: check each folder, read the plan")
def _load(arguments: argparse.Namespace) -> None:
    from packer.conversion.saved import load

    job = load(_saved(arguments), _question(arguments), _options(arguments), _tree(arguments))
    assert job is not None and job.plan.samples == arguments.samples


@step("rows", "read the rows of all shards one by one, as their workers do")
def _rows(arguments: argparse.Namespace) -> None:
    from packer.conversion.saved import load

    job = load(_saved(arguments), _question(arguments), _options(arguments), None)
    assert job is not None
    for number in range(len(job.plan.shards)):
        for block in job.samples(number).slices():
            assert block.places


def _saved(arguments: argparse.Namespace) -> Path:
    return _place(arguments) / "saved"


def _question(arguments: argparse.Namespace) -> str:
    from packer.conversion.options import Choose
    from packer.conversion.saved import question_of
    from packer.sources.folder import FolderSource

    return question_of(FolderSource(_tree(arguments)), _options(arguments), Choose())


@step("convert", "list, plan, pack (read from the page cache, check headers, CRC32C, fsync), commit")
def _convert(arguments: argparse.Namespace) -> None:
    import packer

    shutil.rmtree(_set(arguments), ignore_errors=True)
    packer.convert(_tree(arguments), "hdf5", _set(arguments), shards=_options(arguments).shards)


@step("tasks", "the same by an array of 4 tasks at a time, each packer convert --task I/4 --workers 1")
def _tasks(arguments: argparse.Namespace) -> None:
    shutil.rmtree(_set(arguments), ignore_errors=True)
    shards = _options(arguments).shards
    words = ["convert", _tree(arguments), "--to", "hdf5", "-o", _set(arguments), "--workers", 1]
    words += ["--samples-per-shard", shards.samples, *["--shuffle", shards.shuffle] * arguments.shuffle]
    running = [_packer(*words, "--task", f"{i}/{_TASKS}") for i in range(_TASKS)]
    codes = [process.wait() for process in running]
    assert not any(codes)


@step("commit", "packer commit: makes a set of the shards of all tasks")
def _commit(arguments: argparse.Namespace) -> None:
    assert not _packer("commit", _set(arguments)).wait()


@step("index", "write the index from the parts of its shards, as the commit does: copies columns")
def _index(arguments: argparse.Namespace) -> int:
    """A conversion removes its parts when it ends, so one new part is used for all shards."""
    from readers.layout import ShardInfo

    folder, count = _indexed(arguments), -(-(arguments.index or arguments.samples) // _PART)
    shutil.rmtree(folder / "train.index", ignore_errors=True)
    names = [f"train-{number:05d}-of-{count:05d}.h5" for number in range(count)]
    shards = [ShardInfo(name, 110_000 * _PART, _PART, 0) for name in names]  # files of this size without blocks
    join_parts(folder, "hdf5", [folder / "one.part"] * count, shards, ["a", "b"])
    for shard in shards:
        (folder / shard.path).touch()
        os.truncate(folder / shard.path, shard.bytes)
    return count * _PART


@step("open", "open that set, look up the places, keys and labels of 1,000 random samples")
def _open(arguments: argparse.Namespace) -> int:
    import readers

    before, started = memory_of_self()["private_mb"], time.perf_counter()
    with readers.open(_indexed(arguments)) as reader:
        opened = 1e3 * (time.perf_counter() - started)
        for i in np.random.RandomState(1).randint(0, len(reader), 1000).tolist():
            assert reader.byte_range(i) and reader.labels[i] >= 0 and reader.keys[i]
        private = memory_of_self()["private_mb"] - before
        print(f"open: {opened:.1f} ms; {private:.1f} MB of this process, the rest is mapped", file=sys.stderr)
        return len(reader)


@step("order", "the whole order of an epoch: a shuffle of all samples, 65,536 positions at a time")
def _order(arguments: argparse.Namespace) -> None:
    from readers.order import Shuffled

    order = Shuffled(arguments.samples, seed=1)
    for first in range(0, arguments.samples, 1 << 16):
        order.indices(3, np.arange(first, min(first + (1 << 16), arguments.samples)))


@step("verify", "every sample and its checksum, on all CPUs")
def _verify(arguments: argparse.Namespace) -> None:
    import packer

    assert packer.verify(_set(arguments)).ok


# --- an index without shards --------------------------------------------------------------------------------------
def _indexed(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work) / "index"


def _make_part(place: Path) -> None:
    """The columns of the samples of a shard of 1.1 GB."""
    from packer.columns import PartMeta, save_part
    from readers.layout import ShardInfo
    from readers.table import COLUMNS, FIELD_COLUMNS, Strings

    n = _PART
    place.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {name: np.full(n, 1, dtype) for name, dtype in COLUMNS.items() if name != "shard"}
    columns |= {f"image.{name}": np.full(n, 110_000, dtype) for name, dtype in FIELD_COLUMNS.items()}
    columns["image.offset"] = np.arange(n, dtype="<u8") * 110_000
    keys, names = (f"n{i // 1000:08d}/n{i // 1000:08d}_{i}" for i in range(n)), ("+.JPEG" for _ in range(n))
    for name, texts in {"key": Strings.of(keys), "image.name": Strings.of(names)}.items():
        columns[name], columns[f"{name}.offset"] = texts.blob, texts.offsets
    shard = ShardInfo("train-0.h5", 110_000 * n, n, 0)
    save_part(place / "one.part", columns, PartMeta(shard, 110_000 * n))


# --- running ------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one step in this process."""
    before = memory_of_self()
    reset_peak()
    cpu, started = cpu_seconds(), time.perf_counter()
    samples = chosen.function(arguments) or arguments.samples
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    peak = peak_memory()
    own = peak["peak_self_mb"] - before["private_mb"] - before["file_mb"]
    return {
        "samples": samples,
        "cpu_us": cpu / samples * 1e6,
        "wall_s": wall,
        "own_bytes": own * 1e6 / samples,
        "own_mb": own,
        "child_mb": max(0.0, peak["peak_child_mb"] - before["private_mb"] - before["file_mb"]),
    }


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the tree and the part; with --cold empty the page cache."""
    files = arguments.samples, arguments.per_folder, arguments.inodes
    if not arguments.index:
        make_once(_place(arguments), lambda folder: make_tree(folder, *files))
    if chosen.name in ("index", "open") and not (_indexed(arguments) / "one.part").exists():
        sys.path.append(str(REPOSITORY))
        _make_part(_indexed(arguments))
    if arguments.cold:
        chill([])


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    if arguments.index:
        keep_rows(lambda row: row.name in ("index", "open"))
    if arguments.inodes:
        keep_rows(lambda row: row.name not in _CONVERTING)
    return Benchmark(
        title="What each step costs",
        columns=(
            Column("samples", "samples"),
            Column("cpu_us", "CPU µs a sample", "{:.2f}"),
            Column("wall_s", "wall s", "{:.2f}"),
            Column("own_bytes", "bytes a sample"),
            Column("own_mb", "MB"),
            Column("child_mb", "largest child MB"),
        ),
        key="",  # in their order
        limits=(),
        measure=measure,
        before=before,
    )


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        work="folder for the tree and the outputs",
        samples=(100_000, "names in the tree"),
        per_folder=(1000, "names in a folder"),
        inodes=(False, "a separate empty file for each name"),
        shuffle=(False, "plan and pack in a random order"),
        cold=(False, "empty the page cache before each step"),
        index=(0, "only make and open an index of this many samples"),
        rounds=1,
        timeout=6 * 3600.0,
    )
