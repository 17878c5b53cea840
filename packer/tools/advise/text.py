"""Advice as lines for a terminal: the table of variants, then numbered recommendations with their commands."""

from __future__ import annotations

from cache.messages import human_bytes, human_seconds, plural, table, wrapped
from packer.tools.advise import Advice, Estimate, Measured

__all__ = ["advice_lines"]

HEADINGS = ("variant", "an image", "the set", "images/s", "error", "worst", "PSNR", "encoding")


def advice_lines(advice: Advice, width: int = 110) -> list[str]:
    """The whole advice."""
    quickest = max(map(advice.rate, advice.measured))
    rows = [row_of(advice, one) for one in advice.measured]
    bars = [advice.rate(one) / quickest for one in advice.measured]
    optional = ("encoding", "worst", "PSNR", "an image")
    first, *variants = table(HEADINGS, rows, width - 2, bars=bars, optional=optional)
    lines = [*described(advice), "", f"  {first}"]
    lines += [f"{'→' if number == advice.chosen else ' '} {line}" for number, line in enumerate(variants)]
    remark = "error, worst crop: mean difference from the original, of 255; encoding: the set, on all CPUs"
    lines += ["", *wrapped(remark, width, "")]
    lines += [line for note in advice.notes for line in wrapped(f"note: {note}", width, " " * 6)]
    for number, one in enumerate(advice.recommendations, 1):
        lines += ["", f"{number}. {one.topic}: {one.choice}", *wrapped(f"   {one.reason}", width, "   ")]
        lines += [f"   $ {command}" for command in one.commands]
        lines += [f"   >>> {one.code}"] if one.code else []
    return lines


def described(advice: Advice) -> list[str]:
    """What was measured, in two lines."""
    splits = ", ".join(f"{name} {count:,}" for name, count in advice.splits.items())
    cpus, job = plural(advice.machine.cpus, "CPU"), advice.job
    wanted = "" if job.images_per_second is None else f"; wanted: {job.images_per_second:,.0f} images/s"
    return [
        f"{advice.title}: {plural(advice.total, 'image')} ({splits}), of which {advice.sampled:,} were sampled",
        f"decode, RandomResizedCrop({advice.image_size}) and flip from memory on {cpus}{wanted}",
    ]


def row_of(advice: Advice, one: Measured) -> tuple[str, ...]:
    """The cells of a variant under HEADINGS."""
    original = one.variant.is_original
    encoding = "" if original else human_seconds(one.encode * advice.total / advice.machine.cpus)
    return (
        one.variant.name,
        human_bytes(one.image_bytes),
        _with_interval(one.set_bytes),
        f"{advice.rate(one):,.0f}",
        "" if original else f"{one.error:.2f}",
        "" if original else f"{one.worst:.1f}",
        "" if original else "same" if one.psnr is None else f"{one.psnr:.1f}",
        encoding,
    )


def _with_interval(size: Estimate) -> str:
    """A size, with half of its interval in percent where that is not nothing."""
    around = 50 * (size.most - size.low) / max(size.value, 1.0)
    return human_bytes(size.value) + (f" ±{around:.0f} %" if around >= 0.5 else "")
