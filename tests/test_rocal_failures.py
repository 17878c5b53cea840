"""What goes wrong in rocAL and in programs that use it, on a double that fails on purpose where need be."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocal_images import (
    BATCH,
    MIDDLE,
    epoch_of,
    faces,
    folder_of,
    mapped,
    numbers_of,
    reading_threads,
    solid,
)
from suites.programs import run_python

import readers
from cache.errors import PipelineError
from readers import Ranks
from readers.rocal import RocalLoader, celeba, external_source, pipelines
from readers.rocal.pipelines import Machine, built, encoded_images

pytestmark = pytest.mark.rocal
MEAN, STD = (255 * np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
SIZES = [(96, 80), (60, 120), (128, 64), (40, 40)]


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return folder_of(tmp_path / "images", {number: solid(number) for number in range(22)})


@pytest.fixture
def breaking(rocal_double: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes an iterator of rocAL go wrong: from its third step on until `broken` is False, a function is called."""
    from amd.rocal.plugin import generic

    def install(instead: Any) -> Any:
        class Broken(generic.ROCALGenericIterator):  # type: ignore[misc,name-defined]
            broken, steps = True, 0

            def __next__(self) -> Any:
                self.steps += 1
                return instead(self) if self.broken and self.steps > 2 else super().__next__()

        monkeypatch.setattr(generic, "ROCALGenericIterator", Broken)
        return Broken

    return install


def fails(*_: Any) -> Any:
    raise RuntimeError("Loader module failed")


def ends(iterator: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("instead", "message"),
    [(fails, "rocAL failed: Loader module failed"), (ends, "ended the epoch")],
)
def test_errors_inside_rocal(rocal_double: Any, reader: Any, breaking: Any, instead: Any, message: str) -> None:
    broken, loader = breaking(instead), faces(reader, shuffle=False)
    with pytest.raises(PipelineError, match=message):
        list(loader)
    broken.broken = False
    loader.close()
    assert reading_threads() == [] and rocal_double.FAULTS == []


def test_a_pipeline_that_does_not_end_is_never_released(rocal_double: Any, reader: Any, breaking: Any) -> None:
    """Better a leak than a release that does not return."""
    breaking(lambda iterator: iterator.output_list and (iterator.output_list, None))
    loader = faces(reader, shuffle=False)
    loop = iter(loader)
    next(loop), next(loop)
    with pytest.raises(PipelineError, match="does not end: 8 steps"):
        loader.close()
    del loader, loop
    gc.collect()
    assert not rocal_double.CONTEXTS[-1].released and rocal_double.FAULTS == [] and reading_threads() == []


def test_a_pipeline_that_cannot_be_built(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocAL leaves the interpreter, and prints to stdout."""
    source = external_source(reader, BATCH)
    with monkeypatch.context() as patch, pytest.raises(PipelineError, match="cannot build this pipeline"):
        patch.setattr(rocal_double, "rocalVerify", lambda context: 2)
        celeba(source, crop=MIDDLE)
    monkeypatch.setattr(rocal_double, "rocalCreate", fails)
    with pytest.raises(PipelineError, match="cannot make this pipeline"):
        celeba(source, crop=MIDDLE)


def test_nothing_is_printed_to_stdout(rocal: Any, reader: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Not by rocAL's C++ either, for those who read JSON there."""
    with faces(reader) as loader:
        epoch_of(loader)
        epoch_of(loader)
    print("ours")
    captured = capfd.readouterr()
    assert captured.out == "ours\n" and "kernels" in captured.err


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda fn, images: None,
        lambda fn, images: fn.resize(images, resize_width=0, resize_height=0),
        lambda fn, images: fn.resize(fn.resize(images), resize_width=8, resize_height=8),
    ],
    ids=["None", "an operator that fails", "one in the middle"],
)
def test_a_graph_that_fails_is_an_error(rocal: Any, reader: Any, spoiled: Any) -> None:
    """rocAL ends the process by a segmentation fault."""
    source = external_source(reader, BATCH, ranks=Ranks(rank=0, world_size=1))
    with pytest.raises(PipelineError, match="the graph returned None, as an operator of rocAL does that fails"):
        built(lambda library: spoiled(library.fn, encoded_images(library, source)), Machine(), batch_size=4, seed=0)


