"""`packer diagnose FILE.py:NAME`, `packer diagnose DATASET`: which stage of a loader starves the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import readers
from packer.cli.compare import DiagnoseOrCompare, check_report, compare_option
from packer.cli.held import cleaning_up
from packer.cli.places import (
    batch_sizes_lines,
    batch_sizes_of,
    batch_sizes_option,
    packing_notes,
    places_lines,
    places_of,
    places_option,
)
from packer.cli.script import Named, failed, find_loader, find_named, is_from
from packer.cli.text import Duration, Emphasis, json_option, print_json, show, show_result, watcher, width
from packer.report import write_page
from packer.report.diagnosis import command_line, diagnosis_page
from readers.diagnosis import Diagnosis, diagnose
from readers.diagnosis.findings_text import findings_lines
from readers.diagnosis.text import diagnosis_lines, verdict_lines
from readers.trace import Trace

__all__ = ["command"]


@click.command("diagnose", cls=DiagnoseOrCompare)
@click.argument("loader", type=Named(or_set=True), metavar="FILE.py:NAME | DATASET")
@click.option("--step", type=Named(), metavar="FILE.py:NAME", help="Function of a batch: the training step.")
@click.option("--simulate-step", type=Duration(), metavar="TIME", help="Wait for so long in place of a step, as 20ms.")
@click.option("--device", metavar="DEVICE", help="Copy batches there before the step, as cuda.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="How long to measure, about.")  # fmt: skip
@click.option("--split", metavar="NAME", help="DATASET: this split. Default: the only one, or train.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="DATASET: images in a batch. Default: 64.")
@click.option("--image-size", type=click.IntRange(min=1), metavar="N", help="DATASET: side of the images, in pixels, "
              "after a random crop and a flip. Default: 224.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="DATASET: threads of the loader. Default: one "
              "for each CPU.")  # fmt: skip
@click.option("--apply", is_flag=True, help="Also make the advised changes that are the loader's own, one at a time, "
              "and compare what they bring with what was predicted. Nothing is left behind.")  # fmt: skip
@places_option
@batch_sizes_option
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a report with "
              "charts: one file that needs nothing else.")  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write what happened "
              "when, for Perfetto (ui.perfetto.dev): lines, waits, copies, steps, threads.")  # fmt: skip
@compare_option
@json_option
def command(
    loader: tuple[Path, str] | str,
    step: tuple[Path, str] | None,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the stage of a data loader that starves the training.

    NAME in FILE.py is the loader, or a function without arguments that returns it: any iterable of batches. A torch
    DataLoader is measured stage by stage: storage, reading, each member of the transform, collating, the transfer from
    its workers and to the device. An ImageLoader of this package by reading, decoding and augmenting; with DATASET, a
    packed set or a folder of images, such a loader is made. Needs no GPU with --simulate-step, and no step at all with
    --places alone.

    Importing FILE.py runs what is at its top level; keep the training itself under `if __name__ == "__main__"`.
    """
    if html is not None:
        check_report(html)
    if trace is not None and not trace.parent.is_dir():
        raise click.UsageError(f"--trace {trace}: there is no directory {trace.parent}")
    recorded = None if trace is None else Trace("packer diagnose")
    given = (options["simulate_step"], options["batch_sizes"], options["apply"] or None, html, trace)
    if options["places"] is not None and step is None and not any(value is not None for value in given):
        return _show_places(loader, as_json, options)
    if (step is None) == (options["simulate_step"] is None):
        raise click.UsageError("give either --step FILE.py:NAME or --simulate-step TIME")
    scripts = [named[0] for named in (loader, step) if isinstance(named, tuple)]
    try:
        result = _measure(loader, step, as_json, recorded, options)
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        if script := next((path for path in scripts if is_from(error, path)), None):
            raise failed(script, "failed while it was measured", error) from None
        raise
    if html is not None:
        what = loader if isinstance(loader, str) else f"{loader[0].name}:{loader[1]}"
        write_page(html, diagnosis_page(result, f"Diagnosis of {what}", command_line()))
    if trace is not None and recorded is not None:
        recorded.save(trace)
    written = [f"{what} is in {path}" for what, path in (("the report", html), ("the trace", trace)) if path]
    show_result(result, as_json, lambda: _lines(result, written))
    return None


def _measure(
    loader: tuple[Path, str] | str,
    step: tuple[Path, str] | None,
    as_json: bool,
    trace: Trace | None,
    options: dict[str, Any],
) -> Diagnosis:
    """The diagnosis, with what else was asked for."""
    function = None if step is None else find_named(*step)
    if step is not None and not callable(function):
        found = type(function).__name__
        raise click.ClickException(f"{step[0]}: {step[1]}: expected a function of a batch, found {found}")
    of_set = {name: options[name] for name in ("split", "batch_size", "image_size", "threads") if options[name]}
    usual: dict[str, Any] = {name: options[name] for name in ("device", "simulate_step", "seconds")}
    reader = None
    if isinstance(loader, str):
        reader = _open(loader, of_set.pop("split", None))
        made: Any = _image_loader(reader, options["device"], **of_set)
    else:
        made = find_loader(loader, of_set)
    with cleaning_up():  # of copies that --apply makes
        result = diagnose(made, function, watcher=watcher(as_json), apply=options["apply"], trace=trace, **usual)
    if options["batch_sizes"] is not None:
        sizes = batch_sizes_of(made, options["batch_sizes"], function, as_json, **usual)
        result = replace(result, batch_sizes=sizes)
    if options["places"] is not None:
        result = replace(result, places=_places(made, as_json, options))
    elif reader is not None:
        result = replace(result, notes=(*result.notes, *packing_notes(reader, made.batch_size)))
    return result


def _places(made: Any, as_json: bool, options: dict[str, Any]) -> Any:
    size, seconds = options["batch_size"], options["seconds"]
    return places_of(made, options["places"], batch_size=size, seconds=seconds, as_json=as_json)


def _show_places(loader: tuple[Path, str] | str, as_json: bool, options: dict[str, Any]) -> None:
    """--places alone: no step and no loop."""
    made = _open(loader, options["split"]) if isinstance(loader, str) else find_loader(loader, {})
    measured = _places(made, as_json, options)
    if as_json:
        print_json({"places": measured.to_dict()})
    else:
        show(*places_lines(measured))


def _lines(result: Diagnosis, written: list[str]) -> list[str]:
    """All of it for the terminal, the verdict first and last."""
    verdict = [Emphasis(line) for line in verdict_lines(result, width())]
    lines = [*verdict, "", *diagnosis_lines(result, width()), *findings_lines(result)]
    if result.batch_sizes is not None:
        lines += ["", *batch_sizes_lines(result.batch_sizes)]
    if result.places is not None:
        lines += ["", *places_lines(result.places)]
    return [*lines, *written, "", *verdict]


def _open(dataset: str, split: str | None) -> readers.Reader:
    """A packed set, or a folder of images as it is."""
    packed = "://" in dataset or (Path(dataset) / "dataset.json").is_file()
    return readers.open(dataset, split) if packed else readers.open_folder(dataset, split)


def _image_loader(reader: readers.Reader, device: str | None, **options: int) -> Any:
    """An `ImageLoader` over a reader, with the usual augmentation of a training."""
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    ops = [RandomResizedCrop(options.get("image_size", 224)), RandomHorizontalFlip()]
    batch_size = min(options.get("batch_size", 64), max(1, len(reader)))
    return ImageLoader(reader, batch_size, augment=ops, threads=options.get("threads"), device=device or "cpu")
