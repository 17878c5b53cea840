"""What a user's script has: FILE.py:NAME is imported once, and what fails in it is shown with its own traceback."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import click

__all__ = ["Named", "failed", "find_loader", "find_named", "is_from"]


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


def find_loader(named: tuple[Path, str], options: dict[str, Any]) -> Any:
    """The loader that a script names. Raises UsageError for options that are for a data set only."""
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
        raise failed(path, "failed while it was imported", error) from None
    return module


def failed(path: Path, what: str, error: BaseException) -> click.ClickException:
    """The traceback of the user's code goes to stderr, without our frames before it; the message is a line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return click.ClickException(f"{path}: {what}: {type(error).__name__}: {error}")


def is_from(error: BaseException, path: Path) -> bool:
    """Whether an error came out of a file; what a worker raised has the text of its traceback as its message."""
    return f'File "{path}"' in "".join(traceback.format_exception(error))


def _public(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and not hasattr(value, "__path__")]
