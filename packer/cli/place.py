"""A set on the command line: a directory that is there, or an address."""

from __future__ import annotations

from typing import Any

import click

from cache.remote import RemoteError, parse_url

__all__ = ["SetPlace"]


class SetPlace(click.ParamType):  # type: ignore[type-arg]
    """Hands on a path of this machine, which must exist unless `missing`; or an address of ours.

    local: no address will do, and the message says what will.
    """

    name = "set"

    def __init__(self, *, missing: bool = False, local: bool = False) -> None:
        self._path, self._local = click.Path(exists=not missing), local

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" not in str(value):
            return self._path.convert(value, param, ctx)
        try:
            url = parse_url(value)
        except RemoteError as error:
            self.fail(str(error), param, ctx)
        if self._local:
            self.fail(
                f"the files of {url} are needed here: run  packer stage {url}  and name its directory", param, ctx
            )
        return value
