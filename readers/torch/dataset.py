"""A map-style data set over any reader, for a DataLoader."""

from __future__ import annotations

import copy
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from cache.errors import BadSampleError, ResumeError
from readers.augment.cpu import check_unchanged, decode_own, kind_of_first, pixels_to_tensor
from readers.augment.ops import Op
from readers.augment.recipe import Recipe, made_of
from readers.batch import Fields, Payloads
from readers.collate import stack_masks, to_tensor
from readers.decode import DECODER, Scratch, decode_image
from readers.feed import (
    ON_ERROR,
    OnError,
    check_choice,
    decoder_name,
    for_decoding,
    name_sample,
    read_sample,
    read_samples,
    substitutes_of_row,
    treat,
)
from readers.fields import decode_field
from readers.headers import first_deep
from readers.options import Compose, Decode, FieldOptions, Images, accepts_old_names
from readers.order import Order
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Announcer, Reader, depth_warning
from readers.table import Buffer
from readers.torch.rendering import Made, OpRenderer, PerThread, Place, Task, collate_of_caller, loser_of_places

_NOTHING: Payloads = {}


class ItemMaker:
    """Makes the items of `ImageDataset` from `fields`, and batches of items.

    main: the field that the caller has decoded, given as `image`.
    target_transform: function of the label, or of the label and the sample.
    tensors: whether arrays become tensors.
    one_size: whether all images have one size, so that masks can be stacked.

    Raises ValueError.
    """

    def __init__(
        self,
        fields: Fields,
        target_transform: Callable[..., Any] | None,
        main: str = "image",
        *,
        tensors: bool,
        one_size: bool,
    ) -> None:
        self.fields, self.target_transform, self._main = fields, target_transform, main
        self._tensors, self._one_size = tensors, one_size and tensors
        self._sees_sample = target_transform is not None and _takes_two(target_transform)
        if self._sees_sample and fields.label not in fields.wanted:
            raise ValueError("target_transform computes the label, but fields has no 'label': add it to fields")

    @property
    def keeps_image(self) -> bool:
        """Whether an item has its image exactly once, and unchanged by target_transform."""
        return self.fields.wanted.count("image") == 1 and not self._sees_sample

    def read(self, reader: Reader, rows: Sequence[int], *more: str) -> list[Payloads]:
        """The bytes of the fields other than the image, and of `more` fields."""
        return self.fields.read(reader, rows, *more) if self.fields.stored else [_NOTHING] * len(rows)

    def make(
        self,
        reader: Reader,
        index: int,
        payloads: Payloads,
        image: Any = None,
        done: Task | None = None,
    ) -> Any:
        """One item. done: the ops' job on its image. Raises BadSampleError."""
        fields = self.fields
        if not fields.stored and not self._sees_sample:
            return fields.collect(lambda name: image if name == self._main else self._plain(reader, index, name))
        placement = None
        if fields.moving and "image" in fields.wanted:
            placement = fields.placement(reader, index, *(done or ()))
        sample = fields.decode(payloads, placement)
        if self._tensors:
            sample = {name: to_tensor(fields.kind(name), value) for name, value in sample.items()}
        for name in fields.wanted:
            if name not in sample:
                sample[name] = image if name == self._main else self._plain(reader, index, name)
        label = fields.label
        if self._sees_sample:
            sample[label] = self.target_transform(sample[label], sample)  # type: ignore[misc]
        elif label in sample and label != "label" and self.target_transform is not None:
            sample[label] = self.target_transform(sample[label])
        return fields.collect(sample.__getitem__)

    def _plain(self, reader: Reader, index: int, name: str) -> Any:
        """The key, index or label; a label is transformed here unless its transform needs the sample."""
        value = Fields.value(reader, index, name)
        if name != "label" or self.target_transform is None or self._sees_sample:
            return value
        return self.target_transform(value)

    def collate(self, items: Sequence[Any], images: torch.Tensor | None = None, *, by_torch: bool = False) -> Any:
        """A batch of items; see `ImageDataset.collate`.

        images: one tensor that already holds the items' images. by_torch: make the batch as `default_collate` does.
        """
        fields = self.fields
        by_torch = by_torch or not fields.stored
        if by_torch and images is None and self._main == "image":
            return default_collate(list(items))
        columns = zip(*(item.values() if isinstance(item, dict) else item for item in items), strict=True)
        batch: dict[str, Any] = {}
        for name, values in zip(fields.wanted, columns, strict=True):
            if name == self._main != "image":
                _check_shapes(name, values)
            if name == "image" and images is not None:
                batch[name] = images
            elif by_torch or name not in fields.stored or name in fields.targets:
                batch[name] = default_collate(list(values))
            elif self._one_size and name in fields.stacked:
                batch[name] = stack_masks(values)
            else:
                batch[name] = list(values)
        made = fields.collect(batch.__getitem__)
        return list(made) if by_torch and isinstance(made, tuple) else made


