"""Shared by all commands: types of values, options, and printing of results."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cache.errors import BadNameError, RemoteError
from cache.messages import json_printable, parse_size, printable, quoted
from cache.remote import parse_url
from packer.cli.screen import verbose_option, watcher
from packer.engines import engine_names, open_engine
from packer.formats import format_aliases, resolve_format, writable_formats
from packer.sources import open_source
from packer.sources.layouts import LAYOUTS
from readers.layout import FieldName, SplitName

__all__ = [
    "SOURCE_OPTIONS",
    "SOURCE_SECTIONS",
    "Container",
    "Duration",
    "Emphasis",
    "Rate",
    "SectionedCommand",
    "SetPlace",
    "Size",
    "checksums_option",
    "count_option",
    "dry_run_option",
    "engine_options",
    "existing_file",
    "field_columns",
    "file_list_option",
    "fractions_option",
    "group_option",
    "json_option",
    "keys_option",
    "label_offset_option",
    "new_split_option",
    "one_of_many",
    "pairs",
    "parsed",
    "part_option",
    "print_json",
    "reports",
    "seed_option",
    "set_argument",
    "shard_size_option",
    "show",
    "show_result",
    "shuffle_option",
    "size_option",
    "source_options",
    "split_list",
    "split_option",
    "stratify_option",
    "target_option",
    "threads_option",
    "where_option",
    "workers_option",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


# --- values ---------------------------------------------------------------------------------------------------------
class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 1GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rate(Size):
    """Bytes per second, such as 40GB/s."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, float) else float(super().convert(re.sub(r"/s$", "", str(value)), param, ctx))


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time, such as 20ms or 1.5s, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs|)", str(value))
        if match is not None and not match[2]:
            self.fail(f"{value!r} has no unit: {value}ms or {value}s?", param, ctx)
        if match is None:
            self.fail(f"{value!r} is not a valid time; write it with its unit, such as 20ms or 1.5s", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class SetPlace(click.ParamType):  # type: ignore[type-arg]
    """A local path, which must exist unless `missing`, or the address of a set.

    local: refuse addresses, with a message that says what to do.
    """

    name = "set"

    def __init__(self, *, missing: bool = False, local: bool = False) -> None:
        self._path, self._local = click.Path(exists=not missing), local

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return self._path.shell_complete(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" not in str(value):
            return self._path.convert(value, param, ctx)
        try:
            url = parse_url(value)
        except RemoteError as error:
            self.fail(str(error), param, ctx)
        if self._local:
            advice = f"run  packer stage {quoted(url)}  and name its directory"
            self.fail(f"the files of {url} must be local: {advice}", param, ctx)
        return value


class _Names(click.ParamType):  # type: ignore[type-arg]
    """A name in a registry, which is loaded when the names are shown or one is used."""

    def __init__(self, name: str, names: Callable[[], Sequence[str]]) -> None:
        self.name, self._names = name, names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._names())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self._names():
            self.fail(f"{value!r} is not one of {', '.join(self._names())}", param, ctx)
        return value


class Container(_Names):
    """A format that can be written, under any of its names."""

    def __init__(self) -> None:
        super().__init__("format", writable_formats)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return resolve_format(value)
        except ValueError:
            names = ", ".join(map(repr, self._names()))
            self.fail(f"{value!r} is not one of {names} ({format_aliases()})", param, ctx)


def one_of_many(value: str, otherwise: str = "") -> tuple[int, int]:
    """I/N as (i, n). Raises BadParameter."""
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        problem = f"neither I/N, with I from 0 to N - 1, {otherwise}" if otherwise else "not I/N with I from 0 to N - 1"
        raise click.BadParameter(f"{value!r} is {problem}; write it as 0/4")
    return int(number), int(count)


def parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback of click that parses the value of an option, if there is one. `parse` raises ValueError."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, BadNameError) as error:
            raise click.BadParameter(str(error)) from error

    return callback


def pairs(kind: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], dict[str, Any] | None]:
    """A callback of click for NAME=VALUE, separated by commas or in repeated options."""

    def parse(texts: Any) -> dict[str, Any] | None:
        values: dict[str, Any] = {}
        for text in texts.split(",") if isinstance(texts, str) else texts:
            name, equals, value = text.partition("=")
            try:
                if not name or not equals or name in values:
                    raise ValueError
                values[name] = kind(value)
            except ValueError:
                raise ValueError(f"{text!r} is not NAME=VALUE, each name once") from None
        return values or None

    return parsed(parse)


