"""`packer inspect`."""

from __future__ import annotations

import click

from cache.text import plural
from packer.cli.place import SetPlace
from packer.cli.text import bar, human_bytes, json_option, print_json, show
from packer.inspection import InspectResult, SplitReport, inspect

__all__ = ["command"]

_CLASSES_SHOWN = 20


@click.command("inspect", short_help="Show what a packed set is.")
@click.argument("path", metavar="DIR", type=SetPlace())
@click.option("--classes", "all_classes", is_flag=True, help="Show every class, not the first 20.")
@json_option
def command(path: str, all_classes: bool, as_json: bool) -> None:
    """Show splits, counts, classes, sizes, dimensions, duplicates and origin of the set in DIR."""
    result = inspect(path)
    if as_json:
        print_json(result.to_dict())
    else:
        show(*describe(result, all_classes))


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
    if result.label_offset:
        lines.append(f"  labels in the shards start at {result.label_offset}, here at 0")
    for name, split in result.splits.items():
        lines += ["", *_split_lines(name, split)]
        lines += _class_lines(split, result.classes, all_classes)
    lines += ["", _duplicate_line(result)]
    lines += [f"  {' = '.join(group)}" for group in result.duplicate_examples]
    return lines


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
        lines.append("  coding  " + ", ".join(f"{what} {count:,}" for what, count in split.coding.items()))
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
