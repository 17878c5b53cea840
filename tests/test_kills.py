"""Real commands killed at random moments, again and again: no wrong byte, nothing half-made that looks whole, nothing
lost, and the same command ends with the same bytes.

TRIALS (default 200) is the number of kills of each command; SEED makes a run repeatable. Run by `make test-faults`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from conftest import files_of, make_jpeg

import packer
import readers
from readers.layout import DOCUMENTS

pytestmark = pytest.mark.faults

TRIALS = int(os.environ.get("TRIALS", "200"))
SEED = int(os.environ.get("SEED", "0"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
DEADLINE = 120.0
ROOT = Path(packer.__file__).resolve().parent.parent


class Job(ABC):
    """One command, what may be there after it was killed, and what must be there when it has ended."""

    name: str

    def __init__(self, folder: Path, tree: Path, other: Path) -> None:
        self.folder, self.tree, self.other = folder, tree, other

    def prepare(self) -> None:
        """Bring about what is there before the command; nothing, unless a job says otherwise."""
        assert self.folder.is_dir()

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def check_killed(self) -> None:
        """What must hold after a kill."""

    @abstractmethod
    def check_done(self) -> None:
        """What must hold when the command has ended with 0."""


def wrong_set(out: Path) -> list[str]:
    """What packer.verify says of a set."""
    return [problem.what for problem in packer.verify(out, deep=True, workers=1).problems]


class Convert(Job):
    def __init__(self, folder: Path, tree: Path, other: Path, to: str) -> None:
        super().__init__(folder, tree, other)
        self.out, self.to = folder / "out", to
        packer.convert(tree, to=to, output=folder / "whole", run=packer.Run(workers=1), shards=packer.Shards(samples=9))
        self.whole = files_of(folder / "whole")

    def command(self) -> list[str]:
        return ["convert", str(self.tree), "--to", self.to, "-o", str(self.out), *self.options()]

    def options(self) -> list[str]:
        return ["--workers", "2", "--samples-per-shard", "9"]

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def check_killed(self) -> None:
        if (self.out / "dataset.json").exists():
            found = {name: data for name, data in files_of(self.out).items() if not name.startswith(".packing/")}
            assert found == self.whole, "a set with a dataset.json that is not the set"

    def check_done(self) -> None:
        assert files_of(self.out) == self.whole


class Overwrite(Convert):
    """Another set is there before; what is there afterwards is never a mixture."""

    def __init__(self, folder: Path, tree: Path, other: Path, to: str) -> None:
        super().__init__(folder, tree, other, to)
        packer.convert(other, to=to, output=folder / "old", run=packer.Run(workers=1), shards=packer.Shards(samples=9))
        self.old = files_of(folder / "old")

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.folder / "old", self.out)

    def options(self) -> list[str]:
        return [*super().options(), "--overwrite"]

    def check_killed(self) -> None:
        if (self.out / "dataset.json").exists():
            found = {name: data for name, data in files_of(self.out).items() if not name.startswith(".packing/")}
            assert found in (self.old, self.whole), "neither the old set nor the new one"


class Index(Job):
    """A set whose index is rebuilt: it is whole at every moment."""

    def __init__(self, folder: Path, tree: Path, other: Path, to: str) -> None:
        super().__init__(folder, tree, other)
        self.out = folder / "out"
        packer.convert(tree, to=to, output=self.out, run=packer.Run(workers=1), shards=packer.Shards(samples=9))
        self.samples = self.content()

    def content(self) -> list[tuple[str, int, bytes]]:
        found = []
        for split in ("train", "val"):
            with readers.open(self.out, split, verify=True) as reader:
                found += [(reader.keys[i], int(reader.labels[i]), bytes(reader.read(i))) for i in range(len(reader))]
        return found

    def command(self) -> list[str]:
        return ["index", str(self.out), "--workers", "2"]

    def check_killed(self) -> None:
        assert self.content() == self.samples
        assert wrong_set(self.out) == []

    def check_done(self) -> None:
        self.check_killed()
        hidden = [name for name in os.listdir(self.out) if name.startswith(".") or "tmp" in name]
        assert hidden == [], f"left behind: {hidden}"


class IndexChanged(Job):
    """A set whose index comes out otherwise, here with other labels: it is the old one or the new one."""

    def __init__(self, folder: Path, tree: Path, other: Path) -> None:
        super().__init__(folder, tree, other)
        self.out, old = folder / "out", folder / "old"
        packer.convert(tree, to="tfrecord", output=old, run=packer.Run(workers=1), shards=packer.Shards(samples=9))
        self.old = files_of(old)
        (folder / "names.txt").write_text("nothing\ncat\ndog\n")
        self.whole: dict[str, bytes] = {}

    def command(self) -> list[str]:
        options = ["--label-offset", "-1", "--classes", str(self.folder / "names.txt"), "--workers", "2"]
        return ["index", str(self.out), *options]

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.folder / "old", self.out)

    def check_killed(self) -> None:
        found = files_of(self.out)
        state = self.old if found["dataset.json"] == self.old["dataset.json"] else self.whole
        missing = {name for name in state if found.get(name) != state[name]}
        assert missing <= {*DOCUMENTS}, "neither the old index nor the new one"
        assert not missing & {*found} - {"README.md"}, "names or checksums of another state"
        assert wrong_set(self.out) == []

    def check_done(self) -> None:
        self.whole = self.whole or files_of(self.out)
        assert files_of(self.out) == self.whole and self.whole["dataset.json"] != self.old["dataset.json"]
        assert wrong_set(self.out) == []


class Extract(Job):
    def __init__(self, folder: Path, tree: Path, other: Path) -> None:
        super().__init__(folder, tree, other)
        self.out = folder / "out"
        packer.convert(tree, to="tar", output=folder / "set", run=packer.Run(workers=1))
        self.whole = files_of(tree)

    def command(self) -> list[str]:
        return ["extract", str(self.folder / "set"), "-o", str(self.out)]

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)

    def check_killed(self) -> None:
        for name, data in files_of(self.out).items() if self.out.exists() else ():
            if not name.startswith(".extracting/"):
                assert data == self.whole[name], f"{name} is there and not whole"

    def check_done(self) -> None:
        assert files_of(self.out) == self.whole


class Stage(Job):
    def __init__(self, folder: Path, tree: Path, other: Path) -> None:
        super().__init__(folder, tree, other)
        self.to = folder / "local"
        packer.convert(
            tree, to="tfrecord", output=folder / "set", run=packer.Run(workers=1), shards=packer.Shards(samples=9)
        )
        self.whole = {name: data for name, data in files_of(folder / "set").items() if name not in DOCUMENTS}

    def command(self) -> list[str]:
        return ["stage", str(self.folder / "set"), "--target", str(self.to), "--any-filesystem", "--json"]

    def prepare(self) -> None:
        shutil.rmtree(self.to, ignore_errors=True)
        self.to.mkdir()

    def copies(self) -> list[dict[str, object]]:
        done = run(["stage", "ls", "--target", str(self.to), "--json"])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return list(found["copies"] if isinstance(found, dict) else found)

    def check_killed(self) -> None:
        for path in self.to.rglob("dataset.json"):
            with readers.open(path.parent, "train", fallback=self.folder / "set", verify=True) as reader:
                for i in range(len(reader)):
                    reader.read(i)

    def check_done(self) -> None:
        copies = [path.parent for path in self.to.rglob("dataset.json")]
        assert len(copies) == 1, f"{len(copies)} copies"
        found = {name: data for name, data in files_of(copies[0]).items() if name in self.whole}
        assert found == self.whole
        assert len(self.copies()) == 1
        assert run(["stage", "clean", "--target", str(self.to)]).returncode == 0
        left = [str(path.relative_to(self.to)) for path in self.to.rglob("*") if path.is_file() and path.stat().st_size]
        assert not [name for name in left if name.endswith((".tfrecord", ".npy", "dataset.json"))], left


class CacheFill(Job):
    def __init__(self, folder: Path, tree: Path, other: Path) -> None:
        super().__init__(folder, tree, other)
        self.memory = folder / "memory"
        packer.convert(tree, to="hdf5", output=folder / "set", run=packer.Run(workers=1))
        with readers.open(folder / "set", "train") as reader:
            self.samples = [bytes(data) for data in reader.read_many(range(len(reader)))]

    def command(self) -> list[str]:
        return ["cache", "warm", str(self.folder / "set"), "--split", "train", "--target", str(self.memory)]

    def prepare(self) -> None:
        shutil.rmtree(self.memory, ignore_errors=True)
        self.memory.mkdir()

    def check_killed(self) -> None:
        base = readers.open(self.folder / "set", "train")
        with base, readers.cached(base, directory=self.memory, persist=True) as reader:
            assert [bytes(data) for data in reader.read_many(range(len(reader)))] == self.samples

    def check_done(self) -> None:
        self.check_killed()
        assert run(["cache", "clean", "--all", "--target", str(self.memory)]).returncode == 0
        assert os.listdir(self.memory) == []


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(process: subprocess.Popen[str], choice: random.Random) -> str:
    """One signal to the whole group, the main process or one of its workers; says which."""
    number = choice.choice(SIGNALS)
    whom = choice.choice(("group", "main", "worker"))
    children = children_of(process.pid)
    try:
        if whom == "group":
            os.killpg(process.pid, number)
        elif whom == "worker" and children:
            os.kill(choice.choice(children), number)
        else:
            whom = "main"
            os.kill(process.pid, number)
    except ProcessLookupError:
        return "too late"
    return f"{number.name} {whom}"


def before_our_code(errors: str) -> bool:
    """Was Python itself still starting? What it prints then is not ours to say."""
    return not any(f"{ROOT / layer}/" in errors for layer in ("packer", "readers", "cache"))


def wait_for_group(group: int) -> None:
    """Until no process of the group is left; workers notice within moments that their parent has gone."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"processes of the killed command still run after {DEADLINE} s")


