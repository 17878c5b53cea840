"""`packer inspect`, `packer order` and `packer parity`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import readers
from cache.messages import parse_size, plural
from packer.cli.text import SetPlace, bar, human_bytes, json_option, print_json, show, show_result, split_option
from packer.inspection import InspectResult, OrderReport, SplitReport, compare_orders, inspect
from readers.layout import EDITS

if TYPE_CHECKING:
    from packer.tools.parity import Parity

__all__ = ["command", "describe", "order_command", "parity_command"]

_CLASSES_SHOWN = 20


@click.command("inspect")
@click.argument("path", metavar="SET", type=SetPlace())
@click.option("--classes", "all_classes", is_flag=True, help="Show every class, not the first 20.")
@json_option
def command(path: str, all_classes: bool, as_json: bool) -> None:
    """Show splits, counts, classes, sizes, dimensions, duplicates and origin of SET."""
    result = inspect(path)
    show_result(result, as_json, lambda: describe(result, all_classes))


def describe(result: InspectResult, all_classes: bool = False) -> list[str]:
    """The report as lines."""
    made = result.made
    lines = [
        f"{result.path}: {result.format} set, {plural(len(result.classes), 'class')}, "
        f"fields {', '.join(f'{name} ({kind})' for name, kind in result.fields.items())}",
        f"  fingerprint {result.fingerprint}",
    ]
    if made.get("source"):
        lines.append(f"  made by {made.get('by') or made.get('indexed_by')} from {made['source']}")
    options = {name: value for name, value in dict(made.get("options", {})).items() if value not in (0, "")}
    if options:
        lines.append("  options " + ", ".join(f"{name} {value}" for name, value in options.items()))
    lines += [f"  remark  {remark}" for remark in made.get("remarks", ())]
    if result.label_offset:
        lines.append(f"  labels in the shards start at {result.label_offset}, here at 0")
    for done in result.history:
        before, after = done["samples"]
        arguments = ", ".join(f"{name} {_listed(value)}" for name, value in done["arguments"].items())
        lines.append(f"  {done['date']} {done['operation']}: {arguments}; {before:,} samples, then {after:,}")
    lines += [f"  {EDITS[name]} than the shards" for name in result.edited]
    if result.retired:
        lines.append(f"  {plural(len(result.retired), 'file')} of earlier states; packer prune removes them")
    for name, split in result.splits.items():
        lines += ["", *_split_lines(name, split)]
        lines += _class_lines(split, result.classes, all_classes)
    lines += ["", _duplicate_line(result)]
    lines += [f"  {' = '.join(group)}" for group in result.duplicate_examples]
    return lines


def _listed(value: Any) -> str:
    """An argument of an operation, on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={_listed(item)}" for name, item in value.items())
    return ", ".join(map(_listed, value)) if isinstance(value, list) else str(value)


def _split_lines(name: str, split: SplitReport) -> list[str]:
    samples, shards = plural(split.samples, "sample"), plural(split.shards, "shard")
    size, payload = human_bytes(split.shard_bytes), human_bytes(split.payload_bytes)
    lines = [f"{name}: {samples} in {shards}, {size} ({payload} of payload)"]
    partial = {field: count for field, count in split.field_samples.items() if count != split.samples}
    if partial:
        lines.append("  present in " + ", ".join(f"{field} {count:,}" for field, count in partial.items()))
    if split.size_percentiles:
        lines.append("  bytes   " + _percentile_text({p: human_bytes(v) for p, v in split.size_percentiles.items()}))
    for axis, values in split.dimensions.items():
        if values:
            lines.append(f"  {axis:7s} " + _percentile_text({p: str(v) for p, v in values.items()}))
    lines.append("  images  " + ", ".join(f"{media} {count:,}" for media, count in split.media.items()))
    if split.coding:
        lines.append(
            "  coding  " + ", ".join(f"{what}: {plural(count, 'image')}" for what, count in split.coding.items())
        )
    return lines


def _percentile_text(values: dict[int, str]) -> str:
    names = {0: "min", 50: "median", 100: "max"}
    return "  ".join(f"{names.get(percent, f'{percent} %')} {value}" for percent, value in values.items())


