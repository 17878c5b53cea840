"""A map-style data set over any reader: what goes into a DataLoader."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from readers.augment import Recipe
from readers.augment.cpu import Finish, Renderer
from readers.augment.draws import Draws
from readers.augment.ops import Op
from readers.decode import DECODER, Scratch, decode_image
from readers.errors import BadSampleError, DamagedSampleError, ResumeError, UnknownNameError
from readers.sample import Buffer, Reader
from readers.torch.rendering import render_many
from readers.torch.sampler import Place

__all__ = ["ImageDataset", "Output"]

Output: TypeAlias = Literal["tensor", "numpy", "pil"]
_OUTPUTS = ("tensor", "numpy", "pil")
_ON_ERROR = ("raise", "skip", "substitute")
_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_SUBSTITUTES = 16
_SUBSTITUTE_STREAM = 1 << 20


class ImageDataset(Dataset[tuple[Any, int]]):
    """(image, label) by number; label is -1 where a sample has none.

    transform: a list of `readers.augment` ops, which decodes no more of an image than it needs and draws by (seed,
    epoch, position) when the indices come from `EpochSampler`; or any callable that takes an image; albumentations
    transforms are called the way they want to be. decode: "RGB", or None for the encoded bytes. output: what a callable
    gets and, without one, what comes out: "tensor" (uint8 [3, h, w]; torchvision.transforms.v2), "numpy" (uint8
    [h, w, 3]; albumentations), or "pil" (torchvision.transforms). target_transform: applied to labels.

    on_error: "raise"; "skip", which makes batches smaller (with a DataLoader's batch_size, not with single samples); or
    "substitute" (another sample). `bad_samples` counts both, in all workers; `report` tells and forgets.
    """

    def __init__(
        self,
        reader: Reader,
        transform: Sequence[Op] | Callable[[Any], Any] | None = None,
        decode: Literal["RGB"] | None = "RGB",
        *,
        output: Output = "tensor",
        target_transform: Callable[[int], Any] | None = None,
        on_error: Literal["raise", "skip", "substitute"] = "raise",
    ) -> None:
        if decode not in ("RGB", None):
            raise ValueError(f"decode is 'RGB' or None, not {decode!r}")
        if output not in _OUTPUTS or on_error not in _ON_ERROR:
            raise ValueError(
                f"output is one of {_OUTPUTS} and on_error of {_ON_ERROR}, not {output!r} and {on_error!r}"
            )
        self.reader, self.decode, self.output, self.on_error = reader, decode, output, on_error
        self.transform, self.target_transform = transform, target_transform
        self._recipe = Recipe(transform) if isinstance(transform, Sequence) else None
        if self._recipe is not None and decode is None:
            raise ValueError("ops need decoded images: leave decode='RGB', or take the ops out")
        self._counts = torch.zeros(2, dtype=torch.int64).share_memory_()  # bad samples, and the first one's number + 1
        self._setup()

    def _setup(self) -> None:
        self._local = threading.local()
        self._keywords = _wants_keyword(self.transform)
        if self._recipe is not None:
            dtype = torch.uint8 if self._recipe.normalize is None else torch.float32
            self._finish = Finish(dtype, True, self._recipe.normalize)

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; position = label."""
        return self.reader.classes

    @property
    def targets(self) -> list[int]:
        """All labels, as torchvision's data sets have them."""
        return list(np.asarray(self.reader.labels).tolist())

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        try:
            return self._sample(index, self.reader.read(int(index)))
        except _SAMPLE_ERRORS as error:
            found = self._instead(index, error)
            if found is None:
                raise self._error(index, error, "cannot be skipped one by one; ask for batches") from error
            return found

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Many samples, read together; what DataLoader calls for a batch."""
        items = []
        found: Sequence[Any] = self._read(indices)
        if self._recipe is not None:
            draws = _seeds_of(indices)
            found = render_many(self._recipe, self._finish, self._tools().renderer, draws, found)
        for index, data in zip(indices, found, strict=True):
            try:
                if isinstance(data, Exception):
                    raise data
                image = data if self._recipe is not None else self._image(index, data)
                item: tuple[Any, Any] | None = (image, self._label(index))
            except _SAMPLE_ERRORS as error:
                item = self._instead(index, error)
            if item is not None:
                items.append(item)
        return items

    # --- bad samples --------------------------------------------------------------------------------------------
    @property
    def bad_samples(self) -> int:
        """How many samples were skipped or replaced since the last report, in this process and all workers."""
        return int(self._counts[0])

    def report(self) -> str:
        """One line about the bad samples since the last report, "" if there were none. Say it after each epoch."""
        count, first = self._counts.tolist()
        self._counts.zero_()
        if not count:
            return ""
        done = "skipped" if self.on_error == "skip" else "replaced by others"
        return f"{count} bad samples were {done}, the first is sample {first - 1} ({self.reader.keys[first - 1]})"

    def _instead(self, index: int, error: Exception) -> tuple[Any, Any] | None:
        """Another sample, None for none. Raises under on_error="raise"."""
        if self.on_error == "raise":
            advice = (
                "find all such samples with `packer verify --deep`, or read on with on_error='skip' or 'substitute'"
            )
            raise self._error(index, error, advice) from error
        # Two workers may add at the same time; that one of the two is lost from the count is worth no lock.
        self._counts[0] += 1
        if not self._counts[1]:
            self._counts[1] = int(index) + 1
        return None if self.on_error == "skip" else self._substitute(index, error)

    def _substitute(self, index: int, error: Exception) -> tuple[Any, Any]:
        """The same sample for the same place of the same epoch, in whatever worker."""
        seed, epoch, position = _seeds(index) if isinstance(index, Place) else (0, 0, int(index))
        u = Draws(seed, epoch, np.array([position])).uniform(_SUBSTITUTE_STREAM, _SUBSTITUTES)[0]
        for other in (u * len(self)).astype(np.int64).tolist():
            try:
                return self._sample(Place(other, seed, epoch, position), self.reader.read(other))
            except _SAMPLE_ERRORS:
                continue
        raise self._error(index, error, f"and so were {_SUBSTITUTES} samples in place of it")

    def _error(self, index: int, error: Exception, advice: str) -> BadSampleError:
        return BadSampleError(f"sample {int(index)} ({self.reader.keys[int(index)]}): {error}; {advice}")

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What must be the same when a run goes on: the set and the decoder."""
        return {"fingerprint": self.reader.fingerprint, "decoder": DECODER}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ResumeError where `state` comes from another set."""
        if state.get("fingerprint") != self.reader.fingerprint:
            found, here = state.get("fingerprint"), self.reader.fingerprint
            raise ResumeError(
                f"this state was saved with another set: its fingerprint is {found}, this one's is {here}"
            )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_local", "_finish"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _read(self, indices: Sequence[int]) -> Sequence[Buffer | Exception]:
        numbers = [int(index) for index in indices]
        try:
            return self.reader.read_many(numbers)
        except _SAMPLE_ERRORS:
            return [self._read_one(index) for index in numbers]

    def _read_one(self, index: int) -> Buffer | Exception:
        try:
            return self.reader.read(index)
        except _SAMPLE_ERRORS as error:
            return error

    def _sample(self, index: int, data: Buffer) -> tuple[Any, Any]:
        return self._image(index, data), self._label(index)

    def _label(self, index: int) -> Any:
        label = int(self.reader.labels[int(index)])
        return label if self.target_transform is None else self.target_transform(label)

    def _image(self, index: int, data: Buffer) -> Any:
        if self._recipe is not None:
            return self._render(self._recipe, index, data)
        image: Any = bytes(data) if self.decode is None else self._decoded(data)
        if self.transform is None:
            return image
        call: Any = self.transform
        return call(image=image)["image"] if self._keywords else call(image)

    def _decoded(self, data: Buffer) -> Any:
        pixels = decode_image(data, None, self._tools().scratch).copy()
        if self.output == "pil":
            from PIL import Image

            return Image.fromarray(pixels)
        if self.output == "numpy" or self._keywords:
            return pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _render(self, recipe: Recipe, index: int, data: Buffer) -> torch.Tensor:
        (image,) = render_many(recipe, self._finish, self._tools().renderer, [_seeds(index)], [data])
        if isinstance(image, Exception):
            raise image
        return image

    def _tools(self) -> Any:
        """What this thread decodes with."""
        if not hasattr(self._local, "renderer"):
            self._local.renderer, self._local.scratch = Renderer(), Scratch()
        return self._local


def _seeds(index: int) -> tuple[int, int, int]:
    """(seed, epoch, position): of a Place, or else drawn from torch's generator, as other transforms do."""
    if isinstance(index, Place):
        return index.seed, index.epoch, index.position
    return 0, int(torch.randint(1 << 62, ())), int(index)


def _seeds_of(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """The same for the images of a batch; torch's generator is asked once for all that are no Place."""
    drawn = 0 if all(isinstance(index, Place) for index in indices) else int(torch.randint(1 << 62, ()))
    return [_seeds(index) if isinstance(index, Place) else (0, drawn, row) for row, index in enumerate(indices)]


def _wants_keyword(transform: object) -> bool:
    """albumentations: transforms that take image= and return a dictionary."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in inspect.getmro(type(transform)))
