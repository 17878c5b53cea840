"""A pytest plugin: the report of `make test-cluster`, one line for each test, also as a file of Markdown.

    pytest -p cluster_report --cluster-report build/test-cluster.md tests/cluster

A test counts its trials with the fixture `trial`:

    def test_something(trial: Trial) -> None:
        for seed in range(20):
            with trial:
                ...

A test that counts none is one trial. What was skipped is in the report with the reason.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["Trial"]


class Trial:
    """Counts how often its context was entered, and how often it was left without an error."""

    def __init__(self) -> None:
        self.made = self.passed = 0

    def __enter__(self) -> None:
        """May be entered several times before it is left."""
        self.made += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.passed += error is None


@pytest.fixture
def trial(record_property: Callable[[str, object], None]) -> Iterator[Trial]:
    counts = Trial()
    yield counts
    record_property("trials", (counts.made, counts.passed))


@dataclass
class _Line:
    made: int = 0
    passed: int = 0
    seconds: float = 0.0
    remark: str = ""


@dataclass
class _Report:
    """Collects the lines; prints them when all tests have run."""

    path: str
    lines: dict[str, _Line] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = self.lines.setdefault(_title(report.nodeid), _Line())
        line.seconds += report.duration
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            line.remark = "not run: " + reason.removeprefix("Skipped: ")
        elif report.failed:
            line.remark = f"FAILED ({report.when})"
            line.made = max(line.made, 1)
        elif report.when == "call":
            line.made, line.passed = 1, 1
        if report.when == "teardown":
            line.made, line.passed = _counted(report, line)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = [("what", "trials", "passed", "seconds", "remark"), ("---", "--:", "--:", "--:", "---")]
        for title, line in sorted(self.lines.items()):
            rows.append((title, str(line.made), str(line.passed), f"{line.seconds:.0f}", line.remark))
        made, passed = (sum(getattr(line, name) for line in self.lines.values()) for name in ("made", "passed"))
        rows.append(("all", str(made), str(passed), f"{sum(line.seconds for line in self.lines.values()):.0f}", ""))
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {platform.platform()}"
        terminalreporter.write_sep("=", "report")
        terminalreporter.write_line(table)
        if self.path:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path).write_text(f"{when}\n\n{table}\n")


def _title(nodeid: str) -> str:
    """tests/cluster/test_objects.py::test_read[s3] is "objects: read [s3]"."""
    file, _, name = nodeid.partition("::")
    words = name.removeprefix("test_").replace("_", " ").replace("[", " [")
    return f"{Path(file).stem.removeprefix('test_')}: {words}"


def _counted(report: pytest.TestReport, line: _Line) -> tuple[int, int]:
    for name, value in report.user_properties:
        if name == "trials" and isinstance(value, tuple) and value[0]:
            return value
    return line.made, line.passed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster-report", default="", metavar="FILE", help="write the report to FILE, as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Report(config.getoption("--cluster-report")), "cluster-report-lines")
