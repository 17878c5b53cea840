"""The double does to a naive user what rocAL does; without that, tests against it would show nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rocal_images import box_of, colour, mapped, numbers_of, solid

BATCH = 4


class NaiveSource:
    """A first attempt at a source, as in rocAL's examples: everything is read in advance."""

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


class Changed(NaiveSource):
    """One whose lists of images are changed before they are fed."""

    def __init__(self, change: Callable[[list[Any]], Any]) -> None:
        super().__init__(encoded(12))
        self.change = change

    def __next__(self) -> tuple[Any, Any, list[int]]:
        images, labels, lengths = super().__next__()
        return self.change(images), labels, lengths


def encoded(count: int, **replaced: bytes) -> list[Any]:
    """JPEGs by number; replaced: others in place of some, by `_` and the number."""
    return [np.frombuffer(replaced.get(f"_{number}", solid(number)), np.uint8) for number in range(count)]


@pytest.fixture
def naive(rocal_double: Any) -> Iterator[Callable[..., Any]]:
    """Makes an iterator over a source, by default of 12 images; released without a hang at the end of the test."""
    from amd.rocal import fn, types
    from amd.rocal.pipeline import Pipeline
    from amd.rocal.plugin import generic

    def small(images: Any) -> Any:
        size = {"resize_width": 8, "resize_height": 8, "output_layout": types.NCHW, "output_dtype": types.FLOAT}
        return fn.resize_mirror_normalize(images, mean=[127.5], std=[127.5], mirror=0, **size)

    iterators: list[Any] = []

    def make(
        source: Any = None, graph: Any = small, *, plugin: Any = generic, keep: bool = True, **options: Any
    ) -> Any:
        source = source or NaiveSource(encoded(12))
        pipeline = Pipeline(batch_size=BATCH, num_threads=1, rocal_cpu=True, **options)
        with pipeline:
            images, _ = fn.external_source(source, mode=types.EXTSOURCE_RAW_COMPRESSED, max_width=48, max_height=48)
            pipeline.set_outputs(graph(images))
        pipeline.build()
        iterator = plugin.ROCALGenericIterator(pipeline)
        iterators.extend([iterator] * keep)
        return iterator

    yield make
    for context in rocal_double.CONTEXTS:
        context.external = False  # so that nothing waits for input when the iterators are dropped


# --- what is fed ------------------------------------------------------------------------------------------------------
def test_labels_of_64_bits_are_read_as_halves_and_lists_are_refused(naive: Any) -> None:
    assert next(naive(NaiveSource(encoded(12), np.arange(12, dtype=np.int64))))[1].tolist() == [0, 0, 1, 0]
    with pytest.raises(TypeError, match="labels"):
        next(naive(NaiveSource(encoded(12), list(range(12)))))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda images: [image.astype(np.int32) for image in images], "array of int32"),
        (lambda images: [np.repeat(image, 2)[::2] for image in images], "strided"),
        (lambda images: [image.copy() for image in images], "released while"),
    ],
    ids=["other values", "strided", "not referred to"],
)
def test_arrays_that_end_the_process_or_are_read_wrongly(
    rocal_double: Any, naive: Any, change: Any, expected: str
) -> None:
    with pytest.raises(rocal_double.DoubleAbort, match=expected):
        next(naive(Changed(change)))


def test_a_batch_without_a_good_image_ends_the_process(rocal_double: Any, naive: Any) -> None:
    with pytest.raises(rocal_double.DoubleAbort, match="All images"):
        next(naive(NaiveSource([np.frombuffer(solid(i, "PNG"), np.uint8) for i in range(12)])))


def test_a_batch_is_a_whole_list(naive: Any) -> None:
    with pytest.raises(TypeError, match="arrays"):
        next(naive(Changed(tuple)))
    iterator = naive(NaiveSource(encoded(6)))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)


def test_what_is_no_jpeg_silently_becomes_another_image(naive: Any) -> None:
    outputs, labels = next(naive(NaiveSource(encoded(12, _1=solid(1, "PNG"), _2=solid(2)[:20]))))
    assert (numbers_of(outputs[0]), labels.tolist()) == ([0, 3, 3, 3], [0, 1, 2, 3])


def test_truncated_and_cmyk_images_silently_become_garbage(naive: Any) -> None:
    cut = solid(2)[: solid(2).index(b"\xff\xda") + 20]
    outputs, _ = next(naive(NaiveSource(encoded(12, _1=solid(1, mode="CMYK"), _2=cut))))
    pixels = outputs[0][1:3, :, 7, 7] * 127.5 + 127.5
    assert all(np.abs(pixels[i] - colour(i + 1)).max() > 20 for i in (0, 1)), "decoded well"


def test_the_decoder_enlarges(rocal_double: Any) -> None:
    from rocal_pybind import pixels

    sizes = [pixels.decode(solid(1), side, side).shape[:2] for side in (48, 100, 2000, 30)]
    assert sizes == [(40, 48), (80, 96), (80, 96), (25, 30)]


