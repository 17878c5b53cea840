"""From the figures of all rounds to a table, ratios, and the verdict on what we claim.

A figure is the median over rounds. A ratio is taken within each round, and then its median: both sides have seen
the same phase of the machine. A claim compares one of our rows with a limit, or with every peer that ran.

Contenders may say, as options, what they are `like`: only peers like a row are its rivals. Those with `apart`
are not compared.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

__all__ = ["PEERS", "Claim", "Column", "group_of", "print_report", "save"]

Results = Mapping[str, list[dict[str, Any]]]
Contenders = Mapping[str, Any]
PEERS = "peers"


@dataclass(frozen=True)
class Column:
    """A figure of the runs, its heading, and how it is written."""

    key: str
    heading: str
    form: str = "{:,.0f}"


@dataclass(frozen=True)
class Claim:
    """Of row's median `column`: at_most an absolute figure, or at_least a multiple of another row's.

    against: that other row, or PEERS for every rival among the peers but those named in `but`.
    """

    row: str
    column: str
    at_least: float | None = None
    against: str = PEERS
    at_most: float | None = None
    but: tuple[str, ...] = ()


class Described(Protocol):
    """What the report wants to know of a benchmark (see `harness.Benchmark`)."""

    @property
    def title(self) -> str: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    @property
    def key(self) -> str: ...
    @property
    def limits(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def less_is_better(self) -> bool: ...
    @property
    def claims(self) -> tuple[Claim, ...]: ...


def group_of(name: str) -> str:
    """A row's group: "limit", "ours" or "peer"."""
    return name.partition(":")[0] if name.startswith(("limit:", "ours:")) else "peer"


def print_report(benchmark: Described, contenders: Contenders, results: Results) -> None:
    """Print table, notes, absentees and claims as Markdown."""
    ran = [name for name in results if _values(results, name, None)]
    print(f"\n**{benchmark.title}**\n\n" + _table(benchmark, contenders, results, ran))
    others = [run["others_cpus"] for name in ran for run in results[name] if "others_cpus" in run]
    if others:
        print(
            f"\nMeanwhile others kept {median(others):.2f} CPUs busy (at most {max(others):.2f}), of {os.cpu_count()}."
        )
    notes = [f"- {name}: {contenders[name].note}" for name in ran if contenders[name].note]
    if notes:
        print("\nIn the clock:\n" + "\n".join(notes))
    absent = [f"- {name}: {_why(results[name])}" for name in results if name not in ran]
    if absent:
        print("\nDid not run:\n" + "\n".join(absent))
    verdicts = [line for claim in benchmark.claims for line in _judge(claim, contenders, results, ran)]
    if verdicts:
        print("\n| claim | found | |\n|---|---|---|\n" + "\n".join(verdicts))


def save(path: Path, title: str, settings: Mapping[str, str], results: Results) -> None:
    """Append one run to a JSON file: a list of objects with every figure of every round."""
    runs = json.loads(path.read_text()) if path.exists() else []
    when = time.strftime("%Y-%m-%d %H:%M")
    runs.append({"title": title, "time": when, "settings": dict(settings), "results": results})
    path.write_text(json.dumps(runs, indent=1) + "\n")


def _values(results: Results, name: str, key: str | None) -> list[float]:
    """A figure in every round that gave it; key None: 1 for every good round."""
    good = [run for run in results.get(name, []) if "error" not in run and "missing" not in run]
    return [1.0 for _ in good] if key is None else [run[key] for run in good if run.get(key) is not None]


def _ratio(results: Results, name: str, other: str, key: str) -> float | None:
    pairs = zip(results.get(name, []), results.get(other, []), strict=False)
    found = [ours[key] / theirs[key] for ours, theirs in pairs if ours.get(key) and theirs.get(key)]
    return median(found) if found else None


def _rivals(contenders: Contenders, name: str, ran: Iterable[str]) -> list[str]:
    """The peers that a row is compared with."""
    like = contenders[name].options.get("like")
    peers = [contenders[other] for other in ran if group_of(other) == "peer"]
    return [peer.name for peer in peers if peer.options.get("like") == like and not peer.options.get("apart")]


def _ratio_to_best(results: Results, name: str, rivals: Iterable[str], key: str) -> float | None:
    """As `_ratio`, to whichever of the rivals did best in a round."""
    found = []
    for number, run in enumerate(results[name]):
        rounds = [results[rival][number] for rival in rivals if number < len(results[rival])]
        best = max((other[key] for other in rounds if other.get(key)), default=None)
        if best and run.get(key):
            found.append(run[key] / best)
    return median(found) if found else None


def _table(benchmark: Described, contenders: Contenders, results: Results, ran: list[str]) -> str:
    columns = [column for column in benchmark.columns if any(_values(results, name, column.key) for name in ran)]
    limits = [(key, limit) for key, limit in benchmark.limits if limit == PEERS or _values(results, limit, key)]
    headings = [
        "contender",
        *(column.heading for column in columns),
        *(f"{key} / " + ("best peer" if limit == PEERS else f"`{limit}`") for key, limit in limits),
    ]
    lines = [_row(headings), "|---" * len(headings) + "|"]

    def place(name: str) -> float:
        values = _values(results, name, benchmark.key)
        if not values:
            return math.inf
        return median(values) if benchmark.less_is_better else -median(values)

    for name in sorted(ran, key=place):
        label = f"**{name}**" if group_of(name) == "ours" else name
        cells = [
            label,
            *(_cell(_values(results, name, column.key), column, benchmark.key) for column in columns),
        ]
        for key, limit in limits:
            if limit == PEERS:
                ratio = _ratio_to_best(results, name, _rivals(contenders, name, ran), key)
            else:
                ratio = _ratio(results, name, limit, key)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(values: list[float], column: Column, key: str) -> str:
    if not values:
        return ""
    text = column.form.format(median(values))
    if column.key == key and len(values) > 1:
        text += f" ({column.form.format(min(values))}–{column.form.format(max(values))})"
    return text


def _why(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "not run"
    return str(runs[0].get("missing") or f"failed ({runs[0].get('error')})")


def _judge(claim: Claim, contenders: Contenders, results: Results, ran: list[str]) -> list[str]:
    """Lines that say what was claimed, what was found and whether it holds; none where a side did not run."""
    values = _values(results, claim.row, claim.column)
    if not values:
        return []
    if claim.at_most is not None:
        found = median(values)
        return [_verdict(f"{claim.row}: {claim.column} at most {claim.at_most:g}", found, found <= claim.at_most)]
    rivals = [claim.against]
    if claim.against == PEERS:
        rivals = [n for n in _rivals(contenders, claim.row, ran) if not any(part in n for part in claim.but)]
    ratios = [(ratio, rival) for rival in rivals if (ratio := _ratio(results, claim.row, rival, claim.column))]
    if not ratios:
        return []
    worst, rival = min(ratios)
    least = claim.at_least or 1.0
    what = f"{claim.row}: {claim.column} at least {least:g} × " + (
        f"every peer (the closest: {rival})" if claim.against == PEERS else rival
    )
    return [_verdict(what, worst, worst >= least)]


def _verdict(what: str, found: float, holds: bool) -> str:
    return _row([what, f"{found:.3g}", "holds" if holds else "**fails**"])
