"""`packer cache`: ls, stats, warm, clean."""

from __future__ import annotations

from typing import Any

import click

from cache.messages import plural
from packer.cli.text import (
    SetPlace,
    bar,
    human_bytes,
    human_seconds,
    json_option,
    show_result,
    split_option,
    threads_option,
    watcher,
)
from packer.node import DIRECTORY, CacheReport, WarmResult, clean_caches, list_caches, warm_cache

__all__ = ["command"]

_BAR = 10
_NAME = 48  # characters
directory_option = click.option(
    "--target", "--directory", "directory", default=DIRECTORY, show_default=True, metavar="DIR",
    help="Where the caches are.", type=click.Path(exists=True, file_okay=False),
)  # fmt: skip


@click.group("cache")
def command() -> None:
    """Shared-memory caches that `readers.cached` makes on this node: what there is, filling one ahead, cleaning up."""


@command.command("ls")
@directory_option
@json_option
def list_command(directory: str, as_json: bool) -> None:
    """List the caches: job, set, what is kept, size, how full, hit rate, who uses it."""
    reports = list_caches(directory)
    show_result(reports, as_json, lambda: table(reports) if reports else [f"{directory}: no caches"])


@command.command("stats")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@directory_option
@json_option
def stats_command(names: tuple[str, ...], directory: str, as_json: bool) -> None:
    """Show the use of each cache so far. NAME: a part of its name, its set or of what it keeps."""
    reports = list_caches(directory, names)
    lines = [line for report in reports for line in (*details(report), "")]
    show_result(reports, as_json, lambda: lines[:-1] if lines else [f"{directory}: no caches"])


@command.command("warm")
@click.argument("path", metavar="SET", type=SetPlace())
@split_option("Default: the only split, or train.")
@click.option("--capacity", default="auto", show_default=True, metavar="SIZE", help="As 20GiB, or 50% of the samples. "
              "auto: the whole set, or what memory allows.")  # fmt: skip
@click.option("--keep", default="encoded", show_default=True, metavar="FORM", help="encoded, coefficients (the "
              "same pixels, sooner), recoded:256@90 (short side and JPEG quality), or decoded:256.")  # fmt: skip
@threads_option("Default: one per CPU.")
@click.option("--job", metavar="NAME", help="Only for readers that are opened with this job=.")
@directory_option
@json_option
def warm_command(path: str, as_json: bool, **options: Any) -> None:
    """Fill a cache for SET, which then stays until `packer cache clean --all`.

    In training: readers.cached(reader, keep=…, persist=True).
    """
    result = warm_cache(path, watcher=watcher(as_json), **options)
    show_result(result, as_json, lambda: warmed(result))


@command.command("clean")
@click.argument("names", nargs=-1, metavar="[SET...]")
@click.option("--all", "everything", is_flag=True, help="Also caches that persist. Never those in use.")
@click.option("--dry-run", is_flag=True, help="List only.")
@directory_option
@json_option
def clean_command(names: tuple[str, ...], everything: bool, dry_run: bool, directory: str, as_json: bool) -> None:
    """Remove unused caches, such as those of jobs that were killed. SET: only those of this set, or of this name."""
    others = list_caches(directory, names) if names else []
    reports = clean_caches(directory, names, everything=everything, dry_run=dry_run)
    size = human_bytes(sum(report.capacity_bytes for report in reports))
    done = "would be removed" if dry_run else "removed"
    lines = [f"{directory}: {plural(len(reports), 'cache')} {done}, {size}"]
    lines += [f"  {report.name}  {_set_name(report)}  {report.kept}" for report in reports]
    gone = {report.name for report in reports}
    lines += [f"  kept {other.name}: {_why_kept(other)}" for other in others if other.name not in gone]
    show_result(reports, as_json, lambda: lines)


def table(reports: list[CacheReport]) -> list[str]:
    """One line for each cache."""
    rows = [("job", "set", "kept", "size", "full", "", "hits", "", "used by")]
    for report in reports:
        full, hits = bar(report.filled, _BAR), bar(report.hit_rate, _BAR)
        shares = (f"{report.filled:.0%}", full, f"{report.hit_rate:.0%}", hits)
        rows.append(
            (report.job, _set_name(report), report.kept, human_bytes(report.capacity_bytes), *shares, _users(report))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def details(report: CacheReport) -> list[str]:
    """One cache in full."""
    reads = report.hits + report.misses + report.passed
    kept = "stays when it is not in use" if report.persist else "removed with its last user"
    return [
        f"{report.name}: {report.kept}, made {human_seconds(report.age_s)} ago, {kept}",
        f"  set      {report.title or '(unnamed)'}, fingerprint {report.set}",
        f"  job      {report.job}",
        f"  memory   {human_bytes(report.used_bytes)} of {human_bytes(report.capacity_bytes)}  "
        f"{report.filled:.0%} {bar(report.filled, 20)}",
        f"  reads    {reads:,}: {report.hits:,} hits ({human_bytes(report.hit_bytes)}), {report.misses:,} misses, "
        f"{report.passed:,} passed through  {report.hit_rate:.0%} {bar(report.hit_rate, 20)}",
        f"  stored   {report.puts:,} ({human_bytes(report.put_bytes)})"
        + (f", {report.dropped:,} dropped as damaged" if report.dropped else ""),
        f"  {'used by' if report.users else 'state  '}  {_users(report)}",
    ]


def warmed(result: WarmResult) -> list[str]:
    """The result in two lines."""
    rate = result.present / max(result.seconds, 1e-9)
    return [
        f"{result.path}: {result.present:,} of {plural(result.samples, 'sample')} of {result.split} kept as "
        f"{result.kept_as}, {human_bytes(result.used_bytes)} of {human_bytes(result.capacity_bytes)}",
        f"  {human_seconds(result.seconds)}, {rate:,.0f} samples/s; it stays until  packer cache clean --all",
    ]


def _set_name(report: CacheReport) -> str:
    """The title of the set, of a long one the end; else the beginning of its fingerprint."""
    if report.title:
        return report.title if len(report.title) <= _NAME else f"…{report.title[1 - _NAME :]}"
    fingerprint, slash, split = report.set.partition("/")
    return f"{fingerprint[:12]}{slash}{split}" if report.set else "(half made)"


def _why_kept(report: CacheReport) -> str:
    return "persists; --all removes it, too" if report.persist and not report.in_use else "in use"


def _users(report: CacheReport) -> str:
    if report.users:
        return ", ".join(f"{pid} {command}".rstrip() for pid, command in report.users)
    return "in use" if report.in_use else "unused, persists" if report.persist else "unused"
