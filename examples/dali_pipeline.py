"""A packed set in NVIDIA DALI, on the CPU or a GPU: the ready loader, resume, and your own pipeline.

    make demo && python examples/dali_pipeline.py demo-out/images-hdf5 [--device gpu] [--workers 2]

Needs `pip install 'packer-vision[dali,torch]'`. With --device gpu, the GPU decodes, crops and normalises the images.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import readers
from readers import Ranks
from readers.dali import DaliLoader, PipelineOptions, classification, external_source

BATCH, SIZE = 50, 160


def ready_loader(reader: readers.Reader, options: PipelineOptions) -> None:
    """Run two epochs: stop in the middle of the second, and finish it with another loader."""
    loader = DaliLoader(reader, BATCH, augment=classification(SIZE), options=options, seed=7)
    started, count = time.perf_counter(), 0
    for images, _labels in loader:
        count += len(images)
    rate = count / (time.perf_counter() - started)
    print(f"epoch 0: {count} images of {tuple(images.shape[1:])}, {images.dtype}, on {images.device}: {rate:,.0f}/s")
    for _step, (_images, _labels) in zip(range(3), loader, strict=False):
        checkpoint = loader.state_dict()  # a few numbers: save them with the model
    loader.close()

    other = DaliLoader(reader, BATCH, augment=classification(SIZE), options=options)
    other.load_state_dict(checkpoint)
    print(f"epoch {other.epoch} continues after 3 batches: {other.left} batches are left")
    assert sum(1 for _ in other) == len(reader) // BATCH - 3


def own_pipeline(reader: readers.Reader, options: PipelineOptions) -> None:
    """Use packer's samples as the first nodes of a graph."""
    from nvidia.dali import fn, pipeline_def, types

    gpu = options.device == "cuda"

    @pipeline_def(
        batch_size=BATCH,
        num_threads=2,
        device_id=0 if gpu else None,
        py_num_workers=max(1, options.workers),
        py_start_method="spawn",
    )
    def thumbnails() -> Any:
        encoded, label = external_source(
            reader, BATCH, shuffle=False, ranks=Ranks(tail="exact"), parallel=options.workers > 0
        )
        images = fn.decoders.image(encoded, device="mixed" if gpu else "cpu", output_type=types.RGB)
        return fn.resize(images, size=[32, 32]), label

    pipeline, sums = thumbnails(), dict.fromkeys(range(len(reader.classes)), 0)
    while True:
        try:
            _images, labels = pipeline.run()
        except StopIteration:
            break
        for label in labels.as_array().ravel().tolist():
            sums[label] += 1
    print(f"the custom pipeline read {sums} samples by class")
    assert sum(sums.values()) == len(reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="directory of a packed set")
    parser.add_argument("--split", default="train")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=0, help="reader processes")
    arguments = parser.parse_args()
    options = PipelineOptions(device=arguments.device, workers=arguments.workers)
    with readers.open(arguments.set, arguments.split) as reader:
        ready_loader(reader, options)
        own_pipeline(reader, options)


if __name__ == "__main__":  # worker processes import this file
    main()
