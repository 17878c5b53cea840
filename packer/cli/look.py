"""`packer inspect`, `verify`, `extract`, `export-index`, `order` and `parity`: examining sets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import readers
from cache.messages import bar, human_bytes, parse_size, plural
from packer.cli import flags
from packer.cli.screen import watcher
from packer.exported_index import TARGETS, ExportResult, Target, export_index
from packer.extraction import ExtractResult, extract
from packer.inspection import InspectResult, OrderAdvice, SplitReport, inspect, recommend_order
from packer.verification import VerifyResult, verify
from readers.layout import EDITS
from readers.staging import LABELS_FILE

if TYPE_CHECKING:
    from packer.tools.parity import Parity

__all__ = [
    "export_command",
    "extract_command",
    "inspect_command",
    "order_command",
    "parity_command",
    "verify_command",
]

_CLASSES_SHOWN, _PROBLEMS_SHOWN = 20, 50


@click.command("inspect")
@flags.set_argument
@click.option("--classes", "all_classes", is_flag=True, help="Show every class, not the first 20.")
@flags.json_option
def inspect_command(path: str, all_classes: bool, as_json: bool) -> None:
    """Show splits, counts, classes, sizes, dimensions, duplicates and origin of SET."""
    result = inspect(path)
    flags.show_result(result, as_json, lambda: _described(result, all_classes))


def _described(result: InspectResult, all_classes: bool) -> Iterator[str]:
    made = result.made
    fields = ", ".join(f"{name} ({kind})" for name, kind in result.fields.items())
    yield f"{result.path}: {result.format} set, {plural(len(result.classes), 'class')}, fields {fields}"
    yield f"  fingerprint {result.fingerprint}"
    if made.get("source"):
        yield f"  made by {made.get('by') or made.get('indexed_by')} from {made['source']}"
    options = [f"{name} {value}" for name, value in dict(made.get("options", {})).items() if value not in (0, "")]
    if options:
        yield f"  options {', '.join(options)}"
    yield from (f"  remark  {remark}" for remark in made.get("remarks", ()))
    if result.label_offset:
        yield f"  labels in the shards start at {result.label_offset}, here at 0"
    for done in result.history:
        before, after = done["samples"]
        arguments = ", ".join(f"{name} {_on_one_line(value)}" for name, value in done["arguments"].items())
        yield f"  {done['date']} {done['operation']}: {arguments}; {before:,} samples, then {after:,}"
    yield from (f"  {EDITS[name]} than the shards" for name in result.edited)
    if result.retired:
        yield f"  {plural(len(result.retired), 'file')} of earlier states; packer prune removes them"
    for name, split in result.splits.items():
        yield ""
        yield from _split_lines(name, split)
        yield from _class_lines(split, result.classes, all_classes)
    same = f"{plural(result.duplicates, 'sample')} with the bytes of another" if result.duplicates else "none"
    yield from ("", f"duplicates: {same} (by size and CRC32C)")
    yield from (f"  {' = '.join(group)}" for group in result.duplicate_examples)


def _on_one_line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_on_one_line(item)}" for name, item in value.items())
    return ", ".join(map(_on_one_line, value)) if isinstance(value, list) else str(value)


def _split_lines(name: str, split: SplitReport) -> Iterator[str]:
    samples, shards = plural(split.samples, "sample"), plural(split.shards, "shard")
    size, payload = human_bytes(split.shard_bytes), human_bytes(split.payload_bytes)
    yield f"{name}: {samples} in {shards}, {size} ({payload} of payload)"
    partial = [f"{field} {count:,}" for field, count in split.field_samples.items() if count != split.samples]
    if partial:
        yield f"  present in {', '.join(partial)}"
    sizes = {percent: human_bytes(value) for percent, value in split.size_percentiles.items()}
    of_axes: dict[str, Any] = {"bytes": sizes, **split.dimensions}
    for axis, values in of_axes.items():
        if values:
            names = {0: "min", 50: "median", 100: "max"}
            shown = (f"{names.get(percent, f'{percent} %')} {value}" for percent, value in values.items())
            yield f"  {axis:7s} {'  '.join(shown)}"
    if split.arrays:
        yield f"  arrays  {', '.join(split.arrays)}  (in {sum(split.arrays.values())} samples examined)"
    if split.media:
        yield "  images  " + ", ".join(f"{media} {count:,}" for media, count in split.media.items())
    if split.coding:
        yield "  coding  " + ", ".join(f"{coding}: {plural(count, 'image')}" for coding, count in split.coding.items())


def _class_lines(split: SplitReport, classes: tuple[str, ...], everything: bool) -> Iterator[str]:
    if split.unlabelled:
        yield f"  without a label {split.unlabelled:,}"
    counts = [(label, classes[label] if label < len(classes) else "", n) for label, n in split.label_counts.items()]
    if not counts:
        return
    shown = counts if everything else counts[:_CLASSES_SHOWN]
    top, width = max(split.label_counts.values()), max(len(name) for _, name, _ in shown)
    yield from (f"  {label:5d} {name:{width}s} {count:8,} {bar(count / top)}" for label, name, count in shown)
    if len(shown) < len(counts):
        spread = f"{min(split.label_counts.values()):,} to {top:,} samples each"
        yield f"  … {plural(len(counts), 'class')}, {spread}; --classes shows all"


def _verified(result: VerifyResult) -> Iterator[str]:
    yield from (f"DAMAGED {problem}" for problem in result.problems[:_PROBLEMS_SHOWN])
    if result.problem_count > _PROBLEMS_SHOWN:
        yield f"… and {result.problem_count - _PROBLEMS_SHOWN:,} more; --json lists them"
    state = "OK" if result.ok else plural(result.problem_count, "problem")
    counts = (
        f"{plural(result.samples, 'sample')} in {plural(result.shards, 'shard')}, {human_bytes(result.shard_bytes)}"
    )
    same = f", compared with {result.against}" if result.against else ""
    left = f" ({result.left_out:,} left out when it was packed)" if result.left_out else ""
    written = "; SHA256SUMS is written" if result.sums else ""
    yield f"{result.path}: {state}: {counts}{same}{left}{written}"


@click.command("verify")
@flags.set_argument
@click.option("--deep", is_flag=True, help="Also check the checksum of each whole shard, the format's own checksums, "
              "and a full decode of every image.")  # fmt: skip
@click.option("--against", type=flags.SetPlace(local=True), metavar="SOURCE", help="Compare with the original source.")
@click.option("--sums", is_flag=True, help="Write SHA256SUMS, for  sha256sum -c , if the set is intact.")
@flags.workers_option
@flags.engine_options
@flags.json_option
def verify_command(path: str, as_json: bool, **options: Any) -> None:
    """Check SET: size of every shard, structure, CRC32C of every sample, index against shards.

    If SET is an address, the CRC32C of every shard and the index are checked.

    Exits with 1 and names each damaged sample.
    """
    result = verify(path, watcher=watcher(as_json), **options)
    flags.show_result(result, as_json, lambda: _verified(result))
    if not result.ok:
        sys.exit(1)


def _extracted(result: ExtractResult) -> Iterator[str]:
    kept = f", {result.kept:,} were there already" if result.kept else ""
    yield f"{result.output}: {plural(result.files, 'file')}, {human_bytes(result.bytes)}{kept}"
    if result.labels_file:
        yield f"  labels: {result.output}/{LABELS_FILE}"


@click.command("extract")
@click.argument("path", metavar="SET", type=flags.SetPlace(local=True))
@click.option("-o", "--output", type=click.Path(), required=True, metavar="DIR", help="Directory for the files.")
@flags.split_option()
@click.option("--keys", multiple=True, metavar="PATTERN", help="Only matching keys, such as 'n01440764/*'; repeatable.")
@click.option("--overwrite", is_flag=True, help="Replace existing files with other content.")
@flags.workers_option
@flags.engine_options
@flags.reports(_extracted)
def extract_command(path: str, output: str, **options: Any) -> ExtractResult:
    """Write the files of SET under their original names, byte for byte, and verify every checksum."""
    return extract(path, output, **options)


def _exported(result: ExportResult) -> list[str]:
    where = result.files[0].parent if result.files else result.path
    target, samples = click.get_current_context().params["target"], plural(result.samples, "sample")
    return [f"{where}: {plural(len(result.files), 'index file')} for {target}, {samples}"]


@click.command("export-index")
@click.argument("path", metavar="SET", type=click.Path(exists=True))
@click.option("--for", "target", type=click.Choice(TARGETS), required=True, help="Reader of the files: dali and rocal "
    "read <shard>.idx, tfrecord <shard>.tfindex, wids <split>.wids.json.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(file_okay=False), metavar="DIR", help="Directory for the files. "
              "Default: SET.")  # fmt: skip
@flags.split_option()
@flags.reports(_exported)
def export_command(path: str, target: Target, **options: Any) -> ExportResult:
    """Write the index files that DALI, rocAL, tfrecord or wids need to read the shards of SET.

    There are no such readers for HDF5 shards. The shards are not changed.
    """
    return export_index(path, target, **options)


def _orders(advice: OrderAdvice) -> Iterator[str]:
    """The comparison as lines, and the recommended order."""
    reports = advice.orders
    counts = sorted({count for report in reports for count in report.mixing})
    yield (
        "                     bytes read per byte used   GETs a   kB a              samples/s  first   mixes, "
        "against a global shuffle, over"
    )
    yield (
        "order                4 KiB reads   1 MiB reads   sample   sample  memory      estimated  batch"
        + "  "
        + "".join(f"{plural(count, 'batch'):>12s}" for count in counts)
    )
    for report in reports:
        small, large = report.amplification.values()
        memory = human_bytes(report.memory_bytes) if report.memory_bytes else ""
        costs = f"{report.name:20s} {small:11.2f} {large:13.2f} {report.requests:8.3f} {report.sample_bytes / 1e3:8.1f}"
        costs += f"  {memory:9s} {report.samples_s:11,.0f} {report.first_batch_s:4.1f} s"
        yield f"{costs}  " + "".join(f"{report.mixing[count]:12.2f}" for count in counts)
    blocks = click.get_current_context().params["block_bytes"]
    place = f"{advice.latency_s * 1e3:.3g} ms a read, {human_bytes(int(advice.bandwidth))}/s"
    room = human_bytes(advice.memory_bytes)
    yield f"Blocks hold {blocks}, woven 256 KiB, and are read once, where they fit in {room}."
    yield f"Estimated for one process at {place} ({'measured' if advice.measured else 'as given'}), without decoding."
    yield f"Recommended: {advice.use}"
    yield f"  because {advice.reason}"


@click.command("order")
@flags.set_argument
@flags.split_option("Default: the only split, or train.")
@click.option("--block-bytes", default="8MiB", show_default=True, metavar="SIZE", help="Consecutive bytes per block.")
@flags.count_option("--window", "Blocks mixed at a time; repeatable.", multiple=True)
@flags.seed_option(most=None)
@click.option("--latency", type=click.FloatRange(0, min_open=True), metavar="MS",
              help="Milliseconds per small read. Default: measured by a few reads of SET.")  # fmt: skip
@click.option("--bandwidth", metavar="SIZE", help="Bytes per second. Default: measured by reading at most 32 MiB.")
@click.option("--memory", metavar="SIZE", help="For blocks, per process. Default: half of the free memory.")
@click.option(
    "--need", type=click.FloatRange(0), default=0.0, metavar="N", help="Samples per second that training takes."
)
@flags.reports(_orders, watched=False)
def order_command(
    path: str,
    block_bytes: str,
    window: tuple[int, ...],
    latency: float | None,
    bandwidth: str | None,
    memory: str | None,
    **options: Any,
) -> OrderAdvice:
    """Show the cost, speed and mixing of each order of the samples in SET, and recommend one.

    Estimates are for one process and the storage of SET, or for --latency and --bandwidth. Local disks read single
    samples at little cost; slow and remote storage needs an order that reads blocks.
    """
    options |= {"latency_s": None if latency is None else latency / 1000}
    options |= {"bandwidth": bandwidth and float(parse_size(bandwidth)), "memory_bytes": memory and parse_size(memory)}
    options |= {"windows": window} if window else {}
    return recommend_order(path, block_bytes=parse_size(block_bytes), **options)


@click.command("parity", short_help="Compare decoders and resizers with Pillow.")
@click.argument("path", metavar="SET", type=click.Path(exists=True))
@flags.split_option("Default: the only split, or train.")
@flags.count_option("--samples", "Images, drawn with --seed.", 200)
@click.option("--size", default=224, show_default=True, type=click.IntRange(1, 4096), metavar="N",
              help="Side of the resized boxes, in pixels.")  # fmt: skip
@flags.seed_option(most=None)
@click.option("--device", default="cpu", show_default=True, metavar="DEVICE",
              help="Where to decode and resize: cpu, cuda, cuda:1, …")  # fmt: skip
@flags.json_option
def parity_command(path: str, split: str | None, device: str, as_json: bool, **options: Any) -> None:
    """Show how far the pixels of each decoder and resizer differ from Pillow's, on images of SET."""
    from packer.tools.parity import compare_with_pillow
    from readers.loader.loader import find_device

    with readers.open(path, split) as reader:
        rows = compare_with_pillow(reader, device=find_device(device), **options)
    if as_json:
        flags.print_json([row.to_dict() for row in rows])
    else:
        flags.show(*_parity_lines(rows))


def _parity_lines(rows: list[Parity]) -> Iterator[str]:
    """The comparison as lines; differences are on the scale of 255."""
    yield "                              images  its own      mean  worst image  largest"
    for row in rows:
        name = f"{row.what:9s} {row.name:19s}"
        if row.reason:
            yield f"{name} did not run: {row.reason}"
            continue
        own = f"{row.by_device}" if row.what == "decoder" and row.name != "cpu" else ""
        yield f"{name} {row.images:6d} {own:>8s} {row.mean:9.3f} {row.worst_image:12.3f} {row.largest:8d}"
