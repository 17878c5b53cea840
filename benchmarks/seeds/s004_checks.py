"""The checks of `s004.py`: every row delivers the same images, with the right labels, before any of them is timed.

    python s004_checks.py SPECIFICATION      (what `check_rows` and `time_baseline` run; JSON in, JSON to a file)

The rows are made without anything random (resize, middle, normalise) over a tree in which each image is a class of its
own, so a label says which image it should be; what a row delivers is compared with what Pillow makes of that file. Rows
in torch's DataLoader and the others are in different processes, as a process with DALI in it should not be forked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiment import Check
from harness import CONTENDERS, NotHere
from machine import list_tree
from s004_clock import load_epoch
from s004_dali import DALI_LOADER, loader_row
from s004_sets import CENTRE, EXTENSIVE, LOADS, TASKS, Job
from s004_torch import FILES

__all__ = ["check_rows", "check_tree", "time_baseline"]

# Of 255: DALI's triangular filter against Pillow's, and ours against Pillow's, are in docs/dali.md.
_PILLOW, _OURS, _OTHER_RESIZE, _OTHER_COLOURS = (0.0, 0.0), (8.0, 0.1), (16.0, 0.6), (20.0, 1.0)
_FLOAT_ERROR = 1e-3  # of float32, normalised and back
_TIMEOUT_SECONDS = 300
_FAMILIES = {
    "PyTorch": _PILLOW,
    "ours: ImageDataset": _OURS,
    "DALI": _OTHER_RESIZE,
    "ours: DaliLoader": _OTHER_RESIZE,
    "ours: ImageLoader": _OURS,
}


@dataclass(frozen=True)
class _Found:
    """What a row delivered: how many images, whether each was there once, difference of 255; or why it did not run."""

    row: str
    images: int = 0
    complete: bool = False
    largest: float = 0.0
    mean: float = 0.0
    missing: str = ""


def check_tree(tree: Path, into: Path, count: int) -> None:
    """Some images of a tree, each in a class of its own."""
    items = list_tree(tree)
    for number in range(count):
        path, _ = items[number * len(items) // count]
        target = into / f"class{number:03d}" / "0.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def check_rows(rows: Sequence[str], jobs: Sequence[Job]) -> Iterator[Check]:
    """jobs: for each task one over the sets of a `check_tree`."""
    forked = [row for row in rows if _is_forked(row)]
    groups = [group for group in (forked, [row for row in rows if not _is_forked(row)]) if group]
    running = [_start("deliver", group, jobs, jobs[0].folder / f"found-{i}.json") for i, group in enumerate(groups)]
    results = [_finish(*one) for one in running]
    for job in jobs:
        task = job.task.name
        found = [_Found(**fields) for result in results for fields in result[task]["rows"]]
        draws = {load: values for result in results for load, values in result[task]["draws"].items()}
        yield from _judge(task, [one for one in found if not one.missing], draws)


def _judge(task: str, ran: Sequence[_Found], draws: Mapping[str, Sequence[float]]) -> Iterator[Check]:
    right = [one for one in ran if one.complete]
    yield Check(
        f"{task}: each row's epoch has each sample once, under its label",
        f"{len(right)} of {len(ran)} rows, {ran[0].images if ran else 0} images"
        + "".join(f"; not {one.row}" for one in ran if not one.complete),
        bool(ran) and len(right) == len(ran),
    )
    for family, (largest, mean) in _FAMILIES.items():
        if members := [one for one in ran if one.row.startswith(family)]:
            worst, average = max(one.largest for one in members), max(one.mean for one in members)
            bound = f"bounds {largest:g} and {mean:g}" if largest else "the same pixels"
            yield Check(
                f"{task}: resize and middle, {family}, {len(members)} rows, against Pillow",
                f"at most {worst:.2g} of 255, {average:.2g} on average ({bound})",
                worst <= largest + _FLOAT_ERROR and average <= mean + _FLOAT_ERROR,
            )
    for load, (same, worst, average) in draws.items():
        largest, mean = _OTHER_COLOURS
        yield Check(
            f"{task}: DaliLoader and ImageLoader, {load}: order, crops, flips and colours of one seed",
            f"{'the same labels in the same order' if same else 'other labels'}; pixels differ by at most {worst:.2g} "
            f"of 255, {average:.2g} on average (bounds {largest:g} and {mean:g})",
            bool(same) and worst <= largest and average <= mean,
        )


def time_baseline(jobs: Sequence[Job]) -> dict[str, float]:
    """For each task, seconds of a batch of PyTorch from files, extensive, without a step."""
    return _finish(*_start("time", [FILES], jobs, jobs[0].folder / "baseline.json"))


def _is_forked(row: str) -> bool:
    return "torch.utils.data" in CONTENDERS[row].imports


def _start(what: str, rows: Sequence[str], jobs: Sequence[Job], result: Path) -> tuple[subprocess.Popen[str], Path]:
    result.unlink(missing_ok=True)
    places = {job.task.name: [str(job.folder), job.batch, job.workers] for job in jobs}
    specification = {"what": what, "rows": list(rows), "jobs": places, "result": str(result)}
    command = [sys.executable, os.path.abspath(__file__), json.dumps(specification)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env=environment, **options), result


def _finish(process: subprocess.Popen[str], result: Path) -> dict[str, Any]:
    """Raises RuntimeError where it failed."""
    try:
        _, log = process.communicate(timeout=_TIMEOUT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
        process.wait()
    if not result.exists():
        raise RuntimeError(f"the process of the checks ended with status {process.returncode}: {log[-2000:]}")
    document: dict[str, Any] = json.loads(result.read_text())
    return document


# --- in a process of its own ------------------------------------------------------------------------------------------
def _deliver(rows: Sequence[str], job: Job) -> dict[str, Any]:
    import numpy as np

    references = _references(job)
    found = []
    for row in rows:
        try:
            images, labels = _epoch(row, job)
        except (NotHere, ImportError) as error:
            found.append(_Found(row, missing=str(error)))
            continue
        complete = sorted(labels.tolist()) == list(range(len(references)))
        differences = np.abs(images - references[labels]) if complete else np.zeros(1)
        found.append(_Found(row, len(labels), complete, float(differences.max()), float(differences.mean())))
    pair = DALI_LOADER, loader_row("HDF5")
    draws = {load: _same_draws(*pair, job, load) for load in LOADS if set(pair) <= set(rows)}
    draws = {load: values for load, values in draws.items() if values is not None}
    return {"rows": [asdict(one) for one in found], "draws": draws}


def _references(job: Job) -> Any:
    """float64 [n, 3, crop, crop], 0 to 255, by label: what Pillow makes of the files."""
    import numpy as np
    import pillow_transforms as T

    middle = T.Compose([T.Resize(job.task.resize), T.CenterCrop(job.task.crop)])
    images = [np.asarray(middle(T.read_image(path)), float) for path, _ in list_tree(job.tree)]
    return np.stack(images).transpose(0, 3, 1, 2)


def _epoch(row: str, job: Job) -> tuple[Any, Any]:
    """An epoch of a row: pixels from 0 to 255, labels."""
    import numpy as np

    chosen = CONTENDERS[row]
    for module in chosen.imports:
        __import__(module)
    batches = [(_copy(images), _copy(labels)) for images, labels in chosen.function(job)()]
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    shape = (len(labels), 3, job.task.crop, job.task.crop)
    if images.dtype != np.float32 or images.shape != shape:
        raise ValueError(f"{row}: {images.dtype} {images.shape}, expected float32 {shape}")
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (job.task.mean, job.task.std))
    return 255 * (images * std + mean), labels


def _copy(values: Any) -> Any:
    """An array with memory of its own, from one or a tensor anywhere."""
    import numpy as np

    return np.array(values.cpu() if hasattr(values, "cpu") else values)


def _same_draws(dali: str, ours: str, job: Job, load: Any) -> tuple[bool, float, float] | None:
    """Whether two rows deliver the same labels in the same order; difference of their pixels. None: one is missing."""
    import numpy as np

    random_job = Job(job.task, load, job.folder, job.batch, job.workers)
    try:
        (a, labels), (b, others) = (_epoch(row, random_job) for row in (dali, ours))
    except (NotHere, ImportError):
        return None
    differences = np.abs(a - b)
    return bool(np.array_equal(labels, others)), float(differences.max()), float(differences.mean())


def _time(rows: Sequence[str], job: Job) -> float:
    make_epoch = CONTENDERS[rows[0]].function(job)
    load_epoch(make_epoch)
    seconds, _, labels = load_epoch(make_epoch)
    return seconds * job.batch / len(labels)


def _main(what: str, rows: Sequence[str], jobs: dict[str, Any], result: str) -> None:
    function, load = (_deliver, CENTRE) if what == "deliver" else (_time, EXTENSIVE)
    document = {
        task: function(rows, Job(TASKS[task], load, Path(folder), batch, workers))
        for task, (folder, batch, workers) in jobs.items()
    }
    Path(result + ".partial").write_text(json.dumps(document))
    Path(result + ".partial").rename(result)
    os._exit(0)  # DALI's threads need not be waited for


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
