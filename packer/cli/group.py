"""The group of all commands, and how they end: errors become one line, or JSON, and an exit status.

The library names arguments: overwrite=True, on_error='skip'. Messages show the flags of the command in their place:
--overwrite, --on-error skip. This module imports click alone, so that `packer --help` is quick.
"""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from cache.errors import PackerError
from cache.messages import printable
from packer.cli.interrupt import INTERRUPTED, leave_at_once, started
from packer.cli.screen import learn_flags, stop_logging, verbose_option, version_lines, with_flags

__all__ = ["EXAMPLES", "OTHER_NAMES", "WORDS", "SectionedCommand", "cli", "run"]


# ------------------------------------------------------------------------------
# A command whose options are listed in sections, so that many of them stay readable.


class SectionedCommand(click.Command):
    """sections: title -> names of the parameters in it, both in the order of the help; the others come first."""

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sections = sections
        unknown = {name for names in sections.values() for name in names} - {param.name for param in self.params}
        assert not unknown, f"no such parameters: {unknown}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {param.name: param.get_help_record(ctx) for param in options}
        placed = {name for names in self._sections.values() for name in names}
        rest = [name for name in records if name not in placed]
        for title, names in {"Options": rest, **self._sections}.items():
            rows = [record for record in map(records.get, names) if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


# ------------------------------------------------------------------------------
# The words in usage lines, and the examples at the end of each command's --help: what for, and the line to type.
#
# Names in them mean the same everywhere: images is a folder of images, images-hdf5 (-tar, -tfrecord) a set made of it.


WORDS = {
    "SET": "a packed set: its directory, or its address (s3://, https://, …)",
    "SOURCE": "what can be packed: a folder, an archive, a table, a set, …",
    "SHARD": "a shard that other programs have made, or a directory of them",
    "OUT": "where a new set goes",
    "DIR": "a directory of this machine",
    "FILE": "a file of this machine",
    "SPLIT": "a part of a set, as train",
    "SIZE": "bytes, as 256MiB or 1GB; some options take a share, as 30%",
    "RATE": "bytes a second, as 200MB/s",
    "TIME": "a duration, as 20ms or 1.5s",
    "I/N": "number I, from 0, of N",
}

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "convert": (
        ("pack a folder into images-hdf5", "packer convert images --to hdf5"),
        ("an archive as it is, and smaller images", "packer convert images.tar --to tar -o small --max-side 512"),
        ("how large, how long, how many files", "packer convert images --to hdf5 -o try --dry-run"),
        ("task 3 of an array of 16", "packer convert images --to tar -o /scratch/set --task 3/16"),
    ),
    "commit": (
        ("when all tasks are done", "packer commit /scratch/set"),
        ("for a script", "packer commit /scratch/set --json"),
    ),
    "index": (
        ("read WebDataset shards where they are", "packer index shards --image-key 'jpg;png' --label-key cls"),
        ("the set elsewhere, with links", "packer index shards -o set --split train"),
        ("rebuild the index of a set", "packer index images-tar"),
    ),
    "reshard": (
        ("one set as another container", "packer reshard images-hdf5 --to tar -o images-tar2"),
        ("drop unused bytes, in place", "packer reshard images-hdf5 --shard-size 1GiB"),
    ),
    "append": (
        ("more images into the same splits", "packer append images-hdf5 more"),
        ("a folder without splits, known keys skipped", "packer append images-hdf5 new --split train --existing skip"),
    ),
    "merge": (
        ("one set of two, without copying", "packer merge images-hdf5 other-hdf5 -o both"),
        ("keys that both have", "packer merge images-hdf5 other-hdf5 -o both2 --prefix-keys"),
    ),
    "split": (
        ("hold out a tenth, by class", "packer split images-hdf5 --fractions train=0.9,val=0.1 --stratify -o dealt"),
        ("try it", "packer split images-hdf5 --fractions a=0.5,b=0.5 --seed 1 --dry-run"),
    ),
    "subset": (
        ("a hundred images of each split", "packer subset images-hdf5 -o hundred --limit 100 --seed 0"),
        ("large images only", "packer subset images-hdf5 -o large --where 'min_side >= 224'"),
        ("those of a list", "packer subset images-hdf5 -o listed --keys keys.txt"),
    ),
    "drop": (
        ("samples of a list", "packer drop images-hdf5 --keys keys.txt"),
        ("tiny images, into a new set", "packer drop images-hdf5 --where 'min_side < 32' -o kept"),
    ),
    "erase": (
        ("what it would remove", "packer erase images-hdf5 --keys keys.txt --dry-run"),
        ("the images of a list", "packer erase images-hdf5 --keys keys.txt"),
    ),
    "relabel": (
        ("another name for a class", "packer relabel images-hdf5 --map cat=felis"),
        ("labels from a table", "packer relabel images-hdf5 labels.csv -o relabelled"),
    ),
    "dedup": (
        ("what is there twice", "packer dedup images-hdf5 --dry-run"),
        ("also resized copies; keep those of train", "packer dedup images-hdf5 --near 6 --prefer train -o unique"),
    ),
    "add-field": (
        ("a mask for each image, named by its key", "packer add-field images-hdf5 masks --name mask"),
        ("captions in text files", "packer add-field images-hdf5 captions --name caption --kind text"),
    ),
    "prune": (
        ("what would go", "packer prune images-hdf5 --dry-run"),
        ("remove it", "packer prune images-hdf5"),
    ),
    "inspect": (
        ("splits, classes, sizes, duplicates", "packer inspect images-hdf5"),
        ("for a script", "packer inspect images-hdf5 --json"),
        ("a set in an object store", "packer inspect s3://bucket/images-hdf5"),
    ),
    "view": (
        ("a set, in the browser of this machine", "packer view images-hdf5"),
        ("a folder, as it is", "packer view images"),
        ("a set in an object store", "packer view s3://bucket/images-hdf5"),
        ("a page to put beside the set", "packer view images-hdf5 --export page"),
    ),
    "verify": (
        ("every checksum", "packer verify images-hdf5"),
        ("also decode, and compare with the originals", "packer verify images-hdf5 --deep --against images"),
        ("a set in an object store", "packer verify s3://bucket/images-hdf5"),
    ),
    "extract": (
        ("the original tree", "packer extract images-hdf5 -o back"),
        ("one class of one split", "packer extract images-hdf5 -o cats --split train --keys 'cat/*'"),
    ),
    "export-index": (
        ("files for DALI's own reader", "packer export-index images-tar --for dali"),
        ("for the package tfrecord", "packer export-index images-tfrecord --for tfrecord -o indexes"),
    ),
    "stage": (
        ("in a batch script", "DATA=$(packer stage images-hdf5 --target '$SLURM_TMPDIR')"),
        ("around a training", "packer stage images-hdf5 --cleanup atexit -- python train.py"),
        ("from an object store, one split", "packer stage s3://bucket/images-hdf5 --split train"),
        ("what is staged here; remove what is unused", "packer stage ls && packer stage clean"),
    ),
    "stage ls": (("on the usual disks", "packer stage ls"), ("on this one", "packer stage ls --target /local")),
    "stage clean": (
        ("all copies not in use", "packer stage clean"),
        ("those of one set; say only", "packer stage clean images-hdf5 --dry-run"),
    ),
    "serve": (
        ("on each node, around the training", "packer serve images-hdf5 shared -- python train.py"),
        ("node 2 of 8, with a memory cache", "packer serve images-hdf5 shared --part 2/8 --cache 20GiB"),
    ),
    "cache": (
        ("what this node keeps", "packer cache ls"),
        ("fill one before the job", "packer cache warm images-hdf5 --capacity 20GiB"),
        ("remove those that jobs left", "packer cache clean"),
    ),
    "cache ls": (("job, set, size, hits, users", "packer cache ls"), ("for a script", "packer cache ls --json")),
    "cache stats": (
        ("every cache in full", "packer cache stats"),
        ("those of one set", "packer cache stats images-hdf5"),
    ),
    "cache warm": (
        ("the whole set, or what memory allows", "packer cache warm images-hdf5"),
        ("as small JPEGs", "packer cache warm images-hdf5 --split train --keep recoded:256@90"),
    ),
    "cache clean": (
        ("what no process uses", "packer cache clean"),
        ("also caches that persist", "packer cache clean --all"),
    ),
    "advise": (
        ("what to pack for steps of 50 ms", "packer advise images --simulate-step 50ms --batch-size 64"),
        ("what DALI would read", "packer advise images --reader dali --max-side 512 --max-side 384"),
    ),
    "order": (
        ("bytes read and mixing", "packer order images-hdf5"),
        ("for slow storage", "packer order images-hdf5 --block-bytes 32MiB --window 16 --window 64"),
    ),
    "simulate": (
        ("32 nodes with 8 GPUs", "packer simulate images-hdf5 --nodes 32 --ranks 8 --step 250ms"),
        ("before the set exists", "packer simulate --samples 1281167 --mean-bytes 110kB --nodes 4 --cache 64GiB"),
    ),
    "parity": (
        ("pixels of all decoders here", "packer parity images-hdf5"),
        ("on a GPU, fewer images", "packer parity images-hdf5 --device cuda --samples 50"),
    ),
    "diagnose": (
        ("your loader and your step", "packer diagnose train.py:make_loader --step train.py:train_step"),
        ("a set, without a GPU", "packer diagnose images-hdf5 --simulate-step 20ms"),
        ("two runs", "packer diagnose --compare before.jsonl after.jsonl"),
    ),
    "monitor": (
        ("a table when it ends", "packer monitor -- python train.py"),
        ("a record to compare", "packer monitor --output before.jsonl -- python train.py"),
    ),
    "doctor": (
        ("what works here, what is missing", "packer doctor"),
        ("and whether sets can be written there", "packer doctor /tmp"),
    ),
    "completion": (
        ("for the shell of $SHELL", "packer completion"),
        ("look at the script first", "packer completion zsh --print"),
    ),
}


