"""rocAL pipelines from a function of operators, ready-made pipelines over `external_source`, and `RocalLoader`.

    celeba         a fixed box → resize → mirror, normalise to [-1, 1]        (generative models of faces)
    resnet_train   random resized crop → mirror, normalise                    (ImageNet training)
    resnet_eval    resize of the short side → centre crop, normalise          (ImageNet evaluation)

Each returns a built pipeline for `RocalLoader`, with results float32 [batch_size, 3, size, size]. Means and deviations
are of values in 0..255. rocAL resizes bilinearly without antialiasing, and draws crops and flips itself, so they differ
from those of `readers.augment`. Its random generators are global to the process: the same `seed` gives the same draws
only in the first pipeline of a process, and pipelines that run at the same time affect each other's draws.

This is the only module that imports rocAL. rocAL is not on PyPI: it is part of ROCm, with its Python modules in
/opt/rocm/lib. Its errors take many forms. A failing `Pipeline.build` exits the interpreter, the constructor raises a
bare Exception, a failing operator returns None, which is a segmentation fault in setOutputs, and a build without a GPU
backend silently uses the CPU. Here, all of these raise PipelineError. All output of rocAL, from Python and C++, is
redirected to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError, MissingExtraError, PipelineError
from cache.node import find_library, own_gpu, usable_cpus
from readers.augment import CELEBA_CROP
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD, Crop
from readers.batch import Fields
from readers.feed import BadSample, check_choice
from readers.rocal.source import PADDING_BATCHES, PREFETCH, RocalSource, SourceBatch
from readers.table import upright_sides

Device: TypeAlias = Literal["cpu", "cuda"]
Graph: TypeAlias = Callable[[Any], Any]
Ops: TypeAlias = Callable[[Any, Any], Any]

_STDOUT, _STDERR = 1, 2
_redirected = threading.RLock()
_GPU_LIBRARIES = (b"libamdhip64", b"libOpenCL")  # a rocAL with a GPU backend is linked to one of them
_MIDDLE = [127.5, 127.5, 127.5]
_MEAN = [255 * value for value in IMAGENET_MEAN]
_STD = [255 * value for value in IMAGENET_STD]


class MissingRocalError(MissingExtraError):
    """rocAL cannot be imported; no extra installs it."""

    def __init__(self, purpose: str, reason: str) -> None:
        ImportError.__init__(
            self,
            f"{purpose} needs rocAL ({reason}): no wheel has it, so install ROCm with rocAL and its Python bindings "
            f"(apt install rocal-dev) and run with  PYTHONPATH=/opt/rocm/lib",
        )


def load_rocal(purpose: str) -> Any:
    """The package amd.rocal, with `fn`, `types`, `pipeline` and `plugin.generic`. Raises MissingRocalError."""
    try:
        import amd.rocal.fn
        import amd.rocal.pipeline
        import amd.rocal.plugin.generic
        import amd.rocal.types
    except (ImportError, OSError) as error:  # OSError: a library of ROCm that the extension module needs
        raise MissingRocalError(purpose, str(error)) from error
    return amd.rocal


def gpu_backend(maps: Path = Path("/proc/self/maps")) -> bool | None:
    """Whether the librocal of this process has a GPU backend, by the libraries it is linked with; None if unknown.

    maps: the list of the files mapped into this process.
    """
    try:
        contents = [Path(library).read_bytes() for library in find_library("librocal.so", maps)]
    except OSError:
        return None
    return any(name in content for content in contents for name in _GPU_LIBRARIES) if contents else None


# --- building ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """The device and the threads of a pipeline. Raises ValueError.

    device: runs the operators on decoded images; "cuda" stands for AMD GPUs, as in torch. On both devices, rocAL
        decodes images of an external source on the CPU, and `RocalLoader` returns arrays in host memory.
    threads: number of decoding threads; None divides the CPUs of this process among the ranks of the node. With more
        than one, images can differ slightly from run to run.
    device_id: number of the GPU; None is that of torch.cuda.set_device, or of the local rank.
    """

    device: Device = "cpu"
    threads: int | None = None
    device_id: int | None = None

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("cpu", "cuda"))
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is 1 or more, not {self.threads}")


def built(graph: Graph, machine: Machine, *, batch_size: int, seed: int) -> Any:
    """A built pipeline with one output, the result of `graph`. Raises MissingRocalError, PipelineError."""
    rocal = load_rocal("a rocAL pipeline")
    if machine.device == "cuda" and gpu_backend() is False:
        raise PipelineError(
            'this rocAL was built for the CPU alone, and would silently run device="cuda" there: give device="cpu", '
            "or install a rocAL built with HIP (that of ROCm, /opt/rocm/lib)"
        )
    device_id = own_gpu(_visible_gpus()) if machine.device_id is None else machine.device_id
    try:
        with _stdout_to_stderr():
            pipeline = rocal.pipeline.Pipeline(
                batch_size=batch_size,
                num_threads=machine.threads or usable_cpus(),
                device_id=device_id if machine.device == "cuda" else 0,
                seed=seed,
                prefetch_queue_depth=PREFETCH,
                rocal_cpu=machine.device == "cpu",
                tensor_layout=rocal.types.NCHW,
                tensor_dtype=rocal.types.FLOAT,
            )
            with pipeline:
                output = graph(rocal)
                if output is None:
                    raise PipelineError(
                        "the graph returned None, like failing operators of rocAL; the reason is printed above"
                    )
                pipeline.set_outputs(output)
            pipeline.build()
    except SystemExit as error:
        raise PipelineError("rocAL cannot build this pipeline; the reason is printed above") from error
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(f"rocAL cannot make this pipeline: {error}") from error
    return pipeline


def _visible_gpus() -> int | None:
    """Number of GPUs that the environment of this process allows; None without a limit."""
    named = [
        os.environ.get(name, "") for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    ]
    return min((value.count(",") + 1 for value in named if value), default=None)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr during the block. It applies to all threads, because C++ has one stdout per process."""
    libc = ctypes.CDLL(None)
    with _redirected:
        libc.fflush(None)
        try:
            sys.stdout.flush()
            stdout = os.dup(_STDOUT)
            os.dup2(_STDERR, _STDOUT)
        except (OSError, ValueError, AttributeError):  # a stream is closed or missing: do not redirect
            yield
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            libc.fflush(None)
            os.dup2(stdout, _STDOUT)
            os.close(stdout)


