"""Our external source against rocAL's own reader of files: images/s and CPU time, on rocAL itself.

    python benchmarks/rocal.py --tree TREE --set SET [--set SET …] [--rounds 5] [--batch 32] [--threads 2] [--size 224]

TREE: folders of classes with JPEGs, which rocAL's file reader reads. SET: sets packed of the same tree. Every run is a
process of its own, and the contenders take turns, so that other load affects all of them. A run builds the same
pipeline (random box to --size, flip, normalise) on the CPU backend with the same limits of decoded sizes, lets one
epoch pass, and measures --epochs further ones, their ends included. Printed are medians (min–max) and the ratio to the
file reader. Needs rocAL importable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from readers import Ranks

REPOSITORY = Path(__file__).resolve().parent.parent
OWN = "rocAL's file reader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--set", type=Path, action="append", required=True, dest="sets")
    for name, default in (("rounds", 5), ("batch", 32), ("threads", 2), ("size", 224), ("epochs", 2), ("side", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        sys.path.insert(0, str(REPOSITORY))
        print(json.dumps(measured(arguments, arguments.one)))
        return
    names = [OWN, *map(str, arguments.sets)]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[-2000:]}")
            figures[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {number + 1}, {name}: {figures[name][-1]}", file=sys.stderr)
    base = statistics.median(run["images_per_s"] for run in figures[OWN])
    print("| | images/s (min–max) | CPU ms an image | of rocAL's file reader |\n|---|---|---|---|")
    for name, runs in figures.items():
        rates = sorted(run["images_per_s"] for run in runs)
        cpu = statistics.median(run["cpu_ms"] for run in runs)
        rate = statistics.median(rates)
        label = name if name == OWN else f"`RocalLoader`, {Path(name).name}"
        print(f"| {label} | {rate:.0f} ({rates[0]:.0f}–{rates[-1]:.0f}) | {cpu:.2f} | {rate / base:.2f} |")


def measured(arguments: argparse.Namespace, name: str) -> dict[str, float]:
    """Images/s and CPU time an image of the epochs after the first."""
    epoch = own_reader(arguments) if name == OWN else our_source(arguments, name)
    sum(epoch())
    cpu, started = time.process_time(), time.perf_counter()
    images = sum(sum(epoch()) for _ in range(arguments.epochs))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"images_per_s": round(images / seconds, 1), "cpu_ms": round(1000 * cpu / images, 3)}


def our_source(arguments: argparse.Namespace, path: str) -> Callable[[], Iterator[int]]:
    """A function that runs through an epoch and gives the images of each batch."""
    import readers
    from readers.rocal import RocalLoader, external_source, resnet_train

    limits = {"max_height": arguments.side, "max_width": arguments.side}
    source = external_source(
        readers.open(path), arguments.batch, ranks=Ranks(tail="exact", rank=0, world_size=1), **limits
    )
    loader = RocalLoader(resnet_train(source, size=arguments.size, threads=arguments.threads), source)
    return lambda: (len(images) for images, _ in loader)


def own_reader(arguments: argparse.Namespace) -> Callable[[], Iterator[int]]:
    """The same of rocAL's file reader. It ends an epoch by a count, as its own end is not to be relied on."""
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    from readers.rocal.pipelines import Machine, built, resnet_train_ops

    root = str(arguments.tree)

    def graph(rocal: Any) -> Any:
        files, _ = rocal.fn.readers.file(file_root=root)
        limits = {"max_decoded_height": arguments.side, "max_decoded_width": arguments.side}
        images = rocal.fn.decoders.image(files, file_root=root, random_shuffle=True, **limits)
        return resnet_train_ops(size=arguments.size)(rocal, images)

    pipeline = built(graph, Machine(threads=arguments.threads), batch_size=arguments.batch, seed=0)
    iterator = ROCALClassificationIterator(pipeline)
    count = sum(1 for file in arguments.tree.glob("*/*") if file.is_file())

    def epoch() -> Iterator[int]:
        for start in range(0, count, arguments.batch):
            next(iterator)
            yield min(arguments.batch, count - start)
        iterator.reset()

    return epoch


if __name__ == "__main__":
    main()
