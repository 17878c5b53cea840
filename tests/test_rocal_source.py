"""The external source by itself, without rocAL: its batches, and which images it converts or refuses."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_options import grouped
from rocal_images import colour, folder_of, solid

import readers
from cache.errors import BadSampleError, DatasetError, MissingExtraError
from readers import Ranks
from readers.augment import Crop, Resize
from readers.decode import decode_image
from readers.headers import parse_header
from readers.loader import ImageLoader
from readers.loop import Ahead
from readers.rocal import MissingRocalError, RocalLoader, celeba, external_source
from readers.rocal.source import PADDING_BATCHES, Limits, Vetted, vet

BATCH = 4
ONE = {"rank": 0, "world_size": 1}
EXIF_TURNED = bytes.fromhex("4578696600004d4d002a00000008000101120003000000010006000000000000")


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return folder_of(tmp_path / "images", {number: solid(number) for number in range(22)})


class Wrapped:
    """A reader with changed attributes."""

    def __init__(self, base: Any, **changed: Any) -> None:
        self._base = base
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __len__(self) -> int:
        return len(self._base)


def fed_by(source: Any, batches: int) -> list[Any]:
    fed = [next(source) for _ in range(batches)]
    source.close()
    return fed


def vetted(data: bytes, limits: Any = (100, 100), size: tuple[int, int] = (0, 0), convert: bool = True) -> Vetted:
    return vet(data, Limits(*limits), size=size, convert=convert, quality=95)


def sampling(jpeg: bytes) -> tuple[int, list[int]]:
    """(process, sampling factors) of the frame header: T.81, B.2.2."""
    process = parse_header(jpeg).process
    at = jpeg.index(bytes([0xFF, process])) + 10
    return process, [jpeg[at + 3 * i + 1] for i in range(jpeg[at - 1])]


def test_what_a_batch_is(reader: Any) -> None:
    source = external_source(reader, BATCH, seed=1, **grouped({"ranks": Ranks(tail="exact"), **ONE}))
    assert iter(source) is source and (len(source), source.n) == (6, (6 + PADDING_BATCHES) * BATCH)
    fed = fed_by(source, 6 + PADDING_BATCHES + 3)
    seen = []
    for images, labels, lengths in fed:
        assert isinstance(images, list) and isinstance(lengths, list) and isinstance(labels, np.ndarray)
        assert len(images) == len(lengths) == BATCH and labels.shape == (BATCH,) and labels.dtype == np.int32
        for image, label, length in zip(images, labels.tolist(), lengths, strict=True):
            assert image.dtype == np.uint8 and image.ndim == 1 and image.flags.c_contiguous and image.size == length
            assert parse_header(image.tobytes()).media == "jpeg"
            if label >= 0:
                assert image.tobytes() == solid(label)
                seen.append(label)
    assert sorted(seen) == list(range(22))
    assert fed[5][1].tolist()[2:] == [-1, -1] and all((labels == -1).all() for _, labels, _ in fed[6:])


def test_images_are_not_copied(tmp_path: Path, reader: Any) -> None:
    read: list[bytes] = []

    def read_many(indices: Any, field: str = "image") -> Sequence[Any]:
        data = reader.read_many(indices, field)
        read.extend(data)
        return data

    source = external_source(Wrapped(reader, read_many=read_many), BATCH, shuffle=False, **grouped(ONE))
    ((images, _, _),) = fed_by(source, 1)
    assert all(
        np.shares_memory(image, np.frombuffer(data, np.uint8)) for image, data in zip(images, read, strict=False)
    )


def test_fed_images_stay_in_memory_for_a_while(reader: Any) -> None:
    """rocAL keeps addresses only; the batch that it decodes, and those in its queues, must stay in memory."""
    source = external_source(reader, 2, **grouped(ONE))
    source.start()
    references = []
    for _ in range(11):
        images, _, _ = next(source)
        references.append(weakref.ref(images[0]))
        del images
    gc.collect()
    assert [reference() is not None for reference in references[-6:]] == [True] * 6
    assert all(reference() is None for reference in references[:4]), "memory is released as well"
    source.close()
    gc.collect()
    assert all(reference() is None for reference in references[:-1])


def test_reading_ahead_is_bounded_and_ends(reader: Any) -> None:
    batches: list[int] = []
    fourth = threading.Event()

    def read_many(indices: Any, field: str = "image") -> Sequence[Any]:
        batches.append(len(indices))
        if len(batches) > 3:
            fourth.set()
        return list(reader.read_many(indices, field))

    def reading() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "packer-rocal-ahead"]

    source = external_source(Wrapped(reader, read_many=read_many), 2, ahead=3, **grouped(ONE))
    assert batches == [], "nothing is read before an epoch begins"
    source.start()
    assert not fourth.wait(0.3)
    next(source)
    assert fourth.wait(300), "room for one more"
    source.close()
    assert reading() == []
    source.start()
    del source
    gc.collect()
    assert reading() == []


def test_results_before_an_error_are_handed_out() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise KeyError("two")
        return step

    ahead = Ahead(make, 5, 4, "test")
    assert (ahead.take(), ahead.take()) == (0, 1)
    for _ in range(2):
        with pytest.raises(KeyError, match="two"):
            ahead.take()
    ahead.stop()
    done = Ahead(lambda step: step, 1, 4, "test")
    assert done.take() == 0
    with pytest.raises(RuntimeError, match="no further batch"):
        done.take()


KINDS = ["PNG RGB", "PNG L", "PNG 1", "JPEG CMYK", "WEBP RGB", "GIF RGB", "BMP RGB", "TIFF RGB", "JPEG turned"]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_images_become_baseline_jpegs(kind: str) -> None:
    format, mode = kind.split()
    data = solid(9, exif=EXIF_TURNED) if mode == "turned" else solid(9, format, mode)
    image = vetted(data)
    jpeg = image.data.tobytes()
    assert image.reason and sampling(jpeg) == (0xC0, [0x11, 0x11, 0x11])
    before, after = decode_image(data), decode_image(jpeg)
    assert before.shape == after.shape and np.abs(before.astype(int) - after).mean() < 3
    with pytest.raises(BadSampleError, match=r"rocAL does not decode.*convert=True"):
        vetted(data, convert=False)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"subsampling": 2}])
def test_images_that_rocal_decodes_are_unchanged(options: dict[str, Any]) -> None:
    data = solid(9, **options)
    image = vetted(data, (10, 10), (40, 48))
    assert (image.reason, image.data.tobytes()) == ("", data)


def test_an_image_beyond_the_scales_of_the_decoder_is_reduced() -> None:
    """rocAL would crop it."""
    image = vetted(solid(9, size=(400, 100)), (20, 20), (100, 400))
    header = parse_header(image.data.tobytes())
    assert (header.height, header.width) == (40, 160) and "over 8 times 20 x 20" in image.reason
    assert np.abs(decode_image(image.data.tobytes()).astype(int) - colour(9)).max() <= 4


@pytest.mark.parametrize("cut", [3, 10, 150, -40, -2, -1])
def test_truncated_jpegs_are_bad_samples(cut: int) -> None:
    with pytest.raises(BadSampleError, match=r"truncated|expected"):
        vetted(solid(3)[:cut])


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(-1, 12, "JPEGs of 12 bits"), (6, 0x31, "JPEGs of unusual colour sampling"), (9, 0x21, "unusual colour sampling")],
)
def test_jpegs_of_which_turbojpeg_reads_only_the_header(at: int, value: int, reason: str) -> None:
    """rocAL would show uninitialised memory."""
    data = bytearray(solid(3))
    data[data.index(b"\xff\xc0") + 5 + at] = value
    with pytest.raises(BadSampleError, match=rf"rocAL does not decode .*{reason}"):
        vetted(bytes(data), convert=False)
    if value == 12:
        with pytest.raises(BadSampleError, match="has 12 bits a sample"):
            vetted(bytes(data))
    else:
        difference = np.abs(decode_image(vetted(bytes(data)).data.tobytes()).astype(int) - decode_image(bytes(data)))
        assert difference.mean() < 4


def test_damage_before_the_pixels_is_encoded_again() -> None:
    """TurboJPEG decodes nothing after a warning of libjpeg about the header."""
    image = vetted(solid(3).replace(b"\xff\xda", b"stray\xff\xda"), size=(40, 48))
    assert image.reason == "JPEGs with damage before their pixels"
    assert np.abs(decode_image(image.data.tobytes()).astype(int) - colour(3)).max() <= 4


def test_an_image_of_another_size_than_the_index_says() -> None:
    with pytest.raises(BadSampleError, match="the index says 41 x 48 pixels, found 40 x 48"):
        vetted(solid(3), size=(41, 48))


def test_without_conversion_such_images_are_bad_samples(tmp_path: Path) -> None:
    images = {number: solid(number) for number in range(8)} | {1: solid(1, "PNG"), 6: solid(6, mode="CMYK")}
    source = external_source(
        folder_of(tmp_path / "images", images), BATCH, shuffle=False, convert=False, on_error="skip", **grouped(ONE)
    )
    fed = fed_by(source, 2)
    assert [labels.tolist() for _, labels, _ in fed] == [[0, 2, 3, -1], [4, 5, 7, -1]]
    assert [(bad.key, bad.reason.partition(";")[0]) for bad in source.bad_samples] == [
        ("001/image1", "rocAL does not decode png images"),
        ("006/image6", "rocAL does not decode JPEGs of 4 components"),
    ]


def test_a_batch_without_a_good_sample(tmp_path: Path) -> None:
    """rocAL ends the process where it cannot decode any image of a batch."""
    images = {number: solid(number) if number > 3 else solid(number)[:-2] for number in range(8)}
    source = external_source(
        folder_of(tmp_path / "images", images), BATCH, shuffle=False, on_error="skip", **grouped(ONE)
    )
    (images_of_first, labels, _), (_, others, _) = fed_by(source, 2)
    assert labels.tolist() == [-1] * 4 and others.tolist() == [4, 5, 6, 7]
    assert all(decode_image(image.tobytes()).shape == (16, 16, 3) for image in images_of_first)


def test_substitutes_are_those_of_our_own_loader(tmp_path: Path) -> None:
    images = {number: solid(number) if number % 5 else solid(number)[:-2] for number in range(20)}
    reader = folder_of(tmp_path / "images", images)
    options: dict[str, Any] = {"seed": 5, "on_error": "substitute", **ONE}
    ours = ImageLoader(
        reader, BATCH, fields=["image", "index"], **grouped({"augment": [Resize((8, 8))], "threads": 1, **options})
    )
    with pytest.warns(UserWarning, match="4 bad samples were replaced"):
        wanted = [indices.tolist() for _, indices in ours]
    source = external_source(reader, BATCH, **grouped(options))
    assert [labels.tolist() for _, labels, _ in fed_by(source, 5)] == wanted
    assert [bad.index for bad in source.bad_samples] == [bad.index for bad in ours.bad_samples]


def test_limits_come_from_the_index(tmp_path: Path) -> None:
    images = {0: solid(0, size=(70, 30)), 1: solid(1, size=(20, 60), exif=EXIF_TURNED), 2: solid(2, size=(50, 40))}
    reader = folder_of(tmp_path / "images", images)
    source = external_source(reader, 2, **grouped(ONE))
    assert (source.max_height, source.max_width) == (40, 70), "upright, the second image is 60 wide and 20 high"
    source = external_source(reader, 2, max_height=33, **grouped(ONE))
    assert (source.max_height, source.max_width) == (33, 70)
    large = folder_of(tmp_path / "large", {0: solid(0, size=(1500, 16))})
    assert external_source(large, 2, **grouped(ONE)).max_width == 1024
    unknown = Wrapped(reader, info=reader.info._replace(height=np.zeros(3, np.uint32), width=np.zeros(3, np.uint32)))
    with pytest.raises(DatasetError, match="give max_height and max_width"):
        external_source(unknown, 2, **grouped(ONE))
    assert external_source(unknown, 2, max_height=9, max_width=8, **grouped(ONE)).max_width == 8


def test_labels_must_fit_into_32_bits(reader: Any) -> None:
    source = external_source(Wrapped(reader, labels=reader.labels + (1 << 31)), BATCH, **grouped(ONE))
    with pytest.raises(ValueError, match="labels of 32 bits"):
        next(source)
    source.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1}, "batch_size of 2 or more"),
        ({"on_error": "ignore"}, "on_error is one of raise, skip, substitute"),
        ({"quality": 80}, "quality is 95 to 100, not 80"),
        ({"ahead": 0}, "ahead is 1 or more"),
        ({"max_height": 0, "max_width": 5}, "max_height and max_width are 1 or more"),
        ({"rank": None}, "both rank and world_size or neither"),
        ({"rank": 3}, "rank 3 is outside the world of 1"),
        ({"tail": "keep"}, "tail must be one of"),
    ],
)
def test_options_are_checked(reader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        external_source(reader, **grouped({"batch_size": BATCH, **ONE, **options}))


def test_without_rocal_the_message_says_how_to_get_it(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amd", None)
    source = external_source(reader, BATCH, **grouped(ONE))
    with pytest.raises(MissingRocalError, match=r"no wheel.*install ROCm.*PYTHONPATH=/opt/rocm/lib") as caught:
        celeba(source, crop=Crop(0, 0, 32, 32))
    assert isinstance(caught.value, MissingExtraError) and isinstance(caught.value, ImportError)

    class Pipeline:
        _external_source = source

    with pytest.raises(MissingRocalError):
        RocalLoader(Pipeline(), source)
