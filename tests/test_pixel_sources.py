"""CIFAR, MNIST files and NumPy arrays, in their published layouts: pixels that become PNG."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites.layouts import Layout, LayoutSuite, decoded, refusal

import packer
from cache.errors import SourceError
from packer.testing.sources import Content, content_of

RANDOM = np.random.default_rng(5)
NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE = tuple(f"fine {number}" for number in range(100))
COARSE = tuple(f"coarse {number}" for number in range(20))
Pixels = dict[str, tuple[np.ndarray, list[int]]]  # images and labels by split


def drawn(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def showing(pixels: Pixels) -> Callable[[Path], Content]:
    """The content of a source whose images show these pixels; keys are numbers."""

    def truth(root: Path) -> Content:
        source: Any = packer.open_source(root)
        source.seconds = None
        read = content_of(source)
        assert {name: len(samples) for name, samples in read.splits.items()} == {
            name: len(labels) for name, (_, labels) in pixels.items()
        }
        for name, (images, labels) in pixels.items():
            for number, (key, label, fields) in enumerate(read.splits[name]):
                assert (key, label) == (f"{name}/{number:08d}", labels[number])
                assert np.array_equal(decoded(fields[0]), images[number])
        return read

    return truth


# --- CIFAR --------------------------------------------------------------------------------------------------------
CIFAR: Pixels = {"train": (drawn(7, 32, 32, 3), [3, 0, 9, 1, 1, 2, 5]), "test": (drawn(2, 32, 32, 3), [8, 3])}
(TRAIN, TRAIN_LABELS), (TEST, TEST_LABELS) = CIFAR.values()


def planes(images: np.ndarray) -> np.ndarray:
    """Images [n, 32, 32, 3] as rows of red, green and blue."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), -1))


def records(images: np.ndarray, *labels: list[int]) -> bytes:
    columns = (np.array(numbers, np.uint8)[:, None] for numbers in labels)
    return np.concatenate([*columns, planes(images)], axis=1).tobytes()


def cifar_10(root: Path) -> Path:
    root.mkdir()
    (root / "data_batch_1.bin").write_bytes(records(TRAIN[:3], TRAIN_LABELS[:3]))
    (root / "data_batch_2.bin").write_bytes(records(TRAIN[3:], TRAIN_LABELS[3:]))
    (root / "test_batch.bin").write_bytes(records(TEST, TEST_LABELS))
    (root / "batches.meta.txt").write_text("\n".join(NAMES_10) + "\n\n")
    return root


