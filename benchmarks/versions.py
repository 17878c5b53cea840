"""Two checkouts of this project compared: both do the same work in turn; ratios of the medians.

    python benchmarks/versions.py OLD NEW --images FOLDER [--rounds 5] [--only read,cached]

OLD, NEW: directories of checkouts. FOLDER: some hundred JPEGs. Each round starts a new process of each checkout for
each kind of work, old and new in turn. A ratio is the rate of NEW divided by that of OLD: above 1, NEW is faster. The
machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORKS = ("pack hdf5", "pack tfrecord", "pack tar", "read", "read_many", "stream cold", "cached hit", "loader",
         "loader small", "loader overhead", "first batch", "import")  # fmt: skip

WORK = r"""
import json, os, sys, time
from pathlib import Path
work, images, root = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
began = time.perf_counter()
import readers
imported = time.perf_counter() - began

def timed(call, least=1.0):
    call()
    done, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < least:
        done += call()
    return {"per_second": done / (time.perf_counter() - start), "cpu_us": 1e6 * (time.process_time() - cpu) / done}

def packed():
    import packer
    place = root / f"set-{os.path.basename(sys.argv[4])}"
    if not (place / "dataset.json").exists():
        packer.convert(images, to="tar", output=place, run=packer.Run(workers=1))
    return readers.open(place)

def loader(reader, ops, **options):
    from readers.loader import ImageLoader
    made = ImageLoader(reader, 64, augment=ops, threads=2, seed=1, **options)
    return lambda: sum(len(batch[0]) for batch in made)

if work.startswith("pack "):
    import packer, shutil
    out = root / f"out-{os.getpid()}"
    count = sum(1 for _ in images.rglob("*.*"))
    def pack():
        shutil.rmtree(out, ignore_errors=True)
        packer.convert(images, to=work.split()[1], output=out, workers=1, check="header")
        return count
    figures = timed(pack, 2.0)
    shutil.rmtree(out, ignore_errors=True)
elif work == "import":
    figures = {"per_second": 1 / imported, "cpu_us": 1e6 * imported}
elif work == "first batch":
    from readers.augment import RandomResizedCrop
    from readers.loader import ImageLoader
    start = time.perf_counter()
    next(iter(ImageLoader(packed(), 64, augment=[RandomResizedCrop(224)], threads=2, seed=1)))
    figures = {"per_second": 1 / (time.perf_counter() - start), "cpu_us": 0.0}
else:
    import numpy as np
    from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop
    reader = packed()
    order = np.random.default_rng(1).permutation(len(reader))
    single = order.tolist()
    if work == "read":
        def call():
            for i in single:
                reader.read(i)
            return len(single)
    elif work == "read_many":
        def call():
            for at in range(0, len(order), 64):
                reader.read_many(order[at : at + 64])
            return len(order)
    elif work == "stream cold":
        def call():
            for shard in Path(reader.path).glob("*.tar"):
                with open(shard, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return sum(1 for _ in reader.stream(single))
    elif work == "cached hit":
        shared = readers.cached(reader, directory=root, job=str(os.getpid()))
        shared.prefill(1)
        def call():
            for i in single:
                shared.read(i)
            return len(single)
    elif work == "loader":
        call = loader(reader, [RandomResizedCrop(224), RandomHorizontalFlip()])
    elif work == "loader small":
        call = loader(reader, [RandomResizedCrop(64), RandomHorizontalFlip()])
    else:
        pixels = readers.cached(reader, keep="decoded:32", directory=root, job=str(os.getpid()))
        pixels.prefill(2)
        call = loader(pixels, [CenterCrop(32), RandomHorizontalFlip()])
    figures = timed(call, 3.0 if "loader" in work else 1.0)
print(json.dumps(figures))
"""


def run(checkout: Path, work: str, images: Path, root: Path) -> dict[str, float]:
    """Run one kind of work in a process of a checkout. Raises CalledProcessError."""
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-P", "-c", WORK, work, str(images), str(root), str(checkout)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        sys.exit(f"{checkout}: {work}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="kinds of work to run, comma-separated")
    options = parser.parse_args()
    chosen = [work for work in WORKS if not options.only or any(o in work for o in options.only.split(","))]
    print(f"| work | old, 1/s | new, 1/s | ratio | CPU µs old | CPU µs new |\n|{'---|' * 6}")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for work in chosen:
            rounds = []
            for _ in range(options.rounds):
                checkouts = (options.old, options.new)
                rounds.append([run(path.resolve(), work, options.images.resolve(), root) for path in checkouts])
            old, new = ([pair[i] for pair in rounds] for i in (0, 1))
            rates = [statistics.median(figures["per_second"] for figures in side) for side in (old, new)]
            ratio = statistics.median(b["per_second"] / a["per_second"] for a, b in rounds)
            costs = [statistics.median(figures["cpu_us"] for figures in side) for side in (old, new)]
            print(f"| {work} | {rates[0]:,.1f} | {rates[1]:,.1f} | {ratio:.2f} | {costs[0]:.1f} | {costs[1]:.1f} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
