"""The page of `s003.py`: what was found, the document's figures, and what cannot be compared."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from experiment import Page, figure, ratio
from harness import Results

from packer.tools.report import charts
from readers.order import NodeLocal, Shuffled
from readers.order.quality import shuffle_quality

__all__ = ["publish"]

FILES, ARRAY, SHARED = "DataLoader: files", "DataLoader: byte array", "DataLoader: files in /dev/shm"
PACKED = "ours: ImageLoader, packed set"
READ_ARRAY, READ_FILES = "read: byte array", "read: files"
MADE, TRAINED = "JAX: made on the device", "JAX: made and trained on"
# Images/s in the document, by the rows here that do the same.
DOCUMENT = {
    FILES: 308,
    ARRAY: 388,
    "ours: DataLoader, byte cache": 388,
    SHARED: 370,
    READ_ARRAY: 12_000,
    "ours: read, byte cache": 12_000,
    "read: files in /dev/shm": 40_000,
    "GPU: files": 1450,
    "GPU: byte array": 2100,
    "GPU: files in /dev/shm": 1920,
    MADE: 40_000,
    TRAINED: 8000,
}
_NODES = (2, 8)


class Group(NamedTuple):
    """Rows of one table: those whose names begin with one of these."""

    title: str
    begins: tuple[str, ...]
    text: str
    chart: str


GROUPS = (
    Group(
        "Reading, without decoding",
        ("read: ", "ours: read, "),
        "One process reads one image after the other in random order. The two ranks of the MPI window read at once.",
        "read",
    ),
    Group(
        "Read and decoded on the CPU",
        ("DataLoader: ", "stocaching: ", "ours: DataLoader, ", "ours: decoded, ", "ours: ImageLoader, "),
        "Batches of uint8 images. A DataLoader takes them from as many worker processes as ImageLoader has threads.",
        "decoded",
    ),
    Group(
        "Mirrored at random and normalised, as float32",
        ("augmented: ", "ours: augmented, "),
        "Files, decoded with simplejpeg; with Pillow in the row of its name.",
        "",
    ),
    Group("Decoded on a GPU", ("GPU: ", "ours: GPU, "), "Batches on the GPU.", ""),
    Group(
        "Made on the device",
        ("JAX: ", "ours: packed set, trained"),
        "JAX draws the images from random bytes, and trains a small network on them in one compiled program. The last "
        "row trains the same network on a packed set, decoded by ImageLoader and lent to JAX by DLPack. On a CPU "
        "drawing, training and decoding share the same cores, and the network, a small part of a GPU's time, takes "
        "nearly all of it: these rows say what it costs to do without files there, and nothing of a GPU.",
        "jax",
    ),
)


def publish(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    """The page of the results."""
    _claims(page, results)
    page.text(_answer(results, arguments))
    for group in GROUPS:
        names = [name for name in results if name.startswith(group.begins)]
        ran = [name for name in names if figure(results, name, "images_s") is not None]
        if not ran:
            continue
        page.section(group.title)
        page.text(group.text)
        page.table(
            ("", "images/s", "× files, decoded", "there: images/s", "there: ×", "CPU µs an image"),
            [_row(results, name) for name in ran],
        )
        if group.chart:
            rates = [figure(results, name, "images_s") for name in ran]
            page.chart(group.chart, charts.bars(ran, {"images/s": rates}), f"{group.title}: images/s")
    _cold(page, results)
    _nodes(page, arguments.count)
    _not_compared(page, arguments)


def _row(results: Results, name: str) -> list[str]:
    there = DOCUMENT.get(name)
    return [
        name,
        _text(figure(results, name, "images_s"), "{:,.0f}"),
        _text(ratio(results, name, FILES, "images_s"), "{:.2f}"),
        _text(there, "{:,.0f}"),
        _text(there and there / DOCUMENT[FILES], "{:.2f}"),
        _text(figure(results, name, "cpu_us"), "{:,.0f}"),
    ]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _claims(page: Page, results: Results) -> None:
    """What the document's figures say, as far as both sides ran here."""

    def compare(what: str, ours: str, than: str, *, least: float = 1.0) -> None:
        found = ratio(results, ours, than, "images_s")
        if found is not None:
            there = DOCUMENT[ours] / DOCUMENT[than]
            page.claim(what, f"{found:.2f} times; there {there:.2f}", found > least)

    compare("decoded images come faster from a byte cache than from files", ARRAY, FILES)
    compare("and faster from files in /dev/shm than from files", SHARED, FILES)
    compare("bytes come many times faster from a cache than decoded images do", READ_ARRAY, ARRAY, least=5)
    compare("a GPU decodes images from files several times faster than a CPU", "GPU: files", FILES, least=2)
    compare("a cache gains more where a GPU decodes", "GPU: byte array", "GPU: files", least=1.1)
    if _jax_device(results) not in (None, "cpu"):
        compare("images are made on the device faster than they are read and decoded", MADE, FILES)
        compare("training on images made on the device is faster than reading and decoding", TRAINED, FILES)


