"""`packer view`: a web page with the samples of a set, a folder, an archive or an address."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path
from threading import Event
from typing import Any

import click

from cache.messages import human_bytes, plural, quoted
from packer.cli import flags
from packer.cli.screen import watcher
from packer.cli.signals import CommandSignals
from packer.tools.view import ViewExport, Viewing, export_view, view

__all__ = ["command"]


@click.command("view")
@click.argument("place", metavar="SET|SOURCE", type=flags.SetPlace())
@flags.split_option()
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Port on 127.0.0.1. Default: a free port.")
@click.option("--predictions", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help="CSV "
              "with the columns key and predicted and, optionally, score or loss: shown next to the labels, the worst "
              "mistakes first.")  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--export", "output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write a "
              "page for any web server to DIR instead of serving it. For packed sets.")  # fmt: skip
@click.option("--url", metavar="ADDRESS", help="With --export: address at which browsers find the set. Default: its "
    "path relative to DIR, or its address.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="With --export: replace an earlier page.")
@click.option("--thumbnails/--no-thumbnails", default=None, help="With --export: write small pictures for the grid, "
              "about 8 kB each. Default: for up to 10,000 samples.")  # fmt: skip
@flags.json_option
def command(
    place: str, split: str | None, predictions: Path | None, no_browser: bool, as_json: bool, **options: Any
) -> None:
    """Show the samples of a set or a source in a browser, until Ctrl-C.

    A source is any source of packer convert (a folder, an archive, a table, a shard, …), or the DIR of an earlier
    --export. Nothing is written. The page is served on 127.0.0.1 only; its address contains a token, and anyone who
    has the token can see the samples.
    """
    port = options.pop("port")
    if options["output"] is not None:
        if port is not None:
            raise click.UsageError("--port is for a served page; --export writes a page")
        result = export_view(place, split=split, predictions=predictions, watcher=watcher(as_json), **options)
        flags.show_result(result, as_json, lambda: _written(result))
        return
    for flag, unsaid in (("url", None), ("overwrite", False), ("thumbnails", None)):
        if options[flag] is not unsaid:
            raise click.UsageError(f"--{flag} is for --export")
    opens = not (no_browser or as_json) and _has_display()
    _serve(lambda: view(place, split=split, port=port or 0, predictions=predictions), opens, as_json)


def _serve(begin: Callable[[], Viewing], opens: bool, as_json: bool) -> None:
    stopped = Event()
    signals = CommandSignals(lambda: True, stopped.set)
    with signals.handling(), begin() as viewing:
        if as_json:
            flags.print_json({"url": viewing.url, "port": viewing.port})
        else:
            flags.show(viewing.url)
            flags.show(*_hints(viewing.port), err=True)
        sys.stdout.flush()
        with _redirect(viewing.url) if opens else nullcontext() as file:
            if file is not None:
                webbrowser.open(file.as_uri())
            stopped.wait()
            signals.ignore()


@contextmanager
def _redirect(url: str) -> Iterator[Path]:
    """A file that only this user can read, which redirects a browser to the page; removed at the end.

    The address contains the token, and every user of a machine can read the arguments of a running browser. The file is
    in the home directory, under a plain name, because sandboxed browsers (snap) cannot read other files.
    """
    home = os.path.expanduser("~")
    folder = home if os.access(home, os.W_OK) else None
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="packer-view-", suffix=".html") as file:
        file.write(f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={escape(url)}">\n')
        file.flush()
        yield Path(file.name)


def _hints(port: int) -> list[str]:
    tunnel = [f"packer: from your own machine:  ssh -L {port}:127.0.0.1:{port} {quoted(socket.gethostname())}"]
    return [*(tunnel if "SSH_CONNECTION" in os.environ else ()), "packer: Ctrl-C ends it"]


def _written(result: ViewExport) -> list[str]:
    files = f"{plural(result.files, 'file')}, {human_bytes(result.bytes)}"
    is_near = result.serve in (result.path, result.path.parent)  # else `packer view` cannot read its set
    return [
        f"{result.path}: a page of {plural(result.samples, 'sample')}, {files}",
        *([f"  to view it here:  packer view {quoted(result.path)}"] if is_near else []),
        f"  for others: let a web server that answers Range requests (nginx, Apache, an object store; not python -m "
        f"http.server) serve {result.serve}; the page is at /{result.page}",
    ]


def _has_display() -> bool:
    """Whether a browser could open a window."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
