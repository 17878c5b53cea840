"""What `packer advise` says of a set against what comes out: bytes, encoding time and images/s of packed variants.

    python benchmarks/advise.py --source FOLDER --work DIR [--samples 64] [--seconds 45] [--rounds 7] [--seeds 10]

The sample says what each variant would be. Then each is packed whole, by the command line that advice has for it, and
read by ImageLoader with all CPUs, variants in turn; images/s are medians over the rounds, from the page cache. With
--seeds, bytes are predicted again from other samples, which shows how often the interval holds the real size.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import packer
import readers
from cache.node import usable_cpus
from packer.tools.advise import Advice, Measured
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader

__all__ = ["main"]

BATCH = 64


def pack(source: Path, one: Measured, output: Path) -> float:
    """CPU seconds that packing took, in all its processes."""
    command = [sys.executable, "-m", "packer", "convert", source, "--to", "hdf5", *one.variant.flags, "-o", output]
    started = time.process_time(), sum(children())
    subprocess.run([*map(str, command), "--overwrite"], check=True, capture_output=True)
    return time.process_time() - started[0] + sum(children()) - started[1]


def children() -> tuple[float, float]:
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime


def loader_of(output: Path, one: Measured, size: int) -> Any:
    """An ImageLoader over all images of a packed set, or over pixels that are kept in memory."""
    parts = readers.layout.read_dataset_info(output).splits
    reader = readers.concat([readers.open(output, split) for split in parts])
    if one.variant.keep:
        reader = readers.cached(reader, keep=one.variant.keep, backend="memfd")
        reader.prefill()
    ops = [RandomResizedCrop(size), RandomHorizontalFlip()]
    return ImageLoader(reader, BATCH, augment=ops, threads=usable_cpus(), tail="exact", rank=0, world_size=1)


def epoch(loader: Any) -> tuple[float, float]:
    """(images/s, CPU seconds of an image) of one epoch."""
    count, started, cpu = 0, time.perf_counter(), time.process_time()
    for images, _ in loader:
        count += len(images)
    return count / (time.perf_counter() - started), (time.process_time() - cpu) / count


def compare(advice: Advice, source: Path, work: Path, rounds: int) -> None:
    """Pack and read every variant, and print its figures next to the prediction."""
    outputs = {one.variant.name: work / str(number) for number, one in enumerate(advice.measured)}
    cpu: dict[str, float] = {}
    for one in advice.measured:
        cpu[one.variant.name] = pack(source, one, outputs[one.variant.name])
    loaders = {
        one.variant.name: loader_of(outputs[one.variant.name], one, advice.image_size) for one in advice.measured
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for _ in range(rounds + 1):
        for name, loader in loaders.items():
            rates[name].append(epoch(loader))
    print("| variant | MB, predicted | MB | of it | CPU ms an image, predicted | CPU ms | of it ", end="")
    print("| images/s, predicted ", end="")
    print("| images/s | of it | CPU s of encoding | of packing |")
    print(f"|{'---|' * 12}")
    for one in advice.measured:
        name = one.variant.name
        kept = one.variant.keep
        size = 0 if kept else sum(int(readers.open(outputs[name], split).sizes().sum()) for split in advice.splits)
        rate, used = (statistics.median(column) for column in zip(*rates[name][1:], strict=True))
        bytes_said, said, each = one.set_bytes.value, advice.rate(one), one.decode.value
        sizes = "| – | – " if kept else f"| {size / 1e6:.1f} | {bytes_said / size:.2f} "
        print(
            f"| {name} | {bytes_said / 1e6:.1f} {sizes}| {1e3 * each:.2f} | {1e3 * used:.2f} | {each / used:.2f} "
            f"| {said:,.0f} | {rate:,.0f} | {said / rate:.2f} "
            f"| {one.encode * advice.total:.1f} | {'–' if kept else f'{cpu[name]:.1f}'} |"
        )


def intervals(source: Path, work: Path, advice: Advice, samples: int, seeds: int) -> None:
    """How often the interval of the bytes holds the real size of the packed set."""
    held = trials = 0
    for seed in range(1, seeds + 1):
        again = packer.advise(source, samples=samples, seed=seed, seconds=10.0)
        for number, one in enumerate(again.measured):
            if not one.variant.keep and not one.variant.is_original:
                size = sum(int(readers.open(work / str(number), split).sizes().sum()) for split in again.splits)
                held += one.set_bytes.low <= size <= one.set_bytes.high
                trials += 1
    print(f"\nthe interval held the real size in {held} of {trials} cases, {seeds} samples of {samples} images")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=0)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    advice = packer.advise(given.source, samples=given.samples, seconds=given.seconds)
    compare(advice, given.source, given.work, given.rounds)
    if given.seeds:
        intervals(given.source, given.work, advice, given.samples, given.seeds)


if __name__ == "__main__":
    main()
