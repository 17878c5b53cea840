"""`packer simulate SET`: predict the reads of a multi-node job before it is submitted."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import click

import readers
from packer.cli import flags
from packer.cli.screen import width
from packer.tools.simulate import (
    ORDERS,
    Job,
    Machine,
    Shuffles,
    Simulation,
    planned_set,
    simulate,
    simulation_lines,
    subject_of,
)

__all__ = ["command"]


def _capacities(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[float | int, ...]:
    """Shares of the set, such as 0.3 or 30%, or sizes, such as 64GiB."""
    capacities: list[float | int] = []
    for text in (part.strip() for value in values for part in value.split(",")):
        share = re.fullmatch(r"(\d*\.?\d+)(\s*%)?", text)
        number = float(share[1]) / (100 if share[2] else 1) if share else math.inf
        if share and number > 1:
            raise click.BadParameter(
                f"{text!r} is a share above 1; give 0.3, 30%, or a size with a unit, such as 64GiB"
            )
        capacities.append(number if share else flags.Size().convert(text, param, ctx))
    return tuple(dict.fromkeys(capacities))


_rate = functools.partial(click.option, type=flags.Rate(), show_default=True, metavar="RATE")
_time = functools.partial(click.option, type=flags.Duration(), show_default=True, metavar="TIME")


@click.command("simulate")
@click.argument("dataset", metavar="[SET]", type=flags.SetPlace(), required=False)
@flags.split_option("Default: the only split, or train.")
@flags.count_option("--nodes", "Nodes of the job.", 1)
@flags.count_option("--ranks", "Ranks (GPUs) per node.", 1)
@flags.count_option("--batch-size", "Samples per rank and step.", 64)
@_time("--step", "step_seconds", default="250ms", help="Time of a training step that never waits for data.")
@flags.count_option("--epochs", "Epochs to simulate.", 10)
@click.option("--cache", "caches", multiple=True, default=("0,0.1,0.3,1",), callback=_capacities, metavar="SIZE,…",
              show_default=True, help="What each node may cache: a share of the set, or a size such as 64GiB; "
              "repeatable, or separated by commas.")  # fmt: skip
@click.option("--orders", callback=flags.split_list, default=",".join(ORDERS[:4]), show_default=True, metavar="NAME,…",
              help=f"Orders to compare, of {', '.join(ORDERS)}.")  # fmt: skip
@click.option(
    "--peers", is_flag=True, help="Nodes read samples from the nodes that cache them; each caches a part of the set."
)
@click.option("--tail", type=click.Choice(["drop_last", "exact"]), default="drop_last", show_default=True,
              help="Drop the last samples of an epoch, or read each exactly once.")  # fmt: skip
@_rate("--filesystem-bandwidth", default="40GB/s", help="Bandwidth of the parallel filesystem, for all nodes together.")
@click.option("--filesystem-requests", type=click.FloatRange(min=1), metavar="N", help="Requests per second to the "
    "parallel filesystem. Default: unlimited.")  # fmt: skip
@_time("--latency", default="1ms", help="Latency of a request to the parallel filesystem.")
@flags.count_option("--outstanding", "Concurrent requests per rank.", 16)
@_rate("--node-bandwidth", default="2GB/s", help="Bandwidth of a node's network, in each direction.")
@_rate("--disk-bandwidth", default="3GB/s", help="Bandwidth of a node's local disk.")
@flags.count_option("--prefetch", "Batches that each rank prepares ahead.", 3)
@flags.size_option("--block-bytes", default="8MiB", show_default=True, help="Order block: consecutive bytes per block.")
@flags.count_option("--window", "Order block: blocks mixed at a time.", 64)
@flags.count_option("--exchange-every", "Order node-local: epochs between two exchanges of parts.", 8)
@flags.seed_option("Seed of the orders.", most=None)
@flags.count_option("--samples", "Without SET: samples of a set that is not packed yet.")
@flags.size_option("--mean-bytes", help="Without SET: mean size of a sample. Default: 110kB.")
@flags.count_option("--shards", "Without SET: number of shards. Default: shards of 1 GiB.")
@flags.reports(lambda result: simulation_lines(result, width(other=120)))
def command(
    dataset: str | None, split: str | None, caches: tuple[float | int, ...], orders: tuple[str, ...],
    samples: int | None, mean_bytes: int | None, shards: int | None, watcher: Any, **options: Any,
) -> Simulation:  # fmt: skip
    """Simulate how a job would read SET: which rank reads what, when and from where, for each order and cache size.

    SET is a packed set, in a directory or at an address; only its index is read. --samples, --mean-bytes and --shards
    describe a set that is not packed yet. The orders, schedules, caches and staging of a training job run for all
    nodes in this process; times are computed from the given bandwidths.
    """
    take = options.pop
    requests = take("filesystem_requests")
    machine = Machine(
        take("filesystem_bandwidth"), take("node_bandwidth"), take("disk_bandwidth"),
        math.inf if requests is None else requests, take("latency"), take("outstanding"),
    )  # fmt: skip
    shuffles = Shuffles(orders, **{name: take(name) for name in ("block_bytes", "window", "exchange_every", "seed")})
    run = functools.partial(
        simulate, job=Job(**options), caches=caches, shuffles=shuffles, machine=machine, watcher=watcher
    )
    if dataset is not None:
        if not samples is mean_bytes is shards is None:
            message = "--samples, --mean-bytes and --shards are for a set that is not packed; leave out SET"
            raise click.UsageError(message)
        with readers.open(dataset, split) as reader:
            return run(subject_of(reader, reader.fields[0]))
    if samples is None:
        raise click.UsageError("name a SET, or describe one: --samples 1281167 --mean-bytes 110kB --shards 1300")
    mean = 110_000 if mean_bytes is None else mean_bytes
    return run(planned_set(samples, mean, shards or min(samples, max(1, -(-samples * mean >> 30)))))
