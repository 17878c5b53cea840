"""`packer diagnose FILE.py:NAME`, `packer diagnose SET`: which stage of a loader starves the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import readers
from packer.cli.compare import DiagnoseOrCompare, compare_option
from packer.cli.report import report_option, written_file
from packer.cli.script import Named, failed, find_loader, find_named, is_from
from packer.cli.text import Duration, Emphasis, json_option, show_result, split_option, watcher, width
from packer.tools.diagnose import Diagnosis, diagnose
from packer.tools.diagnose.ladder import advice_lines, diagnosis_lines, verdict_lines
from packer.tools.report import write_page
from packer.tools.report.pages import command_line, diagnosis_page
from readers.trace import Trace

__all__ = ["command"]


@click.command("diagnose", cls=DiagnoseOrCompare)
@click.argument("loader", type=Named(or_set=True), metavar="FILE.py:NAME|SET")
@click.option("--step", type=Named(), metavar="FILE.py:NAME", help="Function of a batch: the training step.")
@click.option("--simulate-step", type=Duration(), metavar="TIME", help="Wait for so long in place of a step, as 20ms.")
@click.option("--device", metavar="DEVICE", help="Copy batches there before the step, as cuda.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              metavar="SECONDS", help="How long to measure, about.")  # fmt: skip
@split_option("SET: this split. Default: the only one, or train.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="SET: images in a batch. Default: 64.")
@click.option("--image-size", type=click.IntRange(min=1), metavar="N", help="SET: side of the images, in pixels, "
              "after a random crop and a flip. Default: 224.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="SET: threads of the loader. Default: one "
              "for each CPU.")  # fmt: skip
@report_option("Write a report with charts, in one file.")
@written_file("--trace", "Write a trace for Perfetto (ui.perfetto.dev): lines, waits, copies, steps, threads.")
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
    its workers and to the device. An ImageLoader of this package by reading, decoding and augmenting; with SET, a
    packed set or a folder of images, such a loader is made. Needs no GPU with --simulate-step.

    Importing FILE.py runs what is at its top level; keep the training itself under `if __name__ == "__main__"`.
    """
    what = loader if isinstance(loader, str) else f"{loader[0].name}:{loader[1]}"
    if (step is None) == (options["simulate_step"] is None):
        raise click.UsageError("give either --step FILE.py:NAME or --simulate-step TIME")
    recorded = None if trace is None else Trace("packer diagnose")
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
        write_page(html, diagnosis_page(result, f"Diagnosis of {what}", command_line()))
    if trace is not None and recorded is not None:
        recorded.save(trace)
    written = [f"{what} is in {path}" for what, path in (("the report", html), ("the trace", trace)) if path]
    show_result(result, as_json, lambda: _lines(result, written))


def _measure(
    loader: tuple[Path, str] | str,
    step: tuple[Path, str] | None,
    as_json: bool,
    trace: Trace | None,
    options: dict[str, Any],
) -> Diagnosis:
    """The diagnosis."""
    function = None if step is None else find_named(*step)
    if step is not None and not callable(function):
        found = type(function).__name__
        raise click.ClickException(f"{step[0]}: {step[1]}: expected a function of a batch, found {found}")
    of_set = {name: options[name] for name in ("split", "batch_size", "image_size", "threads") if options[name]}
    usual: dict[str, Any] = {name: options[name] for name in ("device", "simulate_step", "seconds")}
    usual["watcher"] = watcher(as_json)
    if isinstance(loader, str):
        reader = _open(loader, of_set.pop("split", None))
        made: Any = _image_loader(reader, options["device"], **of_set)
    else:
        made = find_loader(loader, of_set)
    return diagnose(made, function, trace=trace, **usual)


def _lines(result: Diagnosis, written: list[str]) -> list[str]:
    """All of it for the terminal, the verdict first and last."""
    verdict = [Emphasis(line) for line in verdict_lines(result, width())]
    lines = [*diagnosis_lines(result, width()), *advice_lines(result.advice, width())]
    return [*verdict, "", *lines, *written, "", *verdict]


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
