"""The double does to a naive user what rocAL does; without that, tests against it would show nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocal_images import box_of, colour, mapped, numbers_of, solid

BATCH = 4


class NaiveSource:
    """What one writes at first: as the examples have it, and all of it read before."""

    def __init__(self, images: list[Any], labels: Any = None) -> None:
        self.images, self.at = images, 0
        self.labels = np.arange(len(images), dtype=np.int32) if labels is None else labels
        self.n = len(images)

    def __iter__(self) -> NaiveSource:
        return self

    def __next__(self) -> tuple[Any, Any, list[int]]:
        rows = slice(self.at, self.at + BATCH)
        self.at += BATCH
        return self.images[rows], self.labels[rows], [image.size for image in self.images[rows]]


def encoded(count: int) -> list[Any]:
    return [np.frombuffer(solid(number), np.uint8) for number in range(count)]


def naive(double: Any, source: Any, plugin: str = "generic", graph: Any = None, **options: Any) -> Any:
    from amd.rocal import fn, types
    from amd.rocal.pipeline import Pipeline
    from amd.rocal.plugin import generic, pytorch

    def small(images: Any) -> Any:
        return fn.resize_mirror_normalize(
            images,
            resize_width=8,
            resize_height=8,
            mean=[127.5],
            std=[127.5],
            mirror=0,
            output_layout=types.NCHW,
            output_dtype=types.FLOAT,
        )

    pipeline = Pipeline(batch_size=BATCH, num_threads=1, rocal_cpu=True, **options)
    with pipeline:
        images, _ = fn.external_source(source, mode=types.EXTSOURCE_RAW_COMPRESSED, max_width=48, max_height=48)
        pipeline.set_outputs((graph or small)(images))
    pipeline.build()
    return {"generic": generic, "pytorch": pytorch}[plugin].ROCALGenericIterator(pipeline)


def let_go(iterator: Any) -> None:
    """Release without the hang, so that a test ends with nothing raised in a `__del__`."""
    iterator.loader._handle.external = False


def test_the_end_of_an_epoch_is_often_wrong(rocal_double: Any) -> None:
    """As seen in 11 of 30 epochs: stale pixels, a batch too few or too many."""
    wrong = []
    for seed in range(30):
        rocal_double.seed_traps(seed)
        iterator = naive(rocal_double, NaiveSource(encoded(12)))
        seen = [(numbers_of(outputs[0]), labels.tolist()) for outputs, labels in iterator]
        if [numbers for numbers, _ in seen] != [list(range(at, at + BATCH)) for at in range(0, 12, BATCH)]:
            wrong.append("stale" if len(seen) == 3 else "few" if len(seen) < 3 else "many")
            if wrong[-1] == "stale":
                assert seen[-1][0] == [4, 5, 6, 7] and seen[-1][1] == [8, 9, 10, 11], "not the old pixels, new labels"
    assert {"stale", "few", "many"} == set(wrong) and 5 < len(wrong) < 28


def test_labels_of_64_bits_are_read_as_halves_and_lists_are_refused(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource(encoded(12), np.arange(12, dtype=np.int64)))
    assert next(iterator)[1].tolist() == [0, 0, 1, 0]
    let_go(iterator)
    iterator = naive(rocal_double, NaiveSource(encoded(12), list(range(12))))
    with pytest.raises(TypeError, match="labels"):
        next(iterator)
    let_go(iterator)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda image: image.astype(np.int32), "array of int32"),
        (lambda image: np.repeat(image, 2)[::2], "strided"),
    ],
)
def test_other_arrays_are_read_wrongly(rocal_double: Any, spoil: Any, expected: str) -> None:
    iterator = naive(rocal_double, NaiveSource([spoil(image) for image in encoded(12)]))
    with pytest.raises(rocal_double.DoubleAbort, match=expected):
        next(iterator)
    let_go(iterator)


def test_a_batch_is_a_list(rocal_double: Any) -> None:
    class Tuples(NaiveSource):
        def __next__(self) -> tuple[Any, Any, list[int]]:
            images, labels, lengths = super().__next__()
            return tuple(images), labels, lengths

    iterator = naive(rocal_double, Tuples(encoded(12)))
    with pytest.raises(TypeError, match="arrays"):
        next(iterator)
    let_go(iterator)


def test_references_are_not_held(rocal_double: Any) -> None:
    class Forgetful(NaiveSource):
        def __next__(self) -> tuple[Any, Any, list[int]]:
            images, labels, lengths = super().__next__()
            return [image.copy() for image in images], labels, lengths

    iterator = naive(rocal_double, Forgetful(encoded(12)))
    with pytest.raises(rocal_double.DoubleAbort, match="given back"):
        next(iterator)
    let_go(iterator)


def test_a_short_batch_raises(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource(encoded(6)))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)
    let_go(iterator)


def test_what_is_no_jpeg_becomes_another_image_silently(rocal_double: Any) -> None:
    images = encoded(12)
    images[1] = np.frombuffer(solid(1, "PNG"), np.uint8)
    images[2] = images[2][:20]
    iterator = naive(rocal_double, NaiveSource(images))
    outputs, labels = next(iterator)
    assert (numbers_of(outputs[0]), labels.tolist()) == ([0, 3, 3, 3], [0, 1, 2, 3])
    let_go(iterator)


def test_truncated_and_cmyk_images_become_garbage_silently(rocal_double: Any) -> None:
    images = encoded(12)
    images[1] = np.frombuffer(solid(1, mode="CMYK"), np.uint8)
    whole = solid(2)
    images[2] = np.frombuffer(whole[: whole.index(b"\xff\xda") + 20], np.uint8)
    iterator = naive(rocal_double, NaiveSource(images))
    outputs, _ = next(iterator)
    found = outputs[0][1:3, :, 7, 7] * 127.5 + 127.5
    assert all(np.abs(found[i] - colour(i + 1)).max() > 20 for i in (0, 1)), "decoded well"
    let_go(iterator)


def test_a_batch_without_a_good_image_aborts(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource([np.frombuffer(solid(i, "PNG"), np.uint8) for i in range(12)]))
    with pytest.raises(rocal_double.DoubleAbort, match="All images"):
        next(iterator)
    let_go(iterator)


def test_reset_alone_hangs_and_so_does_leaving_early(rocal_double: Any) -> None:
    rocal_double.seed_traps(1)
    source = NaiveSource(encoded(12))
    iterator = naive(rocal_double, source)
    list(iterator)
    source.at = 0
    iterator.reset()
    with pytest.raises(rocal_double.DoubleHang, match="no batch was fed"):
        next(iterator)
    with pytest.raises(rocal_double.DoubleHang, match="release"):
        rocal_double.rocalRelease(iterator.loader._handle)
    let_go(iterator)
    iterator = naive(rocal_double, NaiveSource(encoded(12)))
    with pytest.raises(rocal_double.DoubleHang, match="release"):
        rocal_double.rocalRelease(iterator.loader._handle)
    next(iterator)
    with pytest.raises(rocal_double.DoubleHang, match="reset"):
        iterator.reset()
    let_go(iterator)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropping_the_iterator_hangs(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource(encoded(12)))
    next(iterator)
    del iterator
    gc.collect()
    assert rocal_double.FAULTS == ["release: threads wait for input"]


def test_the_iterator_of_plugin_pytorch_passes_an_argument_too_many(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource(encoded(12)), "pytorch")
    with pytest.raises(TypeError, match="12 were given"):
        next(iterator)
    let_go(iterator)


def test_outputs_are_used_again_and_the_length_is_wrong(rocal_double: Any) -> None:
    iterator = naive(rocal_double, NaiveSource(encoded(12)))
    first, _ = next(iterator)
    assert numbers_of(first[0]) == [0, 1, 2, 3]
    second, _ = next(iterator)
    assert first[0] is second[0] and numbers_of(first[0]) == [4, 5, 6, 7]
    assert len(iterator) == 1, "12 images are 3 batches of 4"
    let_go(iterator)


def test_what_follows_resize_crop_reads_beyond_or_short_of_its_result(rocal_double: Any) -> None:
    """Its valid region stays that of the box: smaller than the result, or larger."""
    from amd.rocal import fn

    def graph(images: Any) -> Any:
        box = fn.resize_crop(images, resize_width=24, resize_height=24)
        return fn.crop_mirror_normalize(box, crop=[24, 24], mean=[0.0] * 3, std=[1.0] * 3, mirror=0)

    iterator = naive(rocal_double, NaiveSource(encoded(12)), graph=graph)
    outputs, labels = next(iterator)
    wanted = np.array([colour(label) for label in labels]).reshape(4, 1, 1, 3)
    assert (np.abs(outputs[0].astype(float) - wanted).max(axis=(1, 2, 3)) > 20).any(), "as good as random_crop"
    let_go(iterator)


def test_positions_of_crop_are_pixels(rocal_double: Any) -> None:
    from amd.rocal import fn

    size = (48, 40)
    images = [np.frombuffer(mapped(number, size), np.uint8) for number in range(12)]
    for graph, box in [
        (lambda images: fn.crop(images, crop=[20, 20]), (0, 0, 20, 20)),
        (lambda images: fn.crop(images, crop=[20, 20], crop_pos_x=5, crop_pos_y=9.0), (5, 9, 25, 29)),
        (lambda images: fn.center_crop(images, crop=[20, 20]), (14, 10, 34, 30)),
    ]:
        iterator = naive(rocal_double, NaiveSource(images), graph=graph)
        outputs, _ = next(iterator)
        np.testing.assert_allclose(box_of(outputs[0][1], size)[1], box, atol=1)
        let_go(iterator)


def test_the_lists_that_random_crop_has_by_default_are_refused(rocal_double: Any) -> None:
    from amd.rocal import fn

    with pytest.raises(TypeError, match="randomCrop"):
        naive(rocal_double, NaiveSource(encoded(12)), graph=fn.random_crop)


def test_deeper_queues_hang_at_the_end_of_an_epoch(rocal_double: Any) -> None:
    rocal_double.seed_traps(1)
    iterator = naive(rocal_double, NaiveSource(encoded(12)), prefetch_queue_depth=3)
    list(iterator)
    with pytest.raises(rocal_double.DoubleHang, match="holds the interpreter's lock"):
        iterator.reset()
    let_go(iterator)


def test_an_operator_that_fails_ends_the_process(rocal_double: Any) -> None:
    from amd.rocal import fn

    with pytest.raises(rocal_double.DoubleAbort, match="segmentation fault"):
        naive(rocal_double, NaiveSource(encoded(12)), graph=lambda images: fn.resize(images, resize_width=0))


def test_a_coin_that_always_falls_one_way_never_does(rocal_double: Any) -> None:
    from amd.rocal import fn

    rng = np.random.default_rng(0)
    assert [fn.random.coin_flip(probability=1.0)(rng) for _ in range(5)] == [0] * 5
    assert 1 in [fn.random.coin_flip(probability=0.9)(rng) for _ in range(5)]


def test_the_decoder_enlarges(rocal_double: Any) -> None:
    from rocal_pybind import pixels

    assert [pixels.decode(solid(1), side, side).shape[:2] for side in (48, 100, 2000, 30)] == [
        (40, 48),
        (80, 96),
        (80, 96),
        (25, 30),
    ]


def test_a_failed_build_ends_the_interpreter(rocal_double: Any, tmp_path: Path) -> None:
    from amd.rocal.pipeline import Pipeline

    with pytest.raises(SystemExit):
        Pipeline(batch_size=BATCH).build()
