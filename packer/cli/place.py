"""A set on the command line: a directory that is there, or an address."""

from __future__ import annotations

from typing import Any

import click

from cache.remote import RemoteError, is_remote, parse_url

__all__ = ["SetPlace"]


class SetPlace(click.ParamType):  # type: ignore[type-arg]
    """Hands on a path of this machine, which must exist unless `missing`; or an address of ours."""

    name = "set"

    def __init__(self, *, missing: bool = False) -> None:
        self._path = click.Path(exists=not missing)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" not in str(value) and not is_remote(value):
            return self._path.convert(value, param, ctx)
        try:
            parse_url(value)
        except RemoteError as error:
            self.fail(str(error), param, ctx)
        return value
