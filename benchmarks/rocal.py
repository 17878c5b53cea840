"""Our external source against rocAL's file reader: images/s and CPU time, in rocAL pipelines.

    python benchmarks/rocal.py --tree TREE --set SET [--set SET …] [--rounds 5] [--batch 32] [--threads 2] [--size 224]

TREE: class folders of JPEGs for rocAL's file reader. SET: a set packed from them. A run builds the same pipeline
(random box to --size, flip, normalise) on the CPU backend with the same limits of decoded sizes, runs one epoch as a
warm-up, and measures the next --epochs epochs with their ends. rocAL must be importable.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import Benchmark, Contender, contender, main
from report import Column

OWN = "rocAL's file reader"


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s and CPU time per image of the epochs after the first."""
    epoch = chosen.function(arguments)
    sum(epoch())
    cpu, started = time.process_time(), time.perf_counter()
    images = sum(sum(epoch()) for _ in range(arguments.epochs))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"images_s": images / seconds, "cpu_ms": 1000 * cpu / images}


def our_source(arguments: argparse.Namespace, path: Path) -> Callable[[], Iterator[int]]:
    """A function that runs an epoch and yields the number of images of each batch."""
    import readers
    from readers import Ranks
    from readers.rocal import RocalLoader, external_source, resnet_train

    limits = {"max_height": arguments.side, "max_width": arguments.side}
    source = external_source(
        readers.open(path), arguments.batch, ranks=Ranks(tail="exact", rank=0, world_size=1), **limits
    )
    loader = RocalLoader(resnet_train(source, size=arguments.size, threads=arguments.threads), source)
    return lambda: (len(images) for images, _ in loader)


def own_reader(arguments: argparse.Namespace) -> Callable[[], Iterator[int]]:
    """As `our_source`, for rocAL's file reader. It counts batches: the reader's end of an epoch is unreliable."""
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


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    contender(OWN, imports="amd.rocal.plugin.generic")(own_reader)
    for path in arguments.set:
        name = f"ours: RocalLoader, {path.name}"
        contender(name, imports="amd.rocal.plugin.generic")(functools.partial(our_source, path=path))
    return Benchmark(
        title="rocAL on the CPU: its file reader, and our external source",
        columns=(Column("images_s", "images/s (min–max)"), Column("cpu_ms", "CPU ms an image", "{:.2f}")),
        key="images_s",
        limits=(("images_s", OWN),),
        measure=measure,
    )


if __name__ == "__main__":
    main(
        _benchmark,
        __doc__,
        tree="class folders of JPEGs",
        set=(list, "a set packed from the tree; may be repeated"),
        batch=(32, "images in a batch"),
        threads=(2, "threads of each row"),
        size=(224, "side of the images"),
        epochs=(2, "measured epochs"),
        side=(512, "largest side of a decoded image"),
        rounds=5,
    )
