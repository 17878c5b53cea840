"""What batches carry to the step, and which of their bytes need not be copied.

A few batches are looked at, and of large arrays some rows only. A fact says what was found and how many bytes of a step
it is worth; facts of one field exclude one another, so what a step saves is the best of each field.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.diagnosis.findings import Payload, PayloadFact, PayloadField
from readers.diagnosis.payload_facts import KINDS, find_facts
from readers.diagnosis.pipeline import in_a_line, paths

__all__ = ["KINDS", "inspect_payload"]

_BATCHES = 4
_FIELDS = 64
_SAMPLED_VALUES = 1 << 20  # of an array of a batch
_COMPARED_BYTES = 64 << 20
_TORCH_NAME = "torch."


@dataclass
class _Array:
    """An array of one batch. values: some of its rows; None where they cannot be seen."""

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    values: npt.NDArray[Any] | None
    whole: Any

    @property
    def bytes(self) -> int:
        return self.item_bytes * int(np.prod(self.shape, dtype=np.int64))


def inspect_payload(
    batches: Sequence[Any],
    step: Callable[[Any], object] | None = None,
    copy: Callable[[Any], Any] | None = None,
) -> Payload:
    """The payload of batches as they leave the loader: tensors and arrays in tuples, lists and mappings.

    step: runs once more, on a copy of a batch, to see which fields it uses. copy: as in `readers.diagnose`.
    """
    looked, notes = [dict(_arrays(batch)) for batch in batches[:_BATCHES]], list[str]()
    paths = list(looked[0])[:_FIELDS] if looked else []
    if looked and not paths:
        notes.append(f"a batch is a {type(batches[0]).__name__}, in which no tensor or array is found")
    if looked and len(looked[0]) > _FIELDS:
        notes.append(f"a batch has {len(looked[0])} arrays; these are the first {_FIELDS}")
    use = _use(batches[0], step, copy, notes) if paths and step is not None else {}
    fields, seen = list[PayloadField](), list[tuple[str, list[_Array]]]()
    for path in paths:
        arrays = [found[path] for found in looked if path in found]
        try:
            fields.append(_field(path, arrays, use, _twin(arrays, seen)))
        except Exception as error:  # an array of another library, which is not like NumPy's in all
            notes.append(f"{path}: its values could not be looked at: {type(error).__name__}")
            fields.append(PayloadField(path, arrays[0].dtype, arrays[0].shape, arrays[0].bytes, None))
        seen.append((path, arrays))
    saves = sum(field.facts[0].saves for field in fields if field.facts)
    return Payload(len(looked), sum(field.bytes for field in fields), saves, tuple(fields), tuple(notes))


def _field(path: str, arrays: list[_Array], use: dict[str, frozenset[str] | None], twin: str | None) -> PayloadField:
    first, size = arrays[0], sum(each.bytes for each in arrays) // len(arrays)
    same_rank = all(len(each.shape) == len(first.shape) for each in arrays)
    shape = tuple(
        n if all(each.shape[d] == n for each in arrays) else None for d, n in enumerate(first.shape) if same_rank
    )
    dtypes = use.get(path)
    used = None if dtypes is None else bool(dtypes)
    found = list[PayloadFact]()
    if used is False:
        found.append(PayloadFact("unused", "the step does nothing with it that PyTorch sees", size))
    if twin is not None:
        found.append(PayloadFact("duplicate", f"the same values as {twin or 'the batch'}", size))
    values = [each.values for each in arrays if each.values is not None and each.values.size]
    if size and values and same_rank:
        shares = find_facts(first.dtype, first.item_bytes, values, dtypes or frozenset())
        found += [replace(fact, saves=int(fact.saves * size / _MILLION)) for fact in shares]
    found = [fact for fact in found if fact.saves > 0]
    found.sort(key=lambda fact: -fact.saves)
    return PayloadField(path, first.dtype, shape, size, used, tuple(found))


_MILLION = 1_000_000  # find_facts counts in millionths of the field


def _twin(arrays: list[_Array], others: list[tuple[str, list[_Array]]]) -> str | None:
    """The path of an earlier field that has the same values in each batch."""
    for path, theirs in others:
        if len(theirs) == len(arrays) and all(map(_are_equal, arrays, theirs)):
            return path
    return None


def _are_equal(one: _Array, other: _Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or not one.bytes or one.bytes > _COMPARED_BYTES:
        return False
    if one.values is None or other.values is None or not np.array_equal(one.values, other.values):
        return False
    return bool((one.whole == other.whole).all())


def _use(
    batch: Any, step: Callable[[Any], object], copy: Callable[[Any], Any] | None, notes: list[str]
) -> dict[str, frozenset[str] | None]:
    """Of each field the types in which the step uses it: none where it does not, None where that is unknown."""
    if "torch" not in sys.modules:
        return {}
    tracking = importlib.import_module("readers.diagnosis.payload_use")
    try:
        use: dict[str, frozenset[str] | None] = tracking.track_use(batch, step, copy)
    except Exception as error:
        notes.append(f"which fields the step uses is unknown: it failed while it was watched: {in_a_line(error)}")
        return {}
    if use and not any(use.values()):
        notes.append("which fields the step uses is unknown: no PyTorch operation on any of them was seen")
        return {}
    return use


def _arrays(batch: Any) -> Iterator[tuple[str, _Array]]:
    for path, leaf in paths(batch):
        if hasattr(leaf, "dtype"):  # a nested tensor has no shape that may be asked for
            yield path, _array(leaf)


def _array(leaf: Any) -> _Array:
    dtype = str(leaf.dtype).removeprefix(_TORCH_NAME)
    size = int(getattr(leaf.dtype, "itemsize", 0))
    try:
        shape = tuple(int(n) for n in leaf.shape)
        return _Array(dtype, size, shape, _some_values(leaf, shape), leaf)
    except Exception:  # a nested, sparse or quantised tensor, or an array of another library
        return _Array(dtype, size, (), None, leaf)


def _some_values(leaf: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Rows of an array, evenly spaced, at most `_SAMPLED_VALUES` values; of very large rows a part of each."""
    if shape and shape[0]:
        row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
        rows = max(1, min(shape[0], _SAMPLED_VALUES // row))
        leaf = leaf[:: -(-shape[0] // rows)]
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":
            leaf = leaf.float()
        leaf = leaf.resolve_conj().resolve_neg() if leaf.is_complex() else leaf
        return np.asarray(leaf.numpy())
    return np.asarray(leaf)
