"""CIFAR, MNIST's files and arrays of NumPy, in the layouts they are published in: pixels that become PNG."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import packer
from cache.errors import SourceError
from packer.testing.sources import Found, SourceSuite, found

RANDOM = np.random.default_rng(5)
NAMES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE = tuple(f"fine {number}" for number in range(100))
COARSE = tuple(f"coarse {number}" for number in range(20))


def drawn(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def decoded(data: bytes | None) -> np.ndarray:
    assert data is not None and data.startswith(b"\x89PNG")
    return np.asarray(Image.open(io.BytesIO(data)))


class OfPixels(SourceSuite):
    """What the source says must be pixels that are equal to `truth`, whose images are arrays; keys are numbers."""

    @pytest.fixture
    def pixels(self) -> dict[str, tuple[np.ndarray, list[int]]]:
        raise NotImplementedError

    @pytest.fixture
    def truth(self, root: Path, pixels: dict[str, tuple[np.ndarray, list[int]]]) -> Found:
        read = found(self.open(root))
        assert {name: len(samples) for name, samples in read.splits.items()} == {
            name: len(labels) for name, (_, labels) in pixels.items()
        }
        for name, (images, labels) in pixels.items():
            for number, (key, label, fields) in enumerate(read.splits[name]):
                assert (key, label) == (f"{name}/{number:08d}", labels[number])
                assert np.array_equal(decoded(fields[0]), images[number])
        return read


# --- CIFAR --------------------------------------------------------------------------------------------------------
def records(images: np.ndarray, *labels: list[int]) -> bytes:
    """Images [n, 32, 32, 3] as the binary version has them."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([*(np.array(its, np.uint8)[:, None] for its in labels), planes], axis=1).tobytes()


def cifar_10(root: Path, pixels: dict[str, tuple[np.ndarray, list[int]]]) -> Path:
    root.mkdir()
    (images, labels), (tests, test_labels) = pixels["train"], pixels["test"]
    (root / "data_batch_1.bin").write_bytes(records(images[:3], labels[:3]))
    (root / "data_batch_2.bin").write_bytes(records(images[3:], labels[3:]))
    (root / "test_batch.bin").write_bytes(records(tests, test_labels))
    (root / "batches.meta.txt").write_text("\n".join(NAMES_10) + "\n\n")
    return root


CIFAR = {"train": (drawn(7, 32, 32, 3), [3, 0, 9, 1, 1, 2, 5]), "test": (drawn(2, 32, 32, 3), [8, 3])}


class TestCifar10(OfPixels):
    @pytest.fixture
    def pixels(self) -> dict[str, tuple[np.ndarray, list[int]]]:
        return CIFAR

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return cifar_10(tmp_path / "cifar-10-batches-bin", CIFAR)

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in root.iterdir() if path.suffix == ".bin"}

    def test_names(self, root: Path) -> None:
        (root / "readme.html").write_text("about")
        listing = packer.open_source(root).list(None)
        assert listing.classes == NAMES_10 and dict(listing.left_out) == {"readme.html": "not a file of CIFAR"}


@pytest.fixture
def cifar_100(tmp_path: Path) -> Path:
    root = tmp_path / "cifar-100-binary"
    root.mkdir()
    images, labels = CIFAR["train"]
    (root / "train.bin").write_bytes(
        records(images, [label + 10 for label in labels], [label + 90 for label in labels])
    )
    (root / "fine_label_names.txt").write_text("\n".join(FINE))
    (root / "coarse_label_names.txt").write_text("\n".join(COARSE))
    return root


@pytest.mark.parametrize(
    ("label_column", "names", "more"), [(None, FINE, 90), ("fine", FINE, 90), ("coarse", COARSE, 10)]
)
def test_cifar_100(cifar_100: Path, label_column: str | None, names: tuple[str, ...], more: int) -> None:
    read = found(packer.open_source(cifar_100, label_column=label_column))
    assert (read.classes, read.fields) == (names, ("image", "json"))
    images, labels = CIFAR["train"]
    for number, (_, label, (image, record)) in enumerate(read.splits["train"]):
        assert label == labels[number] + more and np.array_equal(decoded(image), images[number])
        assert json.loads(record or b"") == {
            "coarse_label": labels[number] + 10,
            "coarse": COARSE[labels[number] + 10],
            "fine_label": labels[number] + 90,
            "fine": FINE[labels[number] + 90],
        }


