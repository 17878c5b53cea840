"""`packer view PLACE`: a page in the browser that shows the samples of a set, a folder, an archive or an address."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from threading import Event

import click

from packer.cli.held import HeldSignals
from packer.cli.text import SetPlace, json_option, print_json, show, split_option
from packer.viewer import view

__all__ = ["command"]


@click.command("view")
@click.argument("place", metavar="PLACE", type=SetPlace())
@split_option()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of 127.0.0.1. Default: a free one.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@json_option
def command(place: str, split: str | None, port: int, no_browser: bool, as_json: bool) -> None:
    """Show the samples of PLACE in a browser, until Ctrl-C.

    PLACE is a packed set, its address, or any source of packer convert: a folder, an archive, a table. Nothing is
    written. The page is served on 127.0.0.1; its address has a token, and who has that sees the samples.
    """
    stopped = Event()
    signals = HeldSignals(lambda: True, stopped.set)
    with signals.handling(), view(place, split=split, port=port) as viewing:
        if as_json:
            print_json({"url": viewing.url, "port": viewing.port})
        else:
            show(viewing.url)
            show(*_hints(viewing.port), err=True)
        sys.stdout.flush()
        if not (no_browser or as_json) and _has_display():
            webbrowser.open(viewing.url)
        stopped.wait()
        signals.ignore()


def _hints(port: int) -> list[str]:
    tunnel = [f"packer: from your own machine:  ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"]
    return [*(tunnel if "SSH_CONNECTION" in os.environ else ()), "packer: Ctrl-C ends it"]


def _has_display() -> bool:
    """Whether a browser would open a window here."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
