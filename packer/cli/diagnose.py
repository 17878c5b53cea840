"""`packer diagnose FILE.py:NAME`, `packer diagnose DATASET`: which stage of a loader starves the training."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import readers
from packer.cli.compare import DiagnoseOrCompare, compare_option
from packer.cli.places import (
    batch_sizes_lines,
    batch_sizes_of,
    batch_sizes_option,
    packing_notes,
    places_lines,
    places_of,
    places_option,
)
from packer.cli.text import json_option, print_json, show, show_result, watcher, width
from readers.diagnosis import Diagnosis, diagnose
from readers.diagnosis.findings_text import findings_lines
from readers.diagnosis.text import diagnosis_lines, verdict_lines

__all__ = ["Duration", "command"]

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time, as 20ms or 1.5s, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs|)", str(value))
        if found is None:
            self.fail(f"{value!r} is not a valid time: expected a number and a unit, as 20ms or 1.5s", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class Named(click.ParamType):  # type: ignore[type-arg]
    """FILE.py:NAME as (path, name). or_set: or a data set, as the text that it is."""

    name = "file.py:name"

    def __init__(self, *, or_set: bool = False) -> None:
        self._or_set = or_set

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file, colon, name = str(value).rpartition(":")
        if not (colon and file.endswith(".py") and name.isidentifier()):
            if self._or_set and ("://" in str(value) or Path(value).exists()):
                return str(value)
            what = ", and no such file or directory" if self._or_set else ""
            self.fail(f"{value!r} is not FILE.py:NAME, as train.py:make_loader{what}", param, ctx)
        if not Path(file).is_file():
            self.fail(f"{file}: no such file", param, ctx)
        return Path(file).resolve(), name


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
@places_option
@batch_sizes_option
@click.option("--apply", is_flag=True, help="Also make the advised changes that are the loader's own, one at a time, "
              "and compare what they bring with what was predicted. Nothing is left behind.")  # fmt: skip
@compare_option
@json_option
def command(
    loader: tuple[Path, str] | str,
    step: tuple[Path, str] | None,
    simulate_step: float | None,
    device: str | None,
    seconds: float,
    places: tuple[str, ...] | None,
    batch_sizes: tuple[int, ...] | None,
    apply: bool,
    as_json: bool,
    **of_set: Any,
) -> None:
    """Find the stage of a data loader that starves the training.

    NAME in FILE.py is the loader, or a function without arguments that returns it: any iterable of batches. A torch
    DataLoader is measured stage by stage: storage, reading, each member of the transform, collating, the transfer from
    its workers and to the device. An ImageLoader of this package by reading, decoding and augmenting; with DATASET, a
    packed set or a folder of images, such a loader is made. Needs no GPU with --simulate-step, and no step at all with
    --places alone.

    Importing FILE.py runs what is at its top level; keep the training itself under `if __name__ == "__main__"`.
    """
    only_places = places is not None and step is None and simulate_step is None and batch_sizes is None
    if (step is None) == (simulate_step is None) and not only_places:
        raise click.UsageError("give either --step FILE.py:NAME or --simulate-step TIME")
    function = None if step is None else _named(*step)
    if step is not None and not callable(function):
        found = type(function).__name__
        raise click.ClickException(f"{step[0]}: {step[1]}: expected a function of a batch, found {found}")
    options = {name: value for name, value in of_set.items() if value is not None}
    scripts = [named[0] for named in (loader, step) if isinstance(named, tuple)]
    reader = _open(loader, options.pop("split", None)) if isinstance(loader, str) else None
    made: Any = reader if isinstance(loader, str) else _loader_of(loader, options)
    of_places: dict[str, Any] = {"batch_size": options.get("batch_size"), "seconds": seconds, "as_json": as_json}
    if only_places and places is not None:
        measured = places_of(made, places, **of_places)
        if as_json:
            print_json({"places": measured.to_dict()})
        else:
            show(*places_lines(measured))
        return
    if reader is not None:
        made = _image_loader(reader, device, **options)
    usual: dict[str, Any] = {"device": device, "simulate_step": simulate_step, "seconds": seconds}
    try:
        result = diagnose(made, function, watcher=watcher(as_json), apply=apply, **usual)
        if batch_sizes is not None:
            result = replace(result, batch_sizes=batch_sizes_of(made, batch_sizes, function, as_json, **usual))
    except Exception as error:
        if script := next((path for path in scripts if _is_from(error, path)), None):
            raise _failed(script, "failed while it was measured", error) from None
        raise
    if places is not None:
        result = replace(result, places=places_of(made, places, **of_places))
    elif reader is not None:
        result = replace(result, notes=(*result.notes, *packing_notes(reader, made.batch_size)))
    show_result(result, as_json, lambda: _lines(result))


def _lines(result: Diagnosis) -> list[str]:
    """All of it for the terminal, the verdict last."""
    lines = [*diagnosis_lines(result, width()), *findings_lines(result), ""]
    if result.batch_sizes is not None:
        lines += [*batch_sizes_lines(result.batch_sizes), ""]
    if result.places is not None:
        lines += [*places_lines(result.places), ""]
    return [*lines, *verdict_lines(result, width())]


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


def _loader_of(named: tuple[Path, str], options: dict[str, Any]) -> Any:
    """The loader that a script names. Raises UsageError for options that are for a data set only."""
    if options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise click.UsageError(f"{flags} is for a DATASET; {named[0].name}:{named[1]} makes its own loader")
    made = _named(*named)
    if callable(made) and not hasattr(made, "__iter__"):
        try:
            made = made()
        except Exception as error:
            raise _failed(named[0], f"{named[1]}() failed", error) from None
    if not hasattr(made, "__iter__"):
        raise click.ClickException(
            f"{named[0]}: {named[1]} is {type(made).__name__}; expected an iterable of batches, or a function "
            f"without arguments that returns one"
        )
    return made


def _named(path: Path, name: str) -> Any:
    """What a file calls `name`."""
    module = _load(path)
    if not hasattr(module, name):
        raise click.ClickException(
            f"{path}: no {name!r} in it; what there is: {', '.join(_public(module)) or 'nothing'}"
        )
    return getattr(module, name)


def _load(path: Path) -> ModuleType:
    """Import a file once, under its own name, so that workers which are spawned find it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and os.path.realpath(str(module.__file__)) == str(path):
            return module
    if path.stem in sys.modules:
        raise click.ClickException(f"{path}: a module called {path.stem!r} exists; rename the file")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(path, "failed while it was imported", error) from None
    return module


def _failed(path: Path, what: str, error: BaseException) -> click.ClickException:
    """The traceback of the user's code goes to stderr, without our frames before it; the message is a line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return click.ClickException(f"{path}: {what}: {type(error).__name__}: {error}")


def _is_from(error: BaseException, path: Path) -> bool:
    """Whether an error came out of a file; what a worker raised has the text of its traceback as its message."""
    return f'File "{path}"' in "".join(traceback.format_exception(error))


def _public(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not hasattr(value, "__path__")]
