"""`packer diagnose FILE.py:NAME`, `packer diagnose SET`: the stage of a loader that limits training."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import readers
from packer.cli import flags
from packer.cli.monitor import report_option, written_file
from packer.cli.screen import watcher, width
from packer.tools.diagnose import Diagnosis, diagnose
from packer.tools.diagnose.ladder import advice_lines, diagnosis_lines, verdict_lines
from packer.tools.monitor.record import compare as compare_records
from packer.tools.monitor.record import comparison_lines, load
from packer.tools.report import write_page
from packer.tools.report.pages import command_line, comparison_page, diagnosis_page
from readers.trace import Trace

__all__ = []


# ------------------------------------------------------------------------------
# Objects of a user's script: FILE.py:NAME is imported once, and errors in it are shown with their own traceback.


class Named(click.ParamType):  # type: ignore[type-arg]
    """FILE.py:NAME as (path, name); with or_set also a data set, as its text."""

    name = "file.py:name"

    def __init__(self, *, or_set: bool = False) -> None:
        self._or_set = or_set

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file, colon, name = str(value).rpartition(":")
        if not (colon and file.endswith(".py") and name.isidentifier()):
            if self._or_set and ("://" in str(value) or Path(value).exists()):
                return str(value)
            more = ", and no such file or directory" if self._or_set else ""
            self.fail(f"{value!r} is not FILE.py:NAME, such as train.py:make_loader{more}", param, ctx)
        if not Path(file).is_file():
            self.fail(f"{file}: no such file", param, ctx)
        return Path(file).resolve(), name


def find_loader(named: tuple[Path, str], options: dict[str, Any]) -> Any:
    """The loader that a script names. Raises UsageError for options that apply to a data set only."""
    if options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise click.UsageError(f"{flags} is for a SET; {named[0].name}:{named[1]} makes its own loader")
    made = find_named(*named)
    if callable(made) and not hasattr(made, "__iter__"):
        try:
            made = made()
        except Exception as error:
            raise failed(named[0], f"{named[1]}() failed", error) from None
    if not hasattr(made, "__iter__"):
        raise click.ClickException(
            f"{named[0]}: {named[1]} is {type(made).__name__}; expected an iterable of batches, or a function "
            f"without arguments that returns one"
        )
    return made


def find_named(path: Path, name: str) -> Any:
    """The object called `name` in a file."""
    module = _load(path)
    if not hasattr(module, name):
        raise click.ClickException(f"{path}: has no {name!r}; it has {', '.join(_public(module)) or 'nothing'}")
    return getattr(module, name)


def _load(path: Path) -> ModuleType:
    """Import a file once, under its own name, so that spawned workers find it."""
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
        raise failed(path, "failed while it was imported", error) from None
    return module


def failed(path: Path, problem: str, error: BaseException) -> click.ClickException:
    """A one-line error; the traceback of the user's code, without our frames, is printed on stderr."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return click.ClickException(f"{path}: {problem}: {type(error).__name__}: {error}")


def is_from(error: BaseException, path: Path) -> bool:
    """Whether an error came from a file; the message of a worker's error contains its traceback."""
    return f'File "{path}"' in "".join(traceback.format_exception(error))


def _public(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not hasattr(value, "__path__")]


_RECORD = click.Path(exists=True, dir_okay=False, path_type=Path)
_OF_SET = ("split", "batch_size", "image_size", "threads")


