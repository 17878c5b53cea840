"""`packer serve SET DIR`: what this node holds of a set, for the other nodes of the job, until it is stopped.

The address is the only thing on stdout.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import click

import readers
from cache.serving import Server
from packer.cli.held import HeldSignals
from packer.cli.text import (
    SetPlace,
    human_bytes,
    json_option,
    part_option,
    print_json,
    show,
    split_option,
)

__all__ = ["command"]


@click.command("serve")
@click.argument("path", metavar="SET", type=SetPlace())
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@split_option("Default: the only split, or train.")
@part_option("The part that this node holds: node I of N (from 0), as node-local order deals samples. Default: "
             "node, as the launcher numbers the nodes.")  # fmt: skip
@click.option("--local", type=click.Path(exists=True, file_okay=False), metavar="DIR", help="A staged copy of the "
              "part; what it lacks is read from SET.")  # fmt: skip
@click.option("--cache", "capacity", metavar="SIZE", help="Keep what is read of the part in shared memory: as 20GiB, "
              "50% of the samples, or auto. In training: readers.cached(reader, SIZE, partition=…).")  # fmt: skip
@click.option("--host", metavar="ADDRESS", help="Where to listen: a name, an address or a network of this machine, "
              "as 10.1.0.0/16. Default: the address of its own name.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: a free one.")
@click.option("--token", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="A file of mode 0600. "
              "Default: one is made in DIR.")  # fmt: skip
@click.option(
    "--certificate",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Speak TLS, with this certificate (PEM).",
)
@click.option(
    "--key", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Key of the certificate (PEM)."
)
@json_option
@click.argument("run", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(path: str, folder: str, as_json: bool, run: tuple[str, ...], **options: Any) -> int:
    """Serve this node's part of SET to the other nodes of the job, until SIGTERM, Ctrl-C or the end of COMMAND.

    DIR is one that all nodes see: they find each other's addresses and the token there. In training:
    readers.share(reader, DIR, serve=False).
    """
    stopped = threading.Event()
    signals = HeldSignals(lambda: True, stopped.set)
    with signals.handling(), ExitStack() as stack:
        shared = _shared(stack, path, folder, options)
        server = shared.serve(Server)
        if as_json:
            print_json({"url": shared.url, "node": shared.node, "nodes": shared.nodes})
        else:
            show(shared.url)
        status = signals.run(run, {}) if run else 0
        if not run:
            stopped.wait()
        signals.ignore()
        shared.close()
        stats = server.stats
    show(
        f"packer: served {stats.answers:,} ranges, {human_bytes(stats.sent_bytes)}; {stats.missing:,} not found or not "
        f"readable, {stats.refused:,} refused",
        err=True,
    )
    return status


def _shared(stack: ExitStack, path: str, folder: str, options: dict[str, Any]) -> readers.Shared:
    """The reader of this node, to be served. What is opened is closed with the stack."""
    local, capacity, part = options.pop("local"), options.pop("capacity"), options.pop("part")
    split = options.pop("split")
    place = {"node": part[0], "nodes": part[1]} if isinstance(part, tuple) else {}
    reader = readers.open(local or path, split, fallback=path if local else None)
    shared = readers.share(stack.enter_context(reader), folder, **place, **options)
    if capacity is not None:
        partition = (shared.node, shared.nodes)
        cached = stack.enter_context(readers.cached(reader, capacity, partition=partition))
        shared = readers.share(cached, folder, **place, **options)
    return shared
