"""`packer append`, `merge`, `split`, `subset`, `drop`, `erase`, `relabel`, `dedup`, `add-field`, `reshard`, `prune`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cache.messages import listed, plural, quoted
from packer.cli.convert import OF_THE_SOURCE, SOURCE_SECTIONS, Container, dealt_lines, engine_options
from packer.cli.convert import command as convert_command
from packer.cli.group import SectionedCommand
from packer.cli.text import (
    Emphasis,
    SetPlace,
    Size,
    human_bytes,
    json_option,
    new_split_option,
    pairs,
    show_result,
    split_option,
    watcher,
    workers_option,
)
from packer.conversion.options import Run, Shards
from packer.sets.duplicates import KEEP, DedupResult, dedup
from packer.sets.erase import EraseResult, erase
from packer.sets.packing import EXISTING, add_field, append, reshard
from packer.sets.table import SaveResult, SetTable, drop, merge, prune, read_keys, relabel, split, subset
from packer.sources import open_source
from readers.fields import KINDS

__all__ = [
    "append_command",
    "dedup_command",
    "drop_command",
    "erase_command",
    "field_command",
    "merge_command",
    "prune_command",
    "relabel_command",
    "reshard_command",
    "split_command",
    "subset_command",
]

F = TypeVar("F", bound=Callable[..., Any])
_GROUPS_SHOWN, _SHOWN = 20, 10
_set = click.argument("path", metavar="SET", type=SetPlace(local=True))
_output = click.option("-o", "--output", type=click.Path(), metavar="OUT", help="A new set, with links to the shards. "
                       "Default: SET itself is changed.")  # fmt: skip
_new = click.option("-o", "--output", type=click.Path(), metavar="OUT", required=True, help="The new set.")
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and write nothing.")
_shard_size = click.option("--shard-size", type=Size(), metavar="SIZE", help="Size of a shard, as 1GiB. Default: "
                           "8 shards a split, each from 64 MiB to 1 GiB.")  # fmt: skip
_where = click.option("--where", metavar="EXPRESSION", help="""Samples for which this is true, as 'min_side >= 64 """
                      """and label in ("cat", 3)'.""")  # fmt: skip
_keys = click.option("--keys", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Samples with these "
                     "keys, one a line.")  # fmt: skip
_of_the_source = [option for option in convert_command.params if option.name in (*OF_THE_SOURCE, "source_label_offset")]


@click.command("append", cls=SectionedCommand, sections=SOURCE_SECTIONS, params=list(_of_the_source))
@_set
@click.argument("source", metavar="SOURCE", type=SetPlace(local=True))
@new_split_option("Take this split only; or the name of a source without splits.")
@click.option("--existing", type=click.Choice(EXISTING), default="raise", show_default=True,
              help="Samples whose key the split has already.")  # fmt: skip
@click.option("--on-error", type=click.Choice(EXISTING), default="raise", show_default=True, help="Unreadable images.")
@_shard_size
@workers_option
@engine_options
@_dry_run
@json_option
def append_command(path: str, source: str, as_json: bool, **options: Any) -> None:
    """Add the samples of SOURCE, anything that `packer convert` takes, to SET.

    They go into shards of their own; the shards of SET stay as they are. Classes are unified by name. Others that
    append to SET at the same time wait.
    """
    given = {option.name: options.pop(str(option.name)) for option in _of_the_source}
    opened = open_source(source, label_offset=given.pop("source_label_offset"), **given)
    run = _run(options, on_error=options.pop("on_error"))
    shards = Shards(options.pop("shard_size"))
    _show(append(path, opened, shards=shards, run=run, watcher=watcher(as_json), **options), as_json)


@click.command("merge")
@click.argument("sets", nargs=-1, required=True, metavar="SET...", type=SetPlace(local=True))
@_new
@click.option("--prefix-keys", is_flag=True, help="Put the name of its set before each key.")
@_dry_run
@json_option
def merge_command(sets: tuple[str, ...], output: str, as_json: bool, **options: Any) -> None:
    """Make one set of several, split by split. Classes are unified by name; no shard is copied."""
    _show(merge(sets, output, watcher=watcher(as_json), **options), as_json)


@click.command("split")
@_set
@click.option("--fractions", required=True, callback=pairs(float), metavar="NAME=SHARE,…", help="The new splits, as "
              "train=0.9,val=0.1.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="SEED",
              help="Of the draw.")  # fmt: skip
@click.option("--stratify", is_flag=True, help="Every class in these shares.")
@click.option("--group", metavar="COLUMN", help="Keep samples with the same value in this column of the table, as "
              "patient, in one split; folder: those in one folder.")  # fmt: skip
@split_option("Deal the samples of this split; the others stay.")
@_output
@_dry_run
@json_option
def split_command(path: str, fractions: dict[str, float], group: str | None, as_json: bool, **options: Any) -> None:
    """Deal the samples of SET at random to new splits."""
    result = split(path, fractions, group=group, watcher=watcher(as_json), **options)
    lines = [*_summary(result), *dealt_lines(result.splits, fractions, group)]
    show_result(result, as_json, lambda: lines)


