"""Small image trees that most tests start from."""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import gc
import importlib
import importlib.util
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest

import packer
import readers
from cache import list_caches

pytest.register_assert_rewrite("suites")
# Time limits on examples measure the load of the machine, not the code. EXAMPLES=1000 tries more examples.
hypothesis.settings.register_profile(
    "any machine",
    max_examples=int(os.environ.get("EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")

from remote_suite import (  # noqa: E402, F401
    address,
    certificates,
    packed,
    proxy,
    s3,
    web,
)
from suites.warm import wait_for_no_disk  # noqa: E402

from packer.testing.samples import Samples, files_of, make_jpeg, turned_image  # noqa: E402, F401

wait_for_no_disk()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Background jobs of a shell ignore Ctrl-C, and so would all programs that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test takes this long on a working machine. A hanging test fails, with a stack trace of every thread; if that does
# not help either, its process ends, which also fails the test.
TEST_SECONDS, LAST_SECONDS = 600, 720
_UNLIMITED = ("cluster", "corpora", "experiments", "faults", "slurm", "timing", "wheels")
_stderr: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr.append(os.dup(2))


def pytest_collection_finish() -> None:
    """Exclude what collection has made from later garbage collections, a third of the CPU time of some files."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limits the time of a test including its fixtures."""
    if any(item.get_closest_marker(name) for name in _UNLIMITED):
        return (yield)

    def stop(number: int, frame: Any) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(top))}"
            for ident, top in sys._current_frames().items()
        ]
        pytest.fail(f"{item.nodeid} has not ended after {TEST_SECONDS} s\n" + "\n".join(stacks), pytrace=False)

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_SECONDS)
    faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=_stderr[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def jpeg() -> Callable[..., bytes]:
    return make_jpeg


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The samples that the suites read."""
    return Samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Packs a source once for each set of options; tests may not write to the result."""
    made: dict[Any, Path] = {}

    def pack(source: Path, to: str = "tar", **options: Any) -> Path:
        key = (source, to, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("packed") / "set"
            packer.convert(source, to, made[key], **by_subject(options, workers=1))
        return made[key]

    return pack


@pytest.fixture(scope="session")
def spawned() -> Iterator[ProcessPoolExecutor]:
    """A process that was spawned, not forked, shared by many tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def elsewhere(spawned: ProcessPoolExecutor) -> Callable[..., Any]:
    """Calls function(*arguments) in another process with the environment of this one, and returns the result."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return spawned.submit(_call, dict(os.environ), pickle.dumps((function, arguments))).result(timeout=300)

    return call


def _call(environ: dict[str, str], work: bytes) -> Any:
    os.environ.clear()
    os.environ.update(environ)
    function, arguments = pickle.loads(work)
    return function(*arguments)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train and val with three classes each, 12 and 3 images a class; tests may not write to the tree."""
    names = [
        f"{split}/{name}/{name}_{number:03d}.JPEG"
        for split, count in (("train", 12), ("val", 3))
        for name in ("cat", "dog", "owl")
        for number in range(count)
    ]
    files = {name: make_jpeg(seed) for seed, name in enumerate(names, 1)}
    return tree_of(tmp_path_factory.mktemp("tree") / "images", files)


@pytest.fixture(scope="session")
def source(tree: Path, pack: Callable[..., Path]) -> Path:
    """`tree` as a packed set of 9 and 3 shards; tests may not write to the set."""
    return pack(tree, samples_per_shard=4)


def tree_of(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files, by relative path, below a folder."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture
def reader(request: pytest.FixtureRequest) -> Iterator[readers.Reader]:
    """A reader of the set from the module's fixture `packed`: of its only split, or of train."""
    with readers.open(request.getfixturevalue("packed")) as opened:
        yield opened


_OTHER_NAMES = {"samples_per_shard": "samples", "shard_size": "size", "split_fractions": "fractions"}


def by_subject(options: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Arguments for `packer.convert`: options are grouped into their subjects by name; the other options stay."""
    options = {_OTHER_NAMES.get(name, name): value for name, value in (defaults | dict(options)).items()}
    kinds = {"choose": packer.Choose, "images": packer.Images, "shards": packer.Shards, "run": packer.Run}
    arguments: dict[str, Any] = {}
    for subject, kind in kinds.items():
        names = {field.name for field in dataclasses.fields(kind)} & set(options)
        if names:
            arguments[subject] = kind(**{name: options.pop(name) for name in names})
    return arguments | options


def convert(source: Any, output: Path, to: str = "tar", **options: Any) -> packer.ConvertResult:
    """`packer.convert` in this process, with the options of all subjects as plain keyword arguments."""
    return packer.convert(source, to, output, **by_subject(options, workers=1))


def pack_few(root: Path, count: int, size: tuple[int, int] = (40, 32), to: str = "tar", **options: Any) -> Path:
    """A packed set of JPEGs of one size, which are in three classes in turn."""
    tree_of(root / "images", {f"class{i % 3}/{i:02d}.jpg": make_jpeg(i, size) for i in range(count)})
    return packer.convert(root / "images", to=to, output=root / "set", **by_subject(options, workers=1)).output


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """42 images of various sizes, upright and rotated, in two classes; tests may not write to the folder."""
    names = [f"train/{('ant', 'bee')[number % 2]}/{number:02d}.jpg" for number in range(42)]
    files = {name: turned_image(number, (56 + 4 * (number % 5), 64)) for number, name in enumerate(names)}
    return tree_of(tmp_path_factory.mktemp("photos") / "images", files)


@pytest.fixture
def processes_end() -> Iterator[None]:
    """A test leaves no process behind."""
    before = set(multiprocessing.active_children())
    yield
    if set(multiprocessing.active_children()) - before:
        gc.collect()
    assert set(multiprocessing.active_children()) <= before


class Hanging(Protocol):
    """Runs work that must not hang."""

    def __call__(self, work: Callable[[], object], seconds: float = 300.0) -> None: ...


@pytest.fixture
def hanging() -> Hanging:
    """Calls `work` and re-raises its error; the test fails if the call takes longer than `seconds`."""

    def call(work: Callable[[], object], seconds: float = 300.0) -> None:
        raised: list[BaseException | None] = []

        def run() -> None:
            try:
                work()
                raised.append(None)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        assert raised, f"still waiting after {seconds} s"
        if raised[0] is not None:
            raise raised[0]

    return call


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The directory of a test's caches; checks that the test leaves none behind."""
    folder = tmp_path / "memory"
    folder.mkdir()
    yield {"directory": folder, "job": f"test-{os.getpid()}"}
    if any(folder.iterdir()):
        gc.collect()
    assert [path.name for path in folder.iterdir()] == []
    assert [info.name for info in list_caches() if info.job == f"test-{os.getpid()}"] == []


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocation fails as on a full tmpfs."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


@pytest.fixture
def spoil() -> Callable[..., None]:
    """Flips a byte of a sample in a cache."""

    def spoil(reader: Any, index: int, at: int = -1) -> None:
        view = reader.store.shared.get(reader.store.slots.first("image") + index)
        place = at % len(view)
        with open(next(reader.store.shared._spec.directory.glob("packer-cache*")), "r+b") as file:
            whole = file.read()
            start = whole.rindex(bytes(view))
            file.seek(start + place)
            file.write(bytes([view[place] ^ 1]))

    return spoil


@pytest.fixture(params=["torchcodec", "torchvision"])
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A double of a decoder for devices (`gpu_doubles.Double`)."""
    from gpu_doubles import install

    return install(monkeypatch, request.param)


def real_rocal() -> str | None:
    """The path of rocAL, whether or not it can be loaded."""
    spec = importlib.util.find_spec("amd") and importlib.util.find_spec("amd.rocal")
    return None if spec is None or not spec.origin else str(Path(spec.origin).parent)


def pytest_report_header() -> str:
    return f"rocAL: {real_rocal() or 'not here, tests run on the double in tests/rocal_double'}"


@pytest.fixture
def rocal_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`rocal_pybind` of the double in tests/rocal_double, which `amd.rocal` then uses; a fresh double for each test."""
    tops = ("amd", "rocal_pybind")
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "rocal_double"))
    yield importlib.import_module("rocal_pybind")
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


@pytest.fixture
def rocal(request: pytest.FixtureRequest) -> Iterator[Any]:
    """rocAL itself where it is importable (None), otherwise the double, which must not have recorded a fault."""
    if real_rocal() is not None:
        importlib.import_module("amd.rocal.pipeline")  # an installed rocAL that cannot be loaded is an error
        yield None
        return
    double = request.getfixturevalue("rocal_double")
    yield double
    assert double.FAULTS == []


# --- trainers -----------------------------------------------------------------------------------------------------
Packer = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def cli_run(capsys: pytest.CaptureFixture[str]) -> Packer:
    """Runs a command in this process; returns status, stdout, stderr."""

    from packer.cli.group import run

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def lightning() -> Any:
    module = pytest.importorskip("lightning", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return module


def fresh(accelerate: Any) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def accelerate() -> Iterator[Any]:
    module = pytest.importorskip("accelerate", reason="accelerate is not installed")
    fresh(module)
    yield module
    fresh(module)