class Reduced:
    """Is pickled as the call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


# Enough images for a pickled string that is not short.
MANY: Pixels = {
    "train": (np.concatenate([np.tile(some, (12, 1, 1, 1)) for some in (TRAIN[:3], TRAIN[3:])]),
              TRAIN_LABELS[:3] * 12 + TRAIN_LABELS[3:] * 12),
    "test": (np.tile(TEST, (12, 1, 1, 1)), TEST_LABELS * 12),
}  # fmt: skip


def cifar_py(root: Path, protocol: int = 2, **more: Any) -> Path:
    """The version for Python. The published files were pickled by Python 2, whose strings are bytes."""
    root.mkdir()
    (images, labels), (tests, test_labels) = MANY.values()
    parts = {"data_batch_1": (images[:36], labels[:36]), "data_batch_2": (images[36:], labels[36:])}
    for name, (part_images, part_labels) in (parts | {"test_batch": (tests, test_labels)}).items():
        record = {"data": planes(part_images), "labels": part_labels, "batch_label": name} | more
        (root / name).write_bytes(pickle.dumps(record, protocol) if protocol > 2 else as_python_2(record))
    names = {"label_names": list(NAMES_10), "num_vis": 3072, "num_cases_per_batch": 10000}
    (root / "batches.meta").write_bytes(pickle.dumps(names, 0 if protocol == 2 else protocol))
    return root


def as_python_2(record: dict[str, Any]) -> bytes:
    data = record.pop("data")
    state = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05(cnumpy\nndarray\nq\x06K\x00\x85U\x01btRq\x07(K\x01"
        + struct.pack("<BHBHB", ord("M"), data.shape[0], ord("M"), data.shape[1], 0x86)
        + b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + b"T" + struct.pack("<I", data.nbytes) + data.tobytes() + b"tb"
    )  # fmt: skip
    rest = pickle.dumps(record, 2)
    assert rest.endswith(b"u.")
    return rest[:-2] + b"U\x04data" + state + b"u."


def test_names_of_cifar(tmp_path: Path) -> None:
    (cifar_10(tmp_path / "cifar") / "readme.html").write_text("about")
    listing = packer.open_source(tmp_path / "cifar").list(None)
    assert listing.classes == NAMES_10 and dict(listing.left_out) == {"readme.html": "not a file of CIFAR"}


@pytest.mark.parametrize(
    ("label_column", "names", "more"), [(None, FINE, 90), ("fine", FINE, 90), ("coarse", COARSE, 10)]
)
def test_cifar_100(tmp_path: Path, label_column: str | None, names: tuple[str, ...], more: int) -> None:
    labels = [label + 10 for label in TRAIN_LABELS], [label + 90 for label in TRAIN_LABELS]
    (tmp_path / "train.bin").write_bytes(records(TRAIN, *labels))
    for name, words in (("fine", FINE), ("coarse", COARSE)):
        (tmp_path / f"{name}_label_names.txt").write_text("\n".join(words))
    read = content_of(packer.open_source(tmp_path, label_column=label_column))
    assert (read.classes, read.fields) == (names, ("image", "json"))
    for number, (_, label, (image, record)) in enumerate(read.splits["train"]):
        assert label == TRAIN_LABELS[number] + more and np.array_equal(decoded(image), TRAIN[number])
        coarse, fine = labels[0][number], labels[1][number]
        expected = {"coarse_label": coarse, "coarse": COARSE[coarse], "fine_label": fine, "fine": FINE[fine]}
        assert json.loads(record or b"") == expected


def test_missing_cifar_batches_are_named(tmp_path: Path) -> None:
    root = cifar_10(tmp_path / "binary")
    (warning,) = packer.open_source(root).list(None).warnings
    missing = ", ".join(f"data_batch_{number}.bin" for number in (3, 4, 5))
    assert warning == f"{root}: files of CIFAR-10 are missing: {missing}"
    for number in (3, 4, 5):
        (root / f"data_batch_{number}.bin").write_bytes((root / "data_batch_2.bin").read_bytes())
    assert not packer.open_source(root).list(None).warnings
    (root / "test_batch.bin").unlink()
    (warning,) = packer.open_source(root).list(None).warnings
    assert "missing: test_batch.bin" in warning


def pickled(root: Path, data: bytes, seconds: float | None = None) -> Any:
    """A source with this data as its first batch, read in this process unless a time limit is set."""
    source: Any = packer.open_source(cifar_py(root, 4))
    (root / "data_batch_1").write_bytes(data)
    source.seconds = seconds
    return source


@pytest.mark.parametrize(
    ("protocol", "labels"),
    [(3, np.array([3, 0, 9])), (4, [np.int64(3), np.int64(0), np.int64(9)]), (5, np.uint8([3, 0, 9]))],
)
def test_repickled_cifar(tmp_path: Path, protocol: int, labels: Any) -> None:
    """A few images, NumPy labels, images in four dimensions."""
    data = np.ascontiguousarray(TRAIN[:3].transpose(0, 3, 1, 2))
    source = pickled(tmp_path / "cifar", pickle.dumps({b"data": data, b"labels": labels}, protocol))
    (tmp_path / "cifar/data_batch_2").unlink()
    read = content_of(source, "train").splits["train"]
    assert [label for _, label, _ in read] == [3, 0, 9]
    assert all(np.array_equal(decoded(fields[0]), TRAIN[i]) for i, (_, _, fields) in enumerate(read))


@pytest.mark.parametrize("call", [(os.mkdir, ("made",)), (eval, ("1 + 1",)), (print, ("x",))], ids=repr)
def test_a_pickle_runs_no_code(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that calls functions other than those of NumPy is refused, and none is called."""
    monkeypatch.chdir(tmp_path)
    source = pickled(tmp_path / "cifar", pickle.dumps({"data": Reduced(*call)}, 4), 60.0)
    with pytest.raises(SourceError, match=r"data_batch_1: .* without running code from it: it calls"):
        source.list(None)
    assert not (tmp_path / "made").exists()


def array_of(shape: bytes) -> bytes:
    """A dict with an array of this shape, written as pickle instructions."""
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01" + shape
    return b"}U\x04data" + made + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x04abcdtbs."


