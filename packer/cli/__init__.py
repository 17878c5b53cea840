"""The command line: one file per command. Commands parse, call, print; the work is in the library.

Results go to stdout, progress and messages to stderr. Exit status: 0 done, 1 failed or damage found, 2 usage,
130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from packer.version import VERSION

__all__ = ["main"]

_COMMANDS = {
    "convert": "Pack a source into HDF5, TFRecord or tar shards.",
    "index": "Adopt shards made elsewhere, or rebuild an index.",
    "inspect": "Show what a packed set is.",
    "verify": "Check every byte of a packed set.",
    "extract": "Write the original files back.",
    "export-index": "Write the index files of other readers.",
    "stage": "Copy a packed set to this node's own disk.",
    "order": "Compare ways to shuffle a packed set.",
    "parity": "Compare decoders and resizers with Pillow.",
    "cache": "Caches of this node: list, fill, remove.",
}


class _Commands(click.Group):
    """Loads a command's file when it is used, so that `packer --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"packer.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="packer")
def cli() -> None:
    """Pack image datasets into standard shards with one index; verify, inspect and extract them."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Errors of ours, and of the system, are one line on stderr."""
    from readers.errors import PackerError

    try:
        status: Any = cli.main(args=arguments, prog_name="packer", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status or 0)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("packer: interrupted; run the same command again to go on", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; leave quietly, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (PackerError, OSError, ValueError, MemoryError) as error:
        click.echo(f"packer: {error if str(error) else type(error).__name__}", err=True)
        sys.exit(1)