def field_columns(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=COLUMN options as a mapping, for manifests also NAME:KIND=COLUMN; a callback of click."""
    columns = {}
    for value in values:
        name, equals, column = value.partition("=")
        if not (name and equals and column):
            raise click.BadParameter(f"{value!r} is not {param.metavar}")
        plain, colon, kind = name.partition(":") if "KIND" in str(param.metavar) else (name, "", "")
        try:
            columns[f"{FieldName(plain)}{colon}{kind}"] = column
        except BadNameError as error:
            raise click.BadParameter(str(error)) from error
    return columns


def split_list(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """NAME,NAME as a tuple without empty names; a callback of click."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


existing_file = click.Path(exists=True, dir_okay=False)


# --- options that commands have in common ---------------------------------------------------------------------------
def count_option(flag: str, help: str, default: int | None = None, metavar: str = "N", **more: Any) -> Callable[[F], F]:
    """An option for a number from 1 on."""
    shown: Any = {"default": default, "show_default": True} if default is not None else {}
    return click.option(flag, type=click.IntRange(min=1), metavar=metavar, help=help, **shown, **more)


def size_option(*flags: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option for a number of bytes."""
    return click.option(*flags, type=Size(), metavar="SIZE", help=help, **more)


def seed_option(help: str = "Of the draw.", default: int | None = 0, most: int | None = 2**32 - 1) -> Callable[[F], F]:
    """--seed SEED."""
    shown: Any = {"default": default, "show_default": True} if default is not None else {}
    return click.option("--seed", type=click.IntRange(0, most), metavar="SEED", help=help, **shown)


def threads_option(help: str) -> Callable[[F], F]:
    """--threads N."""
    return count_option("--threads", help)


def split_option(help: str = "Only this split.") -> Callable[[F], F]:
    """--split SPLIT of an existing set."""
    return click.option("--split", metavar="SPLIT", help=help)


def new_split_option(help: str) -> Callable[[F], F]:
    """--split SPLIT, which may be a new name."""
    return click.option("--split", callback=parsed(SplitName), metavar="SPLIT", help=help)


def part_option(help: str) -> Callable[[F], F]:
    """--part I/N, as (i, n), or node."""
    part = parsed(lambda value: value if value == "node" else one_of_many(value, "nor node"))
    return click.option("--part", callback=part, metavar="I/N", help=help)


def target_option(help: str, **more: Any) -> Callable[[F], F]:
    """--target DIR."""
    return click.option("--target", metavar="DIR", help=help, **more)


def file_list_option(flag: str, help: str) -> Callable[[F], F]:
    """An option for an existing local file."""
    return click.option(flag, type=existing_file, metavar="FILE", help=help)


def group_option(more: str = "") -> Callable[[F], F]:
    """--group COLUMN."""
    return click.option("--group", metavar="COLUMN", help="Keep samples with the same value in this table column, "
                        f"such as patient, in one split{more}; folder: samples of one folder.")  # fmt: skip


def fractions_option(flag: str, help: str, **more: Any) -> Callable[[F], F]:
    """NAME=SHARE,…"""
    return click.option(flag, callback=pairs(float), metavar="NAME=SHARE,…", help=help, **more)


def stratify_option(help: str) -> Callable[[F], F]:
    """--stratify."""
    return click.option("--stratify", is_flag=True, help=help)


def label_offset_option(**more: Any) -> Callable[[F], F]:
    """--label-offset N of shards."""
    return click.option("--label-offset", metavar="N", help="Labels in the shards start at N (1 in the ImageNet "
                        "TFRecords); labels that readers return start at 0.", **more)  # fmt: skip


workers_option = count_option(
    "--workers", "Processes. Default: the CPUs that this process may use (affinity, cgroup, Slurm)."
)
shard_size_option = size_option("--shard-size", help="Size of a shard, such as 1GiB. Default: 8 shards per split, each "
                                "from 64 MiB to 1 GiB.")  # fmt: skip
shuffle_option = click.option("--shuffle", type=click.IntRange(0, 2**32 - 1), metavar="SEED", help="Pack in a random "
                              "order with this seed.")  # fmt: skip
checksums_option = click.option("--checksums/--no-checksums", help="Write SHA256SUMS, for  sha256sum -c ; later:  "
                                "packer verify --sums .")  # fmt: skip
dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be done, and write nothing.")
where_option = click.option("--where", metavar="EXPRESSION", help="Samples for which this expression is true, such as "
                            "'min_side >= 64 "
                            """and label in ("cat", 3)'.""")  # fmt: skip
keys_option = file_list_option("--keys", "Samples with these keys, one per line.")
set_argument = click.argument("path", metavar="SET", type=SetPlace())


_LOCAL = "local"


def _engines() -> tuple[str, ...]:
    return (_LOCAL, *engine_names())


def engine_options(command: F) -> F:
    """Add --engine and --scheduler, and call the command with engine=: an executor, or None for local processes.

    In a process that works for another one (all ranks of MPI except the first), the command is not called.
    """

    @click.option("--engine", type=_Names("engine", _engines), default=_LOCAL, show_default=True, help="Where the "
        "work runs: local processes, ranks (mpiexec -n N packer …), or a cluster.")  # fmt: skip
    @click.option("--scheduler", metavar="ADDRESS", help="Address of the cluster. Dask: tcp://HOST:PORT or a scheduler "
        "file; Ray: HOST:PORT. Default: the settings of Dask or Ray.")  # fmt: skip
    @functools.wraps(command)
    def with_engine(*args: Any, engine: str, scheduler: str | None, **options: Any) -> Any:
        if engine != _LOCAL:
            with open_engine(engine, scheduler) as executor:
                return None if executor is None else command(*args, engine=executor, **options)
        if scheduler is not None:
            raise click.UsageError("--scheduler is the address of a cluster; name its kind with --engine")
        return command(*args, engine=None, **options)

    return with_engine  # type: ignore[return-value]


# --- a source: what convert, append and advise take -----------------------------------------------------------------
SOURCE_SECTIONS = {
    "Names in the source": (
        *("path_column", "label_column", "fields", "folder", "image_key", "label_key", "source_label_offset"),
        *("layout", "image_sets"),
    ),
    "Lists of addresses": ("rate", "host_rate", "threads", "attempts", "timeout", "max_bytes", "private"),
}


def _source_options() -> list[Callable[[Any], Any]]:
    def of_manifests(flag: str, help: str) -> Callable[[Any], Any]:
        return click.option(flag, metavar="COLUMN", help=help)

    def of_addresses(help: str) -> str:
        return f"List of addresses: {help}"

    return [
        of_manifests("--path-column", "Manifest: column of image paths. List of addresses: their column."),
        of_manifests("--label-column", "Manifest, Hugging Face, MDS, FFCV: column of labels, numbers or names. CelebA: "
                     "an attribute, or identity. CIFAR-100: fine or coarse."),
        of_manifests("--split-column", "Manifest, list of addresses, Hugging Face, MDS: column with the name of the "
                     "split."),
        click.option("--field", "fields", callback=field_columns, multiple=True, metavar="NAME[:KIND]=COLUMN",
                     help="Manifest: a further column, of files or, with a KIND (mask, boxes, points, array, text, "
                         "json), of values."),
        click.option("--folder", type=click.Path(exists=True, file_okay=False), metavar="DIR", help="Manifest: folder "
            "to which its paths are relative. COCO file: folder of its images. Default: the folder of the file."),
        click.option("--image-key", metavar="KEY", help="HDF5 or TFRecord file: name of its images."),
        click.option("--label-key", metavar="KEY", help="HDF5 or TFRecord file: name of its labels."),
        click.option("--source-label-offset", type=int, default=0, metavar="N", help="HDF5, TFRecord or IDX file: its "
                     "labels start at N (1: ImageNet TFRecords, EMNIST's letters)."),
        click.option("--layout", type=click.Choice(LAYOUTS), default="auto", help="Folder or archive. tree: folders "
            "are classes, even if the source looks like COCO, Pascal VOC or the like."),
        click.option("--image-sets", metavar="NAME", help="Pascal VOC: the folder in ImageSets whose lists are the "
                     "splits. Default: Main."),
        click.option("--rate", type=float, metavar="N",
                     help=of_addresses("requests per second, to all hosts together. Default: no limit.")),
        click.option("--host-rate", type=float, metavar="N",
                     help=of_addresses("requests per second to each host. Default: 20.")),
        threads_option(of_addresses("concurrent requests. Default: 32.")),
        count_option("--attempts", of_addresses("requests per image at most. Default: 5.")),
        click.option("--timeout", type=Duration(), metavar="TIME",
                     help=of_addresses("for one request in total. Default: 30s.")),
        size_option("--max-bytes", help=of_addresses("largest image. Default: 64MiB.")),
        click.option("--private", is_flag=True, default=None,
                     help=of_addresses("also allow hosts in private networks.")),
    ]  # fmt: skip


SOURCE_OPTIONS = ("split_column", *(name for names in SOURCE_SECTIONS.values() for name in names))
"""Names of the parameters of `source_options`."""


def source_options(command: F) -> F:
    """Add the options of a source, and call the command with opens=: a function that opens a source by its path."""

    @functools.wraps(command)
    def with_source(*args: Any, **options: Any) -> Any:
        how = {name: options.pop(name) for name in SOURCE_OPTIONS}
        how["label_offset"] = how.pop("source_label_offset")
        return command(*args, opens=functools.partial(open_source, **how), **options)

    decorated: Any = with_source
    for option in reversed(_source_options()):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


class SectionedCommand(click.Command):
    """sections: title -> names of its parameters, both in the order of the help; all others come first."""

    def __init__(self, *arguments: Any, sections: dict[str, tuple[str, ...]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)
                   if isinstance(param, click.Option)}  # fmt: skip
        placed = {name for names in self._sections.values() for name in names}
        for title, names in {"Options": [name for name in records if name not in placed], **self._sections}.items():
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name]) is not None])


