"""ILSVRC (ImageNet): classes are folders in train; those of val are in a table, or in the development kit.

    Data/CLS-LOC/{train,val,test}      the images; in train, one folder per class
    Annotations/CLS-LOC/{train,val}    boxes of some of them, in XML: fields boxes and box_labels
    LOC_val_solution.csv               `ILSVRC2012_val_00048981,n03995372 85 1 499 272`: the classes of val
    {train,val,test}, or the images    the same names, next to that table; also val alone, with the table above it
    ILSVRC2012_img_train.tar, …        see below

Classes are the synset names, sorted, numbered as in torchvision. An image of val that the table does not name has no
label, with a warning.

Boxes count from 0. Some annotations refer to another size than that of the file, so coordinates are scaled from the
size that they state; corners are ordered, and clipped to the image.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from cache.errors import BadSampleError, MissingExtraError, SourceError
from cache.files import read_regular
from cache.messages import listed, plural
from packer.formats.base import Arena
from packer.sources.base import FieldNames, Source, SourceListing, SplitListing, choose_split, of_sample, refusing
from packer.sources.folder import FolderReader, FolderSource
from packer.sources.layouts import SOLUTION, find_solution, ilsvrc_tars
from packer.sources.objects import MAX_XML_BYTES, grid_of, parse_objects
from packer.sources.several import SeveralSources
from packer.sources.tables import open_table
from packer.sources.tar_archive import TarSource
from readers.fields import encode_field
from readers.opening.tree import SPLIT_NAMES, has_image_suffix, key_of_name
from readers.table import NO_LABEL, Buffer, Strings

__all__ = []


# ------------------------------------------------------------------------------
# The classes of ILSVRC images that are in no class folder: from a table, or from the development kit.


_IMAGE, _CLASS = "ImageId", "PredictionString"
_TRUTH, _META = re.compile(r".*/ILSVRC(\d{4})_validation_ground_truth\.txt"), "/data/meta.mat"
_MAX_KIT_BYTES = 64 << 20


def give_labels(listing: SourceListing, solution: Mapping[str, str], where: str) -> None:
    """Give unlabelled images the label from a table (name without suffix -> class), and number all classes.

    Classes of train come first, so that an image of train has the same label with any table.
    """
    before = listing.classes
    new_classes = sorted({*solution.values()}.difference(before))
    listing.classes = (*before, *new_classes)
    numbers = {name: number for number, name in enumerate(listing.classes)}
    new = np.array([*(numbers[name] for name in before), NO_LABEL], np.int64)
    listing.warnings = [text for text in listing.warnings if "has a label" not in text]
    if before and new_classes:
        count = plural(len(new_classes), "class")
        listing.warnings.append(f"{where}: {count} of val that train lacks: {listed(new_classes)}; they follow its own")
    for name, part in listing.splits.items():
        labels = new[part.labels]  # -1 selects the last one
        unlabelled = np.array([row for row in np.flatnonzero(labels == NO_LABEL).tolist() if name != "test"
                               and has_image_suffix(part.names[row][0])], np.int64)  # fmt: skip
        for row in unlabelled.tolist():
            stem = PurePosixPath(key_of_name(part.names[row][0])).name
            labels[row] = numbers.get(solution.get(stem, ""), NO_LABEL)
        missing = int((labels[unlabelled] == NO_LABEL).sum())
        if missing:
            listing.warnings.append(
                f"{where}: {plural(missing, 'image')} of {name} without a label: put {SOLUTION}, or the development "
                f"kit (ILSVRC2012_devkit_t12.tar.gz) for archives, there"
            )
        part.labels = labels


def read_solution(path: Path) -> dict[str, str]:
    """The class of each image of val, by its name without suffix. Raises SourceError."""
    table = open_table(path)
    if {_IMAGE, _CLASS} - {*table.columns}:
        raise SourceError(f"{path}: has the columns {', '.join(table.columns)}, expected {_IMAGE} and {_CLASS}")
    labels: dict[str, str] = {}
    for line, row in table.rows():
        name, words = str(row[_IMAGE]), str(row[_CLASS]).split()
        if not words or not (words[0].isascii() and words[0].isalnum()):
            raise SourceError(
                f"{table.where(line)}: {row[_CLASS]!r:.40} does not begin with a synset such as n03995372"
            )
        if labels.setdefault(name, words[0]) != words[0]:
            raise SourceError(f"{table.where(line)}: {name!r} for the second time, with another class")
    return labels


def read_kit(path: Path) -> dict[str, str]:
    """The class of each image of val, by its name without suffix, from the development kit. Raises SourceError."""
    truth, meta, year = b"", b"", "2012"
    with refusing(path), tarfile.open(path) as archive:
        try:
            for member in archive:
                match = _TRUTH.fullmatch(member.name)
                if member.size > _MAX_KIT_BYTES:
                    raise SourceError(f"{path}: {member.name} has {member.size:,} bytes, expected {_MAX_KIT_BYTES:,}")
                file = archive.extractfile(member) if match or member.name.endswith(_META) else None
                if file is not None and match:
                    truth, year = file.read(), match[1]
                elif file is not None:
                    meta = file.read()
        except tarfile.TarError as error:
            raise SourceError(f"{path}: cannot be read: {error}") from error
    if not truth or not meta:
        raise SourceError(f"{path}: has no data/ILSVRC{year}_validation_ground_truth.txt and {_META[1:]}")
    synsets = _synsets(meta, path)
    lines = truth.decode("ascii", "replace").split()
    unknown = next((number for number, text in enumerate(lines, 1) if text not in synsets), None)
    if unknown is not None:
        raise SourceError(
            f"{path}: image {unknown} is of the class {lines[unknown - 1]!r:.20}, which meta.mat does not have"
        )
    return {f"ILSVRC{year}_val_{number:08d}": synsets[text] for number, text in enumerate(lines, 1)}


def _synsets(meta: bytes, path: Path) -> dict[str, str]:
    """The synset of each number, as text, from meta.mat."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "ilsvrc", "reading meta.mat of the development kit") from error
    try:
        rows = loadmat(io.BytesIO(meta), squeeze_me=True, variable_names=["synsets"])["synsets"].ravel()
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in rows}
    except Exception as error:  # scipy raises errors of any kind for damaged files
        raise SourceError(f"{path}: its meta.mat cannot be read: {error!r:.200}") from error