class Reduced:
    """Pickles as a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def cifar_py(root: Path, protocol: int = 2, **more: Any) -> Path:
    """The version for Python. Those that are published were pickled by Python 2, whose strings are bytes."""
    root.mkdir()
    (images, labels), (tests, test_labels) = CIFAR["train"], CIFAR["test"]
    parts = {"data_batch_1": (images[:3], labels[:3]), "data_batch_2": (images[3:], labels[3:])}
    for name, (its, its_labels) in (parts | {"test_batch": (tests, test_labels)}).items():
        data = np.ascontiguousarray(its.transpose(0, 3, 1, 2).reshape(len(its), -1))
        # As many images as it takes for a string that is not short.
        repeated = {"data": np.tile(data, (12, 1)), "labels": its_labels * 12, "batch_label": name} | more
        (root / name).write_bytes(as_python_2(repeated, protocol))
    names = {"label_names": list(NAMES_10), "num_vis": 3072, "num_cases_per_batch": 10000}
    (root / "batches.meta").write_bytes(pickle.dumps(names, 0 if protocol == 2 else protocol))
    return root


def as_python_2(record: dict[str, Any], protocol: int) -> bytes:
    if protocol > 2:
        return pickle.dumps(record, protocol)
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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
class TestCifarForPython(OfPixels):
    damages = 200

    @pytest.fixture
    def pixels(self) -> dict[str, tuple[np.ndarray, list[int]]]:
        (images, labels), (tests, test_labels) = CIFAR["train"], CIFAR["test"]
        train = np.concatenate([np.tile(images[:3], (12, 1, 1, 1)), np.tile(images[3:], (12, 1, 1, 1))])
        return {
            "train": (train, labels[:3] * 12 + labels[3:] * 12),
            "test": (np.tile(tests, (12, 1, 1, 1)), test_labels * 12),
        }

    @pytest.fixture
    def root(self, tmp_path: Path, protocol: int) -> Path:
        return cifar_py(tmp_path / "cifar-10-batches-py", protocol)

    def open(self, root: Path) -> Any:
        source: Any = super().open(root)
        source.seconds = None  # listed in this process, which is quicker; other tests do otherwise
        return source

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in root.iterdir() if "_batch" in path.name}


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """What would call something else than NumPy's own functions is refused, and nothing is called."""
    for number, call in enumerate([(os.mkdir, (str(tmp_path / "made"),)), (eval, ("1 + 1",)), (print, ("x",))]):
        root = cifar_py(tmp_path / str(number), 4, data=Reduced(*call))
        with pytest.raises(
            SourceError, match="data_batch_1: a pickled file that is not read without running it: it calls"
        ):
            packer.open_source(root).list(None)
    assert not (tmp_path / "made").exists()


def test_batches_of_cifar_that_are_missing_are_named(tmp_path: Path) -> None:
    for root in (cifar_10(tmp_path / "binary", CIFAR), cifar_py(tmp_path / "pickled")):
        (warning,) = packer.open_source(root).list(None).warnings
        suffix = ".bin" if root.name == "binary" else ""
        missing = ", ".join(f"data_batch_{number}{suffix}" for number in (3, 4, 5))
        assert warning == f"{root}: files of CIFAR-10 are missing: {missing}"
        for number in (3, 4, 5):
            (root / f"data_batch_{number}{suffix}").write_bytes((root / f"data_batch_2{suffix}").read_bytes())
        assert not packer.open_source(root).list(None).warnings
        (root / f"test_batch{suffix}").unlink()
        (warning,) = packer.open_source(root).list(None).warnings
        assert f"missing: test_batch{suffix}" in warning


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("labels", [np.array([3, 0, 9]), [np.int64(3), np.int64(0), np.int64(9)], np.uint8([3, 0, 9])])
def test_cifar_that_was_pickled_again(tmp_path: Path, protocol: int, labels: Any) -> None:
    """A few images, labels of NumPy, images in four dimensions."""
    root = cifar_py(tmp_path / "cifar", 4)
    data = np.ascontiguousarray(CIFAR["train"][0][:3].transpose(0, 3, 1, 2))
    (root / "data_batch_1").write_bytes(pickle.dumps({b"data": data, b"labels": labels}, protocol))
    (root / "data_batch_2").unlink()
    listing = packer.open_source(root).list("train")
    assert listing.splits["train"].labels.tolist() == [3, 0, 9]
    assert [key for key, _, _ in found(packer.open_source(root), "train").splits["train"]]


