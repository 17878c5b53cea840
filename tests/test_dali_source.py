"""The batches of a DALI pipeline, without DALI: a function of (epoch, iteration), and what ops do to each image."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import readers
from cache.errors import BadSampleError, MissingExtraError
from readers import Ranks
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.dali import BatchSource, SampleSource, Source
from readers.order import NodeLocal


@pytest.fixture(scope="module")
def reader(tree: Path, pack: Callable[..., Path]) -> Iterator[readers.Reader]:
    with readers.open(pack(tree, "hdf5", samples_per_shard=10), "train") as reader:
        yield reader


def info(epoch: int, step: int, row: int = 0) -> Any:
    """Like DALI's BatchInfo and SampleInfo."""
    return SimpleNamespace(epoch_idx=epoch, iteration=step, idx_in_batch=row)


def indices(source: Source, epoch: int = 0) -> list[int]:
    return [i for step in range(source.batches(epoch)) for i in source.samples_of(epoch, step)[1].tolist()]


def test_every_sample_once_an_epoch_and_then_stop_iteration(reader: readers.Reader) -> None:
    source = Source(reader, 5, seed=3, ranks=Ranks(tail="exact"))
    assert sorted(indices(source)) == sorted(indices(source, 1)) == list(range(36))
    assert indices(source) != indices(source, 1) and source.steps() == 8
    call = BatchSource(source)
    for step in (8, 9, 500, 8):
        with pytest.raises(StopIteration):
            call(info(0, step))


def test_a_batch_is_views_of_the_readers_memory(reader: readers.Reader) -> None:
    source = Source(reader, 4, seed=1)
    arrays, labels = source.batch(0, 2)
    _, wanted = source.samples_of(0, 2)
    assert [a.tobytes() for a in arrays] == [bytes(reader.read(i)) for i in wanted.tolist()]
    assert labels.dtype == np.int64 and labels.ravel().tolist() == reader.labels[wanted].tolist()
    assert all(a.dtype == np.uint8 and not a.flags.owndata and not a.flags.writeable for a in arrays)


def test_the_memory_of_batches_under_way_is_not_reused(reader: readers.Reader) -> None:
    """The reader reuses memory for the next batch where nothing refers to it."""
    source = Source(reader, 4, seed=1)
    kept = BatchSource(source, kept=3)
    addresses = []
    for step in range(6):
        (arrays, *_) = kept(info(0, step))
        addresses.append(arrays[0].__array_interface__["data"][0])
        del arrays
    assert all(len(set(addresses[i : i + 3])) == 3 for i in range(4))
    forgetful = BatchSource(source)
    first = {forgetful(info(0, step))[0][0].__array_interface__["data"][0] for step in range(6)}
    assert len(first) < 6, "the reader never reuses memory: this test shows nothing"


def test_calls_in_any_order_and_process_give_the_same(reader: readers.Reader) -> None:
    ops = [RandomResizedCrop(16), RandomHorizontalFlip()]
    source = Source(reader, 6, augment=ops, seed=5)
    call, other = BatchSource(source, 2), pickle.loads(pickle.dumps(BatchSource(source, 2)))
    for epoch, step in ((1, 3), (0, 0), (1, 2), (0, 5)):
        (a, *columns), (b, *same) = call(info(epoch, step)), other(info(epoch, step))
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]
        assert all((x == y).all() for x, y in zip(columns, same, strict=True))
        one = pickle.loads(pickle.dumps(SampleSource(source)))
        for row in (5, 0):
            image, *rest = one(info(epoch, step, row))
            assert image.tobytes() == a[row].tobytes()
            assert all((x == y[row]).all() for x, y in zip(rest, columns, strict=True))


def test_what_ops_do_comes_with_the_samples(reader: readers.Reader) -> None:
    source = Source(reader, 6, augment=[RandomResizedCrop(16), RandomHorizontalFlip()])
    _, _, box, resized, flips = source.batch(0, 0)
    assert box.dtype == np.int64 and box.shape == (6, 4) and (box[:, :2] + box[:, 2:] <= (24, 32)).all()
    assert resized.dtype == np.float32 and (resized[:, :2] == 16).all() and (resized[:, 2:] == 0).all()
    assert flips.dtype == np.int32 and set(flips[:, 0].tolist()) == {0, 1} and not flips[:, 1].any()
    middle = Source(reader, 6, augment=[Resize(16), CenterCrop(12)])
    _, _, resized, _ = middle.batch(0, 0)  # whole images are resized, without a box
    assert resized[0].tolist() == [16.0, 21.0, 0.5, np.float32(4 / 9)]


