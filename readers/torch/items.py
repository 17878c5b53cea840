"""What an item of `ImageDataset` is made of, from its image and its other fields, and a batch of items."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from readers.augment.recipe import Job
from readers.batch import Fields, Payloads
from readers.collate import stack_masks, to_tensor
from readers.reader import Reader

__all__ = ["ItemMaker"]

_NOTHING: Payloads = {}


class ItemMaker:
    """Makes items of `fields`.

    target_transform: of the label, or of the label and the sample. tensors: whether arrays become tensors.
    one_size: whether all images have one size, so that masks can be stacked.

    Raises ValueError.
    """

    def __init__(
        self, fields: Fields, target_transform: Callable[..., Any] | None, *, tensors: bool, one_size: bool
    ) -> None:
        self.fields, self.target_transform = fields, target_transform
        self._tensors, self._one_size = tensors, one_size and tensors
        self._sees_sample = target_transform is not None and _takes_two(target_transform)
        if self._sees_sample and fields.label not in fields.wanted:
            raise ValueError("target_transform makes the label of a sample: name 'label' in fields")

    def read(self, reader: Reader, rows: Sequence[int]) -> list[Payloads]:
        """The bytes of the fields other than the image."""
        return self.fields.read(reader, rows) if self.fields.stored else [_NOTHING] * len(rows)

    def make(
        self,
        reader: Reader,
        index: int,
        payloads: Payloads,
        image: Any = None,
        done: tuple[Job, tuple[int, int], tuple[int, int]] | None = None,
    ) -> Any:
        """One item. done: what ops did to its image: (job, size before it, size after it). Raises BadSampleError."""
        fields = self.fields
        if not fields.stored and not self._sees_sample:
            return fields.collect(lambda name: image if name == "image" else self._plain(reader, index, name))
        placement = None
        if fields.moving and "image" in fields.wanted:
            placement = fields.placement(reader, index, *(done or ()))
        sample = fields.decode(payloads, placement)
        if self._tensors:
            sample = {name: to_tensor(fields.kind(name), value) for name, value in sample.items()}
        for name in fields.wanted:
            if name not in sample:
                sample[name] = image if name == "image" else self._plain(reader, index, name)
        label = fields.label
        if self._sees_sample:
            sample[label] = self.target_transform(sample[label], sample)  # type: ignore[misc]
        elif label in sample and label != "label" and self.target_transform is not None:
            sample[label] = self.target_transform(sample[label])
        return fields.collect(sample.__getitem__)

    def _plain(self, reader: Reader, index: int, name: str) -> Any:
        """The key, index or label, the latter transformed unless that needs the sample."""
        value = Fields.value(reader, index, name)
        if name != "label" or self.target_transform is None or self._sees_sample:
            return value
        return self.target_transform(value)

    def collate(self, items: Sequence[Any]) -> Any:
        """A batch of items; see `ImageDataset.collate`."""
        fields = self.fields
        if not fields.stored:
            return default_collate(list(items))
        columns = zip(*(item.values() if isinstance(item, dict) else item for item in items), strict=True)
        batch: dict[str, Any] = {}
        for name, values in zip(fields.wanted, columns, strict=True):
            if name not in fields.stored or name in fields.targets:
                batch[name] = default_collate(list(values))
            elif self._one_size and name in fields.stacked:
                batch[name] = stack_masks(values)
            else:
                batch[name] = list(values)
        return fields.collect(batch.__getitem__)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters) >= 2
