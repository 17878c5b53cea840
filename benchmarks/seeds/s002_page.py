"""The page of `s002.py`: gains by model and load next to the document's, loaders by themselves, and what was busy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from experiment import Page, figure, ratio
from harness import CONTENDERS, Results
from s002_rows import DALI, DALI_GPU, OURS, OURS_GPU, OURS_NEAREST, PYTORCH, PYTORCH_LINEAR
from s002_steps import MODELS, QUANTILES, Sleeps, doc_gain, doc_ms

from packer.tools.monitor import Usage
from packer.tools.report import charts

__all__ = ["publish"]

_POINTS = 3.0  # per cent; gains that differ by less count as the same
# What is compared: a row, the row it is compared with, and how a claim names the two.
_PAIRS = (
    (OURS_NEAREST, PYTORCH, "ours over PyTorch, where both take the nearest pixel,"),
    (OURS, PYTORCH_LINEAR, "ours over PyTorch, where both turn bilinearly,"),
    (OURS_GPU, PYTORCH, "ours on the GPU over PyTorch"),
    (DALI_GPU, PYTORCH, "DALI on the GPU over PyTorch, as in the document,"),
)


def publish(page: Page, results: Results, loads: Sequence[int], sleeps: Sleeps | None, usage: dict[str, Path]) -> None:
    """sleeps: what steps were; None where they were those of models. usage: the records of rows."""
    ran = [name for name in CONTENDERS if figure(results, name, f"alone {loads[0]}") is not None]
    _claim_gains(page, results, loads, ran)
    _claim_usage(page, results, ran)
    _answer(page, results, loads, ran)
    _loops(page, results, loads, ran, sleeps)
    _alone(page, results, loads, ran)
    _usage(page, results, loads, {name: usage[name] for name in ran if usage[name].exists()})
    _limits(page, sleeps)


def _gain(results: Results, name: str, other: str, model: str, load: int) -> float | None:
    """Per cent less time a step than another row."""
    found = ratio(results, name, other, f"{model} {load}")
    return None if found is None else 100 * (1 - found)


def _gains(results: Results, name: str, other: str, loads: Sequence[int]) -> dict[str, list[float]]:
    """By model, for each load."""
    every = {model: [_gain(results, name, other, model, load) for load in loads] for model in MODELS}
    return {model: [gain for gain in gains if gain is not None] for model, gains in every.items()}


def _claim_gains(page: Page, results: Results, loads: Sequence[int], ran: Sequence[str]) -> None:
    for name, other, what in _PAIRS:
        gains = _gains(results, name, other, loads)
        if not all(len(found) == len(loads) for found in gains.values()):
            continue
        found = "; ".join(f"{model} {_many(gains[model])} %" for model in MODELS)
        rises = (
            all(row[-1] >= row[0] - _POINTS for row in gains.values()) and gains[MODELS[0]][-1] > gains[MODELS[0]][0]
        )
        page.claim(f"the gain of {what} rises with the load", f"loads {_many(loads)}: {found}", rises)
        last = [gains[model][-1] for model in MODELS]
        falls = all(b <= a + _POINTS for a, b in itertools.pairwise(last)) and last[-1] < last[0]
        page.claim(f"the gain of {what} falls with the model", f"load {loads[-1]}: {_many(last)} %", falls)
        if name == DALI_GPU:
            least, most = (pick(gain for row in gains.values() for gain in row) for pick in (min, max))
            page.claim(
                "28 to 73 % less time by DALI on a GPU", f"{least:.0f} to {most:.0f} %", least > 0 and most >= 28
            )


def _claim_usage(page: Page, results: Results, ran: Sequence[str]) -> None:
    """That the faster trial keeps the accelerator busier; and CPUs less busy, where there is one to take their work."""
    fast, slow = next((pair[:2] for pair in reversed(_PAIRS) if pair[0] in ran), ("", ""))
    on_gpu = fast in (DALI_GPU, OURS_GPU)
    busy, what = ("gpu", "the GPU is busy") if on_gpu else ("step", "steps are under way")
    middle, high, cpu = (
        [figure(results, name, key) for name in (slow, fast)] for key in (f"{busy}_p50", f"{busy}_p95", "cpu_p95")
    )
    if None in (*middle, *high, *cpu):
        return
    page.claim(
        f"{what} more of the time with the faster loader (ResNet-18, load 12: p95 31 to 55 % there)",
        f"{slow} to {fast}: p50 {middle[0]:.0f} to {middle[1]:.0f} %, p95 {high[0]:.0f} to {high[1]:.0f} %",
        (middle[1] or 0.0) > (middle[0] or 0.0),
    )
    if on_gpu:
        page.claim(
            "CPUs are less busy with DALI on the GPU (ResNet-18, load 12: p95 100 to 65 % there)",
            f"{cpu[0]:.0f} to {cpu[1]:.0f} %",
            (cpu[1] or 0.0) < (cpu[0] or 0.0),
        )


def _answer(page: Page, results: Results, loads: Sequence[int], ran: Sequence[str]) -> None:
    first = MODELS[0]
    parts = [
        f"{name} {_number(ends[0])} and {_number(ends[1])} ms"
        for name in ran
        if None not in (ends := [figure(results, name, f"{first} {load}") for load in (loads[0], loads[-1])])
    ]
    page.text(
        f"A step of {first} takes at load {loads[0]} and at load {loads[-1]}: {'; '.join(parts)}. How pixels are "
        "turned matters most: the nearest pixel, torchvision's default, costs Pillow a tenth of a bilinear turn."
    )


def _loops(page: Page, results: Results, loads: Sequence[int], ran: Sequence[str], sleeps: Sleeps | None) -> None:
    page.section("Steps of a training")
    if sleeps is None:
        page.text("Steps are forward, backward and SGD of torchvision's models on the GPU, on 10 classes.")
    else:
        steps = ", ".join(f"{model} {ms:.0f} ms" for model, ms in sleeps.ms.items())
        there = ", ".join(f"{ms / sleeps.factor:.0f}" for ms in sleeps.ms.values())
        page.text(
            f"Steps sleep: {steps}. That is {there} ms, the document's seconds per epoch with DALI over its 298 steps, "
            f"averaged over the loads, times {sleeps.factor:.2f}: PyTorch's time for a batch at load 1 here, over the "
            f"{doc_ms(MODELS[0], 1, 0):.0f} ms that a step with {MODELS[0]} took with it there, where loading was the "
            "limit. So a step is to the loader here what it was there."
        )
    others = [name for name in ran if name != PYTORCH and figure(results, name, f"{MODELS[0]} {loads[0]}")]
    headings = ["model", "load", "there: PyTorch, ms", "DALI on a GPU, ms", "less time", "here: PyTorch, ms"]
    rows = []
    for model in MODELS:
        for load in loads:
            known = load in (1, 4, 8, 12)
            there = [_number(doc_ms(model, load, trial)) for trial in (0, 1)] if known else ["–", "–"]
            row = [model, str(load), *there, f"{doc_gain(model, load):.0f} %" if known else "–"]
            row.append(_number(figure(results, PYTORCH, f"{model} {load}")))
            row += [_cell(results, name, model, load) for name in others]
            rows.append(row)
    page.table([*headings, *others], rows)
    page.text(
        "Milliseconds a step; in brackets how much less than PyTorch's that turns in the same way, within a round (on "
        "a GPU: than the first row's). On a CPU no work is moved elsewhere, so a gain is only what takes less work. "
        "Ours turns in float32 and rounds once, whichever pixels it takes; Pillow turns bytes, and is fastest where it "
        "only copies them."
    )
    every = {name: [figure(results, name, f"{MODELS[0]} {load}") for load in loads] for name in ran}
    of_first = {name: found for name, found in every.items() if any(found)}
    page.chart("steps", charts.bars([f"load {load}" for load in loads], of_first, unit="ms"), f"ms a step, {MODELS[0]}")
    lines: dict[str, list[float | None]] = {}
    for model in MODELS:
        if all(load in (1, 4, 8, 12) for load in loads):
            lines[f"{model}, DALI on a GPU there"] = [doc_gain(model, load) for load in loads]
        if OURS in ran:
            lines[f"{model}, ours here"] = [_gain(results, OURS, PYTORCH_LINEAR, model, load) for load in loads]
    gains = charts.lines(list(loads), lines, x_label="augmentation load", y_label="% less time than PyTorch")
    page.chart("gains", gains, "Gain by load and model; ours against PyTorch with the same bilinear turns")


def _cell(results: Results, name: str, model: str, load: int) -> str:
    other = PYTORCH_LINEAR if name in (OURS, DALI) else PYTORCH
    gain = None if name == PYTORCH_LINEAR else _gain(results, name, other, model, load)
    text = _number(figure(results, name, f"{model} {load}"))
    return text if gain is None else f"{text} ({gain:.0f} %)".replace("-", "−")


def _alone(page: Page, results: Results, loads: Sequence[int], ran: Sequence[str]) -> None:
    page.section("The loaders by themselves")
    headings = [
        "",
        *(f"load {load}: ms a batch" for load in loads),
        *(f"load {load}: CPU ms an image" for load in loads),
    ]
    rows = [
        [name, *(_number(figure(results, name, f"{what} {load}")) for what in ("alone", "cpu") for load in loads)]
        for name in ran
    ]
    page.table(headings, rows)
    values = {f"load {load}": [figure(results, name, f"cpu {load}") for name in ran] for load in loads}
    page.chart("cpu", charts.bars(ran, values, unit="ms"), "CPU time an image, all processes, by load")


def _usage(page: Page, results: Results, loads: Sequence[int], records: dict[str, Path]) -> None:
    page.section("What was busy")
    page.text(
        f"{MODELS[0]}, load {loads[-1]}, sampled five times a second. There, the CPUs were 100 % busy at p95 with "
        "PyTorch and 65 % with DALI, the GPU 31 and 55 %. Below, *step* is the share of time that the loop spends in "
        "steps: how busy a GPU would be that does nothing else. Rows of the CPU keep all CPUs busy while they are the "
        "limit: nothing is moved off them."
    )
    names = {"cpu": "CPUs", "step": "step", "gpu": "GPU"}
    rows = [
        [name, label, *(f"{figure(results, name, f'{key}_{quantile}'):.0f} %" for quantile in QUANTILES)]
        for name in records
        for key, label in names.items()
        if figure(results, name, f"{key}_p50") is not None
    ]
    page.table(["", "busy", *QUANTILES], rows)
    for name, path in records.items():
        _heat_map(page, name, path)


def _heat_map(page: Page, name: str, path: Path) -> None:
    from packer.tools.monitor import load

    record: Usage = load(path).summary()
    count = max(1, min(100, len(record.times)))
    shown = [row for row in record.heat_rows(count) if "busy" in row.name and ("cpu" in row.name or "gpu" in row.name)]
    shown = [row for row in record.heat_rows(count) if row.name == "step busy"] + shown
    times = [record.seconds * column / count for column in range(count)]
    chart = charts.heat_map([row.name for row in shown], times, [row.values for row in shown])
    page.chart("busy-" + "".join(c if c.isalnum() else "-" for c in name.lower()), chart, f"What was busy: {name}")


def _limits(page: Page, sleeps: Sleeps | None) -> None:
    page.section("What does not compare")
    if sleeps is not None:
        page.text(
            "A sleep takes no core and no GPU. A real step keeps up to one core busy to launch its kernels; here the "
            "loaders have that core, too. DALI on a GPU shares the GPU with the model, which is one reason why its "
            "gain falls with the model; that cannot be seen on a CPU, where the gain falls because a longer step hides "
            "more of the loading. Loading that is hidden costs nothing, so a gain like the 28 to 34 % of ResNet-152 "
            "there, whose step took longer than a batch took to load, is not to be expected from a faster loader alone."
        )
    page.text(
        "The augmentation is that of the sample code that was published with the document: flips with p = 0.5, turns "
        "by up to 5 degrees, `RandomResizedCrop(224)`, normalisation. In that code DALI flipped every image and turned "
        "each by exactly 5 degrees, on a canvas that grew with each turn; here all rows draw, and keep the size. "
        "torchvision turned by nearest neighbour and DALI bilinearly, their defaults; here PyTorch has a row for each. "
        "Its epochs also hold a validation without the load, so that milliseconds a step, which follow from seconds an "
        "epoch, are too many there."
    )
    page.text(
        "No row merges turns, since that would change pixels. All files are in the page cache; PyTorch and DALI read "
        "files, ours a packed set of the same bytes."
    )


def _number(value: float | None) -> str:
    return charts.number(value).strip()


def _many(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}".replace("-", "−") for value in values)