# --- results --------------------------------------------------------------------------------------------------------
def json_option(command: F) -> F:
    """--json and -v, which every command has."""
    document = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no progress.")
    return document(verbose_option(command))


def reports(lines: Callable[[Any], Iterable[str]], *, watched: bool = True) -> Callable[[F], F]:
    """Print the return value of a command, a result or a list of them, as lines or as JSON; adds --json and -v.

    watched: whether the command takes watcher=.
    """

    def decorate(command: F) -> F:
        @json_option
        @functools.wraps(command)
        def reporting(*args: Any, as_json: bool, **options: Any) -> None:
            if watched:
                options["watcher"] = watcher(as_json)
            result = command(*args, **options)
            show_result(result, as_json, lambda: lines(result))

        return reporting  # type: ignore[return-value]

    return decorate


class Emphasis(str):
    """A line that `show` prints in yellow, where colours are enabled."""

    __slots__ = ()


def show(*lines: str, err: bool = False) -> None:
    """Print lines, with control characters escaped. All output except JSON goes through this function.

    err: print on stderr, when stdout belongs to another program.
    """
    stream, environ = sys.stderr if err else sys.stdout, os.environ
    coloured = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    for line in lines:
        text = printable(line).replace("\n", "\\n")
        click.echo(click.style(text, fg="yellow") if coloured and isinstance(line, Emphasis) else text, err=err)


def show_result(result: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Print a result, or a list of them, as JSON or as text."""
    if as_json:
        print_json([item.to_dict() for item in result] if isinstance(result, list) else result.to_dict())
    else:
        show(*lines())


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; control characters become JSON escapes."""
    click.echo(json_printable(json.dumps(value, indent=1, ensure_ascii=False, default=list)))
