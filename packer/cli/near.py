"""`packer stage`, `packer upload`, `packer serve` and `packer cache`: data of a set on a node's disk and in its memory.

A staged directory, or the address of a server, is the only output on stdout, so that a batch script can use
DATA=$(packer stage …).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import click

import readers
from cache.launchers import scratch_variables
from cache.messages import Done, bar, human_bytes, human_seconds, plural, quoted
from cache.node import detect_ranks
from cache.serving import Server
from cache.staging.sources import CLEANUPS
from packer.cli import flags
from packer.cli.screen import ProgressDisplay
from packer.cli.signals import CommandSignals, undisturbed
from packer.node import (
    DIRECTORY,
    CacheReport,
    CleanResult,
    StagedCopy,
    WarmResult,
    clean_caches,
    clean_staged,
    list_caches,
    staged_copies,
    warm_cache,
)
from packer.uploading import UploadResult, upload
from readers.staging import FORMS

__all__ = ["cache_command", "serve_command", "stage_command", "upload_command"]

_run = click.argument("run", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")


# --- packer stage ---------------------------------------------------------------------------------------------------
class _Stage(click.Group):
    """A first argument that is not a subcommand is a data set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["copy", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = (param for param in self.commands["copy"].params if isinstance(param, click.Option))
        with formatter.section("Options of packer stage SET"):
            formatter.write_dl([record for param in options if (record := param.get_help_record(ctx)) is not None])
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in ("ls", "clean")])


class _RankDisplay:
    """The progress display of a rank that stages.

    The first rank of a node shows progress, and so does the rank that copies; the notes of the other ranks (`follows`)
    are shown when they begin to copy.
    """

    def __init__(self, silent: bool, follows: bool) -> None:
        self._display = ProgressDisplay(sys.stderr)
        self._silent, self._follows = silent, follows
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        if self._follows:
            self._notes.append(text)
        elif not self._silent:
            self._display.note(text)

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        if not waiting:
            self._follows = False
            for text in self._notes:
                self.note(text)
            self._notes.clear()
        if not (self._silent or self._follows):
            self._display.begin(samples, total_bytes, done, waiting=waiting)

    def end(self) -> None:
        self._display.end()


_target_option = flags.target_option(
    "Local directory of the node; may contain variables, such as '$TMPDIR'. Default: "
    f"the first suitable of {', '.join(f'${name}' for name in scratch_variables())}, /mnt/bb/$USER, /local, "
    "/scratch/local, /dev/shm.",
)


@click.group("stage", cls=_Stage,
             options_metavar="", subcommand_metavar="SET [OPTIONS] [-- COMMAND...] | ls | clean")  # fmt: skip
def stage_command() -> None:
    """Copy a packed set, or part of it, to the local disk of this node: once per node, for any number of processes.

    SET is a directory, or an address: s3://, gs://, az://, https://. The local directory is printed on stdout. COMMAND
    runs while the copy is in use, with the directory in PACKER_STAGED, and its exit status is returned.
    """


@stage_command.command("copy", hidden=True)
@click.argument("dataset", metavar="SET", type=flags.SetPlace())
@_target_option
@click.option("--split", "splits", callback=flags.split_list, metavar="SPLIT,…", help="Only this split, or these.")
@click.option("--as", "form", type=click.Choice(FORMS), default="shards", help="files: the original files of the set, "
              "for programs that read a folder of images. Default: shards.")  # fmt: skip
@flags.part_option("Share of node I of N (from 0), as node-local order deals samples; 'node': numbered by the "
                   "launcher.")  # fmt: skip
@click.option("--overlap/--no-overlap", default=True, help="Stage a shard with samples of two parts on both nodes, or "
    "only on the first, for nodes that serve each other (packer serve).")  # fmt: skip
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), default=1.0, metavar="SHARE",
              help="Share of the bytes to stage, in (0, 1].")  # fmt: skip
@flags.size_option(
    "--quota", "quota_bytes", help="Limit of all copies in DIR: unused copies are removed, least recently used first."
)
@click.option("--verify", is_flag=True, help="Also read existing files, and compare checksums.")
@click.option("--cleanup", type=click.Choice(CLEANUPS), default="never", help="atexit: remove the copy when COMMAND "
              "has ended, unless it is still in use. Default: never.")  # fmt: skip
@click.option("--bandwidth", "bytes_per_second", type=flags.Rate(), metavar="RATE", help="Limit of the bandwidth, such "
    "as 200MB/s.")  # fmt: skip