def _check_shapes(name: str, values: Sequence[Any]) -> None:
    """Raise ValueError for arrays of different shapes, which make no batch."""
    shapes = {tuple(value.shape) for value in values if hasattr(value, "shape")}
    if len(shapes) > 1:
        raise ValueError(
            f"field {name}: the arrays of one batch have the shapes {sorted(map(list, shapes))[:3]}: crop or pad them "
            f"with  transform=,  or make lists, with  collate_fn=list  (ImageStream: collate=list)"
        )


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function requires two positional arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters) >= 2


Output: TypeAlias = Literal["tensor", "numpy", "pil"]
_OUTPUTS = get_args(Output)


class ImageDataset(Dataset[Any]):
    """Map-style data set of (image, label); the label is -1 if a sample has none.

    In a set without images its main field (`reader.main`) takes their place: an array as a tensor, or the bytes of a
    file, passed through `transform`, a function. Arrays of a batch must have the same shape; ValueError otherwise.

    transform: a list of `readers.augment` ops, which decode only the part of an image that they need and draw by (seed,
        epoch, position) if the indices come from `EpochSampler`; or any callable that takes an image, including
        albumentations transforms.
    decode: "RGB"; "unchanged" for the depth and channels of the file, such as uint16, float32 or the indices of a mask,
        also with a list of ops (`readers.augment.cpu`, docs/images.md); or None for the encoded bytes. A
        `readers.Decode` sets "RGB" or "unchanged", `exact_colours`, `compose` and the decoder: "auto"; "cpu", which
        decodes all images by libjpeg; or "compiled", which raises if the compiled codec was not built.
    output: the input of a callable or, without one, the image of an item: "tensor" (uint8 [3, h, w], unchanged
        [channels, h, w]; for torchvision.transforms.v2), "numpy" (uint8 [h, w, 3]; for albumentations), or "pil" (for
        torchvision.transforms), which is RGB only.
    target_transform: computes the label: a function of the stored label, or of the stored label and the sample
        {field: value}.
    fields: the fields of an item: "image", "label", "key", "index", and other fields of the set, which are decoded by
        their kind (`readers.batch`) and moved with the image by a list of ops; None if the sample lacks one. Arrays
        are tensors, or arrays with output="numpy" or "pil". {"pixel_values": "image", "labels": "label"} makes
        dictionaries with these names, as for the Trainer of transformers. Without "image" no image is read. Use
        `FieldOptions` to set how masks and boxes follow the image.
    exact_colours: also interpolate a JPEG's subsampled colours in boxes that ops shrink to half or less; by default
        they are repeated there, as in `ImageLoader`.
    compose: how a list of ops is composed, as for `readers.Decode`.
    on_error: "raise"; "skip", which makes batches smaller, and raises BadSampleError if no sample of a batch is left;
        or "substitute", which takes another sample of the same epoch: the one that `ImageLoader` would take, if the
        indices come from `EpochSampler` or `EpochBatchSampler`; another sample of the batch, with other samplers; any
        sample of the set, for a single index. `bad_samples` counts skipped and replaced samples of all workers until
        `report`, which an `EpochSampler` over this data set calls after each epoch.
    """

    @accepts_old_names
    def __init__(
        self,
        reader: Reader,
        transform: Sequence[Op] | Callable[[Any], Any] | None = None,
        decode: Images | Decode | None = "RGB",
        *,
        output: Output = "tensor",
        target_transform: Callable[..., Any] | None = None,
        fields: Sequence[str] | Mapping[str, str] | FieldOptions = ("image", "label"),
        on_error: OnError = "raise",
        exact_colours: bool = False,
        compose: Compose = "auto",
    ) -> None:
        decoding = decode if isinstance(decode, Decode) else Decode(decode or "RGB")
        if decoding is decode:
            decode, exact_colours, compose = decoding.images, exact_colours or decoding.exact_colours, decoding.compose
            rest = replace(decoding, images="RGB", decoder="auto", exact_colours=False, compose="auto")
            if rest != Decode() or decoding.decoder not in ("auto", "cpu", "compiled"):
                raise ValueError(
                    "ImageDataset decodes single samples on the CPU: of Decode it accepts images, exact_colours, "
                    "compose and decoder='auto', 'compiled' or 'cpu'; for the other options use ImageLoader"
                )
        if decode not in ("RGB", "unchanged", None):
            raise ValueError(f"decode is 'RGB', 'unchanged' or None, not {decode!r}")
        self._compiled = decoding.uses_codec()
        check_choice("output", output, _OUTPUTS)
        check_choice("on_error", on_error, ON_ERROR)
        check_choice("compose", compose, get_args(Compose))
        self.decode, self.output, self.on_error = decode, output, on_error
        self.reader = reader
        self.transform, self.target_transform = transform, target_transform
        self._main: str = getattr(reader, "main", "image")
        own = decode == "unchanged" and self._main == "image"
        if own:
            check_unchanged(reader)
        self._ops = None
        if isinstance(transform, Sequence) and self._main != "image":
            raise ValueError(
                f"ops change images, and this set has none: give a function of {self._main!r} as transform"
            )
        if isinstance(transform, Sequence):
            images = kind_of_first(reader) if own else ("uint8", 3)
            recipe = Recipe(transform, images, compose=compose == "auto")
            self._ops = OpRenderer(recipe, exact_colours, unchanged=own, compiled=self._compiled)
        requested = Fields(fields, reader, self._main)
        if isinstance(transform, Sequence):
            requested.check_ops(transform)
        elif transform is not None:
            requested.check_apart("a function as transform sees only the image", "give a list of readers.augment ops")
        one_size = self._ops is not None and self._ops.out_size is not None and "image" in requested.wanted
        self._maker = ItemMaker(requested, target_transform, self._main, tensors=output == "tensor", one_size=one_size)
        if self._ops is not None and decode is None:
            raise ValueError("ops need decoded images: leave out decode=None, or give a callable as transform")
        if own and output == "pil":
            raise ValueError("decode='unchanged' gives tensors or arrays: choose output='tensor' or 'numpy'")
        self._keywords = _wants_keyword(transform)
        # Of all workers: bad samples, the first one's number + 1, whether there was a warning of depth, and of places;
        # bad samples ever.
        self._counts = torch.zeros(5, dtype=torch.int64).share_memory_()
        self._local = PerThread()
        self._order: Order | None = None
        self._is_placed = False  # whether indices are places in an epoch, so that ops do not draw by torch's generator

    @property
    def reader(self) -> Reader:
        return self._reader

    @reader.setter
    def reader(self, reader: Reader) -> None:
        self._reader = reader
        self._images = for_decoding(reader) if self.decode == "RGB" else reader

    @property
    def fields(self) -> tuple[str, ...]:
        return self._maker.fields.wanted

    @property
    def decoder(self) -> str:
        """The decoder's name in states."""
        if self._ops is None:
            return DECODER
        return decoder_name(DECODER, self._ops.exact_colours, self._ops.recipe.geometry)

    @property
    def made(self) -> dict[str, Any]:
        """What states say of how samples are made (`readers.augment.recipe.made_of`)."""
        ops: Any = [()] if self._ops is None else [self._ops.recipe.ops]
        if self._ops is None and self.transform is not None:
            ops = f"the transform is a function, {getattr(self.transform, '__name__', type(self.transform).__name__)}"
        return made_of(ops, self.decode, self.on_error)

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; position = label."""
        return self.reader.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class name."""
        return self.reader.class_to_idx

    @property
    def targets(self) -> list[Any]:
        """All labels, as in torchvision's data sets. If the label is a field of the set, reads it for all samples."""
        fields = self._maker.fields
        if fields.label == "label":
            return list(np.asarray(self.reader.labels).tolist())
        payloads = self.reader.read_many(range(len(self)), fields.label)
        return [decode_field("target", data).tolist() for data in payloads]

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> Any:
        try:
            operator.index(index)
        except TypeError:
            raise TypeError(
                f"expected a sample number, found {type(index).__name__}; for batches use  DataLoader(dataset, "
                f"batch_sampler=…)  in place of  sampler=…, batch_size=None"
            ) from None
        items, _ = self._items((index,))
        if not items:
            raise name_sample(
                self.reader,
                int(index),
                "it is bad and a single sample cannot be skipped: request batches, or use on_error='substitute'",
            )
        return items[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples, read together; DataLoader calls this for a batch.

        If the caller's collate_fn is `collate` or torch's `default_collate`, images are decoded straight into the
        tensor of the batch, and the batch is made here.
        """
        collate = collate_of_caller()
        by_torch, own = collate is default_collate, getattr(collate, "__func__", None) is ImageDataset.collate
        items, images = self._items(indices, together=by_torch or (own and collate.__self__ is self))
        if not items and len(indices):
            first = int(indices[0])
            raise BadSampleError(
                f"all {len(indices)} samples of a batch are bad, so on_error='skip' leaves none; the first is sample "
                f"{first} ({self.reader.keys[first]}): find them with `packer verify --deep`, or use "
                f"on_error='substitute'"
            )
        return items if images is None else [Made(self._maker.collate(items, images, by_torch=by_torch))]

    def collate(self, items: Sequence[Any]) -> Any:
        """A batch of items, for DataLoader(collate_fn=dataset.collate).

        Masks are stacked if the ops make all images one size and every sample has a mask; other fields of the set
        become lists; `default_collate` does the rest.
        """
        return items[0].batch if isinstance(items[0], Made) else self._maker.collate(items)

    def over(self, reader: Reader) -> ImageDataset:
        """A data set with the same options over another reader of the same fields."""
        other = copy.copy(self)
        other.reader = reader
        return other

    def follow(self, order: Order | None) -> None:
        """Announce coming reads in this order; each DataLoader worker announces its own batches. Called by samplers."""
        self._order, self._is_placed = order, True

    # --- bad samples --------------------------------------------------------------------------------------------
    @property
    def bad_samples(self) -> int:
        """Number of samples skipped or replaced since the last report, in this process and all workers."""
        return int(self._counts[0])

    @property
    def all_bad_samples(self) -> int:
        """The same since the data set was made."""
        return int(self._counts[4])

    def report(self) -> str:
        """One line on the bad samples since the last report, "" if none; resets the count. Call it after an epoch."""
        count, first = self._counts[:2].tolist()
        self._counts[:2] = 0
        if not count:
            return ""
        done = "skipped" if self.on_error == "skip" else "replaced by others"
        return f"{count} bad samples were {done}, the first is sample {first - 1} ({self.reader.keys[first - 1]})"

    def _treat(self, index: int, batch: Sequence[int], error: Exception) -> Any:
        """The item for a sample that failed: read again if only its cached copy was damaged, else skipped (None) or
        replaced. batch: the requested rows. Raises with on_error="raise"."""
        place = index if isinstance(index, Place) else Place(index, 0, 0, int(index))

        def others() -> list[int]:
            named = [row for row in place.others if 0 <= row < len(self)]  # in a ConcatDataset, some are another set's
            mates = [row for row in batch if row != index] or range(len(self))
            return named or substitutes_of_row(int(index), mates)

        def take(row: int) -> Any:
            data = read_sample(self._images, row) if self._main in self.fields else b""
            again = Place(row, place.seed, place.epoch, place.position)
            task = self._plan((again,), (data,), together=False).tasks[0]
            return self._sample(row, data, task, self._maker.read(self.reader, [row])[0])

        where = int(index), place.position
        treated = treat(self.reader, self.on_error, where, error, others, take, self._images)
        if treated.bad:
            # Without a lock, one of two simultaneous increments may be lost: acceptable for a count of bad samples.
            self._counts[0] += 1
            self._counts[4] += 1
            if not self._counts[1]:
                self._counts[1] = int(index) + 1
        return treated.value

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The set's fingerprint and the decoder, which must be the same when a run continues.

        Also the state of torch's generator if ops draw by it: if no `EpochSampler` or `EpochBatchSampler` makes the
        indices.
        """
        state = {"fingerprint": self.reader.fingerprint, "decoder": self.decoder}
        if self._ops is not None and self._ops.draws and not self._is_placed:
            state["generator"] = torch.get_rng_state().numpy().tobytes().hex()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state, and continue torch's generator. Raises ResumeError if it comes from another set."""
        if state.get("fingerprint") != self.reader.fingerprint:
            raise ResumeError(
                f"this state was saved with another set: its fingerprint is {state.get('fingerprint')}, expected "
                f"{self.reader.fingerprint}; open the set that the run began with, or start without the state"
            )
        if "generator" in state:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["generator"]), dtype=torch.uint8))

    # --- inside -------------------------------------------------------------------------------------------------
    def _plan(self, indices: Sequence[int], data: Sequence[Buffer | Exception], *, together: bool) -> _Plan:
        count = len(indices)
        if self._ops is None or "image" not in self.fields:
            return _Plan([None] * count, None, [None] * count, [False] * count)
        tasks, plans = self._ops.plan(indices, data)
        images = self._ops.batch(count) if together and self._maker.keeps_image else None
        if images is None:
            return _Plan(tasks, None, [None] * count, [False] * count)
        return _Plan(tasks, images, images.unbind(), self._ops.render_boxes(data, tasks, plans, images))

    def _items(self, indices: Sequence[int], *, together: bool = False) -> tuple[list[Any], torch.Tensor | None]:
        """Items; and with `together` the tensor of a batch that holds all their images, None if they are apart."""
        rows, items = [int(index) for index in indices], []
        self._is_placed |= bool(rows) and isinstance(indices[0], Place)
        if self._ops is not None and self._ops.draws and not self._counts[3]:
            self._warn_of_places(indices)
        data: Sequence[Buffer | Exception] = [b""] * len(rows)
        wants_main = self._main in self.fields
        announcer = self._announce(indices, rows) if wants_main else None
        is_one_read = wants_main and self._maker.fields.stored and announcer is None and self._images is self.reader
        payloads = self._maker.read(self.reader, rows, *((self._main,) if is_one_read else ()))
        if is_one_read:
            some = [payload if isinstance(payload, Exception) else payload[self._main] for payload in payloads]
            data = [
                read_sample(self._images, row) if payload is None else payload
                for row, payload in zip(rows, some, strict=True)
            ]
        elif wants_main:
            read = partial(read_samples if len(rows) > 1 else _read_each, self._images)
            data = read(rows) if announcer is None else announcer.read(read, rows)
        if self.decode == "RGB" and self._main == "image" and not self._counts[2]:
            self._warn_of_depth(rows, data)
        tasks, images, places, done = self._plan(indices, data, together=together)
        for number, (index, encoded, others) in enumerate(zip(indices, data, payloads, strict=True)):
            try:
                item: Any = self._sample(int(index), encoded, tasks[number], others, places[number], done[number])
            except SAMPLE_ERRORS as error:
                item, images = self._treat(index, rows, error), None
            if item is not None:
                items.append(item)
        return items, images

    def _announce(self, indices: Sequence[int], rows: list[int]) -> Announcer | None:
        """Announce this batch and the next batches of this process; None if the indices do not follow the sampler's
        order, so that the next batches are not known."""
        first, order, info = indices[0] if len(rows) else None, self._order, get_worker_info()
        if order is None or not isinstance(first, Place) or not first.ranks:
            return None
        positions = np.array([getattr(index, "position", -1) for index in indices], np.int64)
        workers = info.num_workers if info else 1
        key = (os.getpid(), first.seed, first.epoch, workers, first.ranks)
        if getattr(self._local, "key", None) != key:
            order, announcer = order.with_seed(first.seed), None
            if (
                0 <= positions.min() <= positions.max() < len(order)
                and order.indices(first.epoch, positions).tolist() == rows
            ):
                announcer = Announcer(
                    self._images, order, first.epoch, first.ranks, workers, len(rows), warns=not info or not info.id
                )
            self._local.key, self._local.announcer = key, announcer
        known: Announcer | None = self._local.announcer
        if known is not None:
            stride = first.ranks * workers * len(rows)  # positions from one batch of this process to its next
            number, length = first.position // stride, len(order)

            def rows_of(batch: int, stop: int) -> tuple[Int64s, Int64s]:
                later = ((np.arange(batch, stop) - number)[:, None] * stride + positions).ravel()
                later = later[later < length]
                return later, known.order.indices(first.epoch, later)

            known.announce(number, number + -(-(length - first.position) // stride), len(rows), rows_of)
        return known

    def _warn_of_depth(self, rows: Sequence[int], data: Sequence[Buffer | Exception]) -> None:
        """Warn once among all workers of an image with more than 8 bits a channel."""
        place = first_deep(data)
        if place >= 0:
            self._counts[2] = 1
            warnings.warn(depth_warning(self.reader, rows[place]), stacklevel=4)

    def _warn_of_places(self, indices: Sequence[int]) -> None:
        """Warn once if a data set that wraps this one passes plain numbers instead of places in the epoch."""
        name = loser_of_places(indices)
        if name:
            self._counts[3] = 1
            warnings.warn(
                f"{name} passes plain numbers to this data set, so the ops cannot draw by the sampler's seed, epoch "
                f"and position: augmentation differs between runs and after a resume; write  "
                f"ImageDataset(reader.select(indices=…), …)  in place of {name}",
                stacklevel=4,
            )

    def _sample(
        self,
        index: int,
        data: Buffer | Exception,
        task: Task | Exception | None,
        others: Payloads,
        image: torch.Tensor | None = None,
        is_made: bool = False,
    ) -> Any:
        """image: where to put its image. is_made: which is there already."""
        for problem in (data, task):
            if isinstance(problem, Exception):
                raise problem
        if self._main not in self.fields:
            return self._maker.make(self.reader, index, others)
        if self._ops is None:
            return self._maker.make(self.reader, index, others, self._decode_and_transform(data))  # type: ignore[arg-type]
        if not is_made:
            image = self._ops.render(data, task, image)  # type: ignore[arg-type]
        return self._maker.make(self.reader, index, others, image, task)  # type: ignore[arg-type]

    def _decode_and_transform(self, data: Buffer) -> Any:
        image: Any = bytes(data) if self.decode is None else self._decode(data)
        if self.transform is None:
            return image
        call: Any = self.transform
        return call(image=image)["image"] if self._keywords else call(image)

    def _decode(self, data: Buffer) -> Any:
        if self._main != "image":
            kind = self._maker.fields.kind(self._main)
            value = decode_field(kind, data)
            return to_tensor(kind, value) if self.output == "tensor" else value
        if self.decode == "unchanged":
            pixels = decode_own(data)
            return pixels if self.output == "numpy" or self._keywords else pixels_to_tensor(pixels)
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        pixels = decode_image(data, None, self._local.scratch, compiled=self._compiled).copy()
        if self.output == "pil":
            from PIL import Image

            return Image.fromarray(pixels)
        if self.output == "numpy" or self._keywords:
            return pixels
        return torch.from_numpy(pixels).permute(2, 0, 1)


class _Plan(NamedTuple):
    """The processing of the images of some samples. images: the memory of a batch, and their places in it; done: the
    images that are already there."""

    tasks: Sequence[Task | Exception | None]
    images: torch.Tensor | None
    places: Sequence[torch.Tensor | None]
    done: Sequence[bool]


def _read_each(images: Reader, rows: Sequence[int]) -> list[Buffer | Exception]:
    return [read_sample(images, row) for row in rows]


def _wants_keyword(transform: object) -> bool:
    """Whether a transform takes image= and returns a dictionary, as those of albumentations do."""
    return any(base.__module__.partition(".")[0] == "albumentations" for base in inspect.getmro(type(transform)))
