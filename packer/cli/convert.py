"""`packer convert`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cache.errors import BadNameError
from cache.messages import plural, quoted
from packer.cli.group import SectionedCommand
from packer.cli.text import (
    Emphasis,
    SetPlace,
    Size,
    human_bytes,
    human_seconds,
    json_option,
    new_split_option,
    one_of_many,
    pairs,
    show_result,
    watcher,
    workers_option,
)
from packer.conversion.ops import parse_op
from packer.conversion.options import CHECKS, CODECS, DECODES, ON_ERROR, Choose, Images, Reencode, Run, Shards
from packer.conversion.result import ConvertResult
from packer.conversion.run import commit, convert
from packer.engines import engine_names, open_engine
from packer.formats import format_aliases, resolve_format, writable_formats
from packer.sets.deal import shares_text
from packer.sources import FETCH_OPTIONS, open_source
from packer.sources.layouts import LAYOUTS
from readers.augment.ops import Op
from readers.layout import FieldName

__all__ = [
    "OF_THE_SOURCE",
    "SOURCE_SECTIONS",
    "Container",
    "command",
    "dealt_lines",
    "engine_options",
    "field_columns",
]


# ------------------------------------------------------------------------------
# --engine and --scheduler: where the tasks of a command run.


F = TypeVar("F", bound=Callable[..., Any])
_LOCAL = "local"


class _EngineName(click.ParamType):  # type: ignore[type-arg]
    """The name of an engine."""

    name = "engine"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join((_LOCAL, *engine_names()))}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = (_LOCAL, *engine_names())
        if value not in names:
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return value


def engine_options(command: F) -> F:
    """Add the options, and call the command with engine=: an executor, or None for processes of this machine.

    A process that works for another one, as all ranks of MPI but the first, does not call it.
    """

    @click.option("--engine", type=_EngineName(), default=_LOCAL, show_default=True, help="Where shards are worked on: "
                  "processes of this machine, ranks (mpiexec -n N packer …), or a cluster.")  # fmt: skip
    @click.option("--scheduler", metavar="ADDRESS", help="Of the cluster: of Dask tcp://HOST:PORT or a scheduler file, "
                  "of Ray HOST:PORT. Default: what their own settings say.")  # fmt: skip
    @functools.wraps(command)
    def with_engine(*args: Any, engine: str, scheduler: str | None, **options: Any) -> None:
        if engine == _LOCAL:
            if scheduler is not None:
                raise click.UsageError("--scheduler is the address of a cluster: say which with --engine")
            command(*args, engine=None, **options)
            return
        with open_engine(engine, scheduler) as executor:
            if executor is not None:
                command(*args, engine=executor, **options)

    return with_engine  # type: ignore[return-value]


_REASONS_SHOWN = 10
OF_THE_SOURCE = (
    *("path_column", "label_column", "split_column", "fields", "folder"),
    *("image_key", "label_key", "layout", "image_sets"),
    *FETCH_OPTIONS,
)


def field_columns(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=COLUMN options as a mapping, of a manifest NAME:KIND=COLUMN as well; a callback of click."""
    found = {}
    for value in values:
        name, equals, column = value.partition("=")
        if not (name and equals and column):
            raise click.BadParameter(f"{value!r} is not {param.metavar}")
        plain, colon, kind = name.partition(":") if "KIND" in str(param.metavar) else (name, "", "")
        try:
            found[f"{FieldName(plain)}{colon}{kind}"] = column
        except BadNameError as error:
            raise click.BadParameter(str(error)) from error
    return found


def _names(ctx: click.Context, param: click.Parameter, given: str | None) -> list[str] | None:
    return None if given is None else given.split(",")


def _ops(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> list[Op]:
    try:
        return [parse_op(text) for text in given]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _task(ctx: click.Context, param: click.Parameter, given: str | None) -> tuple[int, int] | None:
    return None if given is None else one_of_many(given)


class Container(click.ParamType):  # type: ignore[type-arg]
    """A format that can be written, under any of its names."""

    name = "format"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in writable_formats() if name.startswith(incomplete)]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(writable_formats())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return resolve_format(value)
        except ValueError:
            names = ", ".join(map(repr, writable_formats()))
            self.fail(f"{value!r} is not one of {names} ({format_aliases()})", param, ctx)