def test_a_gpu_that_this_rocal_cannot_use_is_refused(
    rocal: Any, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rocAL would silently run on the CPU. A build is known by the libraries it is linked with."""
    maps, library = tmp_path / "maps", tmp_path / "librocal.so.2"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12 {library}\n7f01-7f02 rw-p 0 0:0 0\n")
    for content, expected in ((b"\0libopenvx.so.1\0", False), (b"\0libamdhip64.so.6\0", True)):
        library.write_bytes(content)
        assert pipelines.gpu_backend(maps) is expected
    assert pipelines.gpu_backend(tmp_path / "none") is None
    monkeypatch.setattr(pipelines, "gpu_backend", lambda: False)
    source = external_source(reader, BATCH, ranks=Ranks(rank=0, world_size=1))
    with pytest.raises(PipelineError, match=r'built for the CPU alone.* give device="cpu"'):
        celeba(source, crop=MIDDLE, device="cuda")


def test_the_build_of_rocal_is_recognised() -> None:
    if not Path("/proc/self/maps").exists() or importlib.util.find_spec("rocal_pybind") is None:
        pytest.skip("needs rocAL itself")
    importlib.import_module("rocal_pybind")
    assert pipelines.gpu_backend() is not None, "librocal is loaded and was not found"


def test_a_seed_is_that_of_the_first_pipeline_of_a_process(rocal: Any, tmp_path: Path) -> None:
    """rocAL's generators continue from one pipeline to the next, as docs/rocal.md says."""
    folder_of(tmp_path / "images", {number: mapped(number, (96, 80)) for number in range(8)}).close()
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent / "rocal_double")] * bool(rocal)!r}
import readers
from readers.rocal import RocalLoader, external_source, resnet_train
for _ in range(2):
    source = external_source(readers.open_folder({str(tmp_path / "images")!r}), 4, rank=0, world_size=1)
    with RocalLoader(resnet_train(source, size=16, threads=1, seed=7), source) as loader:
        print([round(float(images.sum())) for images, _ in loader])
"""
    seen = [run_python("-c", script, check=True).stdout.splitlines() for _ in range(2)]
    assert seen[0][0] == seen[1][0], "the first pipelines of two processes draw alike"
    assert seen[0][0] != seen[0][1], "the second pipeline of a process draws as the first: say so in docs/rocal.md"


def test_errors_at_the_end_of_an_epoch_stay_inside_the_padding(rocal_double: Any, reader: Any) -> None:
    """With the source and rocAL's iterator, without our loader, for all endings of an epoch that the double has."""
    from amd.rocal.plugin.generic import ROCALGenericIterator

    endings = set()
    for seed in range(20):
        rocal_double.seed_traps(seed)
        source = external_source(reader, BATCH, seed=3, ranks=Ranks(tail="exact", rank=0, world_size=1))
        iterator = ROCALGenericIterator(celeba(source, size=16, crop=MIDDLE, threads=1))
        endings.add(rocal_double.CONTEXTS[-1].ending)
        seen = []
        for number, (outputs, labels) in enumerate(iterator):
            if number < len(source):
                samples = labels >= 0
                assert numbers_of(outputs[0][samples]) == labels[samples].tolist()
                seen += labels[samples].tolist()
        assert sorted(seen) == list(range(22))
        source.close()
    assert endings == {"right", "stale", "lost", "extra"} and rocal_double.FAULTS == []


def test_a_graph_of_your_own(rocal: Any, reader: Any) -> None:
    source = external_source(reader, BATCH, ranks=Ranks(rank=0, world_size=1))

    def graph(library: Any) -> Any:
        return library.fn.resize(encoded_images(library, source), resize_width=10, resize_height=6)

    pipeline = built(graph, Machine(threads=1), batch_size=BATCH, seed=0)
    with RocalLoader(pipeline, source) as loader:
        for images, labels in loader:
            assert images.dtype == np.uint8 and images.shape == (4, 6, 10, 3)
            assert numbers_of(images.transpose(0, 3, 1, 2).astype(np.float32), 0, 1) == labels.tolist()


def test_where_a_pipeline_runs(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from amd.rocal import types

    monkeypatch.setattr(pipelines, "gpu_backend", lambda: True)
    made: list[tuple[Any, ...]] = []
    create = rocal_double.rocalCreate
    monkeypatch.setattr(rocal_double, "rocalCreate", lambda *given: made.append(given) or create(*given))
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    source = external_source(reader, BATCH)
    assert (source.rank, source.world_size) == (3, 4)
    celeba(source, crop=MIDDLE, device="cuda", threads=5, seed=9)
    celeba(source, crop=MIDDLE, device="cuda", device_id=7, threads=5)
    celeba(source, crop=MIDDLE, threads=2)
    assert made == [(4, types.GPU, 1, 5, 2, 9), (4, types.GPU, 7, 5, 2, 0), (4, types.CPU, 0, 2, 2, 0)]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    celeba(source, crop=MIDDLE, device="cuda", threads=5)
    assert made[-1][2] == 0, "the only one that this rank sees"


def test_an_interpreter_that_ends_in_the_middle_of_a_loop(rocal_double: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "images", {number: solid(number) for number in range(22)}).close()
    script = f"""
import atexit, sys
sys.path.insert(0, {str(Path(__file__).parent / "rocal_double")!r})
import rocal_pybind, readers
atexit.register(lambda: print(context.waiting, context.released, rocal_pybind.FAULTS))
from readers.augment import Crop
from readers.rocal import RocalLoader, celeba, external_source
source = external_source(readers.open_folder({str(tmp_path / "images")!r}), 4)
loader = RocalLoader(celeba(source, size=16, crop=Crop(4, 8, 32, 32)), source)
(context,) = rocal_pybind.CONTEXTS
loop = iter(loader)
next(loop)
print(context.waiting)
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout) == (0, "True\nFalse True []\n"), done.stderr