JOBS = {
    "convert-hdf5": lambda *a: Convert(*a, "hdf5"),
    "convert-tfrecord": lambda *a: Convert(*a, "tfrecord"),
    "convert-tar": lambda *a: Convert(*a, "tar"),
    "overwrite": lambda *a: Overwrite(*a, "tar"),
    "index-hdf5": lambda *a: Index(*a, "hdf5"),
    "index-tar": lambda *a: Index(*a, "tar"),
    "index-changed": IndexChanged,
    "extract": Extract,
    "stage": Stage,
    "cache-fill": CacheFill,
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two trees that share names and differ in bytes."""
    found = []
    for number in range(2):
        root = tmp_path_factory.mktemp(f"tree{number}") / "images"
        for split, count in (("train", 30), ("val", 6)):
            for name in ("cat", "dog"):
                (root / split / name).mkdir(parents=True)
                for i in range(count + number):
                    data = make_jpeg(1000 * number + i, (96, 64))
                    (root / split / name / f"{name}_{i:03d}.JPEG").write_bytes(data)
        found.append(root)
    return found[0], found[1]


@pytest.mark.parametrize("name", JOBS)
def test_killed_at_any_moment(name: str, trees: tuple[Path, Path], tmp_path: Path) -> None:
    job: Job = JOBS[name](tmp_path, *trees)
    job.prepare()
    started = time.monotonic()
    done = run(job.command())
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    job.check_done()
    choice = random.Random(f"{SEED} {name}")
    counts: dict[str, int] = {}
    for trial in range(TRIALS):
        job.prepare()
        command = [sys.executable, "-m", "packer", *job.command()]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        # The first tenth is Python's own start; most kills go where the work is.
        time.sleep(seconds * choice.uniform(0.1, 1.1))
        how = kill(process, choice)
        _, errors = process.communicate(timeout=DEADLINE)
        wait_for_group(process.pid)
        where = f"{name}, trial {trial}, {how}, status {process.returncode}"
        assert "Traceback" not in errors or before_our_code(errors), f"{where}: {errors}"
        try:
            job.check_killed()
            again = run(job.command())
            assert again.returncode == 0, again.stderr
            job.check_done()
        except BaseException as error:
            raise AssertionError(where) from error
        outcome = "ended" if process.returncode == 0 else "killed"
        counts[outcome] = counts.get(outcome, 0) + 1
    print(f"\n{name}: {TRIALS} trials: {counts}; the command takes {seconds:.2f} s")
    assert counts.get("killed", 0) > TRIALS // 3, f"too few commands were hit while they ran: {counts}"


def test_the_trees_differ(trees: tuple[Path, Path]) -> None:
    """Trials of --overwrite are worth something only if no file of one set could pass for one of the other."""
    first, second = (files_of(tree) for tree in trees)
    assert all(first[name] != second[name] for name in first) and len(second) > len(first)