def _class_lines(split: SplitReport, classes: tuple[str, ...], everything: bool) -> list[str]:
    lines = []
    if split.unlabelled:
        lines.append(f"  without a label {split.unlabelled:,}")
    counts = split.label_counts
    if not counts:
        return lines
    top = max(counts.values())
    shown = list(counts.items()) if everything else list(counts.items())[:_CLASSES_SHOWN]
    width = max(len(_class_name(label, classes)) for label, _ in shown)
    lines += [
        f"  {label:5d} {_class_name(label, classes):{width}s} {count:8,} {bar(count / top)}" for label, count in shown
    ]
    if len(shown) < len(counts):
        spread = f"{min(counts.values()):,} to {top:,} samples each"
        lines.append(f"  … {plural(len(counts), 'class')}, {spread}; --classes shows all")
    return lines


def _class_name(label: int, classes: tuple[str, ...]) -> str:
    return classes[label] if label < len(classes) else ""


def _duplicate_line(result: InspectResult) -> str:
    if not result.duplicates:
        return "duplicates: none (by size and CRC32C)"
    return f"duplicates: {plural(result.duplicates, 'sample')} with the bytes of another (by size and CRC32C)"


@click.command("order")
@click.argument("path", metavar="SET", type=SetPlace())
@split_option("Default: the only split, or train.")
@click.option("--block-bytes", default="8MiB", show_default=True, metavar="SIZE", help="Consecutive bytes of a block.")
@click.option(
    "--window",
    "windows",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Blocks in memory at a time; repeatable.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="SEED", help="Of the draw.")
@json_option
def order_command(path: str, block_bytes: str, windows: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Show what each order of the samples in SET costs in bytes read, and how well it mixes them.

    Local disks read single samples at little cost; slow and remote storage needs a block shuffle.
    """
    options |= {"windows": windows} if windows else {}
    reports = compare_orders(path, block_bytes=parse_size(block_bytes), **options)
    show_result(reports, as_json, lambda: _order_lines(reports, block_bytes))


def _order_lines(reports: list[OrderReport], block_bytes: str) -> list[str]:
    """The comparison as lines."""
    lines = [
        "                     bytes read per byte used                 mixes, against",
        "order                4 KiB reads   1 MiB reads   memory      a global shuffle",
    ]
    for report in reports:
        small, large = report.amplification.values()
        memory = human_bytes(report.memory_bytes) if report.memory_bytes else ""
        costs = f"{report.name:20s} {small:11.2f} {large:13.2f}   {memory:9s}"
        lines.append(f"{costs} {report.quality:5.2f} {bar(report.quality, 20)}")
    use = "readers.order.block_shuffled(reader, seed, window=…)"
    return [*lines, f"Blocks hold {block_bytes} and are read once. In training: {use}"]


@click.command("parity", short_help="Compare decoders and resizers with Pillow.")
@click.argument("path", metavar="SET", type=click.Path(exists=True))
@split_option("Default: the only split, or train.")
@click.option("--samples", default=200, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="Images, drawn by --seed.")  # fmt: skip
@click.option("--size", default=224, show_default=True, type=click.IntRange(1, 4096), metavar="N",
              help="Side of the resized boxes, in pixels.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), metavar="SEED", help="Of the draw.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="DEVICE",
    help="Where to decode and resize: cpu, cuda, cuda:1, …",
)
@json_option
def parity_command(
    path: str, split: str | None, samples: int, size: int, seed: int, device: str, as_json: bool
) -> None:
    """Show how far the pixels of each decoder and resizer are from Pillow's, on images of SET."""
    from packer.tools.parity import compare_with_pillow
    from readers.loader.loader import find_device

    with readers.open(path, split) as reader:
        found = compare_with_pillow(reader, samples=samples, size=size, seed=seed, device=find_device(device))
    if as_json:
        print_json([row.to_dict() for row in found])
    else:
        show(*_parity_lines(found))


def _parity_lines(rows: list[Parity]) -> list[str]:
    """The comparison as lines; differences of 255."""
    lines = ["                              images  its own      mean  worst image  largest"]
    for row in rows:
        name = f"{row.what:9s} {row.name:19s}"
        if row.reason:
            lines.append(f"{name} did not run: {row.reason}")
            continue
        own = f"{row.by_device}" if row.what == "decoder" and row.name != "cpu" else ""
        lines.append(f"{name} {row.images:6d} {own:>8s} {row.mean:9.3f} {row.worst_image:12.3f} {row.largest:8d}")
    return lines
