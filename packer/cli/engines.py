"""--engine and --scheduler: where the tasks of a command run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from packer.engines import engine_names, open_engine

__all__ = ["engine_options"]

F = TypeVar("F", bound=Callable[..., Any])
_LOCAL = "local"


class _EngineName(click.ParamType):  # type: ignore[type-arg]
    """The name of an engine."""

    name = "engine"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join((_LOCAL, *engine_names()))}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = (_LOCAL, *engine_names())
        if value not in names:
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return value


def engine_options(command: F) -> F:
    """Add the options, and call the command with engine=: an executor, or None for processes of this machine.

    A process that works for another one, as all ranks of MPI but the first, does not call it.
    """

    @click.option("--engine", type=_EngineName(), default=_LOCAL, show_default=True, help="Where shards are worked on: "
                  "processes of this machine, ranks (mpiexec -n N packer …), or a cluster.")  # fmt: skip
    @click.option("--scheduler", metavar="ADDRESS", help="Of the cluster: of Dask tcp://HOST:PORT or a scheduler file, "
                  "of Ray HOST:PORT. Default: what their own settings say.")  # fmt: skip
    @functools.wraps(command)
    def with_engine(*args: Any, engine: str, scheduler: str | None, **options: Any) -> None:
        if engine == _LOCAL:
            if scheduler is not None:
                raise click.UsageError("--scheduler is the address of a cluster: say which with --engine")
            command(*args, engine=None, **options)
            return
        with open_engine(engine, scheduler) as executor:
            if executor is not None:
                command(*args, engine=executor, **options)

    return with_engine  # type: ignore[return-value]
