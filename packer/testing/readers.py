"""The test suite of readers.

A reader gives random access to n samples, each with a key, a label (or none) and fields of bytes; "image" is the first
field, and nearly every sample has it. All ways of reading return the same bytes, in the requested order. Sample numbers
count from 0, or backwards from -1. A number out of range raises IndexError; a field that the set or the sample lacks
raises UnknownNameError. Columns (keys, labels, sizes, headers) have n entries and a fixed dtype.

A reader may be used by several threads, after a fork, and in another process after pickling. It may be closed at any
time, and opens again at the next read. Returned bytes never change.
"""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

import readers
from cache.errors import SourceError, UnknownNameError
from packer.testing.children import forked
from packer.testing.samples import Truth

__all__ = ["DTYPES", "ReaderSuite", "checksums"]

DTYPES = (np.uint32, np.uint32, np.uint8, np.uint8, np.uint8, np.uint8)  # of ImageInfo


def checksums(reader: Any) -> list[int]:
    """The CRC32C of all images, read one by one; reading all at once must give the same."""
    singly = [crc32c(reader.read(i)) for i in range(len(reader))]
    assert singly == [crc32c(data) for data in reader.read_many(range(len(reader)))]
    return singly


class ReaderSuite:
    """The tests of a reader. Subclasses define the fixtures `reader` and `truth`, with the 12 or more samples expected.

    closed_while_read: whether a thread may close the reader while others read from it.
    """

    closed_while_read = True

    @pytest.fixture
    def reader(self) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def truth(self) -> Truth:
        raise NotImplementedError

    # --- bytes ----------------------------------------------------------------------------------------------------
    def test_every_way_of_reading_gives_the_same_bytes(self, reader: Any, truth: Truth) -> None:
        n, images = len(truth), truth.images
        assert isinstance(reader, readers.Reader) and not isinstance(object(), readers.Reader)
        assert len(reader) == n
        for _ in range(2):  # the second time, some readers have a cache
            assert [bytes(reader.read(i)) for i in range(-n, n)] == images * 2
            assert [bytes(data) for data in reader.read_many(range(n))] == images
            assert [bytes(data) for data in reader.stream()] == images
            assert [bytes(reader[i].image) for i in range(n)] == images
            assert reader.prefetch(range(n)) is None
            assert [bytes(data) for data in reader.read_many(range(n))] == images

    def test_results_are_in_the_requested_order(self, reader: Any, truth: Truth) -> None:
        n, images = len(truth), truth.images
        orders: list[Any] = [[], [7], [n - 1, 0, 5], [3, 3, 3], [-1, 0, -n, n - 1], [*range(n), *range(n)], [9, 2, 1]]
        for order in orders:
            expected = [images[i] for i in order]
            arrays = (np.array(order, np.int16), [*map(np.int64, order)], np.array(order[::-1], np.int64)[::-1])
            for requested in (order, tuple(order), *arrays):
                reader.prefetch(requested)
                assert [bytes(data) for data in reader.read_many(requested)] == expected, f"read_many({order})"
                assert [bytes(data) for data in reader.stream(requested)] == expected, f"stream({order})"
            assert [bytes(data) for data in reader.stream(iter(order))] == expected, f"stream(iter({order}))"
        assert [bytes(data) for data in reader.read_many(range(n - 1, 2, -3))] == images[n - 1 : 2 : -3]

    def test_integers_of_numpy(self, reader: Any, truth: Truth) -> None:
        for kind in (np.int8, np.uint8, np.int64, np.uint64):
            assert bytes(reader.read(kind(5))) == bytes(reader[kind(5)].image) == truth.images[5]
        for wrong in ("5", 1.0, None):
            with pytest.raises(TypeError):
                reader.read(wrong)

    def test_indices_out_of_range(self, reader: Any, truth: Truth) -> None:
        n = len(truth)
        for index in (n, n + 1, 10**12, -n - 1, -(10**12)):
            for get in (reader.read, reader.__getitem__):
                with pytest.raises(IndexError, match=str(n)):
                    get(index)
            for many in (reader.read_many, reader.prefetch, reader.image_info, lambda some: list(reader.stream(some))):
                with pytest.raises(IndexError):
                    many([0, index])
            with pytest.raises(IndexError):
                reader.keys[index]
        assert bytes(reader.read(0)) == truth.images[0]

    def test_unknown_fields(self, reader: Any) -> None:
        calls: list[Callable[[], object]] = [
            lambda: reader.read(0, "depth"),
            lambda: reader.read_many([0], "depth"),
            lambda: list(reader.stream([0], "depth")),
            lambda: reader.sizes("depth"),
        ]
        for call in calls:
            with pytest.raises(UnknownNameError, match="no field 'depth'"):
                call()

    def test_fields_that_some_samples_lack(self, reader: Any, truth: Truth) -> None:
        assert list(reader.fields) == list(truth.fields)
        rows = {
            name: [i for i, value in enumerate(column) if value is not None] for name, column in truth.fields.items()
        }
        for name, data in reader.read_fields(rows).items():
            assert [bytes(value) for value in data] == [truth.fields[name][i] for i in rows[name]]
        for name, column in truth.fields.items():
            present = rows[name]
            assert [bytes(data) for data in reader.read_many(present, name)] == [column[i] for i in present]
            assert [bytes(data) for data in reader.stream(present, name)] == [column[i] for i in present]
            assert [bytes(reader.read(i, name)) for i in present] == [column[i] for i in present]
            assert all(reader.has(i, name) for i in present)
            assert [name in reader[i].fields for i in range(len(truth))] == [data is not None for data in column]
            calls: list[Callable[[int], object]] = [
                partial(reader.read, field=name),
                lambda i, name=name, some=present[0]: reader.read_many([some, i], name),  # type: ignore[misc]
                lambda i, name=name: list(reader.stream([i], name)),  # type: ignore[misc]
            ]
            for absent in sorted(set(range(len(truth))) - set(present))[:2]:
                assert not reader.has(absent, name) and reader.byte_range(absent, name) is None
                for call in calls:
                    with pytest.raises(UnknownNameError, match=f"no field '{name}'"):
                        call(absent)

    # --- columns ----------------------------------------------------------------------------
    def test_samples(self, reader: Any, truth: Truth) -> None:
        whole = [reader[i] for i in range(len(truth))]
        samples = [(s.key, s.label, {name: bytes(data) for name, data in s.fields.items()}) for s in whole]
        expected = [
            (key, None if label < 0 else label, {name: c[i] for name, c in truth.fields.items() if c[i] is not None})
            for i, (key, label) in enumerate(zip(truth.keys, truth.labels, strict=True))
        ]
        assert samples == expected

    def test_keys_labels_and_classes(self, reader: Any, truth: Truth) -> None:
        assert list(reader.keys) == truth.keys and len(reader.keys) == len(truth)
        assert reader.keys[-2] == truth.keys[-2] and list(reader.keys[1:4]) == truth.keys[1:4]
        assert reader.labels.dtype == np.int64 and reader.labels.tolist() == truth.labels
        assert tuple(reader.classes) == truth.classes

    def test_sizes(self, reader: Any, truth: Truth) -> None:
        for name, column in truth.fields.items():
            sizes = reader.sizes(name)
            assert sizes.dtype == np.int64 and sizes.shape == (len(truth),)
            if name != "image" or not truth.estimated:
                assert sizes.tolist() == [len(data or b"") for data in column]

    def test_header_facts(self, reader: Any, truth: Truth) -> None:
        info = reader.info
        assert [column.dtype for column in info] == list(map(np.dtype, DTYPES))
        assert all(column.shape == (len(truth),) for column in info)
        assert list(zip(*(column.tolist() for column in info), strict=True)) == truth.headers
        for order in ([5, 0, 0, -2], [], np.array([3, 1], np.int16)):
            some = reader.image_info(order)
            assert [column.dtype for column in some] == [column.dtype for column in info]
            assert [column.tolist() for column in some] == [[column[i] for i in order] for column in info]

    def test_short_representations(self, reader: Any, truth: Truth) -> None:
        assert str(len(reader)) in repr(reader) and len(repr(reader)) < 400 and "\n" not in repr(reader)
        first = f"Sample({truth.keys[0]!r}, label={reader[0].label}, {{image: {len(truth.images[0]):,} bytes"
        assert repr(reader[0]).startswith(first) and "\n" not in repr(reader[0])

    # --- by name and by part --------------------------------------------------------------------------------------
    def test_slices_and_keys(self, reader: Any, truth: Truth) -> None:
        for part in (slice(0, 3), slice(None, None, -5), slice(-2, None), slice(5, 5), slice(1, 10**9, 7)):
            assert [sample.key for sample in reader[part]] == truth.keys[part], part
            assert [bytes(sample.image) for sample in reader[part]] == truth.images[part], part
        for key in truth.keys:
            assert reader[key].key == key and bytes(reader[key].image) == truth.images[truth.keys.index(key)]
        with pytest.raises(UnknownNameError, match=f"no sample has the key 'cow/1'; the first is {truth.keys[0]!r}"):
            reader["cow/1"]
        for wrong in (1.5, None, [0], np.arange(3)):
            with pytest.raises(TypeError, match="expected a sample number, a key or a slice, found"):
                reader[wrong]

    def test_selections(self, reader: Any, truth: Truth) -> None:
        for indices in ([5, 1, 1, -1], list(range(len(truth)))[::-1]):
            few, expected = reader.select(indices=indices), truth.take(indices)
            assert [bytes(data) for data in few.read_many(range(len(few)))] == expected.images
            assert (list(few.keys), few.labels.tolist()) == (expected.keys, expected.labels)
            assert few.fingerprint != reader.fingerprint
        for label in (truth.labels[0], truth.labels[-1]):
            few = reader.select(labels=label)
            assert list(few.keys) == [
                key for key, number in zip(truth.keys, truth.labels, strict=True) if number == label
            ]
            assert tuple(few.classes) == truth.classes, "labels keep their meaning"
        with pytest.raises(SourceError, match="nothing is selected"):
            reader.select(indices=[])

    # --- the fingerprint ------------------------------------------------------------------------------------------
    def test_the_fingerprint_is_stable(self, reader: Any) -> None:
        first = reader.fingerprint
        assert isinstance(first, str) and 10 < len(first) < 200
        reader.read(0)
        assert pickle.loads(pickle.dumps(reader)).fingerprint == reader.fingerprint == first
        others = [reader.select(indices=indices).fingerprint for indices in ([0, 1], [1, 0], [0])]
        assert len({first, *others}) == 4, "other samples, or another order, have another one"

    # --- processes and threads ------------------------------------------------------------------------------------
    def test_in_a_spawned_process(self, reader: Any, truth: Truth, elsewhere: Callable[..., Any]) -> None:
        reader.read(0)
        expected = [crc32c(image) for image in truth.images]
        assert elsewhere(checksums, reader) == expected
        assert elsewhere(getattr, reader, "fingerprint") == reader.fingerprint
        assert checksums(reader) == expected

    def test_in_a_forked_child(self, reader: Any, truth: Truth) -> None:
        expected = [crc32c(image) for image in truth.images]
        reader.read(0)
        reader.prefetch([1, 2])

        def child() -> None:
            assert checksums(reader) == expected
            with pytest.raises(IndexError):
                reader.read(len(truth))
            reader.close()

        with forked(child):
            assert checksums(reader) == expected, "read at the same time"
        assert checksums(reader) == expected

    def test_pickled_after_close(self, reader: Any, truth: Truth) -> None:
        reader.close()
        again = pickle.loads(pickle.dumps(reader))
        assert [bytes(data) for data in again.read_many([2, 0])] == [truth.images[2], truth.images[0]]
        assert list(again.keys) == truth.keys
        again.close()

    def test_threads(self, reader: Any, truth: Truth) -> None:
        """One thread repeatedly closes the reader while the others read."""
        n = len(truth)

        def work(seed: int) -> int:
            order = [random.Random(seed).randrange(n) for _ in range(60)]
            wrong = 0
            for step, i in enumerate(order):
                wrong += bytes(reader.read(i)) != truth.images[i]
                if step % 20 == 0:
                    part = order[step : step + 10]
                    wrong += [bytes(data) for data in reader.read_many(part)] != [truth.images[j] for j in part]
                if self.closed_while_read and seed == 0 and step % 25 == 24:
                    reader.close()
            return wrong

        with ThreadPoolExecutor(4) as pool:
            assert [result.result(300) for result in [pool.submit(work, seed) for seed in range(4)]] == [0] * 4

    # --- closing --------------------------------------------------------------------------------------------------
    def test_closed_and_read_again(self, reader: Any, truth: Truth) -> None:
        with reader as same:
            assert same is reader and bytes(reader.read(1)) == truth.images[1]
        assert bytes(reader.read(1)) == truth.images[1]
        reader.close()
        reader.close()
        assert [bytes(data) for data in reader.read_many([3, 1])] == [truth.images[3], truth.images[1]]

    def test_views_are_stable_and_read_only(self, reader: Any, truth: Truth) -> None:
        n = len(truth)
        views = [*reader.read_many(range(n)), *map(reader.read, range(n)), *reader.stream(), reader[0].image]
        for i in range(n):
            reader.read((i * 7) % n)
            reader.read_many([i, -1])
        reader.close()
        gc.collect()
        assert [bytes(view) for view in views] == [*truth.images * 3, truth.images[0]]
        assert all(memoryview(view).readonly for view in views)