def encoded_images(rocal: Any, source: RocalSource) -> Any:
    """The node of the decoded images of `source`, for custom graphs; sizes as in `external_source`."""
    images, _ = rocal.fn.external_source(
        source=source,
        mode=rocal.types.EXTSOURCE_RAW_COMPRESSED,
        max_width=source.max_width,
        max_height=source.max_height,
    )
    return images


def _over(source: RocalSource, ops: Ops, machine: Machine, seed: int) -> Any:
    def graph(rocal: Any) -> Any:
        return ops(rocal, encoded_images(rocal, source))

    pipeline = built(graph, machine, batch_size=source.batch_size, seed=seed)
    source.grey_is_grey = True
    return pipeline


# --- ready-made -------------------------------------------------------------------------------------------------
def celeba(
    source: RocalSource,
    *,
    size: int = 64,
    crop: Crop = CELEBA_CROP,
    flip: float = 0.5,
    device: Device = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
    seed: int = 0,
) -> Any:
    """A pipeline for aligned faces, such as those of CelebA (178 x 218 pixels).

    It crops the box `crop`, resizes it to `size`, mirrors it with probability `flip`, and scales values to [-1, 1].

    Raises DatasetError for images of different or unknown sizes; ValueError for a box that is not inside the images,
    and for a max_height or max_width that makes rocAL decode images at another size.
    """
    _check_box(source, crop)
    return _over(source, celeba_ops(size=size, crop=crop, flip=flip), Machine(device, threads, device_id), seed)


