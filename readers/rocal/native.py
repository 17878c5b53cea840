"""rocAL's own readers over our tar and TFRecord shards: pipelines without our reader.

    layout = tar_layout(reader, "rocal-train")
    pipeline = native_pipeline(layout, 128, resnet_train_ops())
    iterator = ROCALClassificationIterator(pipeline)
    for epoch in range(90):
        for images, labels in native_batches(iterator, layout):
            ...

What these readers do not do: resume, an exact last batch, an order of ours. To fill the last batch they repeat the last
sample of the set, and with `shuffle` the repeats are anywhere. Now and then they end an epoch one step too late, with
old pixels: `native_batches` counts instead. Their order is drawn from the C library's generator, not from `seed`.
Images that rocAL does not decode would be other images under the original label, so `tar_layout` and `tfrecord_layout`
refuse a set that has any, by its index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import PipelineError
from readers.rocal.graph import Library, Machine, built
from readers.rocal.layouts import Layout
from readers.rocal.pipelines import Ops

__all__ = ["labels_of", "native_batches", "native_pipeline"]


def native_pipeline(
    layout: Layout,
    batch_size: int,
    ops: Ops,
    *,
    shuffle: bool = True,
    machine: Machine | None = None,
    seed: int = 0,
) -> Any:
    """A built pipeline that reads `layout` by rocAL's own reader and does `ops` (such as `resnet_train_ops()`) to it.

    Make a `ROCALClassificationIterator` of `amd.rocal.plugin.generic` of it, for `native_batches`. seed: of crops and
    flips, not of the order.
    """

    def graph(rocal: Library) -> Any:
        return ops(rocal, (_tar_images if layout.format == "tar" else _tfrecord_images)(rocal, layout, shuffle))

    return built(graph, machine or Machine(), batch_size=batch_size, seed=seed)


def native_batches(iterator: Any, layout: Layout) -> Iterator[tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]]:
    """One epoch of `iterator`: (images, labels) of ceil(samples / batch_size) batches, arrays of your own.

    iterator: a `ROCALClassificationIterator` of a pipeline over `layout`. At the end it is reset, for the next epoch; a
    loop that is left early leaves it where it is. Raises PipelineError where rocAL ends before.
    """
    steps = -(-layout.samples // iterator.batch_size)
    for step in range(steps):
        try:
            outputs, _ = next(iterator)
        except StopIteration:
            raise PipelineError(f"rocAL ended the epoch after {step} of {steps} batches") from None
        yield outputs[0].copy(), labels_of(iterator.loader, layout)
    iterator.reset()


def labels_of(pipeline: Any, layout: Layout) -> npt.NDArray[np.int64]:
    """Labels of the batch that came last, int64 [batch_size], from 0 as those of the reader."""
    if layout.format == "tar":  # the members as they are, a list for each component
        texts = [bytes(text) for text in pipeline.get_ascii_datas()[0]]
        found = np.array([int(text) for text in texts], np.int64)
    else:
        found = np.asarray(pipeline.get_image_labels()).astype(np.int64)
    return found - layout.label_offset


def _tar_images(rocal: Library, layout: Layout, shuffle: bool) -> Any:
    paths = {"path": f"{layout.shards}/", "index": f"{layout.index}/"}  # rocAL appends names to these, and no slash
    encoded = rocal.fn.readers.webdataset(
        path=paths["path"],
        index_paths=paths["index"],
        ext=[{"jpg", "cls"}],
        missing_components_behavior=rocal.types.MISSING_COMPONENT_ERROR,
    )
    return rocal.fn.decoders.image(
        encoded,
        file_root=paths["path"],
        index_path=paths["index"],
        random_shuffle=shuffle,
        max_decoded_width=layout.limits.width,
        max_decoded_height=layout.limits.height,
    )


def _tfrecord_images(rocal: Library, layout: Layout, shuffle: bool) -> Any:
    names = {name: name for name in ("image/encoded", "image/class/label", "image/filename")}
    found = rocal.fn.readers.tfrecord(
        path=str(layout.shards), user_feature_key_map=names, features=dict.fromkeys(names), reader_type=0
    )
    return rocal.fn.decoders.image(
        found["image/encoded"],
        user_feature_key_map=names,
        path=str(layout.shards),
        random_shuffle=shuffle,
        max_decoded_width=layout.limits.width,
        max_decoded_height=layout.limits.height,
    )
