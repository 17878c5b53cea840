"""The runner of the scripts in this folder: options, checks before the clock, rows, and the page.

A script registers rows as those of the other benchmarks do (`harness.contender`), says in `Section`s which of them a
table and a chart show, and calls

    main(Experiment(name="s001", title=…, document=…, about=…, measure=…, check=…, sections=…), parser(__doc__))

which runs the checks, then the rows, each in a process of its own and in interleaved rounds, and writes `s001.md`,
`s001-*.svg` and `s001.json` to `--out`. A check that fails ends the run before any time is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

_PLACE = Path(__file__).resolve().parent
# The scripts of benchmarks/, and the packages before those of the same names that may be installed.
sys.path[1:1] = [str(_PLACE.parent), str(_PLACE.parent.parent)]

from harness import CONTENDERS, Benchmark, Contender, Results, base_parser, drive, run_one_and_exit  # noqa: E402
from machine import has_gpu  # noqa: E402
from report import Column  # noqa: E402

from cache.files import atomic_write  # noqa: E402
from cache.node import usable_cpus  # noqa: E402
from packer.tools.report import Chart, charts, require_charts, svg_image  # noqa: E402

__all__ = ["Check", "Column", "Experiment", "Page", "Section", "figure", "main", "parser", "ratio"]

_PAGES = _PLACE.parent.parent / "docs" / "seeds"
# Whose versions a page names, where they are installed.
_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "h5py", "nvidia-dali-cuda120", "jax", "mpi4py")


@dataclass(frozen=True)
class Check:
    """What was compared, what was found, and whether it is as it must be."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Section:
    """A table of the rows that have the first of the columns, in their order, and a bar chart of the `charted` ones.

    base: the row that the others are compared with, by the first column. there: the document's figures of that column.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    begins: tuple[str, ...] = ("",)
    base: str = ""
    there: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    charted: int = 1


@dataclass(frozen=True)
class Experiment:
    """name: of the files. document: whose experiment it is. about: what it measured, and what is run here.

    check: what must hold before any time is measured. sections: of the page, for these options. claims: what the
    document says, and whether it is so here. limits: what does not compare. more: adds what is not a table of rows.
    sizes: options that --smoke makes small: name -> (small, usual, help).
    """

    name: str
    title: str
    document: str
    about: str
    measure: Callable[[Contender, argparse.Namespace], dict[str, Any]]
    check: Callable[[argparse.Namespace], Iterable[Check]]
    sections: Callable[[argparse.Namespace], Iterable[Section]]
    claims: Callable[[Results, argparse.Namespace], Iterable[Check]] = lambda results, arguments: ()
    limits: Sequence[str] = ()
    more: Callable[[Page, Results, argparse.Namespace], None] = lambda page, results, arguments: None
    before: Callable[[Contender, argparse.Namespace], None] = lambda chosen, arguments: None
    sizes: Mapping[str, tuple[float, float, str]] = field(default_factory=dict)

    @property
    def benchmark(self) -> Benchmark:
        return Benchmark(self.title, (), "", (), self.measure, self.before)


class Page:
    """A page in Markdown with charts beside it."""

    def __init__(self, name: str) -> None:
        self.name, self.charts = name, dict[str, Chart]()
        self._parts: list[str] = []

    def text(self, *texts: str) -> None:
        """Paragraphs of Markdown."""
        self._parts += [text.strip() for text in texts if text]

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [headings, ["---"] * len(headings), *rows]
        self.text("\n".join(f"| {' | '.join(str(c).replace('|', '/') for c in line)} |" for line in lines))

    def chart(self, name: str, chart: Chart, caption: str) -> None:
        """A chart in the file `NAME-name.svg`, and what it shows."""
        self.charts[name] = chart
        self.text(f"![{caption}]({self.name}-{name}.svg)\n\n*{caption}*")

    def section(self, section: Section, results: Results) -> None:
        """What ran of it; nothing where nothing did."""
        key, there = section.columns[0].key, section.there
        ran = [name for name in results if name.startswith(section.begins) and figure(results, name, key) is not None]
        if not ran:
            return
        headings = ["", *(column.heading for column in section.columns)]
        headings += [f"/ {section.base}"] * bool(section.base) + ["there", "there, /"] * bool(there)
        rows = []
        for name in ran:
            values = [(figure(results, name, column.key), column.form) for column in section.columns]
            if section.base:
                values.append((ratio(results, name, section.base, key), "{:.2f}"))
            if there:
                values.append((there.get(name), section.columns[0].form))
                values.append(
                    (there[name] / there[section.base] if {name, section.base} <= set(there) else None, "{:.2f}")
                )
            label = f"**{name}**" if name.startswith("ours: ") else name
            rows.append([label, *("" if value is None else form.format(value) for value, form in values)])
        self.text(f"## {section.title}", section.text)
        self.table(headings, rows)
        if section.charted:
            columns = section.columns[: section.charted]
            shown = {column.heading: [figure(results, name, column.key) for name in ran] for column in columns}
            self.chart(section.name, charts.bars(ran, shown), f"{section.title}: {', '.join(shown)}")

    def render(self) -> str:
        return "\n\n".join(self._parts) + "\n"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of all benchmarks, and those of the scripts of this folder."""
    options = base_parser(description, "folder of the page; default: docs/seeds, and with --smoke none")
    options.add_argument("--smoke", action="store_true", help="everything once and small: does it run?")
    options.add_argument("--images", type=Path, metavar="DIR", help="JPEGs to make the data of; default: made ones")
    options.add_argument("--work", type=Path, metavar="DIR", help="keep the data there; default: a temporary folder")
    options.add_argument("--workers", type=int, default=usable_cpus(), help="processes or threads of each row")
    options.set_defaults(timeout=600.0)
    return options


