"""Run contenders against each other: each in a separate process, in rounds, in a different order each round.

A benchmark is a script that registers contenders and calls `main`:

    @contender("lmdb", imports="lmdb", note="one process, no checksum")
    def lmdb(tree, output): ...

    if __name__ == "__main__":
        main(BENCHMARK, __doc__, tree="folder of class folders", n=(2560, "timed images"))

`main` runs the script again for every contender and round (`--one NAME`); that process imports the contender's
modules, prepares the machine, calls the benchmark's `measure` and writes its figures, a JSON object, to a file. The
order of contenders rotates by one from round to round, and every other round runs in reverse, so that a slow phase of
the machine affects all contenders alike. Ratios are taken within a round, see `report`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import cpu_seconds, system_cpu_seconds
from report import Claim, Column, print_report, save

__all__ = [
    "CONTENDERS",
    "REPOSITORY",
    "Benchmark",
    "Contender",
    "NotHere",
    "Results",
    "base_parser",
    "contender",
    "drive",
    "interpreters",
    "keep_rows",
    "main",
    "make_once",
    "output_of",
    "pack_set",
    "register",
    "run_one_and_exit",
    "slug",
]

REPOSITORY = Path(__file__).resolve().parent.parent
Results = dict[str, list[dict[str, Any]]]


class NotHere(Exception):
    """A contender cannot run: a package or a set that it needs is missing."""


@dataclass(frozen=True)
class Contender:
    """One row. function: for `measure`. imports: modules to import before timing. python: key of its interpreter.

    note: what its time includes. options: further facts for the benchmark.
    """

    name: str
    function: Callable[..., Any]
    imports: tuple[str, ...] = ()
    python: str = "main"
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """A script's measurement.

    key: the column that rows are sorted by. limits: (column, row) pairs that get a column of ratios. measure:
    (contender, arguments) -> figures, in the contender's process. before: (contender, arguments), called before each
    run in the driver's process.
    """

    title: str
    columns: Sequence[Column]
    key: str
    limits: Sequence[tuple[str, str]]
    measure: Callable[[Contender, argparse.Namespace], dict[str, Any]]
    before: Callable[[Contender, argparse.Namespace], None] = lambda contender, arguments: None
    claims: Sequence[Claim] = ()
    less_is_better: bool = False


CONTENDERS: dict[str, Contender] = {}


def contender(
    name: str, *, imports: str = "", python: str = "main", note: str = "", **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a contender. Ratios compare rows named "ours: …" with rows named "limit: …" and with all other rows."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CONTENDERS[name] = Contender(name, function, tuple(imports.split()), python, note, options)
        return function

    return register


def register(
    rows: Iterable[Mapping[str, Any]], makers: Iterable[Callable[..., Any]], add: Callable[..., Any] = contender
) -> None:
    """Register the contenders of a table. rows: name; make: name of a maker; with: its keyword arguments; all other
    keys are arguments of `add`."""
    named = {function.__name__: function for function in makers}
    for row in map(dict, rows):
        function = functools.partial(named[row.pop("make")], **row.pop("with", {}))
        add(row.pop("name"), **row)(function)


def slug(name: str) -> str:
    """A contender's name as a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def base_parser(
    description: str | None, out: str = "append all figures to this JSON file", **more: Any
) -> argparse.ArgumentParser:
    """A parser of the common options and of `more`.

    more: help of a required path; or (default, help) or (default, help, choices). The default False makes a flag, a
    type a required option, `list` a required option that may be repeated. A number alone replaces the default of a
    common option. out: help of --out.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    numbers = {name: option for name, option in more.items() if isinstance(option, int | float)}
    for name, option in more.items():
        if name in numbers:
            continue
        default, text, *choices = (Path, option) if isinstance(option, str) else option
        how: dict[str, Any] = {"default": default, "type": str if default is None else type(default)}
        if default is list:
            how = {"required": True, "type": Path, "action": "append"}
        elif isinstance(default, type):
            how = {"required": True, "type": default}
        elif default is False:
            how = {"action": "store_true"}
        how |= {"choices": choices[0]} if choices else {}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="run contenders whose name contains one of these (comma-separated)")
    parser.add_argument("--skip", help="leave out contenders whose name contains one of these (comma-separated)")
    parser.add_argument("--python", action="append", default=[], metavar="KEY=PATH", help="interpreter of a peer")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a contender may take in a round")
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(**numbers)
    return parser


def interpreters(arguments: argparse.Namespace) -> dict[str, str]:
    """This interpreter as "main", and the interpreters of --python."""
    return {"main": sys.executable, **dict(pair.split("=", 1) for pair in arguments.python)}


def main(
    benchmark: Benchmark | Callable[[argparse.Namespace], Benchmark], description: str | None, **options: Any
) -> None:
    """Drive the rounds and print the report; in a contender's process, run that contender.

    benchmark: a benchmark, or a function from the arguments to one, which may also add and remove rows. options: as
    `more` of `base_parser`.
    """
    arguments = base_parser(description, **options).parse_args()
    if not isinstance(benchmark, Benchmark):
        benchmark = benchmark(arguments)
    run_one_and_exit(benchmark, arguments)
    results = drive(benchmark, arguments)
    print_report(benchmark, CONTENDERS, results)
    if arguments.out:
        settings = {name: str(value) for name, value in vars(arguments).items() if value is not None}
        save(arguments.out, benchmark.title, settings, results)


def output_of(work: Path, name: str) -> Path:
    """The folder of a set or of a packer's output. Raises NotHere."""
    folder = work / slug(name)
    if not folder.is_dir():
        raise NotHere(f"no {folder}: making it failed, or pack.py --keep has not made it")
    return folder


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Unless `folder` exists, let `make` fill an empty folder, and rename it to `folder`."""
    if folder.exists():
        return
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    make(unfinished)
    unfinished.rename(folder)


def pack_set(arguments: argparse.Namespace, **options: Any) -> Path:
    """--work/set, which a separate process packs from --tree as HDF5 unless it exists."""
    made = Path(arguments.work) / "set"
    if not (made / "dataset.json").exists():
        settings = json.dumps({"to": "hdf5", "output": str(made), **options})
        script = "import json, sys, packer\npacker.convert(sys.argv[1], **json.loads(sys.argv[2]))"
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-c", script, str(arguments.tree), settings], check=True, env=environment)
    return made


def keep_rows(is_kept: Callable[[Contender], bool]) -> None:
    """Forget all contenders for which `is_kept` is false."""
    for name in [name for name, row in CONTENDERS.items() if not is_kept(row)]:
        del CONTENDERS[name]


def run_one_and_exit(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """In a contender's process: run the contender and exit. In other processes: do nothing."""
    if arguments.one:
        arguments.result.write_text(json.dumps(_run_one(benchmark, arguments)))
        sys.stdout.flush()
        os._exit(0)  # some peers leave threads behind that never end


