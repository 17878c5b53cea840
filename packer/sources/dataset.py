"""A data set of a program as a source: what has a length and hands out samples by number, as torch's data sets do.

Samples are read by the workers, each once; their labels are known only then. Keys are the numbers of the samples. What
their members are, and their sizes, follow from a few samples, whose bytes also tell one data set from another of the
same length. Where all of a data set is known to be the same by the fingerprint that Hugging Face gives it, that counts;
otherwise the listing is `sampled`: what is packed already is compared with the samples before it is taken for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cache.checksums import crc32c
from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.sources.base import FieldNames, SourceListing, SplitListing
from packer.sources.places import NumberPlaces
from packer.sources.samples import SampleForm
from readers.sample import NO_LABEL, Buffer
from readers.strings import NamesBuilder

__all__ = ["EXAMINED", "DatasetSource", "class_names", "encoded_images", "features_of"]

EXAMINED = 16
"""So many samples are looked at to know what their members are."""
_Errors = (SourceError, BadSampleError)


class DatasetSource:
    """samples: has `__len__` and `__getitem__` with numbers from 0. fields, classes: see `SampleForm`.

    Hugging Face's data sets hand out the encoded bytes of their images, and name their classes, by themselves.
    """

    def __init__(
        self, samples: Any, fields: Mapping[str, str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self._samples = encoded_images(samples)
        self._fields, self._classes = fields, classes
        self._form: SampleForm | None = None

    @property
    def title(self) -> str:
        return f"{type(self._samples).__name__} of {len(self._samples):,} samples"

    def list(self, split: str | None) -> SourceListing:
        count = len(self._samples)
        if not count:
            raise SourceError(f"{self.title}: is empty")
        examined = self._examined(count)
        try:
            classes = class_names(self._samples) if self._classes is None else self._classes
            form = SampleForm.of([sample for _, sample in examined], self._fields, classes, features_of(self._samples))
        except _Errors as error:
            raise SourceError(f"{self.title}: sample {examined[0][0]}: {error}") from error
        self._form = form
        fingerprint = getattr(self._samples, "_fingerprint", "") if hasattr(self._samples, "cast_column") else ""
        sizes, digest = [], crc32c(str(fingerprint).encode())
        for _, sample in examined:
            payloads: Sequence[Buffer | None] = ()
            try:
                payloads = form.payloads(sample)
            except _Errors:  # the worker says what is wrong with it
                continue
            sizes.append(sum(len(payload) for payload in payloads if payload is not None))
            for payload in payloads:
                digest = crc32c(payload or b"", digest)
        keys, names = NamesBuilder(), [NamesBuilder() for _ in form.fields]
        width = len(str(count - 1))
        for i in range(count):
            keys.append(f"{i:0{width}d}")
            for column in names:
                column.append("")
        numbers = np.arange(count, dtype=np.int64)
        part = SplitListing(
            "",
            keys.build(),
            np.full(count, NO_LABEL, np.int64),
            FieldNames(*(column.build() for column in names)),
            np.full(count, int(np.mean(sizes)) if sizes else 0, np.int64),
            NumberPlaces(numbers[:, None]),
            np.full(count, digest, np.int64),
        )
        return SourceListing(
            {split or "train": part},
            form.fields,
            form.classes,
            warnings=form.warnings,
            late_labels=bool(form.label),
            sampled=not fingerprint,
        )

    def _examined(self, count: int) -> Sequence[tuple[int, Any]]:
        """Some samples over all of them, with their numbers; the worker names those that cannot be read."""
        found = []
        for number in np.unique(np.linspace(0, count - 1, EXAMINED).astype(np.int64)).tolist():
            try:
                found.append((number, self._sample(number)))
            except BadSampleError as error:
                last = error
        if not found:
            raise SourceError(f"{self.title}: sample 0, and others: {last}") from last
        return found

    @contextmanager
    def open(self) -> Iterator[_SampleReader]:
        assert self._form is not None  # since it was listed
        yield _SampleReader(self, self._form)

    def paths(self, listing: SourceListing) -> Iterator[str]:
        return iter(())

    def _sample(self, number: int) -> Any:
        try:
            return self._samples[number]
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError, RuntimeError) as error:
            raise BadSampleError(f"cannot be read: {type(error).__name__}: {error}") from error


class _SampleReader:
    """Reads samples by number. It takes no memory of the arena: the samples are objects of their own."""

    def __init__(self, source: DatasetSource, form: SampleForm) -> None:
        self._source, self._form, self._label = source, form, NO_LABEL

    def read(self, place: tuple[int], arena: Arena) -> Sequence[Buffer | None]:
        sample = self._source._sample(place[0])
        try:
            self._label = self._form.label_of(sample)
            return self._form.payloads(sample)
        except SourceError as error:
            raise SourceError(f"{self._source.title}: sample {place[0]}: {error}") from error

    def label(self, place: tuple[int]) -> int:
        return self._label


def encoded_images(samples: Any) -> Any:
    """A Hugging Face data set whose images are handed out as they are stored; anything else as it is."""
    features = getattr(samples, "features", None)
    if not isinstance(features, Mapping) or not hasattr(samples, "cast_column"):
        return samples
    for name, feature in features.items():
        if type(feature).__name__ == "Image" and getattr(feature, "decode", False):
            samples = samples.cast_column(name, type(feature)(decode=False))
    return samples


def features_of(samples: Any) -> Mapping[str, Any]:
    """What Hugging Face says of each member, where samples are handed out in plain Python; else nothing."""
    features = getattr(samples, "features", None)
    form = getattr(samples, "format", None)
    is_plain = not isinstance(form, Mapping) or form.get("type") in (None, "python")
    return features if isinstance(features, Mapping) and is_plain else {}


def class_names(samples: Any) -> tuple[str, ...]:
    """The names of the classes: of the one feature of Hugging Face that has some, or the `classes` of torchvision."""
    features = getattr(samples, "features", None)
    if isinstance(features, Mapping):
        named = [feature.names for feature in features.values() if type(feature).__name__ == "ClassLabel"]
        return tuple(map(str, named[0])) if len(named) == 1 else ()
    classes = getattr(samples, "classes", None)
    is_names = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    return tuple(classes) if is_names and classes is not None else ()
