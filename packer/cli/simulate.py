"""`packer simulate SET`: what a job of many nodes would read, before it is submitted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

import readers
from packer.cli.text import Duration, Rate, SetPlace, Size, json_option, show_result, split_option, watcher, width
from packer.tools.simulate import ORDERS, Job, Machine, Shuffles, planned_set, simulate, simulation_lines, subject_of

__all__ = ["command"]

F = TypeVar("F", bound=Callable[..., Any])
_PLANNED = ("samples", "mean_bytes", "shards")


def _capacities(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[float | int, ...]:
    """Shares of the set, as 0.3 or 30%, or sizes, as 64GiB."""
    found: list[float | int] = []
    for text in (part.strip() for value in values for part in value.split(",")):
        share = re.fullmatch(r"(\d*\.?\d+)(\s*%)?", text)
        number = float(share[1]) / (100 if share[2] else 1) if share else math.inf
        if number <= 1:
            found.append(number)
        elif share:
            raise click.BadParameter(f"{text!r} is a share above 1; give 0.3, 30%, or a size with a unit, as 64GiB")
        else:
            found.append(Size().convert(text, param, ctx))
    return tuple(dict.fromkeys(found))


def _names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _rate(flag: str, default: str, help: str) -> Callable[[F], F]:
    return click.option(flag, type=Rate(), default=default, show_default=True, metavar="RATE", help=help)


def _count(flag: str, default: int | None, help: str, metavar: str = "N") -> Callable[[F], F]:
    shown = default is not None
    return click.option(
        flag, type=click.IntRange(min=1), default=default, show_default=shown, metavar=metavar, help=help
    )


@click.command("simulate")
@click.argument("dataset", metavar="[SET]", type=SetPlace(), required=False)
@split_option("Default: the only split, or train.")
@_count("--nodes", 1, "Nodes of the job.")
@_count("--ranks", 1, "Ranks of each node: GPUs.")
@_count("--batch-size", 64, "Samples of one rank in a step.")
@click.option("--step", "step_seconds", type=Duration(), default="250ms", show_default=True, metavar="TIME",
              help="A training step that never waits for data.")  # fmt: skip
@_count("--epochs", 10, "How many to simulate.")
@click.option("--cache", "caches", multiple=True, default=("0,0.1,0.3,1",), callback=_capacities, metavar="SIZE,…",
              show_default=True, help="What each node may keep: a share of the set, or a size as 64GiB; repeatable, or "
              "separated by commas.")  # fmt: skip
@click.option("--orders", callback=_names, default=",".join(ORDERS[:4]), show_default=True, metavar="NAME,…",
              help=f"Some of {', '.join(ORDERS)}.")  # fmt: skip
@click.option("--peers", is_flag=True, help="Nodes read what other nodes keep from them; each keeps its own part.")
@click.option("--tail", type=click.Choice(["drop_last", "exact"]), default="drop_last", show_default=True,
              help="What the last samples of an epoch are for.")  # fmt: skip
@_rate("--filesystem-bandwidth", "40GB/s", "Of the parallel filesystem, for all nodes together.")
@click.option("--filesystem-requests", type=click.FloatRange(min=1), metavar="N", help="Requests a second that it "
              "answers. Default: unlimited.")  # fmt: skip
@click.option(
    "--latency", type=Duration(), default="1ms", show_default=True, metavar="TIME", help="Of a request to it."
)
@_count("--outstanding", 16, "Requests that a rank has under way at a time.")
@_rate("--node-bandwidth", "2GB/s", "Of a node's network, in each direction.")
@_rate("--disk-bandwidth", "3GB/s", "Of a node's local disk.")
@_count("--prefetch", 3, "Batches that each rank has ahead.")
@click.option("--block-bytes", type=Size(), default="8MiB", show_default=True, metavar="SIZE", help="Of block: "
              "consecutive bytes of a block.")  # fmt: skip
@_count("--window", 64, "Of block: blocks that are mixed at a time.")
@_count("--exchange-every", 8, "Of node-local: epochs from one exchange of parts to the next.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="SEED", help="Of the orders.")
@_count("--samples", None, "Without SET: samples of a set that is not packed yet.")
@click.option("--mean-bytes", type=Size(), metavar="SIZE", help="Of it: bytes of a sample on average. Default: 110kB.")
@_count("--shards", None, "Of it: shards. Default: of 1 GiB.")
@json_option
def command(
    dataset: str | None,
    split: str | None,
    caches: tuple[float | int, ...],
    orders: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate how a job would read SET: who reads what, when, from where, for each order and each cache.

    SET is a packed set, in a directory or at an address; only its index is read. --samples, --mean-bytes and
    --shards describe a set that is not packed yet. The orders, schedules, caches and staging of a training run for all
    nodes in this process; times follow from the bandwidths that are given.
    """
    planned = {name: options.pop(name) for name in _PLANNED}
    machine = _machine(options)
    shuffles = Shuffles(
        orders, **{name: options.pop(name) for name in ("block_bytes", "window", "exchange_every", "seed")}
    )
    job = Job(**options)
    rest: dict[str, Any] = {"caches": caches, "shuffles": shuffles, "machine": machine, "watcher": watcher(as_json)}
    if dataset is None:
        found = simulate(_planned(planned), job, **rest)
    elif any(value is not None for value in planned.values()):
        raise click.UsageError("--samples, --mean-bytes and --shards are for a set that is not packed: leave out SET")
    else:
        with readers.open(dataset, split) as reader:
            found = simulate(subject_of(reader, reader.fields[0]), job, **rest)
    show_result(found, as_json, lambda: simulation_lines(found, width(other=120)))


def _machine(options: dict[str, Any]) -> Machine:
    """Takes the options of the machine out of `options`."""
    names = {"filesystem": "filesystem_bandwidth", "node": "node_bandwidth", "disk": "disk_bandwidth",
             "latency_seconds": "latency", "outstanding": "outstanding"}  # fmt: skip
    requests = options.pop("filesystem_requests")
    rest = {name: options.pop(flag) for name, flag in names.items()}
    return Machine(filesystem_requests=math.inf if requests is None else requests, **rest)


def _planned(given: dict[str, int | None]) -> Any:
    samples, mean, shards = (given[name] for name in _PLANNED)
    if samples is None:
        raise click.UsageError("name a SET, or describe one: --samples 1281167 --mean-bytes 110kB --shards 1300")
    mean = 110_000 if mean is None else mean
    return planned_set(samples, mean, shards or min(samples, max(1, -(-samples * mean >> 30))))
