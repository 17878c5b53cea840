"""DLIO with its own PyTorch loader, and with packer's:  VENV/bin/python run.py WORK/retinanet [options]

Prints the number of emulated accelerators that each keeps busy: the largest number at which DLIO's accelerator
utilisation reaches the workload's target. The accelerators are processes of mpiexec (--processes), or one process at a
multiple of an accelerator's pace, which avoids the CPU time of MPI's waiting. Rows take turns at each number.

start-up: from the command to the first batch. memory: largest sum over all processes (PSS), without the page cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import yaml  # noqa: E402
from machine import pss_of_tree  # noqa: E402

ROWS: dict[str, dict[str, str]] = {
    "DLIO": {},
    "packer": {"reader.data_loader_classname": "loader.PackerDataLoader", "reader.data_loader_sampler": "iterative"},
    "packer's reader": {"reader.reader_classname": "loader.PackerReader"},
}


def list_shards(work: Path, samples: int) -> dict[str, Any]:
    """Make a folder for DLIO with links to the shards of the packed set, which all have one size."""
    shards, folder = sorted((work / "set").rglob("*.h5")), work / "shards"
    if not folder.exists():
        (folder / "valid").mkdir(parents=True)
        (folder / "train").mkdir()
        for number, shard in enumerate(shards):
            (folder / f"train/{number:06d}.hdf5").symlink_to(shard)
    files = {"data_folder": folder, "format": "hdf5", "num_files_train": len(shards), "num_subfolders_train": 0}
    files["num_samples_per_file"] = samples // len(shards)
    return {f"dataset.{name}": value for name, value in files.items()}


def one_run(row: str, pace: float, options: argparse.Namespace, workload: dict[str, Any]) -> dict[str, float]:
    """Run DLIO at `pace` accelerators. Raises RuntimeError if it fails, or exceeds the limits of memory and time."""
    out, venv = options.work / "out", Path(sys.executable).parent
    shutil.rmtree(out, ignore_errors=True)
    processes = int(pace) if options.processes else 1
    step = workload["train"]["computation_time"] / (1 if options.processes else pace)
    epoch = options.samples // workload["reader"]["batch_size"] // processes
    settings = {
        "dataset.data_folder": options.work,
        "dataset.num_files_train": options.samples,
        "dataset.num_subfolders_train": sum(path.is_dir() for path in (options.work / "train").iterdir()),
        "train.computation_time": step,
        "train.total_training_steps": min(max(1, int(options.compute / step)), epoch),  # DLIO takes 0 for all
        "reader.read_threads": 1 if options.processes else os.cpu_count(),
        "output.folder": out,
        **ROWS[row],
    }
    if options.mlperf and row == "packer":  # DLIO lists shards, not images, and makes no table of samples
        settings |= list_shards(options.work, options.samples) | {"reader.data_loader_sampler": "none"}
    command = [venv / "dlio_benchmark", "--config-dir", HERE, f"workload={options.workload}", f"hydra.run.dir={out}"]
    command += [f"++workload.{name}={value}" for name, value in settings.items()]
    command = [venv / "mpiexec", "-n", str(processes), *command] if options.processes else command
    places = [str(HERE), *([str(venv.parent / "mlperf")] if options.mlperf else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(reversed(places)),
        "PACKER_SET": str(options.work / "set"),
        "PACKER_DECODE": str(int(options.decode)),
        "PACKER_CROP": "224" if options.workload == "resnet50" else "0",
        "OMP_NUM_THREADS": "1",
    }
    started, memory, text = time.time(), 0.0, options.work / "out.log"
    with open(text, "w") as log:
        running = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True
        )
        while running.poll() is None:
            memory = max(memory, pss_of_tree(without=os.getpid()))
            if memory > options.memory * 1e3 or time.time() - started > options.seconds:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                raise RuntimeError(f"stopped after {time.time() - started:.0f} s with {memory / 1e3:.1f} GB")
            time.sleep(0.25)
    if running.returncode:
        raise RuntimeError(f"{command[0]} failed: {text.read_text()[-1500:]}")
    metric = json.loads((out / "summary.json").read_text())["metric"]
    first = json.loads((out / "0_output.json").read_text())["1"]["load"]["block1"][0]
    begun = re.search(r"(\S+) Starting epoch 1", text.read_text())
    assert begun is not None
    return {
        "au": metric["train_au_mean_percentage"],
        "samples_s": metric["train_throughput_mean_samples_per_second"],
        "startup": datetime.datetime.fromisoformat(begun[1]).timestamp() - started + first,
        "memory": memory,
    }


class Search:
    """Searches the largest pace at which a row reaches the target: doubles or halves, then tries once in between."""

    def __init__(self, row: str, first: float) -> None:
        self.row, self.first, self.passed, self.failed, self.left = row, first, 0.0, 0.0, True
        self.runs: dict[float, dict[str, float]] = {}

    def pace(self, processes: bool) -> float:
        if not self.failed:
            return 2 * self.passed or self.first
        middle = (self.passed * self.failed) ** 0.5 or self.failed / 2
        return round(middle) if processes else middle

    def note(self, pace: float, run: dict[str, float], target: float) -> None:
        between = bool(self.passed and self.failed)
        self.runs[pace] = run
        if run["au"] >= target:
            self.passed = pace
        else:
            self.failed = pace
        self.left = not between and 1 / 64 < pace < 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder of prepare.py, named like its workload")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--compute", type=float, default=8, help="seconds of computation in a run, up to one epoch")
    parser.add_argument("--first", type=float, default=1, help="number of accelerators at which the search begins")
    parser.add_argument(
        "--pace", type=float, help="run each row once with this number of accelerators, instead of the search"
    )
    parser.add_argument("--processes", action="store_true", help="one process for each accelerator")
    parser.add_argument(
        "--mlperf", action="store_true", help="use the DLIO of MLPerf Storage v3.0, which does not decode"
    )
    parser.add_argument("--decode", action="store_true", help="packer's rows decode the images")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["DLIO", "packer"])
    parser.add_argument("--memory", type=float, default=12, help="stop a run at this many GB")
    parser.add_argument("--seconds", type=float, default=170, help="stop a run after this many seconds")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.workload = options.work.name
    workload = yaml.safe_load((HERE / f"workload/{options.workload}.yaml").read_text())
    target = 100 * workload["metric"]["au"]
    print(f"{'row':17} accelerators   utilisation   samples/s   start-up s   memory MB", flush=True)
    searches = [Search(row, options.first) for row in options.rows]
    while any(search.left for search in searches):
        for search in filter(lambda search: search.left, searches):
            pace = options.pace or search.pace(options.processes)
            try:
                run = one_run(search.row, pace, options, workload)
            except RuntimeError as error:
                print(f"{search.row:17} {pace:12.4g}   {error}", flush=True)
                search.left = False
                continue
            figures = f"{run['au']:11.1f} %   {run['samples_s']:9.0f}   {run['startup']:10.1f}   {run['memory']:9.0f}"
            print(f"{search.row:17} {pace:12.4g} {figures}", flush=True)
            search.note(pace, run, target)
            search.left &= options.pace is None
    dlio, packed = (searches[0], searches[-1])
    name = f"dlio {options.workload}, {'decoded' if options.decode else 'bytes'}"
    measures = [("accelerators", packed.passed, dlio.passed)] if not options.pace else []
    for measure in ("startup", "memory"):
        measures += [(measure, *(next(iter(side.runs.values()), {}).get(measure, 0) for side in (packed, dlio)))]
    for measure, own, other in measures:
        theirs, ratio = (f"{other:.4g}", f"{own / other:.2f}") if other else ("no run ended", "")
        print(f"| {name} | {measure} | {own:.4g} | {theirs} | {ratio} |")


if __name__ == "__main__":
    main()