@click.command("diagnose")
@click.argument("loader", type=Named(or_set=True), metavar="FILE.py:NAME|SET", required=False)
@click.option("--step", type=Named(), metavar="FILE.py:NAME", help="Function of a batch: the training step.")
@click.option(
    "--simulate-step", type=flags.Duration(), metavar="TIME", help="Simulate the step by waiting, such as 20ms."
)
@click.option("--device", metavar="DEVICE", help="Copy batches to this device before the step, such as cuda.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              metavar="SECONDS", help="Approximate time of the measurement.")  # fmt: skip
@flags.split_option("SET: this split. Default: the only one, or train.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="SET: images per batch. Default: 64.")
@click.option("--image-size", type=click.IntRange(min=1), metavar="N", help="SET: side of the images, in pixels, "
              "after a random crop and a flip. Default: 224.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="SET: threads of the loader. Default: one "
              "per CPU.")  # fmt: skip
@report_option("Write a report with charts, in one file.")
@written_file("--trace", "Write a trace for Perfetto (ui.perfetto.dev): lines, waits, copies, steps, threads.")
@click.option("--compare", nargs=2, type=_RECORD, metavar="FILE FILE", help="Instead: compare two runs, each a record "
              "of packer monitor or the JSON of a diagnosis.")  # fmt: skip
@flags.json_option
def command(
    loader: tuple[Path, str] | str | None,
    step: tuple[Path, str] | None,
    html: Path | None,
    trace: Path | None,
    compare: tuple[Path, Path] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the stage of a data loader that training waits for.

    NAME in FILE.py is the loader, or a function without arguments that returns it: any iterable of batches. A torch
    DataLoader is measured stage by stage: storage, reading, each member of the transform, collating, the transfer from
    its workers and to the device. An ImageLoader of this package is measured by reading, decoding and augmenting. With
    SET, a packed set or a folder of images, the command makes an ImageLoader. Needs no GPU with --simulate-step.

    Importing FILE.py runs its top level; keep the training loop under `if __name__ == "__main__"`.
    """
    if compare is not None:
        if loader or step or trace or any(options[name] for name in ("simulate_step", "device", *_OF_SET)):
            raise click.UsageError("--compare FILE FILE can only be combined with --html and --json")
        _compare(compare, html, as_json)
        return
    if loader is None:
        raise click.MissingParameter(param_hint="'FILE.py:NAME|SET'", param_type="argument")
    subject = loader if isinstance(loader, str) else f"{loader[0].name}:{loader[1]}"
    if (step is None) == (options["simulate_step"] is None):
        raise click.UsageError("give either --step FILE.py:NAME or --simulate-step TIME")
    recorded = None if trace is None else Trace("packer diagnose")
    try:
        of_set = {name: value for name in _OF_SET if (value := options.pop(name)) is not None}
        if isinstance(loader, str):
            made = _image_loader(loader, options["device"], **of_set)
        else:
            made = find_loader(loader, of_set)
        function = None if step is None else find_named(*step)
        if step is not None and not callable(function):
            kind = type(function).__name__
            raise click.ClickException(f"{step[0]}: {step[1]}: expected a function of a batch, found {kind}")
        result = diagnose(made, function, trace=recorded, watcher=watcher(as_json), **options)
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except Exception as error:
        scripts = [named[0] for named in (loader, step) if isinstance(named, tuple)]
        if script := next((path for path in scripts if is_from(error, path)), None):
            raise failed(script, "failed while it was measured", error) from None
        raise
    if html is not None:
        write_page(html, diagnosis_page(result, f"Diagnosis of {subject}", command_line()))
    if trace is not None and recorded is not None:
        recorded.save(trace)
    written = [f"{subject} is in {path}" for subject, path in (("the report", html), ("the trace", trace)) if path]
    flags.show_result(result, as_json, lambda: _lines(result, written))


def _compare(paths: tuple[Path, Path], html: Path | None, as_json: bool) -> None:
    result = compare_records(*map(load, paths))
    if html is not None:
        write_page(html, comparison_page(result, (paths[0].name, paths[1].name)))
    flags.show_result(result, as_json, lambda: comparison_lines(result, width()))


def _lines(result: Diagnosis, written: list[str]) -> list[str]:
    """The report for the terminal, with the verdict first and last."""
    verdict = [flags.Emphasis(line) for line in verdict_lines(result, width())]
    lines = [*diagnosis_lines(result, width()), *advice_lines(result.advice, width())]
    return [*verdict, "", *lines, *written, "", *verdict]


def _image_loader(dataset: str, device: str | None, split: str | None = None, **options: int) -> Any:
    """An `ImageLoader` for a packed set or a folder of images, with the usual training augmentation."""
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    packed = "://" in dataset or (Path(dataset) / "dataset.json").is_file()
    reader = readers.open(dataset, split) if packed else readers.open_folder(dataset, split)
    ops = [RandomResizedCrop(options.get("image_size", 224)), RandomHorizontalFlip()]
    batch_size = min(options.get("batch_size", 64), max(1, len(reader)))
    return ImageLoader(reader, batch_size, augment=ops, threads=options.get("threads"), device=device or "cpu")
