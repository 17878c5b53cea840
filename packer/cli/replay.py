"""`packer replay`: the samples of any step of a training run, from a state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import readers
from cache.errors import ResumeError
from cache.messages import plural
from packer.cli import flags
from packer.cli.monitor import report_option
from packer.formats.base import png_of
from packer.tools.report import Page, write_page
from readers.layout import DATASET_FILE
from readers.replaying import Appearance, Replay, ReplayedStep, find_states

__all__ = ["command"]


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"{text!r} is not A:B, from A to before B")
    return range(int(first), int(last))


@click.command("replay")
@click.argument("source", metavar="CHECKPOINT", type=click.Path(exists=True, path_type=Path))
@flags.set_argument
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step of the run, counted from 0 over its epochs.")
@click.option("--steps", callback=flags.parsed(_range), metavar="A:B", help="Steps A to before B.")
@click.option("--epoch", type=click.IntRange(0), metavar="N", help="Count the steps in this epoch.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only this rank.")
@click.option("--who", metavar="KEY", help="The steps that have the sample with this key.")
@click.option("--epochs", callback=flags.parsed(_range), metavar="A:B", help="With --who: epochs A to before B. "
              "Default: from the first that is recorded to that of the checkpoint.")  # fmt: skip
@report_option("Write a page with the pictures as they were trained.")
@click.option("--state", metavar="NAME", help="Of several in the checkpoint: a part of its name.")
@flags.split_option("Default: the split of the state.")
@flags.count_option("--batch-size", "Samples per rank and step after the checkpoint; in all steps if it has no record.")
@flags.count_option("--world-size", "Ranks in the steps after the checkpoint; in all steps if it has no record.")
@click.option("--sampler", is_flag=True, help="With no record: a DataLoader made the batches, over EpochSampler.")
@flags.json_option
def command(
    source: Path,
    path: str,
    step: int | None,
    steps: range | None,
    epoch: int | None,
    rank: int | None,
    who: str | None,
    epochs: range | None,
    html: Path | None,
    state: str | None,
    split: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the samples of past and coming steps of a run that trained on SET: keys, labels, rows and draws of ops.

    CHECKPOINT is a file or folder with a state of a loader, sampler or stream of readers: a checkpoint of Lightning, of
    the Trainer of transformers or of accelerate, what torch.save wrote, or JSON. Nothing in it is executed.

    Without --step, --steps or --who: what the state knows of its run.
    """
    chosen = range(step, step + 1) if step is not None else steps
    if html is not None and chosen is None:
        raise click.UsageError("--html shows the pictures of a step: give --step or --steps")
    states = find_states(source, state)
    with _open(path, split, {str(entry.get("fingerprint")) for entry in states.values()}) as reader:
        replayed = readers.replay(states, reader, **options)
        made = [replayed.step(number, epoch=epoch, rank=rank) for number in chosen or ()]
        appearances = None if who is None else replayed.who(who, epochs)
        if html is not None:
            write_page(html, _page(replayed, made, epoch))
        if as_json:
            document = {"states": list(states), **replayed.to_dict(), "steps": [entry.to_dict() for entry in made]}
            flags.print_json(
                document if appearances is None else document | {"who": [vars(entry) for entry in appearances]}
            )
            return
        for entry in made:
            flags.show(*_step_lines(entry))
        if appearances is not None:
            flags.show(*_who_lines(str(who), appearances))
        if chosen is None and appearances is None:
            flags.show(*(f"state {name}" for name in states), *_run_lines(replayed))
        elif replayed.without_draws:
            flags.show(f"Without draws: {replayed.without_draws}", err=True)


def _open(path: str, split: str | None, fingerprints: set[str]) -> readers.Reader:
    """The split that a state is of. Raises ResumeError."""
    if "://" not in path and not Path(path, DATASET_FILE).exists():
        return readers.open_folder(path, split)
    reader = readers.open(path, split)
    known = {}
    for name in (reader.split, *([] if split else reader.dataset.splits)):
        reader = readers.open(path, name)
        if reader.fingerprint in fingerprints:
            return reader
        known[name] = reader.fingerprint
    listed = ", ".join(f"{name} {fingerprint}" for name, fingerprint in known.items())
    raise ResumeError(
        f"{path}: the checkpoint is of the set {', '.join(sorted(fingerprints))}, this one has {listed}; name the set "
        f"that the run trained on; for a selection, several sets or a cache that keeps other pixels use readers.replay"
    )


def _run_lines(replayed: Replay) -> Iterator[str]:
    start = replayed.start
    done = "" if replayed.done is None else f", after {plural(replayed.done, 'step')}"
    yield f"is in epoch {start.epoch}, at position {start.cursor:,}{done}; seed {replayed.seed}"
    for segment in replayed.run:
        begin = f"step {segment.step:,}" if segment.step >= 0 else "a step of unknown number"
        dealt = f"{plural(segment.world_size, 'rank')} of {segment.batch_size} samples"
        yield f"  from {begin} on, epoch {segment.epoch}: {dealt}, order {segment.order['kind']}, tail {segment.tail}"
    for ops in replayed.ops:
        yield f"  ops {', '.join(map(repr, ops)) or 'none'}"
    if replayed.without_draws:
        yield f"  no ops: {replayed.without_draws}"


def _step_lines(step: ReplayedStep) -> Iterator[str]:
    yield _title(step)
    for sample in step.samples:
        view = f" view {sample.view}" if sample.view else ""
        label = "" if sample.label is None else f"  label {sample.label}"
        draws = "".join(f"  {draw.text}" for draw in sample.draws if draw.values or draw.op.draws)
        fault = f"  BAD {sample.error}" if sample.error else ""
        yield f"  rank {sample.rank} [{sample.place}]{view}  {sample.key}{label}  row {sample.row}{draws}{fault}"


def _title(step: ReplayedStep) -> str:
    number = "" if step.step is None else f"step {step.step:,}, "
    when = ("trained" if step.is_certain else "perhaps trained") if step.is_past else "to come"
    ranks = f"{plural(step.world_size, 'rank')} of {step.batch_size} samples"
    return f"{number}step {step.number:,} of epoch {step.epoch}, {when}, {ranks}"


def _who_lines(key: str, appearances: list[Appearance]) -> Iterator[str]:
    yield f"{key}: in {plural(len(appearances), 'step')}"
    for at in appearances:
        number = "" if at.step is None else f"step {at.step:,}, "
        when = ("trained" if at.is_certain else "perhaps trained") if at.is_past else "to come"
        yield f"  {number}step {at.number:,} of epoch {at.epoch}, rank {at.rank} [{at.place}]: {when}"


def _page(replayed: Replay, steps: list[ReplayedStep], epoch: int | None) -> Page:
    page = Page("Samples of a run", lead=", ".join(map(repr, replayed.ops[0])) if replayed.ops else "")
    for step in steps:
        page.section(_title(step))
        for rank in sorted({sample.rank for sample in step.samples}):
            number = step.number if epoch is not None or step.step is None else step.step
            views, rows = replayed.pictures(number, epoch=epoch, rank=rank)
            named = {(sample.row, sample.view): sample for sample in step.samples if sample.rank == rank}
            items = []
            for view, images in enumerate(views):
                for image, row in zip(images, rows, strict=True):
                    sample = named.get((row, view))
                    title = f"{row}" if sample is None else sample.key
                    draws = ["in place of a bad sample"] if sample is None else [draw.text for draw in sample.draws]
                    items.append((png_of(image), f"rank {rank}: {title}", draws))
            page.pictures(items)
    return page