def main(experiment: Experiment, options: argparse.ArgumentParser) -> None:
    """Check, measure, publish; in the process of a row, only that row."""
    for name, (small, usual, what) in experiment.sizes.items():
        kind = type(usual)
        options.add_argument(f"--{name}", type=kind, metavar="N", help=f"{what} ({usual:,}; with --smoke {small:,})")
    arguments = options.parse_args()
    for name, (small, usual, _) in experiment.sizes.items():
        attribute = name.replace("-", "_")
        if getattr(arguments, attribute) is None:
            setattr(arguments, attribute, small if arguments.smoke else usual)
    if arguments.one:
        run_one_and_exit(experiment.benchmark, arguments)
    require_charts()
    if arguments.smoke and not any(option.startswith("--rounds") for option in sys.argv):
        arguments.rounds = 1
    with tempfile.TemporaryDirectory(prefix=f"{experiment.name}-") as folder:
        if arguments.work is None:
            arguments.work = Path(folder)
            sys.argv += ["--work", folder]  # for the processes of the rows
        arguments.work.mkdir(parents=True, exist_ok=True)
        _run(experiment, arguments)


def figure(results: Results, name: str, key: str) -> float | None:
    """The median over the rounds; None for a row that did not run."""
    values = [run[key] for run in results.get(name, ()) if run.get(key) is not None]
    return median(values) if values else None


def ratio(results: Results, name: str, other: str, key: str) -> float | None:
    """The median of a row over that of another one, of the same round; None where one did not run."""
    pairs = zip(results.get(name, ()), results.get(other, ()), strict=False)
    values = [a[key] / b[key] for a, b in pairs if a.get(key) and b.get(key)]
    return median(values) if values else None


def _run(experiment: Experiment, arguments: argparse.Namespace) -> None:
    checks = []
    for check in experiment.check(arguments):
        checks.append(check)
        print(f"{'ok' if check.holds else 'FAILS'}: {check.what}: {check.found}", file=sys.stderr, flush=True)
    if not checks or not all(check.holds for check in checks):
        sys.exit(f"{experiment.name}: nothing was measured: a check before the clock did not hold")
    results = drive(experiment.benchmark, arguments)
    claims = list(experiment.claims(results, arguments))
    absent = {name: _reason(runs) for name, runs in results.items() if not _ran(runs)}
    page = Page(experiment.name)
    page.text(f"# {experiment.title}", f"*{experiment.document}.* {experiment.about}")
    page.text("\n".join(f"- {'Holds' if c.holds else '**Does not hold**'}: {c.what} ({c.found})" for c in claims))
    for section in experiment.sections(arguments):
        page.section(section, results)
    experiment.more(page, results, arguments)
    page.text("## What does not compare" if experiment.limits else "", *experiment.limits)
    page.text(*_foot(arguments, checks, results, absent))
    print(page.render())
    folder = arguments.out or (None if arguments.smoke else _PAGES)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"name": experiment.name, "document": experiment.document, "date": _today(), "command": _command()}
        facts |= {"machine": _machine(), "versions": _versions(), "results": results, "absent": absent}
        facts |= {"checks": [asdict(c) for c in checks], "claims": [asdict(c) for c in claims]}
        files = {f"-{name}.svg": svg_image(chart) for name, chart in page.charts.items()}
        files |= {".json": json.dumps(facts, indent=1) + "\n", ".md": page.render()}
        for end, text in files.items():
            atomic_write(folder / f"{experiment.name}{end}", text.encode())
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
    notes = {name: CONTENDERS[name].note for name in results if name not in absent and CONTENDERS[name].note}
    compared = {check.what: check.found for check in checks}
    lists = {"Checked before any time was measured": compared, "What the rows hold": notes, "Did not run": absent}
    for title, items in lists.items():
        if items:
            yield f"{title}:\n\n" + "\n".join(f"- {name}: {text}" for name, text in items.items())


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
            words[place : place + 2] = ["--images", "DIR"] if option == "--images" else []
    return " ".join(["python", f"benchmarks/seeds/{Path(sys.argv[0]).name}", *words])


def _machine() -> str:
    """CPUs, accelerator and system."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpu = "no GPU"
    if has_gpu():
        import torch

        gpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return f"{usable_cpus()} CPUs ({models[0] if models else platform.machine()}), {gpu}, Linux {platform.release()}"


def _versions() -> dict[str, str]:
    installed = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _today() -> str:
    return time.strftime("%Y-%m-%d")
