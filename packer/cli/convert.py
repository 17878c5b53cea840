"""`packer convert`, `commit` and `index`: sets from sources, from the shards of tasks, from foreign shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from cache.messages import human_bytes, human_seconds, plural, quoted
from packer.adoption import IndexResult, index
from packer.cli import flags
from packer.cli.screen import with_flags
from packer.conversion.ops import parse_op
from packer.conversion.options import CHECKS, CODECS, DECODES, ON_ERROR, Choose, Images, Reencode, Run, Shards
from packer.conversion.result import ConvertResult
from packer.conversion.run import commit, convert
from packer.sets.deal import shares_text

__all__ = ["command", "commit_command", "dealt_lines", "index_command"]

_REASONS_SHOWN = 10
_SECTIONS = {
    "Which samples": ("split", "split_column", "split_fractions", "seed", "stratify", "group", "classes", "where"),
    "Images": ("on_error", "check", "decode", "reencode", "quality", "max_side", "resize_short", "ops"),
    "Shards": ("shard_size", "samples_per_shard", "shuffle", "label_offset"),
    **flags.SOURCE_SECTIONS,
}


def summary(result: ConvertResult, *, rates: bool = True) -> list[str]:
    """The result in a few lines. rates: whether this command packed the set, so that its time is a speed."""
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    size, shards = human_bytes(result.payload_bytes), plural(result.shards, f"{result.format} shard")
    content = f"{plural(result.samples, 'sample')} ({splits}), {plural(result.classes, 'class')}, {size}"
    if result.dry_run:
        most = "at most " if result.undecided else ""
        lines = [f"{result.output}: would hold {most}{content} in {shards}"]
        if result.expected_seconds is not None and result.expected_bytes is not None:
            time, size = human_seconds(result.expected_seconds), human_bytes(result.expected_bytes)
            lines.append(f"  about {size} of shards, and about {time}, as measured by packing some of the samples")
        if result.undecided:
            lines.append(f"  {result.undecided} is not known before the images are read")
        return lines
    if result.already_done:
        return [f"{result.output}: already holds {content} in {shards}; nothing to do"]
    if result.task is not None:
        number, count = result.task
        return [
            f"{result.output}: task {number} of {count}: {content} in {shards}, {human_seconds(result.seconds)}",
            f"  when all {count} are done:  packer commit {quoted(result.output)}",
        ]
    extra = (result.shard_bytes / result.payload_bytes - 1) * 100 if result.payload_bytes else 0.0
    seconds = max(result.seconds, 1e-9)
    took = [human_seconds(seconds)]
    if result.shards_resumed:
        took.append(f"{plural(result.shards_resumed, 'shard')} resumed")
    elif rates:
        took += [f"{result.samples / seconds:,.0f} samples/s", f"{human_bytes(result.payload_bytes / seconds)}/s"]
    lines = [f"{result.output}: {content} in {shards} ({extra:+.1f} % bytes)", f"  {', '.join(took)}"]
    if result.uploaded_bytes:
        lines.append(f"  {human_bytes(result.uploaded_bytes)} uploaded")
    if result.left_out:
        counts = ", ".join(f"{count:,} {how}" for how, count in result.left_out.items())
        report = "" if set(result.left_out) == {"not chosen"} else f"; see {result.output}/left-out.jsonl"
        reasons = [f"    {count:,} {reason}" for reason, count in result.left_out_reasons.items()]
        lines += map(flags.Emphasis, (f"  left out: {counts}{report}", *reasons[:_REASONS_SHOWN]))
        if len(reasons) > _REASONS_SHOWN:
            lines.append(f"    … and {plural(len(reasons) - _REASONS_SHOWN, 'more reason')}")
    return lines


def dealt_lines(counts: Mapping[str, int], fractions: Mapping[str, float] | None, group: str | None) -> list[str]:
    """How near the shares of a split by groups are to the requested ones; empty without groups."""
    return [] if fractions is None or group is None else [f"  {shares_text(counts, fractions, group)}"]


def _converted(result: ConvertResult) -> list[str]:
    options = click.get_current_context().params
    group = options["group"] if result.task is None else None
    return [*summary(result), *dealt_lines(result.splits, options["split_fractions"], group)]


@click.command("convert", cls=flags.SectionedCommand, sections=_SECTIONS)
@click.argument("sources", type=flags.SetPlace(local=True), nargs=-1, required=True, metavar="SOURCE...")
@click.option("--to", type=flags.Container(), default="hdf5", show_default=True, help="Format of the shards.")
@click.option("-o", "--output", type=flags.SetPlace(missing=True), metavar="OUT", help="Directory of the set, or "
              "s3://, gs:// or az:// address. Default: <source name>-<format>.")  # fmt: skip
@click.option("--work", type=click.Path(file_okay=False), metavar="DIR", help="Local directory of a set that is "
    "uploaded; it is kept. Default: a hidden directory, removed after the upload.")  # fmt: skip
@flags.new_split_option("Pack this split only; or name the split of a source without splits.")
@flags.fractions_option(
    "--split-fractions", "Divide the samples of one split at random into new ones, such as train=0.9,val=0.1."
)
@flags.seed_option("Of --split-fractions.")
@flags.stratify_option("Divide every class in the shares of --split-fractions.")
@flags.group_option(" of --split-fractions")
@click.option("--classes", callback=flags.parsed(lambda names: names.split(",")), metavar="NAME,…",
              help="Pack these classes only; they get the labels 0, 1, … in this order.")  # fmt: skip
@click.option("--where", metavar="EXPRESSION", help="Pack the samples for which this expression is true, such as "
              "'min_side >= 64 and "
              """class_name in ("cat", "dog")'; a wrong name lists all names. Conditions on images are """
              "evaluated when they are read.")  # fmt: skip
