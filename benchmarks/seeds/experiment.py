"""The runner of the scripts in this folder: options, checks before the measurement, rows, and the page.

`s001.toml` is the table of an experiment: its texts, the sizes of its options, its rows, the document's figures, and
the tables of the page. `s001.py` contains the code: the functions of the rows, the measurement of a row, and the
checks. It ends with

    main(Experiment.read(__file__, rows=[…], measure=…, check=…), parser(__doc__))

which runs the checks, then the rows, each in a separate process and in interleaved rounds, and writes `s001.md`,
`s001-*.svg` and `s001.json` to `--out`. A failed check ends the run before any time is measured.

Keys of the table: title, document, about, limits; sizes = {option: [with --smoke, default, help]}; rows = [{name, make:
name of a function, with: its keyword arguments, and further arguments of `harness.contender`}]; there = {row: figure of
the document}; claims = [{what, row, over, key, least}]: a bound on the ratio of two rows; sections: see `Section`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

_PLACE = Path(__file__).resolve().parent
# The scripts of benchmarks/, and this repository's packages before installed ones.
sys.path[1:1] = [str(_PLACE.parent), str(_PLACE.parent.parent)]

import harness  # noqa: E402
from harness import CONTENDERS, Benchmark, Contender, Results, drive, register  # noqa: E402
from machine import has_gpu  # noqa: E402
from report import Column, ratio, reason, values_of  # noqa: E402

from cache.files import atomic_write  # noqa: E402
from cache.node import usable_cpus  # noqa: E402
from packer.tools.report import Chart, charts, require_charts, svg_image  # noqa: E402

__all__ = ["Check", "Column", "Experiment", "Page", "Section", "compared", "figure", "main", "parser", "ratio"]

_PAGES = _PLACE.parent.parent / "docs" / "seeds"
# A page lists the versions of these packages, if installed.
_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "simplejpeg", "h5py", "nvidia-dali-cuda120", "jax", "mpi4py")


@dataclass(frozen=True)
class Check:
    """A comparison (what), its result (found), and whether the result is right (holds)."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True)
class Section:
    """A table of the rows that have a figure in the first column, and a bar chart of the first `charted` columns.

    begins: prefixes of the rows' names. base: the row whose first column is the denominator of ratios. there: the
    document's figures for that column.
    """

    name: str
    title: str
    columns: Sequence[Column]
    begins: Sequence[str] = ("",)
    base: str = ""
    there: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    charted: int = 1


@dataclass(frozen=True)
class Experiment:
    """table: see above. measure: (row, arguments) -> figures. compare: as measure, for the checks (`compared`).

    check: checks before any time is measured. claims, sections, more: parts of the page in addition to the table's.
    """

    name: str
    table: Mapping[str, Any]
    measure: Callable[[Contender, argparse.Namespace], dict[str, Any]]
    check: Callable[[argparse.Namespace], Iterable[Check]]
    compare: Callable[[Contender, argparse.Namespace], dict[str, Any]] | None = None
    before: Callable[[Contender, argparse.Namespace], None] = lambda chosen, arguments: None
    claims: Callable[[Results, argparse.Namespace], Iterable[Check]] = lambda results, arguments: ()
    sections: Callable[[argparse.Namespace], Iterable[Section]] = lambda arguments: ()
    more: Callable[[Page, Results, argparse.Namespace], None] = lambda page, results, arguments: None

    @classmethod
    def read(cls, script: str, rows: Iterable[Callable[..., Any]] = (), **functions: Any) -> Experiment:
        """The experiment of the table next to `script`; registers its rows. rows: the functions that the rows name."""
        place = Path(script).with_suffix(".toml")
        table = tomllib.loads(place.read_text())
        register(table.get("rows", ()), rows)
        return cls(place.stem, table, **functions)

    @property
    def benchmark(self) -> Benchmark:
        def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
            function = self.compare if arguments.compare and self.compare else self.measure
            return function(chosen, arguments)

        return Benchmark(self.table["title"], (), "", (), measure, self.before)

    def all_sections(self, arguments: argparse.Namespace) -> Iterator[Section]:
        for row in self.table.get("sections", ()):
            columns, text = [Column(*column) for column in row["columns"]], row.get("text", "")
            there = self.table.get("there", {}) if row.get("there") else {}
            yield Section(**{**row, "columns": columns, "there": there, "text": text.format_map(vars(arguments))})
        yield from self.sections(arguments)

    def all_claims(self, results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
        there = self.table.get("there", {})
        for claim in self.table.get("claims", ()):
            row, over = claim["row"], claim["over"]
            if (times := ratio(results, row, over, claim["key"])) is not None:
                reference = f"; there {there[row] / there[over]:.2f}" if {row, over} <= there.keys() else ""
                yield Check(claim["what"], f"{times:.2f} times{reference}", times >= claim["least"])
        yield from self.claims(results, arguments)


class Page:
    """A page in Markdown with charts in the same folder."""

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
        """A chart in the file `NAME-name.svg`, with a caption."""
        self.charts[name] = chart
        self.text(f"![{caption}]({self.name}-{name}.svg)\n\n*{caption}*")

    def section(self, section: Section, results: Results) -> None:
        """Add the section with the rows that ran, if any."""
        key, there = section.columns[0].key, section.there
        begins = tuple(section.begins)
        ran = [name for name in results if name.startswith(begins) and figure(results, name, key) is not None]
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
    """A parser of the options of all benchmarks, and of the scripts in this folder."""
    options = harness.base_parser(description, "folder of the page; default: docs/seeds, and with --smoke none")
    options.add_argument("--smoke", action="store_true", help="run everything once with small sizes, as a test")
    options.add_argument(
        "--images", type=Path, metavar="DIR", help="make the data from these JPEGs; default: synthetic images"
    )
    options.add_argument("--work", type=Path, metavar="DIR", help="keep the data there; default: a temporary folder")
    options.add_argument("--workers", type=int, default=usable_cpus(), help="processes or threads of each row")
    options.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    options.set_defaults(timeout=600.0)
    return options


def main(experiment: Experiment, options: argparse.ArgumentParser) -> None:
    """Check, measure, and write the page; in the process of a row, run only that row."""
    sizes = experiment.table.get("sizes", {})
    for name, (small, usual, text) in sizes.items():
        kind = type(usual)
        options.add_argument(f"--{name}", type=kind, metavar="N", help=f"{text} ({usual:,}; with --smoke {small:,})")
    arguments = options.parse_args()
    for name, (small, usual, _) in sizes.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, small if arguments.smoke else usual)
    if arguments.one:
        harness.run_one_and_exit(experiment.benchmark, arguments)
    require_charts()
    if arguments.smoke and not any(option.startswith("--rounds") for option in sys.argv):
        arguments.rounds = 1
    with tempfile.TemporaryDirectory(prefix=f"{experiment.name}-") as folder:
        if arguments.work is None:
            arguments.work = Path(folder)
            sys.argv += ["--work", folder]  # for the processes of the rows
        arguments.work.mkdir(parents=True, exist_ok=True)
        _run(experiment, arguments)


