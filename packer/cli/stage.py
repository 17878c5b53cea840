"""`packer stage SET`, `packer stage ls`, `packer stage clean`.

The local directory is the only thing on stdout, so that a batch script can say DATA=$(packer stage …).
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import click

import readers
from cache.launchers import scratch_variables
from cache.messages import Done, plural
from cache.node import detect_ranks
from cache.staging.sources import CLEANUPS
from packer.cli.held import HeldSignals, undisturbed
from packer.cli.text import (
    ProgressDisplay,
    Rate,
    SetPlace,
    Size,
    human_bytes,
    human_seconds,
    json_option,
    part_option,
    print_json,
    show_result,
    target_option,
    threads_option,
)
from packer.node import CleanResult, StagedCopy, clean_staged, staged_copies
from readers.staging import FORMS

__all__ = ["command"]


class _Stage(click.Group):
    """A first argument that is not a subcommand is a data set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = ["copy", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        copy = self.commands["copy"]
        with formatter.section("Options of packer stage SET"):
            records = (option.get_help_record(ctx) for option in copy.params if isinstance(option, click.Option))
            formatter.write_dl([record for record in records if record is not None])
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in ("ls", "clean")])


class _RankDisplay:
    """The progress display of a rank that stages.

    Of a node's ranks the first shows progress, and so does the one that copies: the notes of others (`follows`) are
    shown when they begin to copy.
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


def _splits(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(name for name in value.split(",") if name)


_target_option = target_option(
    "Directory of this node; may name variables, as '$TMPDIR'. Default: "
    f"the first fit of {', '.join(f'${name}' for name in scratch_variables())}, /mnt/bb/$USER, /local, /scratch/local, "
    "/dev/shm.",
)  # fmt: skip


@click.group("stage", cls=_Stage,
             options_metavar="", subcommand_metavar="SET [OPTIONS] [-- COMMAND...] | ls | clean")  # fmt: skip
def command() -> None:
    """Copy a packed set, or part of it, to this node's own disk: once per node, however many processes ask for it.

    SET is a directory, or an address: s3://, gs://, az://, https://. The local directory is printed on stdout. A
    COMMAND is run while the copy is in use, with the directory in PACKER_STAGED, and its exit status is returned.
    """


@command.command("copy", hidden=True)
@click.argument("dataset", metavar="SET", type=SetPlace())
@_target_option
@click.option("--split", "splits", callback=_splits, metavar="SPLIT,…", help="Only this split, or these.")
@click.option("--as", "form", type=click.Choice(FORMS), default="shards", help="files: the original files of the set, "
              "for programs that read a folder of images. Default: shards.")  # fmt: skip
@part_option("Share of node I of N (from 0), as node-local order deals samples; 'node': as the launcher numbers the "
             "nodes.")  # fmt: skip
@click.option("--overlap/--no-overlap", default=True, help="Whether a shard in which two parts meet is staged on both "
              "nodes, or on the first alone, for nodes that share what they hold (packer serve).")  # fmt: skip
@click.option(
    "--fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="SHARE",
    help="Of the bytes, in (0, 1].",
)
@click.option("--quota", "quota_bytes", type=Size(), metavar="SIZE", help="For all copies in DIR: unused ones are "
              "removed, least recently used first.")  # fmt: skip
@click.option("--verify", is_flag=True, help="Also read files that exist already, and compare checksums.")
@click.option("--cleanup", type=click.Choice(CLEANUPS), default="never", help="atexit: remove the copy when COMMAND "
              "has ended, unless it is still in use. Default: never.")  # fmt: skip
@click.option("--bandwidth", "bytes_per_second", type=Rate(), metavar="RATE", help="At most this much, as 200MB/s.")
@threads_option("Default: 2 to 8, as CPUs allow.")
@click.option("--any-filesystem", is_flag=True, help="Take DIR even if other nodes share it (BeeOND).")
@json_option
@click.argument("run", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def _copy(dataset: str, target: str | None, as_json: bool, run: tuple[str, ...], **options: Any) -> int:
    """Copy SET to this node."""
    if options["cleanup"] == "atexit" and not run:
        raise click.UsageError("--cleanup atexit needs a COMMAND to wait for: packer stage SET … -- COMMAND")
    display = _RankDisplay(as_json, follows=detect_ranks().local_rank > 0)
    staging = readers.stage(dataset, target, watcher=display, **options)
    signals = HeldSignals(lambda: staging.begun, staging.stop)
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
    staging: readers.Staged, display: _RankDisplay, signals: HeldSignals, as_json: bool, run: tuple[str, ...]
) -> int:
    """The status of the command, 0 without one. After a signal it is not run."""
    started = time.monotonic()
    with staging as local:
        if signals.caught:
            return 0
        counts, seconds = staging.counts, time.monotonic() - started
        rate = f", {human_bytes(counts.copied_bytes / max(seconds, 1e-9))}/s" if counts.copied else ""
        copied, found = plural(counts.copied, "file"), plural(counts.found, "file")
        display.note(
            f"{human_bytes(counts.copied_bytes)} in {copied} copied, {found} already there, "
            f"{human_seconds(seconds)}{rate}"
        )
        if as_json:
            print_json({"path": str(local), "seconds": seconds, **vars(counts)})
        elif not run:
            click.echo(str(local))
        if run:
            return signals.run(run, {"PACKER_STAGED": str(local)})
        signals.ignore()
        return 0


@command.command("ls")
@_target_option
@json_option
def _ls(target: str | None, as_json: bool) -> None:
    """List the staged copies of this node."""
    copies = staged_copies(target)
    show_result(copies, as_json, lambda: _copies_lines(copies) or ["no staged copies"])


@command.command("clean")
@click.argument("dataset", metavar="[SET]", required=False)
@_target_option
@click.option("--dry-run", is_flag=True, help="List only.")
@json_option
def _clean(dataset: str | None, target: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove unused staged copies; SET: only those of this set."""
    with undisturbed():
        result = clean_staged(dataset, target, dry_run=dry_run)
    show_result(result, as_json, lambda: _cleaned(result, "would remove" if dry_run else "removed"))


def _copies_lines(copies: list[StagedCopy]) -> list[str]:
    """The copies as lines, one each."""
    return [
        f"{human_bytes(copy.bytes):>8s} of {human_bytes(copy.wanted_bytes):8s} {_use(copy):13s}  "
        f"{human_seconds(max(0.0, time.time() - copy.last_use)):>9s} ago  {copy.path}  of {copy.source}"
        for copy in copies
    ]


def _use(copy: StagedCopy) -> str:
    """How a copy is used. The process that removes one has locked it."""
    if copy.leaving:
        return "being removed" if copy.in_use else "half removed"
    return "in use" if copy.in_use else ""


def _cleaned(result: CleanResult, verb: str) -> list[str]:
    lines = [f"{verb} {copy.path}, {human_bytes(copy.bytes)}" for copy in result.removed]
    lines += [f"kept {copy.path}: in use" for copy in result.kept]
    lines += [f"left {path}: not written by packer" for path in result.foreign]
    return lines or ["no staged copies"]
