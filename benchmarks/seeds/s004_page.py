"""The page of `s004.py`: the answer, the document's figures beside those found, charts, and what does not compare."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from experiment import Page, figure, ratio
from harness import Results
from machine import folder_bytes
from s004_clock import key, sleep_of
from s004_dali import dali_row, loader_row
from s004_sets import EXTENSIVE, FEW, LOADS, TASKS, Load, Scale
from s004_torch import DATASET, FILES, HDF5, PIXELS

from packer.tools.report import charts

__all__ = ["SHARE_OF_STEPS", "publish"]

# Seconds an epoch of ImageNet: 2200 became 1300 with DALI, 1800 did with a dedicated reader alone.
_SLOW, _READER_SLOW, _FAST = 2200.0, 1800.0, 1300.0
SHARE_OF_STEPS = _FAST / _SLOW

_Values: TypeAlias = Mapping[str, float | None]


def publish(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    """The answer, the document's figures beside ours, tables and charts, and what does not compare."""
    ran = [name for name in results if figure(results, name, key(arguments.task[0], FEW, "load_s")) is not None]
    if FILES in ran and dali_row("files") in ran:
        _publish_answer(page, results, arguments.task[0])
    for task in arguments.task:
        _publish_task(page, results, ran, task, Scale.of(arguments))
    _publish_limits(page)


def _publish_answer(page: Page, results: Results, task: str) -> None:
    dali, loader = dali_row("files"), loader_row("HDF5")
    seconds = {row: figure(results, row, key(task, EXTENSIVE, "epoch_s")) for row in (FILES, PIXELS, dali, loader)}
    took = ", ".join(f"{charts.number(value)} s by {row}" for row, value in seconds.items() if value is not None)
    alone = (seconds[FILES] or 0.0) * (1 - (_share(results, FILES, task, EXTENSIVE) or 0.0))
    page.text(
        f"An epoch with extensive augmentation and a step after each batch ({task}) takes {took}; the steps alone take "
        f"{charts.number(alone)} s. Below that no loader can bring it, and nothing is gained by loading faster."
    )
    page.section("The document's figures and ours")
    epochs = {load: _less(results, dali, FILES, task, load) for load in LOADS}
    readers = {row: _less(results, row, FILES, task, FEW) for row in (HDF5, PIXELS, DATASET)}
    loading = {load: ratio(results, FILES, dali, key(task, load, "load_s")) for load in LOADS}
    waiting = ratio(results, FILES, dali, key(task, EXTENSIVE, "wait_s"))
    ours = ratio(results, FILES, loader, key(task, EXTENSIVE, "load_s"))
    ours_less = _less(results, loader, FILES, task, EXTENSIVE)
    shares = {load: _share(results, FILES, task, load) for load in LOADS}
    page.table(
        ["", "there", "here"],
        [
            [
                "an epoch with DALI in place of PyTorch's files, extensive",
                f"{_SLOW:,.0f} → {_FAST:,.0f} s, {_percent(1 - _FAST / _SLOW)} less",
                f"on the CPU {_change(epochs[EXTENSIVE])} (few: {_change(epochs[FEW])}); "
                f"{loader}: {_change(ours_less)}",
            ],
            [
                "an epoch with a dedicated reader alone, without DALI",
                f"{_READER_SLOW:,.0f} → {_FAST:,.0f} s, {_percent(1 - _FAST / _READER_SLOW)} less",
                "few: " + "; ".join(f"{row}: {_change(value)}" for row, value in readers.batch() if value is not None),
            ],
            [
                "loading, PyTorch's files over DALI",
                "“a factor of 100×”",
                f"{_times(loading[FEW])} few, {_times(loading[EXTENSIVE])} extensive, on the CPU; what training waits, "
                f"extensive: {_times(waiting)}; {loader}, loading, extensive: {_times(ours)}",
            ],
            [
                "loading as a share of the epoch, PyTorch's files",
                "“about 40 %”",
                f"{_percent(shares[EXTENSIVE])} extensive, by the length of the step; {_percent(shares[FEW])} few",
            ],
        ],
    )
    _claim(page, epochs, readers, loading)


def _claim(page: Page, epochs: _Values, readers: _Values, loading: _Values) -> None:
    """What the document says. epochs, readers: how much shorter epochs are; loading: how many times as fast it is."""
    gain, bound = epochs[EXTENSIVE], 1 - _FAST / _SLOW
    if gain is not None:
        page.claim(
            f"DALI shortens an epoch with extensive augmentation by {_percent(bound)}, to the time of the steps",
            f"{_change(gain)}, files, on the CPU",
            gain >= bound - 0.05,
        )
    known = {row: value for row, value in readers.batch() if value is not None and row != DATASET}
    if known:
        page.claim(
            f"a dedicated reader alone shortens an epoch by about {_percent(1 - _FAST / _READER_SLOW)}",
            "; ".join(f"{row}: {_change(value)}" for row, value in known.items()) + "; few, warm page cache",
            max(known.values()) >= 0.23,
        )
    few, extensive = loading[FEW], loading[EXTENSIVE]
    if few is not None and extensive is not None:
        found = f"loading {_times(few)} few, {_times(extensive)} extensive, on the CPU"
        page.claim("DALI loads 100 times as fast", f"{found}; no GPU decodes", extensive >= 100)
        page.claim("DALI gains more where augmentation is extensive", found, extensive > few)


