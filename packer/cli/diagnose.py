"""`packer diagnose FILE.py:NAME`: which stage of a loader starves the training."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from packer.cli.text import json_option, show_result
from readers.diagnosis import diagnose
from readers.diagnosis.text import diagnosis_lines

__all__ = ["command"]

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
    """FILE.py:NAME as (path, name)."""

    name = "file.py:name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, str]:
        file, colon, name = str(value).rpartition(":")
        if not (colon and file.endswith(".py") and name.isidentifier()):
            self.fail(f"{value!r} is not FILE.py:NAME, as train.py:make_loader", param, ctx)
        if not Path(file).is_file():
            self.fail(f"{file}: no such file", param, ctx)
        return Path(file).resolve(), name


@click.command("diagnose")
@click.argument("loader", type=Named(), metavar="FILE.py:NAME")
@click.option("--step", type=Named(), metavar="FILE.py:NAME", help="Function of a batch: the training step.")
@click.option("--simulate-step", type=Duration(), metavar="TIME", help="Wait for so long in place of a step, as 20ms.")
@click.option("--device", metavar="DEVICE", help="Copy batches there before the step, as cuda.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="How long to measure, about.")  # fmt: skip
@json_option
def command(
    loader: tuple[Path, str],
    step: tuple[Path, str] | None,
    simulate_step: float | None,
    device: str | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Find the stage of a data loader that starves the training.

    NAME in FILE.py is the loader, or a function without arguments that returns it: any iterable of batches. A torch
    DataLoader is measured stage by stage: storage, reading, each member of the transform, collating, the transfer from
    its workers and to the device. Needs no GPU with --simulate-step.

    Importing FILE.py runs what is at its top level; keep the training itself under `if __name__ == "__main__"`.
    """
    if (step is None) == (simulate_step is None):
        raise click.UsageError("give either --step FILE.py:NAME or --simulate-step TIME")
    made = _named(*loader)
    if callable(made) and not hasattr(made, "__iter__"):
        made = _called(loader, made)
    if not hasattr(made, "__iter__"):
        raise click.ClickException(
            f"{loader[0]}: {loader[1]} is {type(made).__name__}; expected an iterable of batches, or a function "
            f"without arguments that returns one"
        )
    function = None if step is None else _named(*step)
    if step is not None and not callable(function):
        raise click.ClickException(
            f"{step[0]}: {step[1]}: expected a function of a batch, found {type(function).__name__}"
        )
    try:
        result = diagnose(made, function, device=device, simulate_step=simulate_step, seconds=seconds)
    except Exception as error:
        if _is_from(error, {loader[0]} if step is None else {loader[0], step[0]}):
            raise _failed(loader[0], "failed while it was measured", error) from None
        raise
    show_result(result, as_json, lambda: diagnosis_lines(result))


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


def _called(named: tuple[Path, str], function: Any) -> Any:
    try:
        return function()
    except Exception as error:
        raise _failed(named[0], f"{named[1]}() failed", error) from None


def _failed(path: Path, what: str, error: BaseException) -> click.ClickException:
    """The traceback of the user's code goes to stderr, without our frames before it; the message is a line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return click.ClickException(f"{path}: {what}: {type(error).__name__}: {error}")


def _is_from(error: BaseException, paths: set[Path]) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    names = {str(path) for path in paths}
    # What a worker raised carries the text of its traceback in its message.
    return any(frame.filename in names for frame in frames) or any(f'File "{name}"' in str(error) for name in names)


def _public(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not hasattr(value, "__path__")]