# ------------------------------------------------------------------------------
# The archives of ILSVRC as published, read without unpacking.
#
#     ILSVRC2012_img_train.tar               one inner archive per class, n01440764.tar, with its images
#     ILSVRC2012_img_val.tar                 images without labels, which come from
#         LOC_val_solution.csv               as on Kaggle, or
#         ILSVRC2012_devkit_t12.tar.gz       the development kit: data/ILSVRC2012_validation_ground_truth.txt has a
#                                            number for each image, and data/meta.mat the synset of each number
#     ILSVRC2012_img_test_v10102019.tar      images without labels


_KIT = re.compile(r"ILSVRC\d{4}_devkit_t12\.(?:tar\.gz|tgz)")


class _SplitTar(TarSource):
    """An archive that is a split."""

    def __init__(self, path: Path, split: str) -> None:
        super().__init__(path, "tree")
        self._split = split

    def list(self, split: str | None) -> SourceListing:
        return super().list(self._split)


class IlsvrcTarSource(SeveralSources):
    """The archives in the folder `root`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        tars = ilsvrc_tars(self.root)
        super().__init__(
            [_SplitTar(path, split) for split, path in tars.items()], [path.name for path in tars.values()]
        )

    @property
    def title(self) -> str:
        return f"archives of ILSVRC {self.root}"

    def list(self, split: str | None) -> SourceListing:
        listing = super().list(None)
        table = self._table()
        read = read_solution if table is not None and table.name == SOLUTION else read_kit
        give_labels(listing, {} if table is None else read(table), str(self.root))
        choose_split(listing, split, self.root)
        return listing

    def _table(self) -> Path | None:
        """The table, or else the development kit."""
        kits = [name for name in sorted(os.listdir(self.root)) if _KIT.fullmatch(name)]
        return next((self.root / name for name in (SOLUTION, *kits) if (self.root / name).is_file()), None)

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        table = self._table()
        yield from () if table is None else (table,)
        yield from ilsvrc_tars(self.root).values()


_DATA, _ANNOTATIONS = "Data/CLS-LOC", "Annotations/CLS-LOC"


def open_ilsvrc(root: str | os.PathLike[str]) -> Source:
    """The source of a folder of images, or of archives."""
    return IlsvrcTarSource(root) if ilsvrc_tars(Path(root)) else IlsvrcSource(root)


class IlsvrcSource:
    """A folder of ILSVRC; see the module."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.images = self.root / _DATA if (self.root / _DATA).is_dir() else self.root
        self.annotations = self.root / _ANNOTATIONS
        self._has_boxes = self.images != self.root and self.annotations.is_dir()
        self._classes: dict[str, int] = {}

    @property
    def title(self) -> str:
        return f"ILSVRC {self.root}"

    def list(self, split: str | None) -> SourceListing:
        is_val = not any((self.images / name).is_dir() for name in SPLIT_NAMES)
        whole = FolderSource(self.images, "tree").list("val" if is_val else None)
        for name, part in whole.splits.items():  # if the images are next to the table, the table is one of the files
            rows = [row for row, names in enumerate(part.names) if names[0] != SOLUTION]
            if len(rows) < len(part):
                whole.splits[name] = part.take(np.array(rows, np.int64))
        table = find_solution(self.root)
        give_labels(whole, {} if table is None else read_solution(table), str(self.root))
        choose_split(whole, split, self.root)
        whole.left_out = [item for item in whole.left_out if item[0] != SOLUTION]
        self._classes = {name: number for number, name in enumerate(whole.classes)}
        if self._has_boxes:
            whole.fields = {"image": "image", "boxes": "boxes", "box_labels": "array"}
            for name, part in whole.splits.items():
                nothing = Strings.of([""] * len(part))
                names = FieldNames(*part.names.columns, nothing, nothing)
                whole.splits[name] = SplitListing(
                    part.root, part.keys, part.labels, names, part.bytes, part.places, part.stamps
                )
        return whole

    def open(self) -> FolderReader:
        if self._has_boxes:
            return _ReaderWithBoxes(self.images, self.annotations, self._classes)
        return FolderReader(os.fspath(self.images))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        table = find_solution(self.root)
        if table is not None:
            yield table
        for part in listing.splits.values():
            for path, _ in part.places:
                yield self.images / path
                if self._has_boxes and (annotation := _annotation_of(self.annotations, path)).is_file():
                    yield annotation