@click.command("subset")
@_set
@_new
@_where
@_keys
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Each N-th sample of each split.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N samples of each split.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), metavar="SEED", help="Draw those of --limit. Default: the first ones."
)
@split_option()
@_dry_run
@json_option
def subset_command(path: str, output: str, where: str | None, keys: str | None, as_json: bool, **options: Any) -> None:
    """Make a set of the samples of SET that fulfil all criteria. No shard is copied."""
    every, limit, seed, of_split = (options.pop(name) for name in ("every", "limit", "seed", "split"))
    if where is None and keys is None and every is None and limit is None and of_split is None:
        raise click.UsageError("say which samples: --where, --keys, --every, --limit or --split")

    def choose(whole: SetTable) -> SetTable:
        found = whole if of_split is None else whole.of_split(of_split)
        found = found if where is None else found.where(where)
        found = found if keys is None else found.select(read_keys(keys))
        found = found if every is None else found.every(every)
        return found if limit is None else found.limit(limit, seed=seed)

    _show(subset(path, output, choose, watcher=watcher(as_json), **options), as_json)


@click.command("drop")
@_set
@_where
@_keys
@split_option("Only samples of this split.")
@_output
@_dry_run
@json_option
def drop_command(path: str, where: str | None, keys: str | None, as_json: bool, **options: Any) -> None:
    """Take samples out of the index of SET, which shows them no more.

    Their bytes stay in the shards until `packer reshard` and then `packer prune`; `packer erase` removes them at once.
    """
    result = drop(path, where=where, keys=_listed(where, keys), watcher=watcher(as_json), **options)
    stay = (
        f"  the bytes of dropped samples stay in its shards until  packer reshard {quoted(result.output)}  and  "
        f"packer prune {quoted(result.output)}"
    )
    show_result(result, as_json, lambda: [*_summary(result), stay])


def _listed(where: str | None, keys: str | None) -> list[str] | None:
    """The keys of --keys, where that is the one of the two that is given."""
    if (where is None) == (keys is None):
        raise click.UsageError("say which samples: --where or --keys, one of them")
    return None if keys is None else read_keys(keys)


@click.command("erase")
@_set
@_where
@_keys
@split_option("Only samples of this split.")
@workers_option
@engine_options
@_dry_run
@json_option
def erase_command(path: str, where: str | None, keys: str | None, as_json: bool, **options: Any) -> None:
    """Remove samples from SET for good: from its index, its shards, its earlier states and its history.

    Shards with such samples are written again without them; the old ones are removed at once, so programs that have SET
    open must open it again. Copies elsewhere that this node shows are listed, with what removes them.
    """
    result = erase(path, where=where, keys=_listed(where, keys), watcher=watcher(as_json), **options)
    show_result(result, as_json, lambda: _erased(result))


def _erased(result: EraseResult) -> list[str]:
    if not result.samples:
        return [f"{result.path}: what a killed command had left of this erasure is removed; nothing else to do"]
    erased, wrote, removed = (
        ("would erase", "would write", "would remove") if result.dry_run else ("erased", "wrote", "removed")
    )
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    size = "" if result.dry_run else f", {human_bytes(result.written_bytes)}"
    lines = [
        f"{result.path}: {erased} {plural(result.samples, 'sample')} of {result.samples_before:,}; left: {splits}",
        f"  {wrote} {plural(result.rewritten, 'shard')} again{size}",
        f"  {removed} {plural(len(result.removed), 'old file')}, {human_bytes(result.removed_bytes)}",
    ]
    if result.copies:
        lines.append(Emphasis("  there may be more of them, which this command does not reach:"))
        lines += [f"    {copy.what} {copy.where}: {copy.advice}" for copy in result.copies]
    if result.unknown:
        lines.append(Emphasis(f"  files here that are not of the set, not looked at: {listed(result.unknown, _SHOWN)}"))
    return lines


@click.command("relabel")
@_set
@click.argument("labels", required=False, metavar="[FILE]", type=click.Path(exists=True, dir_okay=False))
@click.option("--map", "names", multiple=True, callback=pairs(str), metavar="OLD=NEW", help="Another name of a "
              "class; one that is there joins the two. Repeatable.")  # fmt: skip
@click.option("--classes", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Names by label, one a "
              "line, for a set without.")  # fmt: skip
@_output
@_dry_run
@json_option
def relabel_command(
    path: str, labels: str | None, names: dict[str, str] | None, classes: str | None, as_json: bool, **options: Any
) -> None:
    """Give classes other names, or samples of SET the labels in FILE: a table with the columns key and label."""
    if sum(given is not None for given in (labels, names, classes)) != 1:
        raise click.UsageError("give one of FILE, --map and --classes")
    listed = None if classes is None else read_keys(classes)
    _show(
        relabel(path, names=names, labels=labels, classes=listed, watcher=watcher(as_json), **options),
        as_json,
    )


@click.command("dedup")
@_set
@click.option("--near", type=click.IntRange(0, 20), metavar="N", help="Also images that look alike: perceptual "
              "hashes that differ in at most N of 128 bits; 6 finds resized and re-encoded ones.")  # fmt: skip
