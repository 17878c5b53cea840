"""Options of loaders, grouped by subject in frozen dataclasses: ranks, decoding, threads, views, fields.

    ImageLoader(reader, 256, augment=val, shuffle=False, ranks=Ranks(tail="exact"), decode=Decode(layout="NHWC"))

The most common option of a group can be given as a plain value: `threads=4` is `threads=Threads(4)`,
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

    rank, world_size: default: from torch.distributed or the launcher's variables, determined each time a loop begins.
    tail: see `readers.order.Schedule`; default: "drop_last" for a shuffle, and "exact" (every sample once) for samples
        in stored order.
    """

    rank: int | None = None
    world_size: int | None = None
    tail: Tail | None = None


@dataclass(frozen=True)
class Decode:
    """How images are decoded, and the dtype and layout of their tensors.

    images: "RGB" (8 bits), or "unchanged" for the depth and channels of the files: uint8, uint16, int32 or float32, the
        same for all images of a batch (`readers.augment.cpu`, docs/images.md). "unchanged" refuses ops that are not
        defined for these images, and decodes on the CPU.
    dtype: torch.uint8, or float32, float16 or bfloat16 with values in 0..1; default: that of the images (uint8 for
        "RGB"), or float32 with Normalize.
    layout: "channels_last" is [n, 3, h, w] with channels last in memory, "NCHW" is contiguous, "NHWC" is [n, h, w, 3].
    decoder: "torchcodec" and "torchvision" decode baseline JPEGs on the GPU and leave other images to the CPU. "auto"
        takes the first of these that works on a CUDA device with a JPEG engine; otherwise the CPU, with a warning that
        says why; without a CUDA device the CPU. On the CPU, the compiled codec of this package decodes baseline JPEGs,
        and libjpeg the others; "compiled" is the same, but raises if the codec was not built; "cpu" is libjpeg for all
        JPEGs, with the same pixels (docs/images.md). Coefficients of a cache are decoded with Triton on a CUDA device,
        if Triton is installed, except with "cpu" and "compiled" (docs/gpu.md).
    engine: the implementation of crops and resizes on a CUDA device: "triton", one kernel for a batch; "torch", image
        by image; "auto": Triton if it works, or else torch, with a warning that says why.
    cpu_share: the share of the device's images that the threads decode instead, 0 to 1; or "auto": the share with which
        CPU and device finish together, by measurement (`readers.decode.device`).
    exact_colours: also interpolate a JPEG's subsampled colours if the box is shrunk to half or less; by default they
        are repeated there, which takes a tenth less time on the CPU. `packer parity` shows the difference.
    compose: "auto" combines consecutive flips and turns, the crop after them, and an enlarging resize into one map
        (`readers.augment.compose`); "exact" applies each op separately (docs/training.md).
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

    number: default: one per CPU that this process may use, divided among the ranks of the node.
    prefetch: batches made ahead.
    pin_memory: default: True if CUDA is available.
    """

    number: int | None = None
    prefetch: int = 3
    pin_memory: bool | None = None


@dataclass(frozen=True)
class Views:
    """Augmentation that makes several images of each sample.

    ops: the ops of all views, or a list of ops for each view.
    count: number of views of each sample, each drawn independently.

    Raises ValueError.
    """

    ops: Sequence[Op] | Sequence[Sequence[Op]]
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the count of views is at least 1, not {self.count!r}")
        nested = [isinstance(ops, Sequence) for ops in self.ops]
        if any(nested) and (not all(nested) or self.count > 1):
            raise ValueError("give Views ops and a count, or a list of ops for each view, not both")

    @property
    def lists(self) -> Sequence[Sequence[Op]]:
        """The ops of each view."""
        nested: Any = self.ops
        return nested if nested and isinstance(nested[0], Sequence) else [nested] * self.count


@dataclass(frozen=True)
class FieldOptions:
    """The fields of a batch, and how masks and boxes follow their image. Raises ValueError.

    min_visible: 0 to 1; boxes with a smaller visible share of their area are left out; invisible boxes always are.
    keep_boxes: keep all boxes; those that would be left out get an area of 0.
    mask_fill: value of a mask outside the image, such as 0 or the value that the loss ignores.
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


# --- keyword names of the previous release ----------------------------------------------------------------------
_NONE: Mapping[str, object] = {}
_OLD: dict[str, tuple[str, type[Any]]] = {
    **{one.name: ("ranks", Ranks) for one in fields(Ranks)},
    **{one.name: ("decode", Decode) for one in fields(Decode)[1:] if one.name != "compose"},
    **{one.name: ("threads", Threads) for one in fields(Threads)[1:]},
}


def accepts_old_names(function: Callable[_P, _T], dropped: Mapping[str, object] = _NONE) -> Callable[_P, _T]:
    """Make a function accept, for one release, options by their old names as separate arguments.

    dropped: removed options with the one value that is still accepted; another value raises ValueError.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        if not options.keys() <= parameters.keys():
            options = _moved(options, parameters, dropped)  # type: ignore[assignment]
        return function(*args, **options)

    return call


def _moved(options: dict[str, Any], parameters: Mapping[str, object], dropped: Mapping[str, object]) -> dict[str, Any]:
    """The options under their current names."""
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