def _run_one(benchmark: Benchmark, arguments: argparse.Namespace) -> dict[str, Any]:
    # At the end, so that our folders' names cannot hide a peer's modules.
    sys.path.append(str(REPOSITORY))
    chosen = CONTENDERS[arguments.one]
    started = time.perf_counter()
    try:
        for module in chosen.imports:
            importlib.import_module(module)
    except ImportError as error:
        return {"missing": f"not installed ({error})"}
    except Exception as error:
        return {"missing": f"import failed ({type(error).__name__}: {error})"}
    imported = time.perf_counter() - started
    try:
        return {**benchmark.measure(chosen, arguments), "import_s": imported}
    except NotHere as error:
        return {"missing": str(error)}
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _chosen(arguments: argparse.Namespace) -> list[str]:
    only, skip = ((text or "").split(",") for text in (arguments.only, arguments.skip))
    names = [name for name in CONTENDERS if any(part in name for part in only)]
    return [name for name in names if not any(part and part in name for part in skip)]


def drive(benchmark: Benchmark, arguments: argparse.Namespace) -> Results:
    """Run the chosen contenders, each in a separate process, for all rounds.

    Returns the figures as results[name][round]; a contender that fails does not run again.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the contender, too
    names = _chosen(arguments)
    pythons = interpreters(arguments)
    results: Results = {name: [] for name in names}
    for number in range(arguments.rounds):
        turn = number % max(1, len(names))
        order = names[turn:] + names[:turn]
        for name in reversed(order) if number % 2 else order:
            chosen = CONTENDERS[name]
            if any("missing" in run or "error" in run for run in results[name]):
                continue
            if chosen.python not in pythons:
                run: dict[str, Any] = {"missing": f"no interpreter given (--python {chosen.python}=PATH)"}
            else:
                benchmark.before(chosen, arguments)
                run = _run_alone(pythons[chosen.python], name, arguments.timeout)
            results[name].append(run)
            shown = {key: value for key, value in run.items() if not isinstance(value, dict)}
            figures = ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
            print(f"[{number + 1}/{arguments.rounds}] {name}: {figures}", file=sys.stderr, flush=True)
    return results


def _run_alone(interpreter: str, name: str, timeout: float) -> dict[str, Any]:
    """The figures of one run, and the number of CPUs that other processes used during it."""
    started, own, system = time.perf_counter(), cpu_seconds(), system_cpu_seconds()
    run = _run_child(interpreter, name, timeout)
    others = (system_cpu_seconds() - system) - (cpu_seconds() - own)
    run["others_cpus"] = max(0.0, others / (time.perf_counter() - started))
    return run


def _run_child(interpreter: str, name: str, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [interpreter, *sys.argv, "--one", name, "--result", str(result)]
        # A separate temporary directory, because some peers delete folders there.
        environment = {**os.environ, "TMPDIR": folder, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        with open(log, "wb") as file:
            child = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"no end after {timeout:.0f} s"}
            finally:
                _end_group(child)
        if not result.exists():
            return {"error": f"exit status {status}: {_tail(log)}"}
        run: dict[str, Any] = json.loads(result.read_text())
        if "error" in run:
            print(_tail(log, 2000), file=sys.stderr)
        return run


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the contender, which leads its own session, and all processes that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _tail(log: Path, size: int = 300) -> str:
    return log.read_bytes()[-size:].decode(errors="replace").strip()