@flags.shard_size_option
@flags.count_option("--samples-per-shard", "Samples per shard.")
@flags.workers_option
@flags.engine_options
@flags.shuffle_option
@click.option("--on-error", type=click.Choice(ON_ERROR), default="raise", show_default=True,
              help="Unreadable or truncated images: stop, skip, or skip and copy aside.")  # fmt: skip
@click.option("--check", type=click.Choice(CHECKS), default="header", show_default=True,
              help="Check the header of each image, or decode it.")  # fmt: skip
@click.option("--decode", type=click.Choice(DECODES), default="RGB", show_default=True, help="Pixels that readers "
    "will decode; other images are refused. unchanged: native depth and channels.")  # fmt: skip
@click.option("--reencode", type=click.Choice(CODECS), help="Re-encode images in this codec. Without this and the "
              "next three options the bytes are kept exactly.")  # fmt: skip
@flags.count_option("--max-side", "Shrink to a longest side of N pixels.")
@flags.count_option("--resize-short", "Shrink to a shortest side of N pixels.")
@click.option("--quality", type=click.IntRange(1, 100), metavar="N", help="JPEG or WebP quality of re-encoded images. "
              "Default: 90.")  # fmt: skip
@click.option("--op", "ops", multiple=True, callback=flags.parsed(lambda texts: [*map(parse_op, texts)]),
              metavar="NAME:VALUES", help="Apply this op to each image, as in training, and encode the result: "
              "Resize:256, CenterCrop:224, Crop:TOP,LEFT,HEIGHT,WIDTH. May be repeated, in order. Masks, boxes and "
              "points are transformed, too. Needs torch.")  # fmt: skip
@flags.label_offset_option(type=click.IntRange(min=0), default=0)
@flags.source_options
@click.option("--task", callback=flags.parsed(flags.one_of_many), metavar="I/N",
              help="Pack share I of N only, I from 0, as a task of an array job. When all are "
              "done,  packer commit OUTPUT  makes the set.")  # fmt: skip
