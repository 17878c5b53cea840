"""What the scripts in this folder have in common: options, checks before the clock, rows, and the page.

A script registers rows as those of the other benchmarks do (`harness.contender`) and calls

    main(Experiment(name="s001", document=…, about=…, benchmark=…, check=…, publish=…), parser(__doc__))

which runs the checks, then the rows, each in a process of its own and in interleaved rounds, and writes `s001.md`,
`s001-*.svg` and `s001.json` to `--out`. A check that fails ends the run before any time is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

_HERE = Path(__file__).resolve().parent
# The scripts of benchmarks/, and the packages before those of the same names that may be installed.
sys.path[1:1] = [str(_HERE.parent), str(_HERE.parent.parent)]

from harness import CONTENDERS, Benchmark, Results, base_parser, drive, run_one_and_exit  # noqa: E402

from cache.files import atomic_write  # noqa: E402
from cache.node import usable_cpus  # noqa: E402
from packer.tools.report import Chart, require_charts, svg_image  # noqa: E402

__all__ = ["Check", "Experiment", "Page", "figure", "main", "parser", "ratio"]

_PAGES = _HERE.parent.parent / "docs" / "seeds"
# Whose versions a page names, where they are installed.
_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "h5py", "nvidia-dali-cuda120", "jax", "mpi4py")


@dataclass(frozen=True)
class Check:
    """What was compared, what was found, and whether it is as it must be."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Experiment:
    """name: of the files. document: whose experiment it is. about: what it measured, and what is run here.

    check: what must hold before any time is measured. publish: fills the page from the results of the rows.
    """

    name: str
    document: str
    about: str
    benchmark: Benchmark
    check: Callable[[argparse.Namespace], Iterable[Check]]
    publish: Callable[[Page, Results, argparse.Namespace], None]


class Page:
    """A page in Markdown with charts beside it; and the same as plain values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.charts: dict[str, Chart] = {}
        self.claims: list[Check] = []
        self.tables: list[dict[str, Any]] = []
        self._parts: list[str] = []

    def section(self, title: str) -> None:
        self._parts.append(f"## {title}")

    def text(self, text: str) -> None:
        """A paragraph of Markdown."""
        self._parts.append(text.strip())

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Raises ValueError for a row that has not a cell for each heading."""
        if any(len(row) != len(headings) for row in rows):
            raise ValueError(f"{self.name}: each row of the table needs {len(headings)} cells")
        self.tables.append({"headings": list(headings), "rows": [list(row) for row in rows]})
        lines = [headings, ["---"] * len(headings), *rows]
        self._parts.append("\n".join(f"| {' | '.join(str(c).replace('|', '/') for c in line)} |" for line in lines))

    def chart(self, name: str, chart: Chart, caption: str) -> None:
        """A chart in the file `NAME-name.svg`, and what it shows."""
        self.charts[name] = chart
        self._parts.append(f"![{caption}]({self.name}-{name}.svg)\n\n*{caption}*")

    def claim(self, what: str, found: str, holds: bool) -> None:
        """What the document says, and whether it is so here; a list of them stands at the top of the page."""
        self.claims.append(Check(what, found, holds))

    def render(self) -> str:
        """The claims and what was added, in Markdown."""
        claims = [f"- {_verdict(claim)}: {claim.what} ({claim.found})" for claim in self.claims]
        return "\n\n".join([*(["\n".join(claims)] if claims else []), *self._parts])