def test_a_pickle_of_text_says_how_to_write_it(tmp_path: Path) -> None:
    """Its arrays are not in the file as they are, where workers could read them."""
    root = cifar_py(tmp_path / "cifar", 4)
    (root / "data_batch_1").write_bytes(pickle.dumps({b"data": drawn(30, 3072), b"labels": [0] * 30}, 2))
    with pytest.raises(SourceError, match="pickle it again with protocol=4"):
        packer.open_source(root).list(None)


def array_of(shape: bytes) -> bytes:
    """A dict with an array of this shape, which is written as the instructions of a pickle."""
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01" + shape
    return b"}U\x04data" + made + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x04abcdtbs."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (array_of(b"(" + b"J\xff\xff\xff\x7f" * 100_000 + b"t"), "not read without running it"),
        (b"}(" + b"".join(b"I%d\nN" % (n * ((1 << 61) - 1)) for n in range(90_000)) + b"u.", "takes more than 5 s"),
        (b"Np4000000000\n.", "memory"),
        (b"}" + b")" + b"q\x00h\x00\x86" * 60 + b"Ns.", "takes more than 5 s"),
    ],
    ids=["sides", "keys", "places", "hash"],
)
def test_a_pickle_that_takes_long_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """Each of these would take minutes, or all memory, in proportion to more than its size."""
    source: Any = packer.open_source(cifar_py(tmp_path / "cifar"))
    (source.root / "data_batch_1").write_bytes(data)
    source.seconds = 5.0
    with pytest.raises(SourceError, match=message):
        source.list(None)


@pytest.mark.parametrize(
    "data",
    [b"\x80\x02}q\x01.", b"\x80\x02]q\x01.", b"", b"\x80\x02", b"\x80\x02(.", b"h\x07.", b"\x80\x02}U\x04dataK\x01s.",
     b"B\xff\xff\xff\xff", b"e.", b"s.", b"R.", b"b.", b"\x87.", b"I1x\n.", b"cos\nsystem\n.", b"\x82\x01.",
     b"I" + b"1" * 9000],
)  # fmt: skip
def test_a_pickle_that_is_damaged(tmp_path: Path, data: bytes) -> None:
    source: Any = packer.open_source(cifar_py(tmp_path / "cifar"))
    (source.root / "data_batch_1").write_bytes(data)
    source.seconds = None
    with pytest.raises(SourceError, match="data_batch_1: "):
        source.list(None)


def test_cifar_that_is_damaged(tmp_path: Path) -> None:
    root = cifar_10(tmp_path / "cifar", CIFAR)
    with pytest.raises(SourceError, match="no labels called 'coarse'"):
        packer.open_source(root, label_column="coarse")
    data = (root / "test_batch.bin").read_bytes()
    (root / "test_batch.bin").write_bytes(b"\x0a" + data[1:])
    with pytest.raises(SourceError, match="record 0 has the label 10, but there are 10 classes"):
        packer.open_source(root).list(None)
    (root / "test_batch.bin").write_bytes(data[:-1])
    with pytest.raises(SourceError, match="a whole number of records of 3073"):
        packer.open_source(root).list(None)


# --- MNIST --------------------------------------------------------------------------------------------------------
def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


MNIST = {"train": (drawn(6, 28, 28), [7, 0, 1, 1, 9, 0]), "test": (drawn(3, 28, 28), [2, 1, 0])}


def mnist(root: Path, suffix: str = "", prefix: str = "", name: str = "{}-{}-idx{}-ubyte") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in (("train", MNIST["train"]), ("t10k", MNIST["test"])):
        for kind, values in (("images", images), ("labels", np.array(labels, np.uint8))):
            data = idx(values)
            path = root / (prefix + name.format(split, kind, values.ndim) + suffix)
            path.write_bytes(gzip.compress(data, mtime=0) if suffix else data)
    return root