@flags.checksums_option
@click.option("--overwrite", is_flag=True, help="Replace the set, or unfinished conversion, in the output directory.")
@click.option("--dry-run", is_flag=True, help="List and plan only, and estimate size and time.")
@flags.reports(_converted)
def command(
    sources: tuple[str, ...], to: str, output: str | None, opens: Callable[[str], Any], **options: Any
) -> ConvertResult:
    """Pack SOURCE into HDF5, TFRecord or tar shards with an index; several sources become one set.

    SOURCE is a folder of images (split/class/file, class/file or files), a folder of COCO, Pascal VOC, YOLO or ILSVRC,
    a manifest or a list of addresses (.csv, .tsv, .jsonl, .parquet, .txt), an archive of a folder (.tar, .tar.gz,
    .tar.zst, .tar.xz, .zip), a packed set, foreign shards and folders of them, a data set of Hugging Face (Parquet),
    MosaicML (MDS) or FFCV, CIFAR, MNIST, or NumPy arrays. Its kind is recognised by its content.

    Image bytes are kept exactly. After an interruption or a kill, the same command continues.
    """

    def of(*names: str, **renamed: str) -> dict[str, Any]:
        return {**{name: options[name] for name in names}, **{to: options[name] for to, name in renamed.items()}}

    size, count = options["shard_size"], options["samples_per_shard"]
    codec, changes = options["reencode"], of("max_side", "resize_short", "quality")
    smaller = Reencode(codec or "keep", **changes) if codec or any(changes.values()) else None
    return convert(
        [opens(source) for source in sources],
        to,
        output,
        choose=Choose(**of("split", "classes", "where", "seed", "stratify", "group", fractions="split_fractions")),
        images=Images(reencode=smaller, **of("check", "decode", "ops")),
        shards=Shards(size, count, **of("shuffle", "label_offset", "checksums")),
        run=Run(**of("workers", "engine", "on_error", "task", "work")),
        **of("overwrite", "dry_run", "watcher"),
    )


@click.command("commit")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@flags.reports(lambda result: summary(result, rates=False))
def commit_command(output: str, **options: Any) -> ConvertResult:
    """Make a set of the shards that the tasks of  packer convert … --task I/N  have packed into OUT.

    If shards are missing, the command names the tasks to run again, and changes nothing.
    """
    return commit(output, **options)


def _indexed(result: IndexResult) -> Iterator[str]:
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    shards = plural(result.shards, f"{result.format} shard")
    yield f"{result.output}: {plural(result.samples, 'sample')} ({splits}) in {shards}"
    yield from (f"  warning: {with_flags(warning)}" for warning in result.warnings)


@click.command("index")
@click.argument("shards", nargs=-1, required=True, metavar="SHARD...", type=click.Path(exists=True))
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="Directory of the index, with links to the "
    "shards. Default: the folder of the shards.")  # fmt: skip
@flags.new_split_option("Split of all these shards. Default: from each file name.")
@click.option("--image-key", metavar="KEY", help="Name of the image in the shards: a tar extension (jpg;png), an "
              "Example feature, an HDF5 data set.")  # fmt: skip
@click.option("--label-key", metavar="KEY", help="Name of the label in the shards.")
@click.option("--field", "fields", callback=flags.field_columns, multiple=True, metavar="NAME=KEY",
              help="A further field and its key.")  # fmt: skip
@flags.label_offset_option(type=int)
@flags.file_list_option("--classes", "Text file of class names, one per line.")
@click.option("--accept-loss", is_flag=True, help="Continue even if shards are missing, or the existing set would "
              "lose samples, splits, classes or fields.")  # fmt: skip
@flags.checksums_option
@flags.workers_option
@flags.engine_options
@flags.reports(_indexed)
def index_command(shards: tuple[str, ...], output: str | None, classes: str | None, **options: Any) -> IndexResult:
    """Make a set of each SHARD (a file, or a directory of them) without copying.

    Takes WebDataset tars, TFRecords of tf.train.Example and flat HDF5 files, and shards of packer with a lost or stale
    index. An existing set is compared first: if samples, splits or classes would be lost, the command refuses and
    changes nothing.
    """
    return index(shards, output, classes=None if classes is None else _class_names(Path(classes)), **options)


def _class_names(path: Path) -> list[str]:
    names = [name.strip() for name in path.read_text(encoding="utf-8").rstrip().splitlines()]
    if "" in names:
        raise click.BadParameter(f"line {names.index('') + 1} of {path} is empty; a label would have no name")
    return names