def words_text() -> str:
    """The words as lines for a help text."""
    return "\n".join(["\b", "Words:", *(f"  {word:8}{meaning}" for word, meaning in WORDS.items())])


def show_examples(command: click.Command, path: str) -> None:
    """Add the examples to the help of a command and of those below it."""
    for name, part in command.commands.items() if isinstance(command, click.Group) else ():
        show_examples(part, f"{path} {name}")
    lines = [line for what, example in EXAMPLES.get(path, ()) for line in (f"  # {what}", f"  {example}")]
    if lines and not command.epilog:
        command.epilog = "\n".join(["\b", "Examples:", *lines])


# By task, of each command: what it is for, and where it is (module of packer.cli, name in it).
_TASKS = {
    "Make sets": {
        "convert": ("Pack a source into HDF5, TFRecord or tar shards.", "convert", "command"),
        "commit": ("Make a set of what tasks of an array job have packed.", "convert", "commit_command"),
        "index": ("Adopt shards made elsewhere, or rebuild an index.", "index", "command"),
        "reshard": (
            "Pack a set again: other format or size of shards, without unused bytes.",
            "sets",
            "reshard_command",
        ),
    },
    "Change sets": {
        "append": ("Add a source to a packed set.", "sets", "append_command"),
        "merge": ("Make one set of several.", "sets", "merge_command"),
        "split": ("Deal the samples of a set to splits.", "sets", "split_command"),
        "subset": ("Make a set of some samples of another.", "sets", "subset_command"),
        "drop": ("Take samples out of a set; their bytes stay in its shards.", "sets", "drop_command"),
        "erase": ("Remove samples from a set for good, bytes, names and all.", "sets", "erase_command"),
        "relabel": ("Give classes other names, or samples other labels.", "sets", "relabel_command"),
        "dedup": ("Find duplicates in a set, and keep one of each.", "sets", "dedup_command"),
        "add-field": ("Add masks, boxes, captions, … to a set.", "sets", "field_command"),
        "prune": ("Remove what a set keeps for readers of its earlier states.", "sets", "prune_command"),
    },
    "Look and check": {
        "view": ("Show the samples of a set, a folder or an archive in the browser.", "view", "command"),
        "inspect": ("Show what a packed set is.", "inspect", "command"),
        "verify": ("Check every byte of a packed set.", "verify", "command"),
        "extract": ("Write the original files back.", "verify", "extract_command"),
        "export-index": ("Write the index files of other readers.", "index", "export_command"),
    },
    "Bring data near": {
        "stage": ("Copy a packed set to this node's own disk.", "stage", "command"),
        "serve": ("Serve what this node holds of a set to the other nodes of a job.", "serve", "command"),
        "cache": ("Caches of this node: list, fill, remove.", "cache", "command"),
    },
    "Choose and measure": {
        "advise": ("Measure what to pack for a training, and recommend it.", "advise", "command"),
        "order": ("Compare ways to shuffle a packed set.", "inspect", "order_command"),
        "simulate": ("Show what a job of many nodes would read, before it is submitted.", "simulate", "command"),
        "parity": ("Compare decoders and resizers with Pillow.", "inspect", "parity_command"),
        "diagnose": ("Find the stage of a data loader that starves the training.", "diagnose", "command"),
        "monitor": ("Run a command and record what it uses: CPUs, disks, network, GPUs.", "monitor", "command"),
    },
    "This machine": {
        "doctor": ("Examine this environment, and say what to do.", "doctor", "command"),
        "completion": ("Install the completion of commands for your shell.", "doctor", "completion_command"),
    },
}
_COMMANDS = {name: command for commands in _TASKS.values() for name, command in commands.items()}
# What people type for commands that are called otherwise here.
OTHER_NAMES = {
    "convert": "build create import make pack write",
    "index": "adopt reindex",
    "append": "add extend insert",
    "merge": "combine concat join",
    "split": "deal",
    "subset": "filter sample select",
    "drop": "delete remove rm",
    "relabel": "rename",
    "dedup": "deduplicate duplicates",
    "prune": "gc",
    "view": "browse display gui open",
    "inspect": "cat describe head info list ls show stat stats summary",
    "verify": "check fsck test validate",
    "extract": "export unpack untar",
    "stage": "copy cp fetch sync",
    "advise": "recommend",
    "diagnose": "bench benchmark profile",
    "doctor": "env version",
}
_ADVICE = {
    errno.ENOSPC: "make room there and run the same command again; what is whole is kept",
    errno.EDQUOT: "make room there (your quota is used up) and run the same command again; what is whole is kept",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or make smaller shards, and run the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "free memory, or run with fewer --workers",
}
_OURS = "(module|from) '(packer|readers|cache)[.']"
_INTERRUPTED_STATUS = 130
_TRACEBACK = "PACKER_TRACEBACK"


