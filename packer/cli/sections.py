"""A command whose options are listed in sections, so that many of them stay readable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["SectionedCommand"]


class SectionedCommand(click.Command):
    """sections: title -> names of the parameters in it, both in the order of the help; the others come first."""

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sections = sections
        unknown = {name for names in sections.values() for name in names} - {param.name for param in self.params}
        assert not unknown, f"no such parameters: {unknown}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {param.name: param.get_help_record(ctx) for param in options}
        placed = {name for names in self._sections.values() for name in names}
        rest = [name for name in records if name not in placed]
        for title, names in {"Options": rest, **self._sections}.items():
            rows = [record for record in map(records.get, names) if record is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