def celeba_ops(*, size: int = 64, crop: Crop = CELEBA_CROP, flip: float = 0.5) -> Ops:
    """The operators of `celeba`, for other readers: (rocAL, node) -> node. The box must be inside the images."""
    mirror = _mirror(flip)

    def ops(rocal: Any, images: Any) -> Any:
        box = rocal.fn.crop(
            images,
            crop=[crop.height, crop.width],
            crop_pos_x=float(crop.left),  # in pixels: rocAL's default of 0.5 is the first column or row
            crop_pos_y=float(crop.top),
            **_stored(rocal),
        )
        return _resize(rocal, box, size, mirror(rocal), _MIDDLE, _MIDDLE)

    return ops


def resnet_train(
    source: RocalSource,
    *,
    size: int = 224,
    flip: float = 0.5,
    device: Device = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
    seed: int = 0,
) -> Any:
    """A pipeline for training on ImageNet.

    It crops a random box of 8 to 99 % of the image with an aspect ratio of 3/4 to 4/3 (the defaults of rocAL), resizes
    it to `size`, mirrors it with probability `flip`, and normalises by the mean and standard deviation of ImageNet.
    Raises ValueError if `flip` is not a probability.
    """
    return _over(source, resnet_train_ops(size=size, flip=flip), Machine(device, threads, device_id), seed)


def resnet_train_ops(*, size: int = 224, flip: float = 0.5) -> Ops:
    """The operators of `resnet_train`, for other readers: (rocAL, node) -> node. Raises ValueError."""
    mirror = _mirror(flip)

    def ops(rocal: Any, images: Any) -> Any:
        # resize_crop is unusable: it marks the size of the box as the valid region of the resized image, and later
        # operators read and write that region only. The defaults of random_crop are lists, which rocAL refuses.
        defaults = dict.fromkeys(("crop_area_factor", "crop_aspect_ratio", "crop_pox_x", "crop_pox_y"))
        box = rocal.fn.random_crop(images, **defaults, **_stored(rocal))
        return _resize(rocal, box, size, mirror(rocal), _MEAN, _STD)

    return ops


def resnet_eval(
    source: RocalSource,
    *,
    size: int = 224,
    resize: int = 256,
    device: Device = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
) -> Any:
    """A pipeline for evaluation on ImageNet.

    It resizes the short side to `resize`, crops the centre of `size` x `size`, and normalises by the mean and standard
    deviation of ImageNet. Raises ValueError if `resize` is smaller than `size`.
    """
    return _over(source, resnet_eval_ops(size=size, resize=resize), Machine(device, threads, device_id), seed=0)


def resnet_eval_ops(*, size: int = 224, resize: int = 256) -> Ops:
    """The operators of `resnet_eval`, for other readers: (rocAL, node) -> node. Raises ValueError."""
    if resize < size:
        raise ValueError(f"resize {resize} is smaller than size {size}, so the crop does not fit")

    def ops(rocal: Any, images: Any) -> Any:
        small = rocal.fn.resize(
            images,
            resize_shorter=resize,
            scaling_mode=rocal.types.SCALING_MODE_NOT_SMALLER,
            interpolation_type=rocal.types.LINEAR_INTERPOLATION,
            **_stored(rocal),
        )
        # Pass the size as `crop`: its default, a pair of zeros, overrides crop_w and crop_h.
        return rocal.fn.crop_mirror_normalize(
            small, crop=[size, size], mean=_MEAN, std=_STD, mirror=0, **_normalised(rocal)
        )

    return ops


def _resize(rocal: Any, images: Any, size: int, mirror: Any, mean: list[float], std: list[float]) -> Any:
    return rocal.fn.resize_mirror_normalize(
        images,
        resize_width=size,
        resize_height=size,
        mean=mean,
        std=std,
        mirror=mirror,
        **_normalised(rocal),
    )


