"""tf.data over packer sets: TFRecord shards with TensorFlow's reader, and any set through a generator in packer's
order.

TensorFlow is not among the test dependencies: these tests run after `pip install tensorflow-cpu`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import pack_few
from loader_options import grouped

from readers.decode import decode_image
from readers.loader import ImageLoader

COUNT, BATCH = 30, 4


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow", reason="tensorflow is not installed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_few(tmp_path_factory.mktemp("tensorflow"), COUNT, to="tfrecord", samples_per_shard=8)


def test_the_reader_of_tensorflow_finds_all_samples(tf: Any, reader: Any, packed: Path) -> None:
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    records = tf.data.TFRecordDataset(sorted(map(str, packed.glob("*.tfrecord"))), num_parallel_reads=1)
    examples = [tf.io.parse_single_example(record, features) for record in records]
    assert [(example["image/encoded"].numpy(), int(example["image/class/label"])) for example in examples] == [
        (bytes(reader.read(i)), int(reader.labels[i])) for i in range(COUNT)
    ]


def test_a_generator_gives_our_batches_and_the_state_after_each(tf: Any, reader: Any) -> None:
    """The recipe of docs/jax.md: tf.data prefetches, so each batch carries its state."""
    options: dict[str, Any] = {"layout": "NHWC", "threads": 1, "seed": 1, "fields": ("image", "index")}

    def dataset(state: str = "") -> Any:
        loader = ImageLoader(reader, BATCH, **grouped(options))
        if state:
            loader.load_state_dict(json.loads(state))

        def batches() -> Iterator[Any]:
            for images, rows in loader:
                yield images.numpy(), rows.numpy(), json.dumps(loader.state_dict())

        shape = (
            tf.TensorSpec([None, 32, 40, 3], tf.uint8),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([], tf.string),
        )
        return tf.data.Dataset.from_generator(batches, output_signature=shape).prefetch(3).as_numpy_iterator()

    whole = list(dataset())
    for images, rows, _ in whole:
        assert all((image == decode_image(reader.read(row))).all() for image, row in zip(images, rows, strict=True))
    assert sorted(row for _, rows, _ in whole for row in rows) == sorted({row for _, rows, _ in whole for row in rows})
    assert len(whole) == COUNT // BATCH
    rest = list(dataset(whole[2][2].decode()))
    assert [rows.tolist() for _, rows, _ in rest] == [rows.tolist() for _, rows, _ in whole[3:]]


def test_decoders_agree(tf: Any, reader: Any) -> None:
    """Of 255; TensorFlow repeats chroma of half the size unless an option says otherwise."""
    for i in range(3):
        data = bytes(reader.read(i))
        pixels = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE", fancy_upscaling=True).numpy()
        assert np.abs(pixels.astype(int) - decode_image(data)).max() <= 1
