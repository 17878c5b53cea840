"""Options of loaders by subject, each a frozen object: how ranks share an epoch, how images are decoded, and the like.

    ImageLoader(reader, 256, augment=val, shuffle=False, ranks=Ranks(tail="exact"), decode=Decode(layout="NHWC"))

Where an option has a plain value as well, the plain value is enough: `threads=4` is `threads=Threads(4)`,
`decode="unchanged"` is `decode=Decode("unchanged")`, and `augment=ops` is `augment=Views(ops)`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

from cache.errors import UnsupportedCpuError

if TYPE_CHECKING:
    import torch

    from readers.augment.fused import Engine
    from readers.augment.ops import Op
    from readers.decode.batch import DecoderName
    from readers.decode.device import CpuShare
    from readers.order.schedule import Tail

Images: TypeAlias = Literal["RGB", "unchanged"]
Compose: TypeAlias = Literal["auto", "exact"]
Layout: TypeAlias = Literal["channels_last", "NCHW", "NHWC"]
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """How ranks share an epoch.

    rank, world_size: by default those of torch.distributed or the launcher's variables, determined each time a loop
        begins.
    tail: see `readers.order.Schedule`; by default "drop_last" for a shuffle and "exact", every sample once, for samples
        in the order in which they are stored.
    """

    rank: int | None = None
    world_size: int | None = None
    tail: Tail | None = None


@dataclass(frozen=True)
class Decode:
    """How images are decoded, and the form of their tensors.

    images: "RGB", 8 bits; or "unchanged" for the depth and channels of the files: uint8, uint16, int32 or float32, the
        same for all images of a batch (`readers.augment.cpu`, docs/images.md). Ops that are not defined for them
        are refused. The CPU decodes.
    dtype: uint8, or float32, float16 or bfloat16 in 0..1; Normalize in `augment` makes float32.
    layout: "channels_last" is [n, 3, h, w] with channels last in memory, "NCHW" is contiguous, "NHWC" is [n, h, w, 3].
    decoder: "torchcodec" or "torchvision" decode baseline JPEGs and leave other images to the CPU; "auto" takes the
        first of them that works on a CUDA device with a JPEG engine, or else the CPU, with a warning that says why;
        elsewhere it is the CPU. There the compiled codec of this package decodes baseline JPEGs, and libjpeg the
        others; "compiled" is the same, an error where the codec was not built; "cpu" is libjpeg for all, to the same
        pixels (docs/images.md). What a cache keeps as coefficients a CUDA device decodes with Triton, if it is
        installed, except with "cpu" and "compiled" (docs/gpu.md).
    engine: the implementation of crops and resizes on a CUDA device: "triton", one kernel for a batch; "torch", image
        by image; "auto": Triton where it works, or else torch, with a warning that says why.
    cpu_share: of the images that the device could decode, the share that the threads decode in its place, 0 to 1; or
        "auto": the share with which both finish together, by measurement (`readers.decode.device`).
    exact_colours: interpolate colours that a JPEG stores at half the size also where the box is made half as large or
        less; otherwise they are repeated there, which is a tenth quicker on the CPU. `packer parity` shows the
        difference.
    compose: "auto" makes one map of flips and turns that follow each other, of the crop after them, and of a resize
        that enlarges (`readers.augment.compose`); "exact" makes each op by itself (docs/training.md).
    """

    images: Images = "RGB"
    dtype: torch.dtype | None = None
    layout: Layout = "channels_last"
    decoder: DecoderName | Literal["compiled"] = "auto"
    engine: Engine = "auto"
    cpu_share: CpuShare = 0
    exact_colours: bool = False
    compose: Compose = "auto"

    def uses_codec(self) -> bool:
        """Whether the compiled codec may decode on the CPU; warns once where it is missing.

        Raises UnsupportedCpuError where it is missing and decoder="compiled".
        """
        from readers.coefficients import unsupported_reason  # loads crc32c

        if self.decoder in ("auto", "compiled") and (reason := unsupported_reason()):
            if self.decoder == "compiled":
                raise UnsupportedCpuError(f"decoder='compiled' does not work here: {reason}; use decoder='cpu'")
            _warn_of_libjpeg(reason)
        return self.decoder != "cpu"


@functools.cache
def _warn_of_libjpeg(reason: str) -> None:
    if sys.platform == "linux":
        slower = f"libjpeg decodes JPEGs, in about twice the time: {reason}"
        warnings.warn(f"{slower}; decoder='cpu' keeps it, without this warning", stacklevel=5)


@dataclass(frozen=True)
class Threads:
    """The threads that make batches.

    number: default one per CPU this process may use, shared among the ranks of the node.
    prefetch: batches made ahead.
    pin_memory: default where CUDA is available.
    """

    number: int | None = None
    prefetch: int = 3
    pin_memory: bool | None = None


@dataclass(frozen=True)
class Views:
    """Augmentation that makes several images of each sample.

    ops: of all views; or a list of ops for each view.
    count: number of views of each sample, each with its own draws.

    Raises ValueError.
    """

    ops: Sequence[Op] | Sequence[Sequence[Op]]
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the count of views is 1 or more, not {self.count!r}")
        nested = [isinstance(ops, Sequence) for ops in self.ops]
        if any(nested) and (not all(nested) or self.count > 1):
            raise ValueError("Views has ops and a count, or a list of ops for each view: not both")

    @property
    def lists(self) -> Sequence[Sequence[Op]]:
        """The ops of each view."""
        nested: Any = self.ops
        return nested if nested and isinstance(nested[0], Sequence) else [nested] * self.count


@dataclass(frozen=True)
class FieldOptions:
    """The fields of a batch, and how masks and boxes follow their image. Raises ValueError.

    min_visible: 0 to 1; a box with a smaller visible share of its area is left out, and an invisible box in any case.
    keep_boxes: keep all boxes; those that would be left out have an area of 0.
    mask_fill: the value of a mask outside the image: 0, or the value that the loss ignores.
    names: the fields, in order, or {name in the batch: field}.
    """

    min_visible: float = 0.0
    keep_boxes: bool = False
    mask_fill: int = 0
    names: Sequence[str] | Mapping[str, str] = ("image", "label")

    def __post_init__(self) -> None:
        if not 0 <= self.min_visible <= 1:
            raise ValueError(f"min_visible is a share from 0 to 1, not {self.min_visible!r}")
        if not 0 <= self.mask_fill <= 255:
            raise ValueError(f"mask_fill is a number from 0 to 255, not {self.mask_fill!r}")


# --- keyword names of the release before ------------------------------------------------------------------------
_NONE: Mapping[str, object] = {}
_OLD: dict[str, tuple[str, type[Any]]] = {
    **{one.name: ("ranks", Ranks) for one in fields(Ranks)},
    **{one.name: ("decode", Decode) for one in fields(Decode)[1:] if one.name != "compose"},
    **{one.name: ("threads", Threads) for one in fields(Threads)[1:]},
}


def accepts_old_names(function: Callable[_P, _T], dropped: Mapping[str, object] = _NONE) -> Callable[_P, _T]:
    """The function, which for one release also takes options by the names that they had as separate arguments.

    dropped: options that only ever had one value, and it. Raises ValueError for another one.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        if not options.keys() <= parameters.keys():
            options = _moved(options, parameters, dropped)  # type: ignore[assignment]
        return function(*args, **options)

    return call