@flags.threads_option("Default: 2 to 8, depending on the CPUs.")
@click.option("--any-filesystem", is_flag=True, help="Use DIR even if other nodes share it (BeeOND).")
@flags.json_option
@_run
def _copy(dataset: str, target: str | None, as_json: bool, run: tuple[str, ...], **options: Any) -> int:
    """Copy SET to this node."""
    if options["cleanup"] == "atexit" and not run:
        raise click.UsageError("--cleanup atexit needs a COMMAND to wait for: packer stage SET … -- COMMAND")
    display = _RankDisplay(as_json, follows=detect_ranks().local_rank > 0)
    staging = readers.stage(dataset, target, watcher=display, **options)
    signals = CommandSignals(lambda: staging.begun, staging.stop)
    with signals.handling():
        try:
            status = _stage_and_run(staging, display, signals, as_json, run)
        except (KeyboardInterrupt, readers.StagingError):
            if not signals.caught:
                raise
        if not signals.caught:
            return status
    if signals.caught == signal.SIGINT:
        raise click.Abort
    name = signal.Signals(signals.caught).name
    click.echo(f"packer: stopped by {name}; run the same command again to continue", err=True)
    return 128 + signals.caught


def _stage_and_run(
    staging: readers.Staged, display: _RankDisplay, signals: CommandSignals, as_json: bool, run: tuple[str, ...]
) -> int:
    """Stage, then run the command if there is one; returns its status, else 0. After a signal it is not run."""
    started = time.monotonic()
    with staging as local:
        if signals.caught:
            return 0
        counts, seconds = staging.counts, time.monotonic() - started
        copied, present = plural(counts.copied, "file"), plural(counts.found, "file")
        rate = f", {human_bytes(counts.copied_bytes / max(seconds, 1e-9))}/s" if counts.copied else ""
        size, took = human_bytes(counts.copied_bytes), human_seconds(seconds)
        display.note(f"{size} in {copied} copied, {present} already there, {took}{rate}")
        if as_json:
            flags.print_json({"path": str(local), "seconds": seconds, **vars(counts)})
        elif not run:
            click.echo(str(local))
        if run:
            return signals.run(run, {"PACKER_STAGED": str(local)})
        signals.ignore()
        return 0


def _copies(copies: list[StagedCopy]) -> list[str]:
    return [
        f"{human_bytes(copy.bytes):>8s} of {human_bytes(copy.wanted_bytes):8s} {_use(copy):13s}  "
        f"{human_seconds(max(0.0, time.time() - copy.last_use)):>9s} ago  {copy.path}  of {copy.source}"
        for copy in copies
    ] or ["no staged copies"]


def _use(copy: StagedCopy) -> str:
    """How a copy is used. A process that removes a copy holds its lock."""
    if copy.leaving:
        return "being removed" if copy.in_use else "half removed"
    return "in use" if copy.in_use else ""


@stage_command.command("ls")
@_target_option
@flags.reports(_copies, watched=False)
def _ls(target: str | None) -> list[StagedCopy]:
    """List the staged copies of this node."""
    return staged_copies(target)


def _cleaned(result: CleanResult) -> list[str]:
    verb = "would remove" if click.get_current_context().params["dry_run"] else "removed"
    lines = [f"{verb} {copy.path}, {human_bytes(copy.bytes)}" for copy in result.removed]
    lines += [f"kept {copy.path}: in use" for copy in result.kept]
    lines += [f"kept {path}: not written by packer" for path in result.foreign]
    return lines or ["no staged copies"]


@stage_command.command("clean")
@click.argument("dataset", metavar="[SET]", required=False)
@_target_option
@click.option("--dry-run", is_flag=True, help="List only.")
@flags.reports(_cleaned, watched=False)
def _clean(dataset: str | None, target: str | None, dry_run: bool) -> CleanResult:
    """Remove unused staged copies; with SET, those of this set only."""
    with undisturbed():
        return clean_staged(dataset, target, dry_run=dry_run)


# --- packer upload ---------------------------------------------------------------------------------------------------
def _uploaded(result: UploadResult) -> Iterator[str]:
    sent, size = plural(result.sent, "file"), human_bytes(result.sent_bytes)
    removed = f", {plural(result.removed, 'file')} of the old set removed" if result.removed else ""
    yield f"{result.address}: {sent} sent, {size}; {result.found:,} there already{removed}; all checked"
    yield f"  packer verify {quoted(result.address)}  reads every byte back"


@click.command("upload")
@click.argument("path", metavar="SET", type=flags.SetPlace(local=True))
@click.argument("address", metavar="ADDRESS")
@click.option("--overwrite", is_flag=True, help="Replace another set at ADDRESS.")
@flags.reports(_uploaded)
def upload_command(path: str, address: str, **options: Any) -> UploadResult:
    """Copy SET to ADDRESS: s3://, gs://, az:// or https:// (WebDAV).

    Every file is stored with its checksum. After an interruption the same command sends what is missing. Readers see
    the set when it is complete, because its dataset.json is written last.
    """
    return upload(path, address, **options)