def _verdict(claim: Check) -> str:
    return "Holds" if claim.holds else "**Does not hold**"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of all benchmarks, and those of the scripts of this folder."""
    options = base_parser(description, "folder of the page; default: docs/seeds, and with --smoke none")
    options.add_argument("--smoke", action="store_true", help="everything once and small: does it run?")
    options.add_argument("--images", type=Path, metavar="DIR", help="JPEGs to make the data of; default: made ones")
    options.add_argument("--work", type=Path, metavar="DIR", help="keep the data there; default: a temporary folder")
    options.set_defaults(timeout=600.0)
    return options


def main(experiment: Experiment, options: argparse.ArgumentParser) -> None:
    """Check, measure, publish; in the process of a row, only that row."""
    arguments = options.parse_args()
    if arguments.one:
        run_one_and_exit(experiment.benchmark, arguments)
    require_charts()
    if arguments.smoke and not any(option.startswith("--rounds") for option in sys.argv):
        arguments.rounds = 1
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
        _run(experiment, arguments)
        return
    with tempfile.TemporaryDirectory(prefix=f"{experiment.name}-") as folder:
        arguments.work = Path(folder)
        sys.argv += ["--work", folder]  # for the processes of the rows
        _run(experiment, arguments)


def figure(results: Results, name: str, key: str) -> float | None:
    """The median over the rounds; None for a row that did not run."""
    found = [run[key] for run in results.get(name, ()) if run.get(key) is not None]
    return median(found) if found else None


def ratio(results: Results, name: str, other: str, key: str) -> float | None:
    """The median of a row over that of another one, of the same round; None where one did not run."""
    pairs = zip(results.get(name, ()), results.get(other, ()), strict=False)
    found = [a[key] / b[key] for a, b in pairs if a.get(key) and b.get(key)]
    return median(found) if found else None


def _run(experiment: Experiment, arguments: argparse.Namespace) -> None:
    checks = []
    for check in experiment.check(arguments):
        checks.append(check)
        print(f"{'ok' if check.holds else 'FAILS'}: {check.what}: {check.found}", file=sys.stderr, flush=True)
    if not checks or not all(check.holds for check in checks):
        sys.exit(f"{experiment.name}: nothing was measured: a check before the clock did not hold")
    results = drive(experiment.benchmark, arguments)
    page = Page(experiment.name)
    experiment.publish(page, results, arguments)
    absent = {name: _reason(runs) for name, runs in results.items() if not _ran(runs)}
    title = f"# {experiment.benchmark.title}\n\n*{experiment.document}.* {experiment.about}"
    document = "\n\n".join([title, page.render(), *_foot(arguments, checks, results, absent)]) + "\n"
    print(document)
    folder = arguments.out or (None if arguments.smoke else _PAGES)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"name": experiment.name, "document": experiment.document, "date": _today()}
        facts |= {"command": _command(), "machine": _machine(), "versions": _versions()}
        figures = {"checks": [asdict(c) for c in checks], "claims": [asdict(c) for c in page.claims]}
        figures |= {"tables": page.tables, "results": results, "absent": absent}
        for name, chart in page.charts.items():
            _write(folder / f"{experiment.name}-{name}.svg", svg_image(chart))
        _write(folder / f"{experiment.name}.json", json.dumps(facts | figures, indent=1) + "\n")
        _write(folder / f"{experiment.name}.md", document)
        print(f"{folder / experiment.name}.md, .json and {len(page.charts)} charts", file=sys.stderr)
    if failed := [name for name, runs in results.items() if any("error" in run for run in runs)]:
        sys.exit(f"{experiment.name}: failed: {', '.join(failed)}")


def _foot(
    arguments: argparse.Namespace, checks: Sequence[Check], results: Results, absent: Mapping[str, str]
) -> Iterator[str]:
    """How it was measured: where, with what, what was checked, what a row holds, what did not run."""
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    rounds = f"{arguments.rounds} rounds" if arguments.rounds > 1 else "one round"
    yield f"## How it was measured\n\n`{_command()}`, {_today()}, {rounds}, on {_machine()}; {versions}."
    others = [run["others_cpus"] for runs in results.values() for run in runs if "others_cpus" in run]
    if others:
        yield f"Meanwhile other processes kept {median(others):.2f} CPUs busy (at most {max(others):.2f})."
    yield "Checked before any time was measured:\n\n" + _list((check.what, check.found) for check in checks)
    if notes := [(n, CONTENDERS[n].note) for n in results if n not in absent and CONTENDERS[n].note]:
        yield "What the rows hold:\n\n" + _list(notes)
    if absent:
        yield "Did not run:\n\n" + _list(absent.items())


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {name}: {text}" for name, text in items)


def _ran(runs: Sequence[Mapping[str, Any]]) -> bool:
    return any("missing" not in run and "error" not in run for run in runs)


def _reason(runs: Sequence[Mapping[str, Any]]) -> str:
    run = runs[0] if runs else {}
    return str(run.get("missing") or f"failed: {run.get('error', 'not run')}")


def _command() -> str:
    """As a user would type it: without the temporary folder."""
    words = list(sys.argv[1:])
    for option in ("--work", "--images", "--out"):
        if option in words:
            place = words.index(option)
            words[place : place + 2] = [] if option != "--images" else ["--images", "DIR"]
    return " ".join(["python", f"benchmarks/seeds/{Path(sys.argv[0]).name}", *words])


def _machine() -> str:
    """CPUs, accelerator and system."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    gpu = "no GPU"
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return f"{usable_cpus()} CPUs ({models[0] if models else platform.machine()}), {gpu}, Linux {platform.release()}"


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _write(path: Path, text: str) -> None:
    atomic_write(path, text.encode())