@pytest.mark.parametrize(
    ("data", "seconds", "message"),
    [
        (array_of(b"(" + b"J\xff\xff\xff\x7f" * 100_000 + b"t"), 60, "cannot be read without running code from it"),
        (b"}(" + b"".join(b"I%d\nN" % (n * ((1 << 61) - 1)) for n in range(90_000)) + b"u.", 2, "takes more than 2 s"),
        (b"Np4000000000\n.", 60, "memory"),
        (b"}" + b")" + b"q\x00h\x00\x86" * 60 + b"Ns.", 2, "takes more than 2 s"),
    ],
    ids=["sides", "keys", "places", "hash"],
)
def test_a_pickle_that_takes_long_is_refused(tmp_path: Path, data: bytes, seconds: float, message: str) -> None:
    """Each of these pickles would take minutes or all memory, far out of proportion to its size."""
    with pytest.raises(SourceError, match=message):
        pickled(tmp_path / "cifar", data, seconds).list(None)


def test_a_damaged_pickle(tmp_path: Path) -> None:
    text = pickle.dumps({b"data": drawn(30, 3072), b"labels": [0] * 30}, 2)
    source = pickled(tmp_path / "cifar", text)  # its array is not stored as raw bytes that workers could read
    with pytest.raises(SourceError, match="pickle it again with protocol=4"):
        source.list(None)
    for data in (
        b"\x80\x02}q\x01.", b"\x80\x02]q\x01.", b"", b"\x80\x02", b"\x80\x02(.", b"h\x07.",
        b"\x80\x02}U\x04dataK\x01s.",
        b"B\xff\xff\xff\xff", b"e.", b"s.", b"R.", b"b.", b"\x87.", b"I1x\n.", b"cos\nsystem\n.", b"\x82\x01.",
        b"I" + b"1" * 9000,
    ):  # fmt: skip
        (tmp_path / "cifar/data_batch_1").write_bytes(data)
        with pytest.raises(SourceError, match="data_batch_1: "):
            source.list(None)


def test_damaged_cifar(tmp_path: Path) -> None:
    root = cifar_10(tmp_path / "cifar")
    assert "no labels called 'coarse'" in refusal(root, label_column="coarse")
    data = (root / "test_batch.bin").read_bytes()
    (root / "test_batch.bin").write_bytes(b"\x0a" + data[1:])
    assert "record 0 has the label 10, but there are 10 classes" in refusal(root)
    (root / "test_batch.bin").write_bytes(data[:-1])
    assert "a whole number of records of 3073" in refusal(root)


# --- MNIST --------------------------------------------------------------------------------------------------------
def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


MNIST: Pixels = {"train": (drawn(6, 28, 28), [7, 0, 1, 1, 9, 0]), "test": (drawn(3, 28, 28), [2, 1, 0])}


def mnist(root: Path, suffix: str = "", prefix: str = "", name: str = "{}-{}-idx{}-ubyte") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in (("train", MNIST["train"]), ("t10k", MNIST["test"])):
        for kind, values in (("images", images), ("labels", np.array(labels, np.uint8))):
            data = idx(values)
            path = root / (prefix + name.format(split, kind, values.ndim) + suffix)
            path.write_bytes(gzip.compress(data, mtime=0) if suffix else data)
    return root


def test_one_of_several_mnist_sets(tmp_path: Path) -> None:
    for prefix in ("emnist-letters-", "emnist-digits-"):
        mnist(tmp_path, ".gz", prefix)
    (tmp_path / "emnist-digits-mapping.txt").write_text("".join(f"{n} {48 + n}\n" for n in range(10)))
    assert "has the sets emnist-digits, emnist-letters; name a file of one of them" in refusal(tmp_path)
    listing = packer.open_source(tmp_path / "emnist-digits-train-images-idx3-ubyte.gz").list(None)
    labels = {name: list(part.labels) for name, part in listing.splits.items()}
    assert labels == {name: labels for name, (_, labels) in MNIST.items()}
    assert listing.classes == tuple("0123456789") and not listing.shuffles
    assert {reason for _, reason in listing.left_out} == {"of another set"}