# --- packer serve ---------------------------------------------------------------------------------------------------
@click.command("serve")
@flags.set_argument
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@flags.split_option("Default: the only split, or train.")
@flags.part_option("The part of this node: node I of N (from 0), as node-local order deals samples. Default: "
             "node, numbered by the launcher.")  # fmt: skip
@click.option("--local", type=click.Path(exists=True, file_okay=False), metavar="DIR", help="A staged copy of the "
    "part; other samples are read from SET.")  # fmt: skip
@click.option("--cache", "capacity", metavar="SIZE", help="Cache samples of the part in shared memory: such as 20GiB, "
    "50% of the samples, or auto. In training: readers.cached(reader, SIZE, partition=…).")  # fmt: skip
@click.option("--host", metavar="ADDRESS", help="Where to listen: a name, an address or a network of this machine, "
    "such as 10.1.0.0/16. Default: the address of its hostname.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: a free one.")
@flags.file_list_option("--token", "A file of mode 0600. Default: one is created in DIR.")
@flags.file_list_option("--certificate", "Use TLS, with this certificate (PEM).")
@flags.file_list_option("--key", "Key of the certificate (PEM).")
@flags.json_option
@_run
def serve_command(path: str, folder: str, as_json: bool, run: tuple[str, ...], **options: Any) -> int:
    """Serve this node's part of SET to the other nodes of the job, until SIGTERM, Ctrl-C or the end of COMMAND.

    DIR is shared by all nodes, which exchange addresses and the token in it. In training:
    readers.share(reader, DIR, serve=False).
    """
    stopped = threading.Event()
    signals = CommandSignals(lambda: True, stopped.set)
    with signals.handling(), ExitStack() as stack:
        shared = _shared(stack, path, folder, **options)
        server = shared.serve(Server)
        if as_json:
            flags.print_json({"url": shared.url, "node": shared.node, "nodes": shared.nodes})
        else:
            flags.show(shared.url)
        status = signals.run(run, {}) if run else 0
        if not run:
            stopped.wait()
        signals.ignore()
        shared.close()
        stats = server.stats
    served = f"{stats.answers:,} ranges, {human_bytes(stats.sent_bytes)}"
    failed = f"{stats.missing:,} not found or not readable, {stats.refused:,} refused"
    flags.show(f"packer: served {served}; {failed}", err=True)
    return status


def _shared(
    stack: ExitStack, path: str, folder: str, *, local: str | None, capacity: str | None,
    part: tuple[int, int] | str | None, split: str | None, **options: Any,
) -> readers.Shared:  # fmt: skip
    """The reader that this node serves. Everything opened is closed with the stack."""
    if isinstance(part, tuple):
        options |= {"node": part[0], "nodes": part[1]}
    reader = stack.enter_context(readers.open(local or path, split, fallback=path if local else None))
    shared = readers.share(reader, folder, **options)
    if capacity is None:
        return shared
    partition = (shared.node, shared.nodes)
    return readers.share(stack.enter_context(readers.cached(reader, capacity, partition=partition)), folder, **options)


# --- packer cache ---------------------------------------------------------------------------------------------------
_BAR = 10
_NAME = 48  # characters
_directory_option = click.option("--target", "--directory", "directory", default=DIRECTORY, show_default=True,
                                 metavar="DIR", help="Directory of the caches.",
                                 type=click.Path(exists=True, file_okay=False))  # fmt: skip


@click.group("cache")
def cache_command() -> None:
    """Shared-memory caches of `readers.cached` on this node: list them, fill one in advance, remove unused ones."""


