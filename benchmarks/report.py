"""From the figures of all rounds to a table, ratios, and verdicts on the claims.

A figure is the median over rounds. A ratio is the median of the ratios within each round, because both rows of a round
ran in the same phase of the machine. A claim compares one of our rows with a limit, or with every peer that ran.

A row is compared only with peers that have the same option `like`, and never with rows that have the option `apart`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["PEERS", "Claim", "Column", "group_of", "print_report", "ratio", "reason", "save", "table", "values_of"]

Results = Mapping[str, list[dict[str, Any]]]
Contenders = Mapping[str, Any]
PEERS = "peers"


@dataclass(frozen=True)
class Column:
    """A figure of the runs, its heading, and its format."""

    key: str
    heading: str
    form: str = "{:,.0f}"


@dataclass(frozen=True)
class Claim:
    """A bound on the median of a row's figure `column`: at_most, or at_least times another row's figure.

    against: the other row, or PEERS for every comparable peer, except the rows in `but`.
    """

    row: str
    column: str
    at_least: float = 1.0
    against: str = PEERS
    at_most: float | None = None
    but: tuple[str, ...] = ()


def group_of(name: str) -> str:
    """A row's group: "limit", "ours" or "peer"."""
    return name.partition(":")[0] if name.startswith(("limit:", "ours:")) else "peer"


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    headings = list(headings)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *rows))


def print_report(benchmark: Any, contenders: Contenders, results: Results) -> None:
    """Print table, notes, missing rows and claims of a `harness.Benchmark` as Markdown."""
    ran = [name for name in results if values_of(results, name, None)]
    print(f"\n**{benchmark.title}**\n\n" + _figures(benchmark, contenders, results, ran))
    others = [run["others_cpus"] for name in ran for run in results[name] if "others_cpus" in run]
    if others:
        busy = f"{median(others):.2f} CPUs busy (at most {max(others):.2f}), of {os.cpu_count()}"
        print(f"\nOther processes during the runs: {busy}.")
    versions = {name: version for name in ran for name, version in results[name][0].get("versions", {}).items()}
    if versions:
        print(f"\nCommit {_commit()}; " + ", ".join(" ".join(pair) for pair in sorted(versions.items())) + ".")
    if notes := [f"- {name}: {contenders[name].note}" for name in ran if contenders[name].note]:
        print("\nIncluded in the times:\n" + "\n".join(notes))
    if absent := [f"- {name}: {reason(results[name])}" for name in results if name not in ran]:
        print("\nDid not run:\n" + "\n".join(absent))
    if verdicts := [line for claim in benchmark.claims for line in _judge(claim, contenders, results, ran)]:
        print("\n" + table(["claim", "found", ""], verdicts))


def _commit() -> str:
    """The commit of this repository, with "-dirty" if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def save(path: Path, title: str, settings: Mapping[str, str], results: Results) -> None:
    """Append one run to a JSON file: a list of objects with every figure of every round."""
    runs = json.loads(path.read_text()) if path.exists() else []
    when = time.strftime("%Y-%m-%d %H:%M")
    runs.append({"title": title, "time": when, "commit": _commit(), "settings": dict(settings), "results": results})
    path.write_text(json.dumps(runs, indent=1) + "\n")


def values_of(results: Results, name: str, key: str | None) -> list[Any]:
    """A figure's values, one per round that has it; key None: 1 per successful round."""
    good = [run for run in results.get(name, []) if "error" not in run and "missing" not in run]
    return [1.0 for _ in good] if key is None else [run[key] for run in good if run.get(key) is not None]


def ratio(results: Results, name: str, other: str, key: str) -> float | None:
    """The median over rounds of a row's figure divided by another row's; None if one of them did not run."""
    values = _ratios(results, name, other, key)
    return median(values) if values else None


def _ratios(results: Results, name: str, other: str, key: str) -> list[float]:
    pairs = zip(results.get(name, []), results.get(other, []), strict=False)
    return [own[key] / rival[key] for own, rival in pairs if own.get(key) and rival.get(key)]


def reason(runs: list[dict[str, Any]]) -> str:
    """The reason why a row has no figures."""
    run = runs[0] if runs else {}
    return str(run.get("missing") or f"failed: {run.get('error', 'not run')}")


def _rivals(contenders: Contenders, name: str, ran: Iterable[str]) -> list[str]:
    """The peers that a row is compared with."""
    like = contenders[name].options.get("like")
    peers = [contenders[other] for other in ran if group_of(other) == "peer"]
    return [peer.name for peer in peers if peer.options.get("like") == like and not peer.options.get("apart")]


def _ratios_to_best(results: Results, name: str, rivals: Iterable[str], key: str) -> list[float]:
    """As `_ratios`, to the best rival of each round."""
    rounds = itertools.zip_longest(*(results[rival] for rival in rivals), fillvalue={})
    best = [{key: max((run[key] for run in runs if run.get(key)), default=None)} for runs in rounds]
    return _ratios({name: results[name], PEERS: best}, name, PEERS, key)


def _figures(benchmark: Any, contenders: Contenders, results: Results, ran: list[str]) -> str:
    columns = [column for column in benchmark.columns if any(values_of(results, name, column.key) for name in ran)]
    limits = [(key, limit) for key, limit in benchmark.limits if limit == PEERS or values_of(results, limit, key)]
    over = (f"{key} / " + ("best peer" if limit == PEERS else f"`{limit}`") for key, limit in limits)
    sign = 1 if benchmark.less_is_better else -1

    def place(name: str) -> float:
        values = values_of(results, name, benchmark.key)
        return sign * median(values) if values else math.inf

    lines = []
    for name in sorted(ran, key=place):
        cells = [f"**{name}**" if group_of(name) == "ours" else name]
        cells += [_cell(values_of(results, name, c.key), c.form, c.key == benchmark.key) for c in columns]
        for key, limit in limits:
            rivals = _rivals(contenders, name, ran) if limit == PEERS else [limit]
            cells.append(_cell(_ratios_to_best(results, name, rivals, key), "{:.2f}", True))
        lines.append(cells)
    return table(["contender", *(column.heading for column in columns), *over], lines)


def _cell(values: list[float], form: str, with_range: bool) -> str:
    if not values:
        return ""
    text = form.format(median(values))
    if with_range and len(values) > 1:
        text += f" ({form.format(min(values))}–{form.format(max(values))})"
    return text


def _judge(claim: Claim, contenders: Contenders, results: Results, ran: list[str]) -> list[list[str]]:
    """Rows of (claim, result, verdict); no row if one of the compared rows did not run."""
    values = values_of(results, claim.row, claim.column)
    if not values:
        return []
    if claim.at_most is not None:
        value, holds = median(values), median(values) <= claim.at_most
        bound = f"at most {claim.at_most:g}"
    else:
        rivals = [claim.against]
        if claim.against == PEERS:
            rivals = [n for n in _rivals(contenders, claim.row, ran) if not any(part in n for part in claim.but)]
        ratios = [(times, rival) for rival in rivals if (times := ratio(results, claim.row, rival, claim.column))]
        if not ratios:
            return []
        value, rival = min(ratios)
        holds = value >= claim.at_least
        name = f"every peer (the closest: {rival})" if claim.against == PEERS else rival
        bound = f"at least {claim.at_least:g} × {name}"
    return [[f"{claim.row}: {claim.column} {bound}", f"{value:.3g}", "holds" if holds else "**fails**"]]