def test_labels_of_mnist(tmp_path: Path) -> None:
    """Labels from 1, as those of EMNIST's letters; no labels; a compressed twin next to each file; names with dots."""
    root = mnist(tmp_path / "mnist")
    mnist(root, ".gz")
    (root / "train-labels-idx1-ubyte").write_bytes(idx(np.array([1, 2, 3, 1, 2, 3], np.uint8)))
    for path in root.glob("t10k-labels*"):
        path.unlink()
    listing = packer.open_source(root).list(None)
    assert list(listing.splits["train"].labels) == [1, 2, 3, 1, 2, 3] and set(listing.splits["test"].labels) == {-1}
    assert dict(listing.left_out)["train-images-idx3-ubyte.gz"] == "compressed, next to the same file unpacked"
    only = packer.open_source(root, label_offset=1).list("train")
    assert list(only.splits["train"].labels) == [0, 1, 2, 0, 1, 2]
    dotted = packer.open_source(mnist(tmp_path / "dots", name="{}-{}.idx{}-ubyte")).list(None)
    assert list(dotted.splits["train"].labels) == MNIST["train"][1]


IMAGES = "train-images-idx3-ubyte"
BOMB = gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 1 << 31, 28, 28))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (IMAGES, idx(drawn(6, 28, 28))[:-1], "expected 4,720 for [6, 28, 28]: truncated"),
        (IMAGES, b"\0\0\x0d\x03" + idx(drawn(6, 28, 28))[4:], "begins with 00 00 0d 03"),
        (IMAGES, b"\0\0\x08\x03" + struct.pack(">III", 1, 1 << 31, 1 << 31), "truncated"),
        (f"{IMAGES}.gz", BOMB, "more than gzip unpacks to"),
        ("train-labels-idx1-ubyte", idx(drawn(5)), "has 5 labels, but train-images-idx3-ubyte has 6 images"),
    ],
    ids=["short", "type", "size", "bomb", "labels"],
)
def test_damaged_mnist(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    root = mnist(tmp_path / "mnist")
    (root / name.removesuffix(".gz")).unlink()
    (root / name).write_bytes(data)
    assert message in refusal(root)


# --- NumPy --------------------------------------------------------------------------------------------------------
ARRAYS: Pixels = {"train": (drawn(6, 9, 7, 3), [2, 0, 1, 0, 2, -1]), "test": (drawn(3, 9, 7, 3), [1, 0, 0])}


def arrays(images: Callable[[np.ndarray], np.ndarray], save: Callable[..., None] | None) -> Callable[[Path], Path]:
    """Writes the arrays as one kind of image source; save: into one archive, or each into a separate file."""

    def write(folder: Path) -> Path:
        of = {f"x_{name}": images(values) for name, (values, _) in ARRAYS.items()}
        of |= {f"y_{name}": np.array(labels)[:, None] for name, (_, labels) in ARRAYS.items()}
        if save is not None:
            save(folder / "arrays.npz", **of)
            return folder / "arrays.npz"
        (folder / "arrays").mkdir()
        for name, array in of.items():
            np.save(folder / "arrays" / f"{name}.npy", array)
        return folder / "arrays"

    return write


def shown(images: Callable[[np.ndarray], np.ndarray] = lambda images: images) -> Callable[[Path], Content]:
    return showing({name: (images(values), labels) for name, (values, labels) in ARRAYS.items()})


def planar(images: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def with_alpha(images: np.ndarray) -> np.ndarray:
    return np.concatenate([images, images[..., :1]], axis=-1)


def test_grey_arrays_with_and_without_a_channel(tmp_path: Path) -> None:
    truth = shown(lambda images: images[..., 0])
    for number, images in enumerate((lambda images: images[..., :1].copy(), lambda images: images[..., 0].copy())):
        (tmp_path / str(number)).mkdir()
        truth(arrays(images, np.savez_compressed)(tmp_path / str(number)))


def test_arrays_without_splits(tmp_path: Path) -> None:
    """Labels that are names; a file of images with its labels next to it; other arrays."""
    root, images = tmp_path / "val", drawn(3, 4, 5)
    root.mkdir()
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", np.array(["dog", "cat", "dog"]))
    np.save(root / "boxes.npy", np.zeros((3, 4)))
    for path in (root, root / "images.npy"):
        read = content_of(packer.open_source(path))
        assert read.classes == ("cat", "dog") and list(read.splits) == ["val" if path == root else "train"]
        (samples,) = read.splits.values()
        assert [label for _, label, _ in samples] == [1, 0, 1]
        assert all(np.array_equal(decoded(row[0]), image) for (_, _, row), image in zip(samples, images, strict=True))
    assert packer.open_source(root).list(None).left_out == [("boxes.npy", "no array of images or labels")]
    np.save(tmp_path / "pictures.npy", images)
    assert set(packer.open_source(tmp_path / "pictures.npy").list("test").splits["test"].labels) == {-1}


def header(shape: tuple[int, ...], dtype: str = "|u1", order: bool = False, length: int | None = None) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) if length is None else length) + text