@pytest.mark.parametrize(
    ("suffix", "below", "name"),
    [
        ("", "", "{}-{}-idx{}-ubyte"),
        (".gz", "", "{}-{}-idx{}-ubyte"),
        ("", "MNIST/raw", "{}-{}-idx{}-ubyte"),
        ("", "", "{}-{}.idx{}-ubyte"),
    ],
    ids=["plain", "gz", "torchvision", "dots"],
)
class TestMnist(OfPixels):
    damages = 200

    @pytest.fixture
    def pixels(self) -> dict[str, tuple[np.ndarray, list[int]]]:
        return MNIST

    @pytest.fixture
    def root(self, tmp_path: Path, suffix: str, below: str, name: str) -> Path:
        mnist(tmp_path / "mnist" / below, suffix, name=name)
        return tmp_path / "mnist"

    def data_files(self, root: Path) -> set[Path]:
        return {path for path in self.files(root) if "images" in path.name}


def mnist_gz(root: Path) -> Path:
    return mnist(root, ".gz")


def test_a_set_among_several_of_mnist(tmp_path: Path) -> None:
    for prefix in ("emnist-letters-", "emnist-digits-"):
        mnist(tmp_path, ".gz", prefix)
    (tmp_path / "emnist-digits-mapping.txt").write_text("".join(f"{n} {48 + n}\n" for n in range(10)))
    with pytest.raises(SourceError, match="has the sets emnist-digits, emnist-letters; name a file of the one"):
        packer.open_source(tmp_path).list(None)
    listing = packer.open_source(tmp_path / "emnist-digits-train-images-idx3-ubyte.gz").list(None)
    assert {name: list(part.labels) for name, part in listing.splits.items()} == {
        name: labels for name, (_, labels) in MNIST.items()
    }
    assert listing.classes == tuple("0123456789") and not listing.shuffles
    assert {reason for _, reason in listing.left_out} == {"of another set"}


def test_labels_of_mnist(tmp_path: Path) -> None:
    """From 1 on, as those of EMNIST's letters; none; a compressed twin next to each file."""
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


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", idx(drawn(6, 28, 28))[:-1], "expected 4,720 for .6, 28, 28.: truncated"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + idx(drawn(6, 28, 28))[4:], "begins with 00 00 0d 03"),
        ("train-labels-idx1-ubyte", idx(drawn(5)), "has 5 labels, but train-images-idx3-ubyte has 6 images"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03" + struct.pack(">III", 1, 1 << 31, 1 << 31), "truncated"),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 1 << 31, 28, 28)),
            "more than gzip unpacks to",
        ),
    ],
    ids=["short", "type", "labels", "size", "bomb"],
)
def test_mnist_that_is_damaged(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    root = mnist(tmp_path / "mnist")
    (root / name.removesuffix(".gz")).unlink()
    (root / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        packer.open_source(root).list(None)


# --- NumPy --------------------------------------------------------------------------------------------------------
ARRAYS = {"train": (drawn(6, 9, 7, 3), [2, 0, 1, 0, 2, -1]), "test": (drawn(3, 9, 7, 3), [1, 0, 0])}
SHAPES = {
    "last": lambda images: images,
    "first": lambda images: np.ascontiguousarray(images.transpose(0, 3, 1, 2)),
    "grey": lambda images: images[..., 0].copy(),
    "one": lambda images: images[..., :1].copy(),
    "alpha": lambda images: np.concatenate([images, images[..., :1]], axis=-1),
}


@pytest.mark.parametrize(
    ("shape", "container"),
    [("last", "folder"), ("first", "npz"), ("grey", "compressed"), ("one", "compressed"), ("alpha", "npz")],
)
class TestArrays(OfPixels):
    damages = 200

    @pytest.fixture
    def pixels(self, shape: str) -> dict[str, tuple[np.ndarray, list[int]]]:
        seen = {"first": lambda images: images, "one": SHAPES["grey"]}.get(shape, SHAPES[shape])
        return {name: (seen(images), labels) for name, (images, labels) in ARRAYS.items()}

    @pytest.fixture
    def root(self, tmp_path: Path, shape: str, container: str) -> Path:
        arrays = {}
        for name, (images, labels) in ARRAYS.items():
            arrays |= {f"x_{name}": SHAPES[shape](images), f"y_{name}": np.array(labels)[:, None]}
        if container != "folder":
            save = np.savez if container == "npz" else np.savez_compressed
            save(tmp_path / "arrays.npz", **arrays)
            return tmp_path / "arrays.npz"
        (tmp_path / "arrays").mkdir()
        for name, array in arrays.items():
            np.save(tmp_path / "arrays" / f"{name}.npy", array)
        return tmp_path / "arrays"


def test_arrays_without_splits(tmp_path: Path) -> None:
    """Labels that are names; the file of the images, whose labels are beside it; other arrays."""
    root = tmp_path / "val"
    root.mkdir()
    images = drawn(3, 4, 5)
    np.save(root / "images.npy", images)
    np.save(root / "labels.npy", np.array(["dog", "cat", "dog"]))
    np.save(root / "boxes.npy", np.zeros((3, 4)))
    for path in (root, root / "images.npy"):
        read = found(packer.open_source(path))
        assert read.classes == ("cat", "dog") and list(read.splits) == ["val" if path == root else "train"]
        (samples,) = read.splits.values()
        assert [label for _, label, _ in samples] == [1, 0, 1]
        assert all(np.array_equal(decoded(its[0]), image) for (_, _, its), image in zip(samples, images, strict=True))
    assert packer.open_source(root).list(None).left_out == [("boxes.npy", "no array of images or labels")]
    np.save(tmp_path / "pictures.npy", images)
    assert set(packer.open_source(tmp_path / "pictures.npy").list("test").splits["test"].labels) == {-1}


def arrays_in(root: Path) -> Path:
    root.mkdir()
    np.save(root / "images.npy", drawn(3, 4, 5))
    np.save(root / "labels.npy", np.arange(3))
    return root


def header(shape: tuple[int, ...], dtype: str = "|u1", order: bool = False, length: int | None = None) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) if length is None else length) + text