def compared(experiment: Experiment, arguments: argparse.Namespace, *skip: str, smoke: str = "") -> dict[str, Any]:
    """The results of `experiment.compare` for each row that can run, except `skip`; with --smoke only rows `smoke`."""
    some = {"rounds": 1, "skip": ",".join(filter(None, (arguments.skip, *skip)))}
    if arguments.smoke and not arguments.only:
        some["only"] = smoke
    sys.argv.append("--compare")
    try:
        results = drive(experiment.benchmark, argparse.Namespace(**{**vars(arguments), **some}))
    finally:
        sys.argv.remove("--compare")
    return {name: runs[0] for name, runs in results.items() if runs and "missing" not in runs[0]}


def figure(results: Results, name: str, key: str) -> float | None:
    """The median over the rounds; None if the row did not run."""
    values = values_of(results, name, key)
    return median(values) if values else None


def _run(experiment: Experiment, arguments: argparse.Namespace) -> None:
    checks = []
    for check in experiment.check(arguments):
        checks.append(check)
        print(f"{'ok' if check.holds else 'FAILS'}: {check.what}: {check.found}", file=sys.stderr, flush=True)
    if not checks or not all(check.holds for check in checks):
        sys.exit(f"{experiment.name}: nothing was measured, because a check failed")
    results = drive(experiment.benchmark, arguments)
    claims = list(experiment.all_claims(results, arguments))
    absent = {name: reason(runs) for name, runs in results.items() if not values_of(results, name, None)}
    page = Page(experiment.name)
    table = experiment.table
    page.text(f"# {table['title']}", f"*{table['document']}.* {table['about']}")
    page.text("\n".join(f"- {'Holds' if c.holds else '**Does not hold**'}: {c.what} ({c.found})" for c in claims))
    for section in experiment.all_sections(arguments):
        page.section(section, results)
    experiment.more(page, results, arguments)
    limits = table.get("limits", ())
    page.text("## Limits of the comparison" if limits else "", *limits)
    page.text(*_foot(arguments, checks, results, absent))
    print(page.render())
    folder = arguments.out or (None if arguments.smoke else _PAGES)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"name": experiment.name, "document": table["document"], "date": _today(), "command": _command()}
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
    """The part "How it was measured": machine, versions, checks, notes of the rows, rows that did not run."""
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    rounds = f"{arguments.rounds} rounds" if arguments.rounds > 1 else "one round"
    yield f"## How it was measured\n\n`{_command()}`, {_today()}, {rounds}, on {_machine()}; {versions}."
    others = [run["others_cpus"] for runs in results.values() for run in runs if "others_cpus" in run]
    if others:
        yield f"CPUs used by other processes during the runs: {median(others):.2f} (at most {max(others):.2f})."
    notes = {name: CONTENDERS[name].note for name in results if name not in absent and CONTENDERS[name].note}
    compared = {check.what: check.found for check in checks}
    lists = {"Checked before any time was measured": compared, "Notes on the rows": notes, "Did not run": absent}
    for title, items in lists.items():
        if items:
            yield f"{title}:\n\n" + "\n".join(f"- {name}: {text}" for name, text in items.items())


def _command() -> str:
    """The command as a user would type it, without the temporary folder."""
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