def test_the_state_between_epochs(reader: readers.Reader) -> None:
    source = Source(reader, 6, seed=4)
    assert source.state_after(0, 6) == source.state_after(1, 0) and source.state_after(0, 6)["epoch"] == 1


def test_an_epoch_of_other_nodes_is_finished_as_it_began(reader: readers.Reader) -> None:
    old, new = NodeLocal(36, 2, exchange_every=1), NodeLocal(36, 3, exchange_every=1)
    state = Source(reader, 4, order=old, ranks=Ranks(rank=0, world_size=2)).state_after(0, 1)
    resumed = Source(reader, 4, order=new, ranks=Ranks(rank=0, world_size=3)).resumed(state)
    assert resumed.feed.start.order.spec() == old.spec() and resumed.feed.order.spec() == new.spec()


def test_bad_samples_are_named(tmp_path: Path, jpeg: Any) -> None:
    for name, data in (("a", jpeg(1)), ("b", b""), ("c", b"no image")):
        (tmp_path / f"{name}.jpg").write_bytes(data)
    Image.new("RGB", (9, 9)).save(tmp_path / "d.gif")
    reader = readers.open_folder(tmp_path)
    plain, cropped = Source(reader, 1, shuffle=False), Source(reader, 1, shuffle=False, augment=[CenterCrop(8)])
    assert plain.batch(0, 0) and plain.batch(0, 2), "what DALI will say of it is not known yet"
    with pytest.raises(BadSampleError, match=r"sample 1 \(b\): its image has no bytes; find .* `packer verify --deep`"):
        plain.batch(0, 1)
    with pytest.raises(BadSampleError, match=r"sample 2 \(c\): its header cannot be read"):
        cropped.batch(0, 2)
    with pytest.raises(BadSampleError, match=r"sample 3 \(d\): DALI does not decode GIF images"):
        cropped.batch(0, 3)
    with pytest.raises(BadSampleError, match=r"sample 0 \(a\): CenterCrop\(size=30\) does not fit"):
        Source(reader, 1, shuffle=False, augment=[CenterCrop(30)]).batch(0, 0)


def test_a_batch_without_its_bad_samples(tmp_path: Path, jpeg: Any) -> None:
    images = {
        "a": jpeg(1),
        "b": jpeg(2)[:-300],
        "c": b"",
        "d": jpeg(3),
        "e": jpeg(4).replace(b"\xff\xda", b"x\xff\xda"),
    }
    for name, data in images.items():
        (tmp_path / f"{name}.jpg").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    skipping = Source(reader, 5, augment=[RandomResizedCrop(8)], shuffle=False, on_error="skip")
    arrays, labels, *columns, rows = skipping.batch(0, 0)
    assert rows.ravel().tolist() == [0, 3] and [array.tobytes() for array in arrays] == [images["a"], images["d"]]
    assert len(labels) == 2 and all(len(column) == 2 for column in columns)
    whole = Source(reader.select(indices=[0, 3, 0, 3, 0]), 5, augment=[RandomResizedCrop(8)], shuffle=False)
    _, _, *same = whole.batch(0, 0)
    boxes, same_boxes = columns[0], same[0]
    assert (boxes[0] == same_boxes[0]).all() and (boxes[1] == same_boxes[3]).all(), "crops stay those of the position"
    bad = skipping.bad_samples_of(0, 0, rows.ravel())
    assert [(sample.index, sample.key) for sample in bad] == [(1, "b"), (2, "c"), (4, "e")]
    assert "expected" in bad[0].reason and "no bytes" in bad[1].reason and "stray bytes" in bad[2].reason
    replacing = pickle.loads(pickle.dumps(Source(reader, 5, shuffle=False, on_error="substitute")))
    arrays, _, rows = replacing.batch(0, 0)
    assert len(rows) == 5 and set(rows.ravel().tolist()) == {0, 3} and rows[[0, 3], 0].tolist() == [0, 3]
    assert [sample.index for sample in replacing.bad_samples_of(0, 0, rows.ravel())] == [1, 2, 4]
    assert replacing.batch(0, 0)[-1].tolist() == rows.tolist(), "the same ones each time"
    only_bad = Source(reader.select(indices=[1, 2]), 2, shuffle=False, on_error="skip")
    with pytest.raises(BadSampleError, match=r"sample 0 \(b\): it is the first of 2 samples .* all bad.*'substitute'"):
        only_bad.batch(0, 0)


def test_without_dali_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, reader: readers.Reader) -> None:
    from readers.dali import external_source

    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingExtraError, match=r"needs NVIDIA DALI: run  pip install 'packer-vision\[dali\]'"):
        external_source(reader, 4)