def _answer(results: Results, arguments: argparse.Namespace) -> str:
    """The first paragraph. Sentences whose rows did not run are left out."""
    parts = []
    gain, read = ratio(results, ARRAY, FILES, "images_s"), ratio(results, READ_ARRAY, READ_FILES, "images_s")
    if gain is not None and read is not None:
        parts.append(
            f"From memory, bytes are read {read:.1f} times as fast as from files that are in the page cache. Of that, "
            f"{gain:.2f} times is left once the CPU decodes them (1.26 there): decoding is what takes the time."
        )
    loader = ratio(results, PACKED, FILES, "images_s")
    if loader is not None:
        parts.append(f"ImageLoader over a packed set gives {loader:.2f} times what a DataLoader over the files does.")
    cold = ratio(results, "read: files, cold", READ_FILES, "images_s")
    if cold is not None:
        parts.append(f"With an empty page cache the files are read at {cold:.2f} of their rate from it.")
    made = ratio(results, MADE, FILES, "images_s")
    if made is not None:
        on = "on the CPU" if _jax_device(results) == "cpu" else "on the device"
        parts.append(f"JAX makes such images {on} at {made:.2f} times the rate at which files are read and decoded.")
    took = arguments.seconds_of
    parts.append(
        f"{arguments.count:,} images took {took['making']:.1f} s to make, {took['packing']:.1f} s to pack and "
        f"{took['staging']:.1f} s to stage to /dev/shm as files."
    )
    return " ".join(parts)


def _jax_device(results: Results) -> str | None:
    return next((run["jax"] for run in results.get(MADE, ()) if "jax" in run), None)


def _cold(page: Page, results: Results) -> None:
    pairs = [(name, name.removesuffix(", cold")) for name in results if name.endswith(", cold")]
    rows = []
    for name, warm in pairs:
        if (rate := figure(results, name, "images_s")) is not None:
            rows.append([name, f"{rate:,.0f}", _text(ratio(results, name, warm, "images_s"), "{:.2f}")])
    if not rows:
        return
    ways = {run["cache"] for name, _ in pairs for run in results[name] if "cache" in run}
    dropped = "was emptied" if ways == {"drop_caches"} else "lost these files only, since emptying it needs root"
    page.section("What a warm page cache hides")
    page.text(
        f"All other rows find the files in memory, as every epoch but the first does where the set fits into it and "
        f"the file system keeps what it has read. On a shared file system it often does not, and the first epoch never "
        f"does. Before these rows the page cache {dropped}. A cache that holds half of the set, as stochastic caching "
        f"does, leaves the other half of the reads to the files."
    )
    page.table(("", "images/s", "of the same, warm"), rows)


@dataclass(frozen=True)
class _View:
    """What one node, or without a number all of them, see of a node-local order: in epochs of one kind alone."""

    order: NodeLocal
    exchange: bool
    node: int | None = None

    def __len__(self) -> int:
        return len(self.order) if self.node is None else len(self.order.local_part(self.node))

    def spec(self) -> Mapping[str, Any]:
        return self.order.spec()

    def indices(self, epoch: int, positions: Any) -> Any:
        between = self.order.exchange_every - 1
        epoch = (epoch + 1) * (between + 1) - 1 if self.exchange else epoch // between * (between + 1) + epoch % between
        if self.node is not None:
            positions = np.asarray(positions) * self.order.nodes + self.node
        return self.order.indices(epoch, positions)


def _nodes(page: Page, count: int) -> None:
    page.section("Shuffling on each node, and over all nodes sometimes")
    page.text(
        "`readers.order.NodeLocal` keeps each node to its own part of the samples, so that a node stages or caches "
        "only that, and exchanges all parts in every eighth epoch. The figures say how well a batch of 256 mixes the "
        "set, next to a global shuffle (1), by `readers.order.quality`: a batch of all nodes together, and one of a "
        "single node. Gradients are averaged over all nodes; statistics of a batch are those of its node."
    )
    rows = [["Shuffled", "all", f"{shuffle_quality(Shuffled(count)):.2f}", "1.00", ""]]
    for nodes in _NODES:
        order = NodeLocal(count, nodes)
        views: list[Any] = [_View(order, False), _View(order, False, 0), _View(order, True, 0)]
        rows.append([f"NodeLocal, {nodes} nodes", f"1/{nodes}", *(f"{shuffle_quality(v):.2f}" for v in views)])
    page.table(("order", "read by a node", "all nodes", "one node", "one node, eighth epoch"), rows)


def _not_compared(page: Page, arguments: argparse.Namespace) -> None:
    page.section("What does not compare")
    page.text(
        "The talk measured on nodes of a computing centre with a shared file system and GPUs; here the files are on a "
        "local disk, and only ratios mean anything. Its rows decode with torchvision, in one process as it seems; all "
        "rows here decode with libjpeg-turbo, and with all CPUs. Its rows with a GPU are written, and run where there "
        "is one. ROOT, nvCOMP and parallel HDF5, which it names without figures, have a paragraph in "
        "[README.md](README.md)."
    )