def _stored(rocal: Any) -> dict[str, Any]:
    """The arguments for the layout and dtype of images between two operators."""
    return {"output_layout": rocal.types.NHWC, "output_dtype": rocal.types.UINT8}


def _normalised(rocal: Any) -> dict[str, Any]:
    """The arguments for the layout and dtype of results."""
    return {"output_layout": rocal.types.NCHW, "output_dtype": rocal.types.FLOAT}


def _mirror(flip: float) -> Callable[[Any], Any]:
    """A function of rocAL that makes the argument `mirror` for a probability. Raises ValueError."""
    if not 0 <= flip <= 1:
        raise ValueError(f"flip is a probability, not {flip}")
    if flip in (0, 1):
        return lambda rocal: int(flip)  # a coin_flip with probability 1 never flips
    return lambda rocal: rocal.fn.random.coin_flip(probability=flip)


def _check_box(source: RocalSource, crop: Crop) -> None:
    """Check that all images have the same size, contain the box, and are decoded at their size, because the box is in
    pixels of the decoded image. Raises DatasetError and ValueError."""
    sides = np.stack(upright_sides(source.reader.info), axis=1)
    sizes = np.unique(sides[sides.all(axis=1)], axis=0)  # the sizes of damaged images are unknown
    if len(sizes) != 1:
        examples = "; ".join(f"{height} x {width}" for height, width in sizes[:2])
        raise DatasetError(
            f"the index knows {len(sizes)} sizes of the images{', such as ' if examples else ''}{examples} (height x "
            f"width): this pipeline needs one, as aligned faces have; use resnet_train"
        )
    height, width = (int(side) for side in sizes[0])
    if (source.max_height, source.max_width) != (height, width):
        raise ValueError(
            f"max_height and max_width are {source.max_height} and {source.max_width}, where the images have {height} "
            f"and {width}: rocAL would decode them at another size; give external_source max_height={height} and "
            f"max_width={width}"
        )
    if crop.top + crop.height > height or crop.left + crop.width > width:
        raise ValueError(f"the box {crop} is not within the images, {height} x {width} (height, width)")


# `RocalLoader`: the batches of a rocAL pipeline over `external_source`, in order, with the exact number of samples.
#
# with RocalLoader(pipeline, source) as loader:
#     for epoch in range(90):
#         for images, labels in loader:       # copies: float32 [128, 3, 224, 224], int64 [128]
#             ...
#
# The loader feeds rocAL's iterator batch by batch, and drains it before a reset or release, which would hang otherwise:
# from the moment a pipeline is built, its threads wait for input, and only input wakes them. So every epoch ends in the
# same way, also after a break or an error: the loader feeds padding, marks the last of it as the end of the sequence,
# and runs the pipeline up to StopIteration.
#
#     waiting   built or reset, nothing fed   → begin, close (which feeds padding first)
#     fed       in the middle of an epoch     → end, which drains
#     drained   StopIteration was raised      → begin, which resets; close, which releases
#
# While a batch is fed, the receiving thread of rocAL can wake too early. It then takes an image twice, and all later
# images of the epoch are one row late, under wrong labels. So the loader examines the first padding batch: all of its
# rows are the same grey image, and any other row is an image that is late.
#
# The loader uses next and reset of `amd.rocal.plugin.generic.ROCALGenericIterator`, and its attributes index,
# num_batches and eos, which determine whether a further batch is fed; reset does not change them. The iterator of
# plugin.pytorch is unusable, because it calls the extension with one argument too many.


_Arrays: TypeAlias = list[npt.NDArray[Any]]
_GREY = 0.1  # tolerance of normalised values, about 6 of 255 or more
_used: weakref.WeakSet[Any] = weakref.WeakSet()  # pipelines with a loader, which releases them once