def _moved(options: dict[str, Any], parameters: Mapping[str, object], dropped: Mapping[str, object]) -> dict[str, Any]:
    """Options by the names of today."""
    options = dict(options)
    for name in [name for name in options if name not in parameters]:
        parameter, kind = _OLD.get(name, ("", object))
        if name in dropped:
            if options.pop(name) != dropped[name]:
                raise ValueError(f"{name} is always {dropped[name]}: leave it out")
            warnings.warn(f"{name}= is deprecated: leave it out", DeprecationWarning, stacklevel=3)
        if name == "views":
            parameter = "augment"
        elif name == "field_options":
            parameter = "fields"
        if parameter not in parameters:
            continue  # the function refuses it
        value, now = options.pop(name), options.get(parameter)
        if name == "views":
            views = Views(now or (), value) if isinstance(value, int) else Views(value)
            if now and not isinstance(value, int):
                raise ValueError("views= has a list of ops for each view: leave augment= out")
            options[parameter], instead = views, "augment=Views(…)"
        elif name == "field_options":
            value = value or FieldOptions()
            options[parameter] = value if now is None else replace(value, names=now)
            instead = "fields=FieldOptions(…, names=…)"
        else:
            base = now if isinstance(now, kind) else kind() if now is None else kind(now)
            options[parameter] = replace(base, **{name: value})
            instead = f"{parameter}={kind.__name__}({name}=…)"
        warnings.warn(f"{name}= is deprecated: write  {instead}", DeprecationWarning, stacklevel=3)
    return options
