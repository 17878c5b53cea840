"""`packer advise SOURCE`: what to pack for a training job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from packer.cli import flags
from packer.cli.screen import width
from packer.tools.advise import READERS, Advice, Choices, Job, advice_lines, advise

__all__ = ["command"]

_positive = click.FloatRange(min=0, min_open=True)


@click.command("advise")
@click.argument("dataset", metavar="SOURCE", type=flags.SetPlace(local=True))
@flags.source_options
@flags.split_option("Only this split.")
@click.option("--image-size", type=click.IntRange(1, 4096), default=224, show_default=True, metavar="N",
              help="Side of the training crops, in pixels.")  # fmt: skip
@click.option("--crop-scale", type=click.FloatRange(0, 1, min_open=True), default=0.08, show_default=True,
              metavar="SHARE", help="Smallest share of an image's area in a random crop.")  # fmt: skip
@click.option("--images-per-second", type=_positive, metavar="N", help="Images per second that all GPUs of a node "
    "need together; packer diagnose measures them.")  # fmt: skip
@click.option("--simulate-step", type=flags.Duration(), metavar="TIME", help="Instead: time of a training step, such "
    "as 150ms; the rate is GPUs times batch size, divided by it.")  # fmt: skip
@flags.count_option("--batch-size", "With --simulate-step: images per GPU and batch. Default: 64.")
@flags.count_option("--gpus", "GPUs of a node.", 1)
@click.option("--reader", type=click.Choice(READERS), default="packer", show_default=True,
              help="Program that will read the set.")  # fmt: skip
@click.option("--max-error", type=click.FloatRange(min=0), metavar="N", help="Recommend nothing with a higher mean "
              "error, on the scale of 255.")  # fmt: skip
@flags.count_option("--max-side", "Longest sides to try; may be repeated. Default: 500, 400 and 256, for crops of "
                    "224.", multiple=True)  # fmt: skip
@click.option("--quality", type=click.IntRange(1, 100), multiple=True, metavar="N", help="JPEG qualities to try; may "
              "be repeated. Default: 95, 90 and 85.")  # fmt: skip
@click.option("--samples", type=click.IntRange(2, 100_000), default=128, show_default=True, metavar="N",
              help="Images to draw at random.")  # fmt: skip
@flags.seed_option("Seed of the random sample: the same seed takes the same images.")
@click.option("--seconds", type=_positive, default=45.0, show_default=True, metavar="SECONDS",
              help="Approximate time of the measurement.")  # fmt: skip
@flags.reports(lambda result: advice_lines(result, width(other=110)))
@click.pass_context
def command(
    ctx: click.Context,
    /,
    dataset: str,
    opens: Callable[[str], Any],
    images_per_second: float | None,
    simulate_step: float | None,
    batch_size: int | None,
    gpus: int,
    reader: str,
    max_error: float | None,
    **options: Any,
) -> Advice:
    """Measure SOURCE in other sizes and codecs, and recommend how to pack and read it.

    SOURCE is any source of packer convert: a folder of images, an archive, a manifest, a packed set, shards. A random
    sample is encoded as packer convert does, decoded as ImageLoader does, and compared with the originals. No set is
    written.
    """
    if simulate_step is not None and images_per_second is not None:
        raise click.UsageError("give either --images-per-second or --simulate-step")
    if batch_size is not None and simulate_step is None:
        raise click.UsageError("--batch-size belongs to the step; give --simulate-step TIME, too")
    if simulate_step is not None:
        if simulate_step <= 0:
            raise click.UsageError("--simulate-step must be above 0")
        images_per_second = gpus * (batch_size or 64) / simulate_step
    choices = Choices(*(options.pop(name) for name in ("image_size", "max_side", "quality")))
    job = Job(images_per_second, gpus, reader, max_error)
    return advise(opens(dataset), choices=choices, job=job, flags=_flags(ctx), **options)


def _flags(ctx: click.Context) -> tuple[str, ...]:
    """The options for `packer convert` to open the same source."""
    words: list[str] = []
    for option in ctx.command.params:
        name = str(option.name)
        value = ctx.params.get(name)
        unset = ctx.get_parameter_source(name) is click.core.ParameterSource.DEFAULT
        if unset or value is None or name not in (*flags.SOURCE_OPTIONS, "split"):
            continue
        if isinstance(value, bool):
            words.append(option.opts[0])
            continue
        values = [f"{field}={key}" for field, key in value.items()] if isinstance(value, dict) else [str(value)]
        words += [text for each in values for text in (option.opts[0], each)]
    return tuple(words)