def _publish_task(page: Page, results: Results, ran: Sequence[str], task: str, scale: Scale) -> None:
    about, count, folder = TASKS[task], scale.count(task), scale.folder(task)
    page.section(f"{task}: {count:,} JPEGs of {about.size[0]} × {about.size[1]} to {about.crop} × {about.crop}")

    def found(row: str, load: Load, name: str) -> float | None:
        return figure(results, row, key(task, load, name))

    rows = sorted(ran, key=lambda row: found(row, EXTENSIVE, "load_s") or 0.0)
    seconds = sleep_of(scale.work, task)
    sizes = {name: folder_bytes(folder / name) / 1e6 for name in ("tree", "hdf5", "pixels.h5")}
    step = "ResNet-50" if seconds is None else f"a sleep of {1e3 * seconds:.0f} ms in place of ResNet-50"
    page.text(
        f"Batches of {scale.batch}, {scale.workers} processes or threads; the step is {step}. Loading: an epoch "
        f"without steps. Waiting: what the steps of another epoch waited for batches, which loaders make during the "
        f"steps. The files have {sizes['tree']:.1f} MB, packed into HDF5 {sizes['hdf5']:.1f} MB, as pixels "
        f"{sizes['pixels.h5']:.1f} MB."
    )
    headings = ["", *(f"{load}: {what}" for load in LOADS for what in ("ms a batch", "PyTorch's files over it"))]
    headings += [f"{load}: epoch s (waiting)" for load in LOADS] + ["CPU µs an image, few and extensive"]
    lines = []
    for row in rows:
        cells = [f"**{row}**" if row.startswith("ours:") else row]
        for load in LOADS:
            other = ratio(results, FILES, row, key(task, load, "load_s"))
            cells += [charts.number(found(row, load, "batch_ms")), _times(other)]
        for load in LOADS:
            share = _percent(_share(results, row, task, load))
            cells.append(f"{charts.number(found(row, load, 'epoch_s'))} ({share})")
        cells.append(" and ".join(charts.number(found(row, load, "cpu_us")) for load in LOADS))
        lines.append(cells)
    page.table(headings, lines)
    page.chart(
        f"{task}-loading",
        charts.bars(rows, {load: [found(row, load, "batch_ms") for row in rows] for load in LOADS}, unit="ms"),
        f"Loading time of a batch of {scale.batch}, {task}, without steps (the document's Figure 5)",
    )
    for load in LOADS:
        waits = [found(row, load, "wait_s") or 0.0 for row in rows]
        training = [(found(row, load, "epoch_s") or 0.0) - wait for row, wait in zip(rows, waits, strict=True)]
        page.chart(
            f"{task}-epoch-{load}",
            charts.stacked_bars(rows, {"training": training, "waiting for batches": waits}, unit="s"),
            f"An epoch, {task}, {load} augmentation: training, and waiting for batches on top (Figures 6 and 7)",
        )


def _publish_limits(page: Page) -> None:
    page.section("What does not compare")
    for text in (
        "**The step.** Where no GPU is, it is a sleep. Its length is chosen: 1300/2200 of what a batch takes PyTorch "
        "from files with extensive augmentation, so that this row has the document's share of loading by construction; "
        "what the other rows take with the same step is measured. A sleep leaves all CPUs to the loader, and there is "
        "no copy to a device, no launch of kernels and no decoding on the GPU that training has to share: what the "
        "document says of balancing CPU and GPU, and of small networks that train faster with DALI on the CPU, cannot "
        "be found with it.",
        "**The 100×** was measured with GPUs that decode. Here the same few CPU cores decode in all rows, so loading "
        "can differ only by what the libraries do on them. What training waits for can shrink by any factor, as it is "
        "nothing as soon as loading is faster than the step.",
        "**Reading.** All files are in the page cache, so a file for each costs little more than a shard. The document "
        "speaks of data that memory does not hold, where a dedicated reader saves the opening and seeking of every "
        "file; what that is worth is in [the table of cold reads](../performance.md#reading-from-a-cold-page-cache).",
        "**HDF5.** The document does not say whether its file held JPEGs or pixels; both are here. With pixels nothing "
        "is decoded in training, for several times the bytes.",
        "**Colours.** DALI's own ColorTwist has other formulas (contrast about a fixed value, another colour space); "
        "`DaliLoader` executes this project's draws and formulas in DALI, so that its batches are those of "
        "`ImageLoader`. torchvision draws the order of the three as well.",
        "**Epochs.** DALI's own readers have no end and no pause between epochs; the other rows start again for each.",
    ):
        page.text(text)


def _less(results: Results, row: str, other: str, task: str, load: Load) -> float | None:
    """By what share an epoch with steps is shorter than that of another row."""
    found = ratio(results, row, other, key(task, load, "epoch_s"))
    return None if found is None else 1 - found


def _share(results: Results, row: str, task: str, load: Load) -> float | None:
    """Of an epoch, waiting for batches."""
    wait, epoch = (figure(results, row, key(task, load, name)) for name in ("wait_s", "epoch_s"))
    return None if wait is None or not epoch else wait / epoch


def _change(less: float | None) -> str:
    return "–" if less is None else f"{_percent(abs(less))} {'less' if less >= 0 else 'more'}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{charts.number(value)}×"