def zipped(data: bytes, claims: int | None = None, name: str = "images.npy") -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # without the time: tests are named by it
    packed = bytearray(memory.getvalue())
    if claims is not None:
        at = packed.index(b"PK\1\2") + 24
        packed[at : at + 4] = struct.pack("<I", claims)
    return bytes(packed)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("images.npy", header((9, 4, 4)) + bytes(143), "for [9, 4, 4]: truncated"),
        (
            "images.npy",
            header((2, 4, 4), "<f4") + bytes(128),
            "of float32, expected images of uint8: [n, height, width], with",
        ),
        ("x.npy", header((2,), "<f4") + bytes(8), "expected images of uint8, or other numbers [n, …]"),
        ("x.npy", header((2, 2), "<M8[s]") + bytes(32), "expected images of uint8, or other numbers [n, …]"),
        ("z.npz", zipped(header((2, 4, 4)) + bytes(32), name="z.npy"), "name the array of the samples with image_key"),
        ("images.npy", header((2, 4, 4), "|O") + bytes(128), "holds pickled objects"),
        ("images.npy", header((2, 4, 4), order=True) + bytes(32), "in Fortran order"),
        ("images.npy", header((2, 5, 5, 7)) + bytes(350), "image_key='images'"),
        ("images.npy", header((2, 4, 4), length=60000) + bytes(32), "claims a header of 60,000 bytes"),
        ("images.npy", b"\x93NUMPY\1\0\x10\0" + b"__import__('os')" + bytes(9), "a header that cannot be read"),
        ("images.npz", zipped(header((9, 4, 4)) + bytes(9)), "truncated"),
        ("images.npz", zipped(header((1 << 20, 32, 32)), 1 << 30), "claims 1,073,741,824 bytes, more than"),
        ("images.npz", zipped(header((2, 4, 4)) + bytes(32))[:-9], "not a .npz, or truncated"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert message in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1]), "expected 3 labels"),
        (np.array([0.5, 1, 2]), "expected 3 labels, which are whole numbers or names"),
        (np.array([0, -7, 2]), "label 1 is -7: classes count from 0"),
        (np.eye(3, dtype=np.uint8), "expected 3 labels"),
    ],
    ids=["count", "float", "negative", "matrix"],
)
def test_labels_of_arrays_that_are_refused(tmp_path: Path, labels: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "x.npz", images=drawn(3, 4, 4), labels=labels)
    assert message in refusal(tmp_path / "x.npz")


# --- the contract -------------------------------------------------------------------------------------------------
def cifar_layout(protocol: int) -> Layout:
    """Pickles are listed in this process, which is faster; other tests use a separate process."""
    return Layout(lambda folder: cifar_py(folder / "cifar", protocol), showing(MANY), "*_batch*",
                  inside={"seconds": None}, damages=200)  # fmt: skip


LAYOUTS = {
    "cifar": Layout(lambda folder: cifar_10(folder / "cifar"), showing(CIFAR), "*.bin"),
    "cifar of python 2": cifar_layout(2),
    "cifar of python 3": cifar_layout(5),
    "mnist of torchvision": Layout(
        lambda folder: mnist(folder / "mnist/MNIST/raw").parents[1], showing(MNIST), "*images*", damages=200
    ),
    "mnist packed": Layout(lambda folder: mnist(folder / "mnist", ".gz"), showing(MNIST), "*images*", damages=200),
    "arrays in files": Layout(arrays(lambda images: images, None), shown(), damages=200),
    "arrays in an archive": Layout(arrays(planar, np.savez), shown(), damages=200),
    "arrays packed": Layout(arrays(with_alpha, np.savez_compressed), shown(with_alpha), damages=200),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
class TestPixels(LayoutSuite):
    pass