def _annotation_of(folder: Path, path: str) -> Path:
    return folder / f"{key_of_name(path)}.xml"


class _ReaderWithBoxes(FolderReader):
    """Reads images, and their annotations if they have some."""

    def __init__(self, images: Path, annotations: Path, classes: Mapping[str, int]) -> None:
        super().__init__(os.fspath(images))
        self._annotations, self._classes = annotations, classes

    def read(self, place: tuple[str, int], arena: Arena) -> Sequence[Buffer | None]:  # type: ignore[override]
        (image,) = super().read(place, arena)
        path = _annotation_of(self._annotations, place[0])
        with of_sample(path):
            try:
                data = read_regular(path, MAX_XML_BYTES)
            except (FileNotFoundError, NotADirectoryError):
                return image, None, None
            return image, *self._boxes(image, data)

    def _boxes(self, image: Buffer, data: bytes) -> tuple[Buffer, Buffer]:
        objects, grid = parse_objects(data), grid_of(image, None)
        unknown = next((name for name in objects.names if name not in self._classes), None)
        if unknown is not None:
            raise BadSampleError(f"an object of the class {unknown!r}, which no folder and no line has")
        height, width = objects.size or (grid.height, grid.width)
        corners = objects.corners.reshape(-1, 2, 2) * (grid.width / width, grid.height / height)
        corners = np.clip(corners, 0, (grid.width, grid.height))
        boxes = grid.boxes(np.concatenate([corners.min(1), corners.max(1)], 1))
        labels = np.array([self._classes[name] for name in objects.names], np.int64)
        return encode_field("boxes", boxes), encode_field("array", labels)