class RocalLoader:
    """Iterates over a built pipeline; each `for` loop is one epoch.

    pipeline: built over `source`, for example by `resnet_train`.
    fields: the parts of a batch: "image" (an array [n, …] in host memory for each output of the pipeline), "label"
        (int64 [n], -1 for none), "key" (list of str), "index" (int64 [n]), and other fields of the set (lists of values
        decoded by `readers.fields`, None for samples without the field). n is batch_size, or less at the end of an
        epoch and after skipped samples. Masks, boxes and points raise ValueError, because they cannot follow the crops
        and flips that rocAL draws.

    A `break` ends the epoch; the next loop begins the next epoch. The position in `state_dict` is the first batch that
    was not handed out. Close the loader after use, or use `with`; an unreferenced loader closes itself.

    Raises MissingRocalError, and PipelineError for errors inside rocAL. Images under wrong labels raise PipelineError
    at the end of the epoch or, after a `break`, at the start of the next loop.
    """

    def __init__(self, pipeline: Any, source: RocalSource, *, fields: Sequence[str] = ("image", "label")) -> None:
        self.source, self._fields = source, Fields(fields, source.reader)
        self._fields.check_apart("rocAL draws the random ops of images itself", "take ImageLoader")
        self._feeder = _Feeder(pipeline, source)
        self._finalizer = weakref.finalize(self, self._feeder.close)
        self._running: weakref.ref[Generator[tuple[Any, ...], None, None]] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields.wanted

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.source.epoch

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced on this rank in the current epoch or, between loops, in the last one."""
        return self.source.bad_samples

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of `epoch`."""
        self._end()
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position as a small dictionary of plain values, the same on every rank, for any number of ranks.

        It determines the next samples. The random numbers of rocAL are not part of it, so a resume draws new crops.
        """
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop at the position of `state`. Raises ResumeError; warns about another decoder."""
        self._end()
        self.source.load_state_dict(state)

    def __len__(self) -> int:
        """Batches of the current or next loop on this rank: an epoch, or the rest of a resumed epoch."""
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self._end()
        if self._feeder.closed:
            raise PipelineError("the loader is closed: build a new pipeline and a new loader")
        self._feeder.check()
        self.source.start()
        self._feeder.begin(len(self.source))
        epoch = self._batches()
        self._running = weakref.ref(epoch)
        return epoch

    def close(self) -> None:
        """End the current loop, join the reading thread and release the pipeline. Idempotent."""
        self._finalizer()

    def __enter__(self) -> RocalLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self) -> Generator[tuple[Any, ...], None, None]:
        """The rest of an epoch. The pipeline is drained at its end, also after a break or an error."""
        try:
            while (batch := self.source.prepare()) is not None:
                yield self._collect(batch, self._feeder.run())
        except BaseException:
            with contextlib.suppress(PipelineError):  # raise the first error; the next loop and `close` raise this one
                self._feeder.end()
            raise
        self._feeder.end()
        self.source.finish()
        self._feeder.check()

    def _collect(self, batch: SourceBatch, outputs: _Arrays) -> tuple[Any, ...]:
        """The parts of a batch. Labels are those that were fed: those of rocAL are the same memory, so a comparison
        would find no errors."""
        values: list[Any] = []
        reader, fields = self.source.reader, self._fields
        stored = [fields.decode(some) for some in fields.read(reader, batch.rows)] if fields.stored else []
        for name in fields.wanted:
            if name == "image":
                values += [output[: len(batch.rows)].copy() for output in outputs]
            elif name in fields.stored:
                values.append([some[name] for some in stored])
            else:
                values.append(Fields.column(reader, batch.rows, name))
        return tuple(values)

    def _end(self) -> None:
        """End the current loop; it returns no further batch."""
        epoch = self._running() if self._running else None
        if epoch is not None:
            epoch.close()
        self._feeder.end()