SOURCE_SECTIONS = {
    "What a source calls things": (
        *("path_column", "label_column", "fields", "folder", "image_key", "label_key", "source_label_offset"),
        *("layout", "image_sets"),
    ),
    "Lists of addresses": FETCH_OPTIONS,
}
_SECTIONS = {
    "Which samples": ("split", "split_column", "split_fractions", "seed", "stratify", "group", "classes", "where"),
    "Images": ("on_error", "check", "decode", "reencode", "quality", "max_side", "resize_short", "ops"),
    "Shards": ("shard_size", "samples_per_shard", "shuffle", "label_offset"),
    **SOURCE_SECTIONS,
}


@click.command("convert", cls=SectionedCommand, sections=_SECTIONS)
@click.argument("sources", type=SetPlace(local=True), nargs=-1, required=True, metavar="SOURCE...")
@click.option("--to", type=Container(), default="hdf5", show_default=True, help="Format of the shards.")
@click.option("-o", "--output", type=SetPlace(missing=True), metavar="OUT", help="Directory of the set, or s3://, "
              "gs:// or az:// address. Default: <source name>-<format>.")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False), metavar="DIR", help="Where a set for an address is made "
              "first, and stays. Default: a hidden directory here, removed after the upload.")  # fmt: skip
@new_split_option("Take this split only; or the name of a source without splits.")
@click.option("--split-fractions", callback=pairs(float), metavar="NAME=SHARE,…", help="Deal the samples of one split "
              "at random to new ones, as train=0.9,val=0.1.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="SEED",
              help="Of --split-fractions.")  # fmt: skip
@click.option("--stratify", is_flag=True, help="Every class in the shares of --split-fractions.")
@click.option("--group", metavar="COLUMN", help="Keep samples with the same value in this column of the table, as "
              "patient, in one split of --split-fractions; folder: those in one folder.")  # fmt: skip
@click.option("--classes", callback=_names, metavar="NAME,…", help="Take these classes only; they get the labels 0, 1, "
              "… in this order.")  # fmt: skip
@click.option(
    "--where",
    metavar="EXPRESSION",
    help="""Take the samples for which this is true, as 'min_side >= 64 and
              class_name in ("cat", "dog")'; a wrong name is answered with all names. What it says of images is decided
              when they are read.""",
)
@click.option("--shard-size", type=Size(), metavar="SIZE", help="Size of a shard, as 1GiB. Default: 8 shards a "
              "split, each from 64 MiB to 1 GiB.")  # fmt: skip
@click.option("--samples-per-shard", type=click.IntRange(min=1), metavar="N", help="Samples in a shard.")
@workers_option
@engine_options
@click.option("--shuffle", type=click.IntRange(0, 2**32 - 1), metavar="SEED", help="Pack in this random order.")
@click.option("--on-error", type=click.Choice(ON_ERROR), default="raise", show_default=True,
              help="Unreadable or truncated images: stop, leave out, or leave out and copy aside.")  # fmt: skip
@click.option("--check", type=click.Choice(CHECKS), default="header", show_default=True,
              help="How closely to look at each image.")  # fmt: skip
@click.option("--decode", type=click.Choice(DECODES), default="RGB", show_default=True, help="What readers will decode "
              "images to; those that cannot be are refused. unchanged: native depth and channels.")  # fmt: skip
@click.option("--reencode", type=click.Choice(CODECS), help="Re-encode images in this codec. Without this and the "
              "next three options the bytes are kept exactly.")  # fmt: skip
@click.option("--max-side", type=click.IntRange(min=1), metavar="N", help="Shrink to a longest side of N pixels.")
@click.option("--resize-short", type=click.IntRange(min=1), metavar="N", help="Shrink to a shortest side of N pixels.")
@click.option("--quality", type=click.IntRange(1, 100), metavar="N", help="JPEG or WebP quality of re-encoded images. "
              "Default: 90.")  # fmt: skip
@click.option("--op", "ops", multiple=True, callback=_ops, metavar="NAME:VALUES", help="Do this to each image, as "
              "training would, and encode the result: Resize:256, CenterCrop:224, Crop:TOP,LEFT,HEIGHT,WIDTH. May be "
              "repeated, in order. Masks, boxes and points follow. Needs torch.")  # fmt: skip
@click.option("--label-offset", type=click.IntRange(min=0), default=0, metavar="N", help="Labels in the shards "
              "start at N (1: as in the ImageNet TFRecords); those of readers start at 0.")  # fmt: skip