def zipped(data: bytes, claims: int | None = None) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", data)
    packed = bytearray(memory.getvalue())
    if claims is not None:
        at = packed.index(b"PK\1\2") + 24
        packed[at : at + 4] = struct.pack("<I", claims)
    return bytes(packed)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("images.npy", header((9, 4, 4)) + bytes(143), "expected 2.. for .9, 4, 4.: truncated"),
        ("images.npy", header((1 << 40, 1, 1)), "truncated"),
        ("images.npy", header((2, 4, 4), "<f4") + bytes(128), "an array of float32, expected images of uint8; if its"),
        ("images.npy", header((2, 4, 4), "|O") + bytes(128), "holds objects, which are pickled"),
        ("images.npy", header((2, 4, 4), order=True) + bytes(32), "in the order of Fortran"),
        ("images.npy", header((2, 5, 5, 7)) + bytes(350), "expected images .n, height, width."),
        ("images.npy", header((2, 4, 4), length=60000) + bytes(32), "claims a header of 60,000 bytes"),
        ("images.npy", b"\x93NUMPY\1\0\x10\0" + b"__import__('os')" + bytes(9), "a header that cannot be read"),
        ("images.npz", zipped(header((9, 4, 4)) + bytes(9)), "truncated"),
        ("images.npz", zipped(header((1 << 20, 32, 32)), 1 << 30), "claims 1,073,741,824 bytes, more than"),
        ("images.npz", zipped(header((2, 4, 4)) + bytes(32))[:-9], "not a .npz, or truncated"),
    ],
    ids=["short", "count", "float", "objects", "fortran", "shape", "header", "code", "member", "bomb", "archive"],
)
def test_arrays_that_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        packer.open_source(tmp_path / name).list(None)


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
    with pytest.raises(SourceError, match=message):
        packer.open_source(tmp_path / "x.npz").list(None)


def test_a_file_that_changes(tmp_path: Path) -> None:
    root = cifar_10(tmp_path / "cifar", CIFAR)
    source: Any = packer.open_source(root)
    source.list(None)
    (root / "data_batch_1.bin").write_bytes(records(*CIFAR["test"]))
    with pytest.raises(SourceError, match="has changed since it was listed"), source.open():
        pass