class _Feeder:
    """Runs a pipeline over the batches of its source. Raises PipelineError for all errors inside rocAL."""

    def __init__(self, pipeline: Any, source: RocalSource) -> None:
        if getattr(pipeline, "_external_source", None) is not source:
            raise ValueError("the pipeline was built over another source: give the one passed to fn.external_source")
        if pipeline in _used:
            raise ValueError("the pipeline has, or had, a loader, which releases it: build another")
        self._iterator: Any = load_rocal("RocalLoader").plugin.generic.ROCALGenericIterator(pipeline)
        _used.add(pipeline)
        self._source = source
        self._state: Literal["waiting", "fed", "drained"] = "waiting"
        self._late = 0  # rows of padding in the last epoch with images of samples

    @property
    def closed(self) -> bool:
        return self._iterator is None

    def begin(self, steps: int) -> None:
        """Prepare for an epoch of `steps` batches; call `end` for the epoch before it first."""
        iterator = self._iterator
        if self._state == "drained":
            _translated(iterator.reset)
            self._state = "waiting"
        iterator.index, iterator.eos, iterator.num_batches = 0, False, steps + PADDING_BATCHES

    def run(self) -> _Arrays:
        """Feed the next batch of the source, and return the outputs, in memory that rocAL will reuse."""
        self._state = "fed"
        try:
            outputs, _ = _translated(self._iterator.__next__)
        except StopIteration:
            raise PipelineError("rocAL ended the epoch before its last batch") from None
        return cast(_Arrays, outputs)

    def end(self) -> None:
        """End the epoch after any of its batches. Idempotent."""
        if not self.closed:
            self._source.stop()
            if self._state == "fed":
                self._drain()

    def check(self) -> None:
        """Raise PipelineError, once, if the last epoch had images under wrong labels."""
        late, self._late = self._late, 0
        if late:
            raise PipelineError(
                f"rocAL took {late} images twice in this epoch, and showed those after them {late} rows late: labels, "
                f"keys and indices were those of other images from some batch on; go back to a checkpoint from before"
            )

    def close(self) -> None:
        """Drain and release the pipeline. If draining fails, it is never released, because the release would hang."""
        iterator = self._iterator
        if iterator is None:
            return
        self._source.stop()
        try:
            if self._state != "drained":
                self._drain()
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(iterator))
            raise
        finally:
            self._iterator = None
            self._source.close()

    def _drain(self) -> None:
        """Feed padding up to the end of the sequence, and take the remaining batches. The source must be stopped, so
        that it returns padding."""
        iterator = self._iterator
        iterator.eos, iterator.num_batches = False, iterator.index + PADDING_BATCHES
        most = PADDING_BATCHES + 2 * PREFETCH + 2  # the queues of rocAL hold at most this many
        for step in range(most):
            try:
                outputs, _ = _translated(iterator.__next__)
                if step == 0 and self._state == "fed" and self._source.grey_is_grey:
                    self._late = max(_rows_with_images(output) for output in outputs)
            except StopIteration:
                if iterator.eos:  # otherwise a run failed, which rocAL does not report, and its threads still wait
                    self._state = "drained"
                    return
        raise PipelineError(f"rocAL does not end: {most} steps after the last batch it still has some, or fails")


def _translated(call: Callable[[], Any]) -> Any:
    """The result of a call into rocAL. Raises StopIteration unchanged, any other error as PipelineError."""
    try:
        return call()
    except (StopIteration, PipelineError):
        raise
    except Exception as error:
        raise PipelineError(f"rocAL failed: {error}") from error


def _rows_with_images(output: npt.NDArray[Any]) -> int:
    """Number of rows of a padding batch, float [n, 3, h, w], normalised, that differ from the grey last row."""
    flat = output.reshape(*output.shape[:2], -1)
    grey = np.abs(flat.mean(axis=2) - flat[-1].mean(axis=1)).max(axis=1) < _GREY
    return int(np.count_nonzero(~(grey & (flat.std(axis=2).max(axis=1) < _GREY))))