class _Commands(click.Group):
    """Loads a command's file when it is used, so that `packer --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *_installed_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return _installed_commands().get(cmd_name)
        _, module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"packer.cli.{module}"), name)
        show_examples(command, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-") and args[0] not in _installed_commands():
            ctx.fail(f"No such command {args[0]!r}.{_did_you_mean(args[0])}")
        found = super().resolve_command(ctx, args)
        learn_flags(found[1])
        started()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, _COMMANDS))
        for task, commands in _TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(longest), help) for name, (help, _, _) in commands.items()])
        others = [(name.ljust(longest), part.get_short_help_str()) for name, part in _installed_commands().items()]
        if others:
            with formatter.section("Of other packages"):
                formatter.write_dl(others)


@functools.cache
def _installed_commands() -> dict[str, click.Command]:
    """The commands of other distributions, from the entry points of packer.commands.

    The files are searched for that group first: importlib.metadata would take longer than all the rest of a help page.
    """
    if not any(map(_names_commands, sys.path)):
        return {}
    from packer.registry import installed_points, load_point

    points = installed_points("packer.commands", _COMMANDS)
    commands = {point.name: load_point(point, click.Command) for point in points}
    return {name: command for name, command in commands.items() if command is not None}


def _names_commands(folder: str) -> bool:
    """Whether metadata in a folder of sys.path has an entry point of packer.commands."""
    try:
        with os.scandir(folder or ".") as entries:
            places = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False
    for place in places:
        try:
            with open(os.path.join(place, "entry_points.txt"), "rb") as file:
                if b"[packer.commands]" in file.read():
                    return True
        except OSError:
            continue
    return False


def _did_you_mean(name: str) -> str:
    meant = [command for command, others in OTHER_NAMES.items() if name.lower() in others.split()]
    close = meant or difflib.get_close_matches(name, _COMMANDS, cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo("\n".join(version_lines()))
        ctx.exit()


@click.group(
    cls=_Commands,
    epilog=words_text(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version,
              help="Show the versions of packer and of what it runs on.")  # fmt: skip
@verbose_option
def cli() -> None:
    """Pack image datasets into standard shards with one index; check, change, stage, cache and read them.

    \b
      packer convert images --to hdf5       pack a folder into images-hdf5
      packer verify images-hdf5             check every byte
      packer inspect images-hdf5            show what is in it
    """


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    before_command = arguments[: arguments.index("--")] if "--" in arguments else arguments
    _escape_unprintable()
    try:
        status = _status_of(arguments, "--json" in before_command)
    except KeyboardInterrupt:  # a second one, while the first was handled
        status = _INTERRUPTED_STATUS
    finally:
        stop_logging()
    if status == _INTERRUPTED_STATUS:
        leave_at_once()
    sys.exit(status)


def _status_of(arguments: list[str], as_json: bool) -> int:
    """Run a command; its exit status. A failure has been reported."""
    try:
        status: Any = cli.main(args=arguments, prog_name="packer", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        kind = "UsageError" if isinstance(error, click.UsageError) else "ClickException"
        return _fail(kind, error.format_message(), error.exit_code, as_json, _usage_text(error))
    except (click.Abort, KeyboardInterrupt):
        return _fail("KeyboardInterrupt", INTERRUPTED, _INTERRUPTED_STATUS, as_json)
    except BrokenPipeError:
        _give_up_stdout()  # the reader of the output has gone: leave quietly
        return 1
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            traceback.print_exc()
        message = with_flags(_message_of(error))
        if type(error) is ValueError:  # an argument that the library rejects
            return _fail("UsageError", message, 2, as_json)
        return _fail(type(error).__name__, message, 1, as_json)
    return int(status or 0)


def _fail(kind: str, message: str, status: int, as_json: bool, shown: str = "") -> int:
    """Report a failure on stderr, and with --json also on stdout."""
    text = shown or (message if message.startswith("packer: ") else f"packer: {message}")
    click.echo(printable(text), err=True)
    try:
        if as_json:
            document = {"error": {"type": kind, "message": message.removeprefix("packer: "), "status": status}}
            click.echo(json.dumps(document, indent=1))
        sys.stdout.flush()
    except OSError:
        _give_up_stdout()
    return status


def _usage_text(error: click.ClickException) -> str:
    """A usage error as click prints it: usage, where help is, the error."""
    text = io.StringIO()
    error.show(file=text)
    return text.getvalue().rstrip("\n")


def _message_of(error: Exception) -> str:
    """One message for an error: what, where, what to do."""
    if isinstance(error, PackerError):
        return str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return f"not enough memory; {_ADVICE[errno.ENOMEM]}"
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        advice = f"; {_ADVICE[error.errno]}" if error.errno in _ADVICE else ""
        return f"{where}{what}{advice}"
    if isinstance(error, ValueError):
        return str(error) or type(error).__name__
    if isinstance(error, (AttributeError, ImportError)) and re.search(_OURS, str(error)):
        return (
            f"{error}: another package may have overwritten a part of this one; see what  packer doctor  says, or "
            f"install packer in an environment of its own"
        )
    return (
        f"unexpected {type(error).__name__}: {error}; this is a defect of packer: run the same command with "
        f"{_TRACEBACK}=1 and report what it prints"
    )


def _escape_unprintable() -> None:
    """Print characters that a terminal's encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _give_up_stdout() -> None:
    """Prevent errors at exit about output that cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