def _table(caches: list[CacheReport]) -> list[str]:
    """One line per cache."""
    rows = [("job", "set", "kept", "size", "full", "", "hits", "", "used by")]
    for report in caches:
        full = (f"{report.filled:.0%}", bar(report.filled, _BAR))
        hits = (f"{report.hit_rate:.0%}", bar(report.hit_rate, _BAR))
        size = human_bytes(report.capacity_bytes)
        rows.append((report.job, _set_name(report), report.kept, size, *full, *hits, _users(report)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines if caches else _no_caches()


def _no_caches() -> list[str]:
    return [f"{click.get_current_context().params['directory']}: no caches"]


def _details(caches: list[CacheReport]) -> list[str]:
    lines = [line for report in caches for line in (*_detail(report), "")]
    return lines[:-1] or _no_caches()


def _detail(report: CacheReport) -> Iterator[str]:
    """All figures of one cache."""
    reads = report.hits + report.misses + report.passed
    kept = "persists when unused" if report.persist else "removed with its last user"
    hits = f"{report.hits:,} hits ({human_bytes(report.hit_bytes)}), {report.misses:,} misses"
    used = f"{human_bytes(report.used_bytes)} of {human_bytes(report.capacity_bytes)}"
    dropped = f", {report.dropped:,} dropped as damaged" if report.dropped else ""
    yield f"{report.name}: {report.kept}, made {human_seconds(report.age_s)} ago, {kept}"
    yield f"  set      {report.title or '(unnamed)'}, fingerprint {report.set}"
    yield f"  job      {report.job}"
    yield f"  memory   {used}  {report.filled:.0%} {bar(report.filled, 20)}"
    passed = f"{report.passed:,} passed through"
    yield f"  reads    {reads:,}: {hits}, {passed}  {report.hit_rate:.0%} {bar(report.hit_rate, 20)}"
    yield f"  stored   {report.puts:,} ({human_bytes(report.put_bytes)}){dropped}"
    yield f"  {'used by' if report.users else 'state  '}  {_users(report)}"


def _set_name(report: CacheReport) -> str:
    """The title of the set, cut at the front if long; without one, the beginning of its fingerprint."""
    if report.title:
        return report.title if len(report.title) <= _NAME else f"…{report.title[1 - _NAME :]}"
    fingerprint, slash, split = report.set.partition("/")
    return f"{fingerprint[:12]}{slash}{split}" if report.set else "(half made)"


def _users(report: CacheReport) -> str:
    if report.users:
        return ", ".join(f"{pid} {command}".rstrip() for pid, command in report.users)
    return "in use" if report.in_use else "unused, persists" if report.persist else "unused"


@cache_command.command("ls")
@_directory_option
@flags.reports(_table, watched=False)
def _list(directory: str) -> list[CacheReport]:
    """List the caches: job, set, form, size, fill, hit rate, users."""
    return list_caches(directory)


@cache_command.command("stats")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@_directory_option
@flags.reports(_details, watched=False)
def _stats(names: tuple[str, ...], directory: str) -> list[CacheReport]:
    """Show the use of each cache so far. NAME: a part of its name, its set or its form."""
    return list_caches(directory, names)


def _warmed(result: WarmResult) -> list[str]:
    rate = result.present / max(result.seconds, 1e-9)
    return [
        f"{result.path}: {result.present:,} of {plural(result.samples, 'sample')} of {result.split} kept as "
        f"{result.kept_as}, {human_bytes(result.used_bytes)} of {human_bytes(result.capacity_bytes)}",
        f"  {human_seconds(result.seconds)}, {rate:,.0f} samples/s; it stays until  packer cache clean --all",
    ]


@cache_command.command("warm")
@flags.set_argument
@flags.split_option("Default: the only split, or train.")
@click.option("--capacity", default="auto", show_default=True, metavar="SIZE", help="Such as 20GiB, or 50% of the "
              "samples. auto: the whole set, or as much as memory allows.")  # fmt: skip
@click.option("--keep", default="encoded", show_default=True, metavar="FORM", help="encoded, coefficients (the same "
    "pixels, decoded faster), recoded:256@90 (short side and JPEG quality), or decoded:256.")  # fmt: skip
@flags.threads_option("Default: one per CPU.")
@click.option("--job", metavar="NAME", help="Only for readers with this job=.")
@_directory_option
@flags.reports(_warmed)
def _warm(path: str, **options: Any) -> WarmResult:
    """Fill a cache for SET, which persists until `packer cache clean --all`.

    In training: readers.cached(reader, keep=…, persist=True).
    """
    return warm_cache(path, **options)


@cache_command.command("clean")
@click.argument("names", nargs=-1, metavar="[SET...]")
@click.option("--all", "everything", is_flag=True, help="Also persistent caches; never caches in use.")
@click.option("--dry-run", is_flag=True, help="List only.")
@_directory_option
@flags.json_option
def _clean_caches(names: tuple[str, ...], everything: bool, dry_run: bool, directory: str, as_json: bool) -> None:
    """Remove unused caches, for example of jobs that were killed. SET: only those of this set, or of this name."""
    named = list_caches(directory, names) if names else []
    removed = clean_caches(directory, names, everything=everything, dry_run=dry_run)
    size = human_bytes(sum(report.capacity_bytes for report in removed))
    done = "would be removed" if dry_run else "removed"
    lines = [f"{directory}: {plural(len(removed), 'cache')} {done}, {size}"]
    lines += [f"  {report.name}  {_set_name(report)}  {report.kept}" for report in removed]
    gone = {report.name for report in removed}
    for report in named:
        if report.name not in gone:
            why = "persists; --all removes it, too" if report.persist and not report.in_use else "in use"
            lines.append(f"  kept {report.name}: {why}")
    flags.show_result(removed, as_json, lambda: lines)
