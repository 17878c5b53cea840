"""bench.py of webdataset 0.1.103 over one tar shard, read by webdataset 1.0.2, which has no benchmark, and by packer.

The script is loaded into the package unchanged, and times its `Dataset`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import webdataset

import readers


class Mapped:
    """The methods of a data set that the script calls: `map` in place, and iteration."""

    def __init__(self, samples: Callable[[], Iterable[dict[str, Any]]]) -> None:
        self.samples, self.function = samples, lambda sample: sample

    def map(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return map(self.function, self.samples())


def packed(url: str) -> Iterator[dict[str, Any]]:
    with readers.open(Path(url).parent) as reader:
        for key, label, data in zip(reader.keys, reader.labels.tolist(), reader.stream(), strict=True):
            yield {"__key__": key, "__url__": url, "cls": b"%d" % label, "jpg": data}


def rate(script: Any, shard: Path, samples: Callable[[str], Iterable[Any]]) -> float:
    webdataset.dataset = script.dataset = SimpleNamespace(Dataset=lambda url: Mapped(lambda: samples(url)))
    with contextlib.redirect_stdout(io.StringIO()) as kept:
        script.main(Namespace(shards=[str(shard)], decode="", count=10**9))
    print(kept.getvalue(), flush=True)
    return float(re.findall(r"#samples/sec: +([\d.]+)", kept.getvalue())[0])


if __name__ == "__main__":
    webdataset.dataset = SimpleNamespace()
    spec = importlib.util.spec_from_file_location("webdataset.bench", f"{sys.prefix}/webdataset/webdataset/bench.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                f"{sys.prefix}/bin/packer",
                "convert",
                sys.argv[1],
                "--to",
                "tar",
                "--shard-size",
                "64GiB",
                "-o",
                f"{folder}/set",
            ],
            check=True,
        )
        [shard] = Path(folder, "set").glob("*.tar")
        theirs = max(rate(script, shard, lambda url: webdataset.WebDataset(url, shardshuffle=False)) for _ in range(3))
        ours = max(rate(script, shard, packed) for _ in range(3))
        print(f"| webdataset's bench.py | samples/s | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.1f} |")