@click.option("--path-column", metavar="COLUMN", help="Manifest: column of image paths. List of addresses: "
              "their column.")  # fmt: skip
@click.option("--label-column", metavar="COLUMN", help="Manifest, Hugging Face, MDS, FFCV: column of labels, numbers "
              "or names. CelebA: an attribute, or identity. CIFAR-100: fine or coarse.")  # fmt: skip
@click.option("--split-column", metavar="COLUMN", help="Manifest, list of addresses, Hugging Face, MDS: column whose "
              "values are the splits.")  # fmt: skip
@click.option(
    "--field",
    "fields",
    callback=field_columns,
    multiple=True,
    metavar="NAME[:KIND]=COLUMN",
    help="Manifest: a further column of files or, where the KIND says what it is (mask, boxes, points, array, text, "
    "json), of values.",
)
@click.option("--folder", type=click.Path(exists=True, file_okay=False), metavar="DIR", help="Manifest: folder its "
              "paths start from. File of COCO: folder of its images. Default: its own.")  # fmt: skip
@click.option("--image-key", metavar="KEY", help="HDF5 or TFRecord file: what it calls the image.")
@click.option("--label-key", metavar="KEY", help="HDF5 or TFRecord file: what it calls the label.")
@click.option("--source-label-offset", type=int, default=0, metavar="N", help="HDF5, TFRecord or IDX file: its labels "
              "start at N (1: ImageNet TFRecords, EMNIST's letters).")  # fmt: skip
@click.option("--layout", type=click.Choice(LAYOUTS), default="auto", help="Folder or archive. tree: its folders are "
              "classes, also where it looks like COCO, Pascal VOC or the like.")  # fmt: skip
@click.option("--image-sets", metavar="NAME", help="Pascal VOC: the folder of ImageSets whose lists are the splits. "
              "Default: Main.")  # fmt: skip
@click.option("--rate", type=float, metavar="N", help="List of addresses: requests a second, to all hosts together. "
              "Default: no limit.")  # fmt: skip
@click.option("--host-rate", type=float, metavar="N", help="List of addresses: requests a second to each host. "
              "Default: 20.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="List of addresses: requests at a time. "
              "Default: 32.")  # fmt: skip
@click.option("--attempts", type=click.IntRange(min=1), metavar="N", help="List of addresses: requests for an image at "
              "most. Default: 5.")  # fmt: skip
@click.option("--timeout", type=float, metavar="SECONDS", help="List of addresses: for a request as a whole. "
              "Default: 30.")  # fmt: skip
@click.option("--max-bytes", type=Size(), metavar="SIZE", help="List of addresses: largest image. Default: 64MiB.")
@click.option("--private", is_flag=True, default=None, help="List of addresses: also ask hosts in private networks.")
@click.option("--task", callback=_task, metavar="I/N", help="Pack share I of N only, I from 0, as a task "
              "of an array job. When all are done,  packer commit OUTPUT  makes the set.")  # fmt: skip
@click.option("--checksums/--no-checksums", help="Write SHA256SUMS, for  sha256sum -c  (packer verify --sums: later).")
@click.option("--overwrite", is_flag=True, help="Replace the set, or unfinished conversion, in the output directory.")
@click.option("--dry-run", is_flag=True, help="List and plan only, and measure what it will take.")
@json_option
def command(
    sources: tuple[str, ...],
    to: str,
    output: str | None,
    as_json: bool,
    source_label_offset: int,
    **options: Any,
) -> None:
    """Pack SOURCE into HDF5, TFRecord or tar shards with an index; several of them as one set.

    SOURCE is a folder of images (split/class/file, class/file or files), the folder of COCO, Pascal VOC, YOLO or
    ILSVRC, a manifest or a list of addresses (.csv, .tsv, .jsonl, .parquet, .txt), an archive of a folder (.tar,
    .tar.gz, .tar.zst, .tar.xz, .zip), a packed set, shards made elsewhere and folders of them, a data set of Hugging
    Face (Parquet), MosaicML (MDS) or FFCV, CIFAR, MNIST, or arrays of NumPy. It is recognised by its content.

    The bytes of the images are kept exactly. After an interruption or a kill, the same command continues where it was.
    """
    how = {name: options.pop(name) for name in OF_THE_SOURCE}
    opened = [open_source(source, label_offset=source_label_offset, **how) for source in sources]
    codec, *changes = (options.pop(name) for name in ("reencode", "max_side", "resize_short", "quality"))
    smaller = Reencode(codec or "keep", *changes) if codec or any(changes) else None
    fractions, size, samples = (options.pop(name) for name in ("split_fractions", "shard_size", "samples_per_shard"))

    def of(*names: str) -> dict[str, Any]:
        return {name: options[name] for name in names}

    choice = Choose(fractions=fractions, **of("split", "classes", "where", "seed", "stratify", "group"))
    result = convert(
        opened,
        to,
        output,
        choose=choice,
        images=Images(reencode=smaller, **of("check", "decode", "ops")),
        shards=Shards(size, samples, **of("shuffle", "label_offset", "checksums")),
        run=Run(**of("workers", "engine", "on_error", "task", "work")),
        watcher=watcher(as_json),
        **of("overwrite", "dry_run"),
    )
    group = choice.group if result.task is None else None
    lines = [*summary(result), *dealt_lines(result.splits, choice.fractions, group)]
    show_result(result, as_json, lambda: lines)