@click.option("--keep", type=click.Choice(KEEP), default="first", show_default=True, help="Which of a group stays.")
@click.option("--prefer", metavar="SPLIT", help="Samples of this split stay before all others.")
@_output
@workers_option
@engine_options
@_dry_run
@json_option
def dedup_command(path: str, as_json: bool, **options: Any) -> None:
    """Find images of SET that are the same, byte by byte, in all splits, and drop all but one of each."""
    result = dedup(path, watcher=watcher(as_json), **options)
    show_result(result, as_json, lambda: _groups(result))


def _groups(result: DedupResult) -> list[str]:
    lines = [
        "  " + ", ".join(f"{'' if one.kept else 'not '}{one.split}/{one.key}" for one in group)
        for group in result.groups[:_GROUPS_SHOWN]
    ]
    if len(result.groups) > _GROUPS_SHOWN:
        lines.append(f"  … and {plural(len(result.groups) - _GROUPS_SHOWN, 'more group')}; --json lists them")
    found = f"{result.path}: {plural(len(result.groups), 'group')} of duplicates in {plural(result.samples, 'sample')}"
    for count, what in ((result.across_splits, "splits"), (result.across_classes, "classes")):
        found += f", {count:,} across {what}" if count else ""
    lines.insert(0, found)
    if result.unread:
        lines.append(
            Emphasis(f"  {plural(result.unread, 'image')} could not be decoded, and were compared as bytes only")
        )
    return lines if result.saved is None else [*lines, *_summary(result.saved)]


@click.command("add-field")
@_set
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--name", required=True, metavar="NAME", help="Name of the field, as mask.")
@click.option("--kind", type=click.Choice(list(KINDS)), help="What the files are. Default: by the field's name, or "
              "their suffix.")  # fmt: skip
@_shard_size
@workers_option
@engine_options
@_dry_run
@json_option
def field_command(path: str, folder: str, as_json: bool, **options: Any) -> None:
    """Add a field to SET: a file in DIR for each sample, named by its key, as cat/001.png.

    The files go into shards of their own; those of SET stay as they are.
    """
    shards, run = Shards(options.pop("shard_size")), _run(options)
    name = options.pop("name")
    _show(add_field(path, folder, name, shards=shards, run=run, watcher=watcher(as_json), **options), as_json)


@click.command("reshard")
@_set
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="A new set. Default: SET itself; its old shards "
              "stay until `packer prune`.")  # fmt: skip
@click.option("--to", type=Container(), help="Format of the shards. Default: that of SET.")
@_shard_size
@click.option("--shuffle", type=click.IntRange(0, 2**32 - 1), metavar="SEED", help="Pack in this random order.")
@workers_option
@engine_options
@_dry_run
@json_option
def reshard_command(path: str, as_json: bool, **options: Any) -> None:
    """Pack the samples of SET again, without the bytes that no sample uses any more."""
    shards, run = Shards(options.pop("shard_size"), shuffle=options.pop("shuffle")), _run(options)
    _show(reshard(path, shards=shards, run=run, watcher=watcher(as_json), **options), as_json)


@click.command("prune")
@_set
@_dry_run
@json_option
def prune_command(path: str, dry_run: bool, as_json: bool) -> None:
    """Remove old indexes and shards of SET, which stay for those who opened it before it was changed."""
    result = prune(path, dry_run=dry_run, watcher=watcher(as_json))
    would = "would remove" if dry_run else "removed"
    size = "" if dry_run else f", {human_bytes(result.bytes)}"
    show_result(result, as_json, lambda: [f"{result.path}: {would} {plural(len(result.files), 'old file')}{size}"])


def _run(options: dict[str, Any], **more: Any) -> Run:
    return Run(options.pop("workers"), options.pop("engine"), **more)


def _show(result: SaveResult, as_json: bool) -> None:
    show_result(result, as_json, lambda: _summary(result))


def _summary(result: SaveResult) -> list[str]:
    """The result in a few lines."""
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    samples = f"{plural(result.samples, 'sample')} ({splits}), {plural(result.classes, 'class')}"
    done = "would hold" if result.dry_run else "holds"
    lines = [f"{result.output}: {done} {samples}, from {result.samples_before:,}"]
    shards = f"  {plural(result.shards, 'shard')}, {human_bytes(result.shard_bytes)}"
    if result.written_bytes:
        shards += f", {human_bytes(result.written_bytes)} of them written"
    if result.linked:
        shards += f", {result.linked:,} linked"
    lines.append(shards)
    if result.with_field:
        lines.append(f"  {plural(result.with_field, 'sample')} with the new field")
    for count, noun, what in (
        (result.skipped, "sample", "in the set already"),
        (result.left_out, "file", "of the source left out"),
        (result.unmatched, "file", "of no sample"),
        (result.symbolic, "symbolic link", "to sets that must stay where they are"),
    ):
        if count:
            lines.append(Emphasis(f"  {plural(count, noun)} {what}"))
    return lines