# --- epochs -----------------------------------------------------------------------------------------------------------
def test_the_end_of_an_epoch_is_often_wrong(rocal_double: Any, naive: Any) -> None:
    """As seen in 11 of 30 epochs: stale pixels, a batch too few or too many."""
    wrong = []
    for seed in range(30):
        rocal_double.seed_traps(seed)
        seen = [(numbers_of(outputs[0]), labels.tolist()) for outputs, labels in naive()]
        if [numbers for numbers, _ in seen] != [list(range(at, at + BATCH)) for at in range(0, 12, BATCH)]:
            wrong.append("stale" if len(seen) == 3 else "few" if len(seen) < 3 else "many")
            if wrong[-1] == "stale":
                assert seen[-1][0] == [4, 5, 6, 7] and seen[-1][1] == [8, 9, 10, 11], "not the old pixels, new labels"
    assert {"stale", "few", "many"} == set(wrong) and 5 < len(wrong) < 28


def test_reset_alone_hangs_and_so_does_leaving_early(rocal_double: Any, naive: Any) -> None:
    rocal_double.seed_traps(1)
    source = NaiveSource(encoded(12))
    iterator = naive(source)
    list(iterator)
    source.at = 0
    iterator.reset()
    with pytest.raises(rocal_double.DoubleHang, match="no batch was fed"):
        next(iterator)
    for unfinished in (iterator, naive()):
        with pytest.raises(rocal_double.DoubleHang, match="release"):
            rocal_double.rocalRelease(unfinished.loader._handle)
    next(unfinished)
    with pytest.raises(rocal_double.DoubleHang, match="reset"):
        unfinished.reset()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_dropping_the_iterator_hangs(rocal_double: Any, naive: Any) -> None:
    next(naive(keep=False))
    gc.collect()
    assert rocal_double.FAULTS == ["release: threads wait for input"]


def test_deeper_queues_hang_at_the_end_of_an_epoch(rocal_double: Any, naive: Any) -> None:
    rocal_double.seed_traps(1)
    iterator = naive(prefetch_queue_depth=3)
    list(iterator)
    with pytest.raises(rocal_double.DoubleHang, match="holds the interpreter's lock"):
        iterator.reset()


def test_outputs_are_used_again_and_the_length_is_wrong(naive: Any) -> None:
    iterator = naive()
    first, _ = next(iterator)
    assert numbers_of(first[0]) == [0, 1, 2, 3]
    second, _ = next(iterator)
    assert first[0] is second[0] and numbers_of(first[0]) == [4, 5, 6, 7]
    assert len(iterator) == 1, "12 images are 3 batches of 4"


def test_the_iterator_of_plugin_pytorch_passes_an_argument_too_many(rocal_double: Any, naive: Any) -> None:
    from amd.rocal.plugin import pytorch

    with pytest.raises(TypeError, match="12 were given"):
        next(naive(plugin=pytorch))


# --- operators --------------------------------------------------------------------------------------------------------
def test_operators_after_resize_crop_read_beyond_or_short_of_its_result(rocal_double: Any, naive: Any) -> None:
    """Its valid region stays that of the box: smaller than the result, or larger."""
    from amd.rocal import fn

    def graph(images: Any) -> Any:
        box = fn.resize_crop(images, resize_width=24, resize_height=24)
        return fn.crop_mirror_normalize(box, crop=[24, 24], mean=[0.0] * 3, std=[1.0] * 3, mirror=0)

    outputs, labels = next(naive(graph=graph))
    expected = np.array([colour(label) for label in labels]).reshape(4, 1, 1, 3)
    assert (np.abs(outputs[0].astype(float) - expected).max(axis=(1, 2, 3)) > 20).any(), "as good as random_crop"


@pytest.mark.parametrize(
    ("operator", "arguments", "box"),
    [
        ("crop", {}, (0, 0, 20, 20)),
        ("crop", {"crop_pos_x": 5, "crop_pos_y": 9.0}, (5, 9, 25, 29)),
        ("center_crop", {}, (14, 10, 34, 30)),
    ],
)
def test_positions_of_crop_are_pixels(rocal_double: Any, naive: Any, operator: str, arguments: Any, box: Any) -> None:
    from amd.rocal import fn

    source = NaiveSource([np.frombuffer(mapped(number, (48, 40)), np.uint8) for number in range(12)])
    outputs, _ = next(naive(source, lambda images: getattr(fn, operator)(images, crop=[20, 20], **arguments)))
    np.testing.assert_allclose(box_of(outputs[0][1], (48, 40))[1], box, atol=1)


def test_operators_that_fail(rocal_double: Any, naive: Any) -> None:
    """The defaults of random_crop are lists, which it refuses; what fails is None, which ends the process."""
    from amd.rocal import fn

    with pytest.raises(TypeError, match="randomCrop"):
        naive(graph=fn.random_crop)
    with pytest.raises(rocal_double.DoubleAbort, match="segmentation fault"):
        naive(graph=lambda images: fn.resize(images, resize_width=0))


def test_a_coin_of_probability_1_never_flips(rocal_double: Any) -> None:
    from amd.rocal import fn

    rng = np.random.default_rng(0)
    assert [fn.random.coin_flip(probability=1.0)(rng) for _ in range(5)] == [0] * 5
    assert 1 in [fn.random.coin_flip(probability=0.9)(rng) for _ in range(5)]


def test_a_failed_build_ends_the_interpreter(rocal_double: Any) -> None:
    from amd.rocal.pipeline import Pipeline

    with pytest.raises(SystemExit):
        Pipeline(batch_size=BATCH).build()
