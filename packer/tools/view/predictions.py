"""Predictions of a model, compared with the labels of a set: `packer view SET --predictions FILE`.

The file is CSV with a header. Columns are found by name, ignoring case:

    key            the key of a sample (key, file, filename, path or image)
    predicted      the name or number of a class (predicted, prediction, pred, class or label)
    score          optional: the confidence of the model, a number (score, confidence or probability)
    loss           optional: the loss of the sample, used instead of the score; the largest loss is the worst
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError
from cache.messages import listed
from readers.reader import Reader
from readers.table import NO_LABEL

__all__ = ["OrderColumn", "Predictions", "Run", "read_predictions"]

_NAMES = {
    "key": ("key", "file", "filename", "path", "image"),
    "predicted": ("predicted", "prediction", "pred", "class", "label"),
    "score": ("score", "confidence", "probability"),
    "loss": ("loss",),
}


class Run(NamedTuple):
    """Samples [first, first + samples) of an order."""

    name: str
    first: int
    samples: int


class OrderColumn(NamedTuple):
    """An order of samples, with its runs. values: sample numbers, uint32 [count]."""

    values: npt.NDArray[np.uint32]
    runs: list[Run]


class Predictions(NamedTuple):
    """The predictions for a split.

    labels: int64 [n], -1 for none. scores: float64 [n], NaN for none; losses if `is_loss`. unknown: number of rows of
    the file that match no sample.
    """

    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    is_loss: bool
    unknown: int

    def order(self, name: str, true_labels: npt.NDArray[np.int64], classes: Sequence[str]) -> OrderColumn:
        """The order "mistakes" or "confusion". true_labels: labels of the set.

        Mistakes: wrong predictions, worst first; then right ones, least confident first; then samples without a label
        or a prediction. Confusion: wrong predictions only, by pair of classes, the most frequent pair first. The worst
        predictions have the largest loss, or the highest score.
        """
        known = (true_labels != NO_LABEL) & (self.labels >= 0)
        wrong, scores = known & (true_labels != self.labels), np.nan_to_num(self.scores, nan=-math.inf)
        badness = scores if self.is_loss else np.where(wrong, scores, -scores)
        group = np.where(wrong, 0, np.where(known, 1, 2))
        worst = np.lexsort((-badness, group))
        if name == "mistakes":
            counts = np.bincount(group, minlength=3).tolist()
            names = ("wrong", "right", "unknown")
            runs = [
                Run(name, sum(counts[:i]), count) for i, (name, count) in enumerate(zip(names, counts, strict=True))
            ]
            return OrderColumn(worst.astype(np.uint32), runs)
        worst = worst[: int(wrong.sum())]
        pairs, inverse, counts_of = np.unique(
            np.stack((true_labels[worst], self.labels[worst]), 1), axis=0, return_inverse=True, return_counts=True
        )
        by_count = np.argsort(-counts_of, kind="stable")
        rank = np.empty(len(pairs), np.int64)
        rank[by_count] = np.arange(len(pairs))
        values = worst[np.argsort(rank[inverse.reshape(-1)], kind="stable")]
        ends = np.cumsum(counts_of[by_count]).tolist()
        runs = [
            Run(
                " → ".join(_class_name(int(label), classes) for label in pairs[pair]),
                end - int(counts_of[pair]),
                int(counts_of[pair]),
            )
            for pair, end in zip(by_count.tolist(), ends, strict=True)
        ]
        return OrderColumn(values.astype(np.uint32), runs)


def _class_name(label: int, classes: Sequence[str]) -> str:
    return classes[label] if label < len(classes) else str(label)


def read_predictions(path: str | os.PathLike[str], splits: Mapping[str, Reader]) -> dict[str, Predictions]:
    """Read predictions from a CSV file, by split. Raises DatasetError.

    A row applies to every split that has its key; samples without a row have no prediction.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for name, reader in splits.items():
        for index, key in enumerate(reader.keys):
            places.setdefault(key, []).append((name, index))
    classes = next((reader.classes for reader in splits.values() if reader.classes), ())
    labels = {name: np.full(len(reader), NO_LABEL, np.int64) for name, reader in splits.items()}
    scores = {name: np.full(len(reader), np.nan) for name, reader in splits.items()}
    numbers = {name: number for number, name in enumerate(classes)}
    unknown, rows, is_loss = [], 0, False
    for where, row in _rows(path):
        rows, is_loss = rows + 1, "loss" in row
        text = row["predicted"]
        label = numbers.get(text)
        if label is None:
            if not text.isdecimal() or len(text) > 9 or (classes and int(text) >= len(classes)):
                expected = f"a number below {len(classes)} or one of {listed(classes)}"
                raise DatasetError(f"{where}: no class {text!r:.80}; expected {expected}")
            label = int(text)
        samples = places.get(row["key"], ())
        if not samples:
            unknown.append(row["key"])
        for name, index in samples:
            if labels[name][index] != NO_LABEL:
                raise DatasetError(f"{where}: {row['key']!r:.80} has a prediction already; expected one row a sample")
            labels[name][index], scores[name][index] = label, _number(row, where)
    if len(unknown) == rows:
        first, key = next(iter(unknown), ""), next(iter(places), "")
        raise DatasetError(
            f"{os.fspath(path)}: none of its {rows:,} rows names a sample: the first has the key {first!r:.80}, and "
            f"the set has keys such as {key!r:.80}"
        )
    return {name: Predictions(labels[name], scores[name], is_loss, len(unknown)) for name in splits}


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file and line, values of a row by the names of _NAMES)."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            columns = {
                name: header.index(alias)
                for name, aliases in _NAMES.items()
                for alias in aliases[::-1]
                if alias in header
            }
            for name in ("key", "predicted"):
                if name not in columns:
                    raise DatasetError(
                        f"{os.fspath(path)}: has no column {name!r}; expected a CSV file whose first line names key "
                        f"and predicted and, if known, score or loss; its first line names {listed(header)}"
                    )
            for row in reader:
                where = f"{os.fspath(path)}, line {reader.line_num}"
                if row and len(row) != len(header):
                    raise DatasetError(f"{where}: has {len(row)} values, expected {len(header)} as in the first line")
                if row:
                    yield where, {name: row[column] for name, column in columns.items()}
    except (OSError, ValueError, csv.Error) as error:
        raise DatasetError(f"{os.fspath(path)}: cannot be read as CSV in UTF-8: {error}") from error


def _number(row: Mapping[str, str], where: str) -> float:
    text = row.get("loss", row.get("score", ""))
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise DatasetError(f"{where}: {text!r:.40} is not a number; expected a score or a loss such as 0.93") from None
