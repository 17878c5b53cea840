"""`packer advise SOURCE`: what to pack for a training."""

from __future__ import annotations

from typing import Any

import click

from packer.cli.convert import OF_THE_SOURCE
from packer.cli.convert import command as convert_command
from packer.cli.text import Duration, SetPlace, json_option, show_result, split_option, watcher, width
from packer.sources import open_source
from packer.tools.advise import READERS, Choices, Job, advice_lines, advise

__all__ = ["command"]

_AT_ONCE = "--images-per-second or --simulate-step"


@click.command("advise")
@click.argument("dataset", metavar="SOURCE", type=SetPlace(local=True))
@split_option("Only this split.")
@click.option("--image-size", type=click.IntRange(1, 4096), default=224, show_default=True, metavar="N",
              help="Side of the crops that training takes, in pixels.")  # fmt: skip
@click.option("--crop-scale", type=click.FloatRange(0, 1, min_open=True), default=0.08, show_default=True,
              metavar="SHARE", help="Smallest share of an image's area that a random crop takes.")  # fmt: skip
@click.option("--images-per-second", type=click.FloatRange(min=0, min_open=True), metavar="N", help="What all GPUs of "
              "a node want together, as packer diagnose measures it.")  # fmt: skip
@click.option("--simulate-step", type=Duration(), metavar="TIME", help="The same by the time of a training step, as "
              "150ms: GPUs times batch size, divided by it.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="With --simulate-step: images of one GPU's "
              "batch. Default: 64.")  # fmt: skip
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="GPUs of a node.")
@click.option(
    "--reader", type=click.Choice(READERS), default="packer", show_default=True, help="What will read the set."
)
@click.option("--max-error", type=click.FloatRange(min=0), metavar="N", help="Recommend nothing with a mean error "
              "above this, of 255.")  # fmt: skip
@click.option("--max-side", "max_sides", type=click.IntRange(min=1), multiple=True, metavar="N", help="Longest sides "
              "to try; may be repeated. Default: 500, 400 and 256, for images of 224.")  # fmt: skip
@click.option("--quality", "qualities", type=click.IntRange(1, 100), multiple=True, metavar="N", help="JPEG qualities "
              "to try; may be repeated. Default: 95, 90 and 85.")  # fmt: skip
@click.option("--samples", type=click.IntRange(2, 100_000), default=128, show_default=True, metavar="N",
              help="Images to draw at random.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="SEED",
              help="Of the draw: the same seed takes the same images.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=45.0, show_default=True,
              metavar="SECONDS", help="How long to measure, about.")  # fmt: skip
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    dataset: str,
    as_json: bool,
    image_size: int,
    max_sides: tuple[int, ...],
    qualities: tuple[int, ...],
    **options: Any,
) -> None:
    """Measure what SOURCE would be in other sizes and codecs, and recommend what to pack and how to read it.

    SOURCE is what packer convert takes: a folder of images, an archive, a manifest, a packed set, shards. A random
    sample is encoded as packer convert would, decoded as ImageLoader does, and compared with the originals. No set is
    written.
    """
    given = {name: options.pop(name) for name in (*OF_THE_SOURCE, "source_label_offset")}
    flags = _flags_of(ctx, given, options["split"])
    opened = open_source(dataset, label_offset=given.pop("source_label_offset"), **given)
    job = _job(options)
    choices = Choices(image_size, max_sides, qualities)
    result = advise(opened, choices=choices, job=job, flags=flags, watcher=watcher(as_json), **options)
    show_result(result, as_json, lambda: advice_lines(result, width(other=110)))


def _job(options: dict[str, Any]) -> Job:
    """What the training wants; takes its options out of `options`. Raises UsageError."""
    step, batch_size, wanted = (options.pop(name) for name in ("simulate_step", "batch_size", "images_per_second"))
    gpus = options.pop("gpus")
    if step is not None and wanted is not None:
        raise click.UsageError(f"give either {_AT_ONCE}")
    if batch_size is not None and step is None:
        raise click.UsageError("--batch-size is of the step: give --simulate-step TIME, too")
    if step is not None:
        if step <= 0:
            raise click.UsageError("--simulate-step must be above 0")
        wanted = gpus * (batch_size or 64) / step
    return Job(wanted, gpus, options.pop("reader"), options.pop("max_error"))


def _flags_of(ctx: click.Context, given: dict[str, Any], split: str | None) -> tuple[str, ...]:
    """The options with which `packer convert` opens the same source."""
    found = [] if split is None else ["--split", split]
    for option in convert_command.params:
        name = str(option.name)
        if name not in given or ctx.get_parameter_source(name) is click.core.ParameterSource.DEFAULT:
            continue
        value = given[name]
        if isinstance(value, bool):
            found.append(option.opts[0])
            continue
        values = [f"{field}={key}" for field, key in value.items()] if isinstance(value, dict) else [str(value)]
        found += [text for each in values for text in (option.opts[0], each)]
    return tuple(found)


command.params[1:1] = [
    option for option in convert_command.params if option.name in (*OF_THE_SOURCE, "source_label_offset")
]
