"""LitData's optimize_imagenet.py and stream_imagenet.py unchanged, then the same tasks by packer: `ours.py IMAGES`.

IMAGES has class folders. `packer convert` resizes and encodes like the first script with the options of its README. In
the second script, which measures the time, an ImageLoader replaces the StreamingDataLoader.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, f"{sys.prefix}/litdata/benchmarks/litdata")


def script(name: str, *arguments: object) -> list[float]:
    """Run a script in a separate process; returns its printed figures."""
    command = [sys.executable, __file__, name, *arguments]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return [float(figure) for figure in re.findall(r"([\d.]+) (?:images/sec|seconds)", done.stdout)]


def optimize() -> None:
    import optimize_imagenet

    names = sorted(os.listdir(sys.argv[2]))  # instead of ImageNet's names, which the script downloads
    optimize_imagenet.load_imagenet_class_index = lambda: {name: number for number, name in enumerate(names)}
    optimize_imagenet.main()


def stream(by_packer: bool = False) -> None:
    import stream_imagenet

    if by_packer:
        import readers
        from readers.augment import RandomHorizontalFlip, RandomResizedCrop
        from readers.loader import ImageLoader

        class Named:
            def __init__(self, input_dir: str, **options: Any) -> None:
                self.reader = readers.open(input_dir)

        def loader(dataset: Named, batch_size: int, num_workers: int, drop_last: bool) -> ImageLoader:
            ops = [RandomResizedCrop(224), RandomHorizontalFlip()]
            return ImageLoader(dataset.reader, batch_size, augment=ops, threads=num_workers)

        stream_imagenet.StreamingDataset, stream_imagenet.StreamingDataLoader = Named, loader
    stream_imagenet.main()


def main(images: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train, lit, packed, cache = (Path(folder) / name for name in ("train", "lit", "ours", "cache"))
        train.symlink_to(images)
        resize = ("--resize", "--resize_size", 256, "--write_mode", "jpeg", "--quality", 90, "--num_workers", 2)
        *_, other = script("optimize", "--input_dir", f"{train}/", "--output_dir", lit, *resize)
        options = ["--to", "hdf5", "--max-side", "256", "--reencode", "jpeg", "--quality", "90", "--workers", "2"]
        start = time.perf_counter()
        subprocess.run([f"{sys.prefix}/bin/packer", "convert", images, "-o", packed, *options], check=True)
        seconds = time.perf_counter() - start
        print(f"| LitData's optimize | s | {seconds:.1f} | {other:.1f} | {seconds / other:.2f} |")
        rates = [
            script(name, "--input_dir", root, "--cache_dir", cache, "--num_workers", 2)
            for name, root in (("stream", lit), ("ours", packed))
        ]
        for epoch, (other, rate) in enumerate(zip(*rates, strict=True), 1):
            print(f"| LitData's stream | images/s, epoch {epoch} | {rate:,.0f} | {other:,.0f} | {rate / other:.2f} |")


if __name__ == "__main__":
    scripts = {"optimize": optimize, "stream": stream, "ours": lambda: stream(by_packer=True)}
    if sys.argv[1] in scripts:
        scripts[sys.argv.pop(1)]()
    else:
        main(Path(sys.argv[1]).absolute())
