"""`packer append`, `merge`, `split`, `subset`, `drop`, `erase`, `relabel`, `dedup`, `add-field`, `reshard`, `prune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from cache.messages import human_bytes, listed, plural, quoted
from packer.cli import flags
from packer.cli.convert import dealt_lines
from packer.conversion.options import Run, Shards
from packer.sets.duplicates import KEEP, DedupResult, dedup
from packer.sets.erase import EraseResult, erase
from packer.sets.packing import EXISTING, add_field, append, reshard
from packer.sets.table import PruneResult, SaveResult, SetTable, drop, merge, prune, read_keys, relabel, split, subset
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

_GROUPS_SHOWN, _SHOWN = 20, 10
_set = click.argument("path", metavar="SET", type=flags.SetPlace(local=True))
_output = click.option("-o", "--output", type=click.Path(), metavar="OUT", help="A new set, with links to the shards. "
                       "Default: SET itself is changed.")  # fmt: skip
_new = click.option("-o", "--output", type=click.Path(), metavar="OUT", required=True, help="The new set.")


def _summary(result: SaveResult) -> Iterator[str]:
    """The result in a few lines."""
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    samples = f"{plural(result.samples, 'sample')} ({splits}), {plural(result.classes, 'class')}"
    done = "would hold" if result.dry_run else "holds"
    yield f"{result.output}: {done} {samples}, from {result.samples_before:,}"
    written = f", {human_bytes(result.written_bytes)} of them written" if result.written_bytes else ""
    links = f", {result.linked:,} linked" if result.linked else ""
    yield f"  {plural(result.shards, 'shard')}, {human_bytes(result.shard_bytes)}{written}{links}"
    if result.with_field:
        yield f"  {plural(result.with_field, 'sample')} with the new field"
    for count, noun, place in (
        (result.skipped, "sample", "in the set already"),
        (result.left_out, "file", "of the source left out"),
        (result.unmatched, "file", "of no sample"),
        (result.symbolic, "symbolic link", "to sets that must stay where they are"),
    ):
        if count:
            yield flags.Emphasis(f"  {plural(count, noun)} {place}")


def _run(options: dict[str, Any], **more: Any) -> Run:
    return Run(options.pop("workers"), options.pop("engine"), **more)


@click.command("append", cls=flags.SectionedCommand, sections=flags.SOURCE_SECTIONS)
@flags.source_options
@_set
@click.argument("source", metavar="SOURCE", type=flags.SetPlace(local=True))
@flags.new_split_option("Take this split only; or name the split of a source without splits.")
@click.option("--existing", type=click.Choice(EXISTING), default="raise", show_default=True,
              help="Samples whose key the split has already.")  # fmt: skip
@click.option("--on-error", type=click.Choice(EXISTING), default="raise", show_default=True, help="Unreadable images.")
@flags.shard_size_option
@flags.workers_option
@flags.engine_options
@flags.dry_run_option
@flags.reports(_summary)
def append_command(path: str, source: str, opens: Callable[[str], Any], **options: Any) -> SaveResult:
    """Add the samples of SOURCE, any source of `packer convert`, to SET.

    New samples go into new shards; existing shards do not change. Classes are unified by name. Concurrent appends to
    SET wait for each other.
    """
    run = _run(options, on_error=options.pop("on_error"))
    return append(path, opens(source), shards=Shards(options.pop("shard_size")), run=run, **options)


@click.command("merge")
@click.argument("sets", nargs=-1, required=True, metavar="SET...", type=flags.SetPlace(local=True))
@_new
@click.option("--prefix-keys", is_flag=True, help="Prefix each key with the name of its set.")
@flags.dry_run_option
@flags.reports(_summary)
def merge_command(sets: tuple[str, ...], output: str, **options: Any) -> SaveResult:
    """Merge several sets into one, split by split. Classes are unified by name; no shard is copied."""
    return merge(sets, output, **options)


def _dealt(result: SaveResult) -> Iterator[str]:
    yield from _summary(result)
    options = click.get_current_context().params
    yield from dealt_lines(result.splits, options["fractions"], options["group"])


@click.command("split")
@_set
@flags.fractions_option("--fractions", "The new splits, such as train=0.9,val=0.1.", required=True)
@flags.seed_option()
@flags.stratify_option("Divide every class by these shares.")
@flags.group_option()
@flags.split_option("Divide the samples of this split; the others stay.")
@_output
@flags.dry_run_option
@flags.reports(_dealt)
def split_command(path: str, fractions: dict[str, float], **options: Any) -> SaveResult:
    """Divide the samples of SET at random into new splits."""
    return split(path, fractions, **options)


@click.command("subset")
@_set
@_new
@flags.where_option
@flags.keys_option
@flags.count_option("--every", "Every N-th sample of each split.")
@flags.count_option("--limit", "At most N samples of each split.")
@flags.seed_option("Draw the samples of --limit at random. Default: the first samples.", None)
@flags.split_option()
@flags.dry_run_option
@flags.reports(_summary)
def subset_command(
    path: str, output: str, where: str | None, keys: str | None, every: int | None, limit: int | None,
    seed: int | None, split: str | None, **options: Any,
) -> SaveResult:  # fmt: skip
    """Make a set of the samples of SET that meet all criteria. No shard is copied."""
    if where is None and keys is None and every is None and limit is None and split is None:
        raise click.UsageError("select samples: --where, --keys, --every, --limit or --split")

    def choose(table: SetTable) -> SetTable:
        table = table if split is None else table.of_split(split)
        table = table if where is None else table.where(where)
        table = table if keys is None else table.select(read_keys(keys))
        table = table if every is None else table.every(every)
        return table if limit is None else table.limit(limit, seed=seed)

    return subset(path, output, choose, **options)


def _chosen(where: str | None, keys: str | None) -> dict[str, Any]:
    """--where or --keys as arguments of the library."""
    if (where is None) == (keys is None):
        raise click.UsageError("select samples by either --where or --keys")
    return {"where": where, "keys": None if keys is None else read_keys(keys)}


def _dropped(result: SaveResult) -> Iterator[str]:
    yield from _summary(result)
    yield (
        f"  the bytes of dropped samples stay in its shards until  packer reshard {quoted(result.output)}  and  "
        f"packer prune {quoted(result.output)}"
    )


@click.command("drop")
@_set
@flags.where_option
@flags.keys_option
@flags.split_option("Only samples of this split.")
@_output
@flags.dry_run_option
@flags.reports(_dropped)
def drop_command(path: str, where: str | None, keys: str | None, **options: Any) -> SaveResult:
    """Remove samples from the index of SET.

    Their bytes stay in the shards until `packer reshard` and then `packer prune`; `packer erase` removes them at once.
    """
    return drop(path, **_chosen(where, keys), **options)


def _erased(result: EraseResult) -> Iterator[str]:
    if not result.samples:
        yield f"{result.path}: the leftovers of a killed erasure are removed; nothing else to do"
        return
    erased, wrote, removed = (
        ("would erase", "would write", "would remove") if result.dry_run else ("erased", "wrote", "removed")
    )
    splits = ", ".join(f"{name} {count:,}" for name, count in result.splits.items())
    size = "" if result.dry_run else f", {human_bytes(result.written_bytes)}"
    yield f"{result.path}: {erased} {plural(result.samples, 'sample')} of {result.samples_before:,}; left: {splits}"
    yield f"  {wrote} {plural(result.rewritten, 'shard')} again{size}"
    yield f"  {removed} {plural(len(result.removed), 'old file')}, {human_bytes(result.removed_bytes)}"
    if result.copies:
        yield flags.Emphasis("  other copies may exist, which this command does not reach:")
        yield from (f"    {copy.what} {copy.where}: {copy.advice}" for copy in result.copies)
    if result.unknown:
        yield flags.Emphasis(
            f"  files here that do not belong to the set, not checked: {listed(result.unknown, _SHOWN)}"
        )


@click.command("erase")
@_set
@flags.where_option
@flags.keys_option
@flags.split_option("Only samples of this split.")
@flags.workers_option
@flags.engine_options
@flags.dry_run_option
@flags.reports(_erased)
def erase_command(path: str, where: str | None, keys: str | None, **options: Any) -> EraseResult:
    """Remove samples from SET for good: from its index, its shards, its earlier states and its history.

    Shards with these samples are rewritten without them; the old shards are removed at once, so programs that have SET
    open must open it again. Other copies that are visible on this node are listed, with the command that removes them.
    """
    return erase(path, **_chosen(where, keys), **options)


@click.command("relabel")
@_set
@click.argument("labels", required=False, metavar="[FILE]", type=flags.existing_file)
@click.option("--map", "names", multiple=True, callback=flags.pairs(str), metavar="OLD=NEW", help="Rename a class; "
    "the name of an existing class joins both. Repeatable.")  # fmt: skip
@flags.file_list_option("--classes", "Class names in the order of the labels, one per line, for a set without names.")
@_output
@flags.dry_run_option
@flags.reports(_summary)
def relabel_command(
    path: str, labels: str | None, names: dict[str, str] | None, classes: str | None, **options: Any
) -> SaveResult:
    """Rename classes of SET, or give its samples the labels in FILE, a table with the columns key and label."""
    if sum(value is not None for value in (labels, names, classes)) != 1:
        raise click.UsageError("give one of FILE, --map and --classes")
    listed_classes = None if classes is None else read_keys(classes)
    return relabel(path, names=names, labels=labels, classes=listed_classes, **options)


def _groups(result: DedupResult) -> Iterator[str]:
    count = f"{plural(len(result.groups), 'group')} of duplicates in {plural(result.samples, 'sample')}"
    across = ((result.across_splits, "splits"), (result.across_classes, "classes"))
    yield f"{result.path}: {count}" + "".join(f", {number:,} across {unit}" for number, unit in across if number)
    for group in result.groups[:_GROUPS_SHOWN]:
        yield "  " + ", ".join(f"{'' if sample.kept else 'not '}{sample.split}/{sample.key}" for sample in group)
    if len(result.groups) > _GROUPS_SHOWN:
        yield f"  … and {plural(len(result.groups) - _GROUPS_SHOWN, 'more group')}; --json lists them"
    if result.unread:
        yield flags.Emphasis(
            f"  {plural(result.unread, 'image')} could not be decoded, and were compared as bytes only"
        )
    if result.saved is not None:
        yield from _summary(result.saved)


@click.command("dedup")
@_set
@click.option("--near", type=click.IntRange(0, 20), metavar="N", help="Also similar images: perceptual hashes that "
    "differ in at most N of 128 bits; 6 finds resized and re-encoded copies.")  # fmt: skip
@click.option("--keep", type=click.Choice(KEEP), default="first", show_default=True, help="Sample of a group to keep.")
@click.option("--prefer", metavar="SPLIT", help="Prefer to keep samples of this split.")
@_output
@flags.workers_option
@flags.engine_options
@flags.dry_run_option
@flags.reports(_groups)
def dedup_command(path: str, **options: Any) -> DedupResult:
    """Find images of SET with equal bytes, in all splits, and drop all but one of each group."""
    return dedup(path, **options)


@click.command("add-field")
@_set
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option("--name", required=True, metavar="NAME", help="Name of the field, such as mask.")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Kind of the files. Default: from the field's name, or "
    "from their suffix.")  # fmt: skip
@flags.shard_size_option
@flags.workers_option
@flags.engine_options
@flags.dry_run_option
@flags.reports(_summary)
def field_command(path: str, folder: str, name: str, **options: Any) -> SaveResult:
    """Add a field to SET: a file in DIR for each sample, named after its key, such as cat/001.png.

    The files go into new shards; existing shards do not change.
    """
    return add_field(path, folder, name, shards=Shards(options.pop("shard_size")), run=_run(options), **options)


@click.command("reshard")
@_set
@click.option("-o", "--output", type=click.Path(), metavar="OUT", help="A new set. Default: SET itself; its old shards "
              "stay until `packer prune`.")  # fmt: skip
@click.option("--to", type=flags.Container(), help="Format of the shards. Default: that of SET.")
@flags.shard_size_option
@flags.shuffle_option
@flags.workers_option
@flags.engine_options
@flags.dry_run_option
@flags.reports(_summary)
def reshard_command(path: str, **options: Any) -> SaveResult:
    """Repack the samples of SET, without unused bytes."""
    shards = Shards(options.pop("shard_size"), shuffle=options.pop("shuffle"))
    return reshard(path, shards=shards, run=_run(options), **options)


def _pruned(result: PruneResult) -> list[str]:
    dry_run = click.get_current_context().params["dry_run"]
    size = "" if dry_run else f", {human_bytes(result.bytes)}"
    would = "would remove" if dry_run else "removed"
    return [f"{result.path}: {would} {plural(len(result.files), 'old file')}{size}"]


@click.command("prune")
@_set
@flags.dry_run_option
@flags.reports(_pruned)
def prune_command(path: str, **options: Any) -> PruneResult:
    """Remove old indexes and shards of SET, which were kept for readers of its earlier states."""
    return prune(path, **options)
