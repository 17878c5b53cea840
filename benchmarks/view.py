"""The bytes and response times of `packer view` for the first screen of a set of a million samples.

    python benchmarks/view.py --work DIR --samples 1000000

Makes, once, a set of N samples: 10,000 JPEGs of 340 bytes to 3 kB in one shard, and hard links of that shard with
different keys and labels, joined by the index writer of conversions. Then it starts the command, and sends the same
requests as the page: its files, view.json, the order by class, keys and labels of a screen, and sixty pictures. Prints
the bytes and the wall time of each request, and the seconds from the start of the process to the printed address.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from index_set import join_parts

_PART = 10_000
_CLASSES = 10_000
_SCREEN = 60


def make_images(folder: Path) -> None:
    """Write ten thousand small JPEGs of several sizes."""
    from PIL import Image

    random = np.random.default_rng(1)
    for number in range(_PART):
        height, width = (int(side) for side in random.integers(16, 65, 2))
        pixels = np.full((height, width, 3), random.integers(0, 256, 3), np.uint8)
        pixels[:: 1 + number % 7] //= 2
        place = folder / f"{number % 100:03d}"
        place.mkdir(parents=True, exist_ok=True)
        memory = io.BytesIO()
        Image.fromarray(pixels).save(memory, "JPEG", quality=70)
        (place / f"{number:05d}.jpg").write_bytes(memory.getvalue())


def make_set(work: Path, samples: int) -> Path:
    """Make a set of `samples` samples, in parts of ten thousand."""
    import packer
    import readers
    from packer.columns import PartMeta, save_part
    from readers.layout import ShardInfo, read_dataset_info
    from readers.table import Strings

    root, single = work / f"set-{samples}", work / "one"
    if (root / "dataset.json").is_file():
        return root
    if not (single / "dataset.json").is_file():
        make_images(work / "images")
        packer.convert(work / "images", "tar", single, shards=packer.Shards(samples=_PART), overwrite=True)
    root.mkdir(parents=True, exist_ok=True)
    shard, random = read_dataset_info(single).splits["train"].shards[0], np.random.default_rng(2)
    parts, shards = [], []
    with readers.open(single) as reader:
        places = (single / reader.split_info.index).glob("*.npy")
        columns = {place.stem: np.load(place) for place in places if place.stem != "shard"}
        for number in range(samples // _PART):
            keys = Strings.of(f"n{number:05d}/{key}" for key in reader.keys)
            columns |= {"key": keys.blob, "key.offset": keys.offsets}
            columns["label"] = np.sort(random.integers(0, _CLASSES, _PART))
            shards.append(ShardInfo(f"train-{number:06d}.tar", shard.bytes, _PART, shard.crc32c))
            (root / shards[-1].path).unlink(missing_ok=True)
            os.link(single / shard.path, root / shards[-1].path)
            parts.append(root / f"{number}.part")
            save_part(parts[-1], columns, PartMeta(shards[-1], shard.bytes))
    join_parts(root, "tar", parts, shards, [f"class {number:05d}" for number in range(_CLASSES)])
    for part in parts:
        part.unlink()
    return root


class Browser:
    """Sends the page's requests; counts the bytes of the answers."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._base = parts.path
        self._line = http.client.HTTPConnection("127.0.0.1", parts.port)
        self.bytes = self.largest = 0
        self.seconds = 0.0

    def get(self, label: str, path: str, first: int | None = None, stop: int = 0) -> bytes:
        started = time.perf_counter()
        headers = {} if first is None else {"Range": f"bytes={first}-{stop - 1}"}
        self._line.request("GET", self._base + path, headers=headers)
        answer = self._line.getresponse()
        data = answer.read()
        seconds = time.perf_counter() - started
        assert answer.status in (200, 206), (path, answer.status, data[:200])
        self.bytes, self.seconds = self.bytes + len(data), self.seconds + seconds
        self.largest = max(self.largest, len(data))
        if label:
            say(label, len(data), seconds)
        return data

    def some(self, label: str, column: dict[str, Any], first: int, count: int) -> np.ndarray[Any, Any]:
        width = np.dtype(column["dtype"]).itemsize
        start = column["start"] + first * width
        return np.frombuffer(self.get(label, column["url"], start, start + count * width), column["dtype"])


def say(label: str, size: int, seconds: float, more: str = "") -> None:
    print(f"{label:28s} {size:10,} bytes {1e3 * seconds:8.1f} ms{more}")


def look(root: Path) -> None:
    """Start the command, and send the page's requests to it."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "packer", "view", str(root), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            print(f"address after {time.perf_counter() - started:.2f} s")
            ask(Browser(url))
        finally:
            process.terminate()


def ask(browser: Browser) -> None:
    """The first requests of a page, then the other orders."""
    from packer.tools.view.answers import page_files

    for name in page_files():
        browser.get("", name)
    say("the files of the page", browser.bytes, browser.seconds)
    document = json.loads(browser.get("view.json", "view.json"))
    split = document["splits"]["train"]
    columns = split["columns"]
    offsets = browser.some("offsets of 60 keys", columns["key.offset"], 0, _SCREEN + 1)
    browser.some("60 keys", columns["key"], 0, int(offsets[-1]))
    browser.some("60 labels", columns["label"], 0, _SCREEN)
    before, seconds = browser.bytes, browser.seconds
    for index in range(_SCREEN):
        browser.get("", f"thumb/train/{index}?side=160")
    say("60 pictures", browser.bytes - before, browser.seconds - seconds)
    more = f"; the largest {browser.largest:,} bytes"
    say("before the first screen", browser.bytes, browser.seconds, more)
    for name, order in split["orders"].items():
        if order is not None and not order["scan"]:
            places = json.loads(browser.get(f"order {name}", order["document"]))
            browser.get("", places["url"], places["start"], places["start"] + 4 * min(_SCREEN, places["count"]) or 1)
    browser.get("the same again: key", "order/train/key.json")
    browser.get("where", "where.json?split=train&where=min_side%20%3E%2060%20and%20bytes%20%3E%20500")
    browser.get("batch", "batches.json?split=train&epoch=3&batch=100&batch_size=64&op=RandomResizedCrop:224")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Path, help="a directory; half a gigabyte for a million samples")
    parser.add_argument("--samples", type=int, default=1_000_000, help="a multiple of 10,000")
    arguments = parser.parse_args()
    look(make_set(arguments.work, arguments.samples))


if __name__ == "__main__":
    main()