def dealt_lines(counts: Mapping[str, int], fractions: Mapping[str, float] | None, group: str | None) -> list[str]:
    """How near the shares are that groups were dealt in; nothing without groups."""
    return [] if fractions is None or group is None else [f"  {shares_text(counts, fractions, group)}"]


def summary(result: ConvertResult, *, rates: bool = True) -> list[str]:
    """The result in a few lines. rates: whether this command packed it, so that its time says how fast."""
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    shards = plural(result.shards, f"{result.format} shard")
    what = (
        f"{plural(result.samples, 'sample')} ({splits}), {plural(result.classes, 'class')}, "
        f"{human_bytes(result.payload_bytes)}"
    )
    if result.dry_run:
        most = "at most " if result.undecided else ""
        lines = [f"{result.output}: would hold {most}{what} in {shards}"]
        if result.expected_seconds is not None and result.expected_bytes is not None:
            time, size = human_seconds(result.expected_seconds), human_bytes(result.expected_bytes)
            lines.append(f"  about {size} of shards, and about {time}, as measured by packing some of the samples")
        if result.undecided:
            lines.append(f"  {result.undecided} is not known before the images are read")
        return lines
    if result.task is not None and not result.already_done:
        number, count = result.task
        return [
            f"{result.output}: task {number} of {count}: {what} in {shards}, {human_seconds(result.seconds)}",
            f"  when all {count} are done:  packer commit {quoted(result.output)}",
        ]
    if result.already_done:
        return [f"{result.output}: already holds {what} in {shards}; nothing to do"]
    extra = (result.shard_bytes / result.payload_bytes - 1) * 100 if result.payload_bytes else 0.0
    seconds = max(result.seconds, 1e-9)
    took = [human_seconds(seconds)]
    if result.shards_resumed:
        took.append(f"{plural(result.shards_resumed, 'shard')} resumed")
    elif rates:
        took += [f"{result.samples / seconds:,.0f} samples/s", f"{human_bytes(result.payload_bytes / seconds)}/s"]
    lines = [f"{result.output}: {what} in {shards} ({extra:+.1f} % bytes)", f"  {', '.join(took)}"]
    if result.uploaded_bytes:
        lines.append(f"  {human_bytes(result.uploaded_bytes)} uploaded")
    if result.left_out:
        counts = ", ".join(f"{count:,} {how}" for how, count in result.left_out.items())
        report = "" if set(result.left_out) == {"not chosen"} else f"; see {result.output}/left-out.jsonl"
        lines.append(Emphasis(f"  left out: {counts}{report}"))
        reasons = list(result.left_out_reasons.items())
        lines += [Emphasis(f"    {count:,} {reason}") for reason, count in reasons[:_REASONS_SHOWN]]
        if len(reasons) > _REASONS_SHOWN:
            lines.append(f"    … and {plural(len(reasons) - _REASONS_SHOWN, 'more reason')}")
    return lines


# ------------------------------------------------------------------------------
# `packer commit`: the last step of a conversion by the tasks of an array job.


@click.command("commit")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def commit_command(output: str, as_json: bool) -> None:
    """Make a set of what the tasks of  packer convert … --task I/N  have packed into OUT.

    Where shards are missing, it says which tasks to run again, and changes nothing.
    """
    result = commit(output, watcher=watcher(as_json))
    show_result(result, as_json, lambda: summary(result, rates=False))
