"""A double of rocAL's extension module: the observed behaviour of its CPU backend, with its traps.

Where rocAL would wait forever, this raises DoubleHang; where it reads wrong memory, DoubleAbort. Both are recorded in
`FAULTS` as well, since one raised in a `__del__` is lost. The fault at the end of an epoch is drawn from a generator,
which `seed_traps(n)` seeds.

The handles stand for a queue of addresses and a graph that runs over one batch at a time.
"""

import itertools
import os
import random
import weakref
from collections import deque

import numpy as np

from rocal_pybind import pixels

FAULTS: list[str] = []
CONTEXTS = []  # of all pipelines, for tests to inspect
SLIPS: set[int] = set()  # numbers of batches, of a pipeline, in which an image is taken twice
_traps = random.Random(0)
_pipelines = itertools.count()
_DEEPEST = 2
_ENDINGS = ("right", "stale", "lost", "extra")
_HELD_BATCHES_PER_DEPTH = 2


class DoubleHang(Exception):
    """rocAL would wait forever here."""


class DoubleAbort(Exception):
    """rocAL would read wrong memory, or end the process."""


def fault(kind, text):
    FAULTS.append(text)
    return kind(text)


def seed_traps(seed):
    _traps.seed(seed)


class ROIxywh:
    x = y = w = h = 0


class Tensor:
    def __init__(self, array):
        self._array = array

    def dimensions(self):
        return list(self._array.shape)

    def dtype(self):
        return self._array.dtype.name

    def copy_data(self, out):
        out[...] = self._array


class Context:
    def __init__(self, batch_size, depth, seed):
        self.batch_size, self.depth = batch_size, depth
        self.rng = np.random.default_rng([seed, next(_pipelines)])  # setting a seed does not reset the generators
        self.external = self.built = self.eos = self.released = False
        self.nodes, self.outputs, self.labels, self.ascii = (), None, None, None
        self.queue, self.recent = deque(), deque(maxlen=_HELD_BATCHES_PER_DEPTH * depth)
        self.feeds, self.late = 0, []
        self.ending, self.extra = _traps.choice(_ENDINGS), False
        self.size, self.native, self.filled, self.shuffle, self.at = (0, 0), None, [], False, 0

    @property
    def waiting(self):
        """Whether the threads of the pipeline wait for input, and for nothing else."""
        return self.external and self.built and not (self.eos and not self.queue)


def rocalCreate(batch_size, mode, device_id, threads, depth, seed):
    if batch_size < 1:
        raise Exception("Failed creating the pipeline")
    os.write(1, b"OK: loaded 45 kernels from libvx_rpp.so\n")  # by printf, not through sys.stdout
    CONTEXTS.append(Context(batch_size, depth, seed))
    return CONTEXTS[-1]


def externalFileSource(context, max_width, max_height, mode):
    context.external, context.size = True, (max_height, max_width)
    return ("source",)


def shardSource(context, samples, shuffle, max_width, max_height):
    context.native, context.size, context.shuffle = list(samples), (max_height, max_width), shuffle
    return ("source",)


def node(kind, image, layout, dtype, *arguments):
    """Append a node. A failing node reports the error on stderr and returns None."""
    if image is None or (kind == "resize" and not any(arguments)):
        os.write(2, f"[ERR] {kind}: invalid input or size\n".encode())
        return None
    return (kind, image, layout, dtype, *arguments)


def createIntParameter(value):
    return lambda rng: value


def createIntRand(values, frequencies):
    if 1.0 in frequencies:  # rocAL mistakes the parameter for one with a single value
        return lambda rng: values[0]
    return lambda rng: int(rng.choice(values, p=frequencies))


def setOutputs(context, count, nodes):
    if None in nodes:
        raise fault(DoubleAbort, "a segmentation fault: setOutputs of None")
    context.nodes = nodes


def rocalVerify(context):
    context.built = bool(context.nodes)
    return 0 if context.built else 2


def externalSourceFeedInput(context, names, labels, arrays, rois, width, height, channels, mode, layout, eos):
    if not isinstance(labels, np.ndarray):
        raise TypeError("externalSourceFeedInput(): incompatible function arguments (labels)")
    if not isinstance(arrays, list):
        raise TypeError("externalSourceFeedInput(): incompatible function arguments (arrays)")
    if len(arrays) != context.batch_size or labels.size != context.batch_size:
        raise fault(DoubleAbort, f"a batch of {len(arrays)} images and {labels.size} labels, not {context.batch_size}")
    for array, roi in zip(arrays, rois, strict=True):
        if array.dtype != np.uint8:
            raise fault(DoubleAbort, f"an array of {array.dtype}: its copy as uint8 is gone before it is read")
        if not array.flags.c_contiguous or array.ndim != 1:
            raise fault(DoubleAbort, "a strided array: what is between its values is read")
        if not 0 < roi.h <= array.size:
            raise fault(DoubleAbort, f"a length of {roi.h} for {array.size} bytes")
    fed = [(weakref.ref(array), roi.h) for array, roi in zip(arrays, rois, strict=True)]
    batch = context.late + fed
    if context.feeds in SLIPS:  # the thread that takes images wakes too early and takes the previous image again
        batch.insert(1, batch[0])
    context.feeds += 1
    batch, context.late = batch[: context.batch_size], batch[context.batch_size :]
    context.queue.append(batch)
    context.recent.append(batch)
    # rocAL stores the address and reads its memory as int32: for int64 these are halves.
    context.labels = np.ascontiguousarray(labels).view(np.int32)[: labels.size].copy()
    context.eos = eos


def rocalRun(context):
    if context.native is not None:
        return _run_native(context)
    for batch in context.recent:
        if any(reference() is None for reference, _ in batch):
            raise fault(DoubleAbort, "an image was released while rocAL still had its address")
    if not context.queue:
        if not context.eos:
            raise fault(DoubleHang, "run: no batch was fed, and the sequence has not ended")
        if context.ending == "extra" and not context.extra and context.outputs is not None:
            context.extra = True
            return 0
        os.write(2, b"[ERR]  {output_routine}  Loader module failed to load next batch of images, status 5\n")
        return 1
    batch = context.queue.popleft()
    last = context.eos and not context.queue
    if last and context.ending == "lost":
        return 1
    if not (last and context.ending == "stale" and context.outputs is not None):
        data = [bytes(reference()[:length]) for reference, length in batch]
        _process(context, _decoded(context, data))
    return 0


def _decoded(context, data):
    """The images of a batch. An image that cannot be decoded becomes the last decodable image of the batch."""
    good = [i for i, image in enumerate(data) if pixels.header(image) is not None]
    if not good:
        raise fault(DoubleAbort, "All images in the batch failed decoding")
    taken = [image if i in good else data[good[-1]] for i, image in enumerate(data)]
    return [pixels.decode(image, *context.size) for image in taken]


def _run_native(context):
    """The last sample pads the set to whole batches, before the shuffle. Now and then the ring buffer is empty while
    the routine that fills it has not reported its end: then one more step follows, without labels."""
    if context.at == 0 or not context.filled:
        missing = -len(context.native) % context.batch_size
        context.filled = [*context.native, *[context.native[-1]] * missing]
        if context.shuffle:
            context.rng.shuffle(context.filled)
    if context.at >= len(context.filled):
        if context.ending == "extra" and not context.extra:
            context.extra, context.labels, context.ascii = True, None, None
            return 0
        return 1
    samples = context.filled[context.at : context.at + context.batch_size]
    context.at += context.batch_size
    context.labels = np.array([label for _, label, _ in samples], np.int32)
    context.ascii = [list(parts) for parts in zip(*(texts for _, _, texts in samples), strict=True)]
    _process(context, _decoded(context, [image for image, _, _ in samples]))
    return 0


def _process(context, images):
    context.outputs = [_finished(context, node, images) for node in context.nodes]


def _finished(context, node, images):
    """The size of an output is that of its last operator, even if fewer pixels are written into it."""
    results = _results(context, node, images)
    dtype = np.uint8 if len(node) < 4 or node[3] == 1 else np.float32
    named = node[1] if node[0] == "mirror_normalize" else node
    sizes = {"center_crop": named[4:5], "resize": [named[4:6]] if all(named[4:6]) else []}.get(named[0])
    height, width = sizes[0] if sizes else (max(image.shape[axis] for image in results) for axis in (0, 1))
    whole = pixels.uninitialised((len(results), height, width, 3), dtype)
    for place, image in zip(whole, results, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    planar = len(node) > 2 and node[2] == 1
    return Tensor(np.ascontiguousarray(whole.transpose(0, 3, 1, 2)) if planar else whole)


def _results(context, node, images):
    if node[0] == "source":
        return images
    kind, source, _, _, *arguments = node
    return [_applied(context.rng, kind, image, arguments) for image in _results(context, source, images)]


def _applied(rng, kind, image, arguments):
    if kind == "mirror_normalize":
        mirror, mean, std = arguments
        return pixels.normalized(image[:, ::-1] if mirror(rng) else image, mean, std)
    if kind == "random_crop":
        return pixels.random_box(image, rng)
    return getattr(pixels, kind)(image, *arguments)


def getOutputTensors(context):
    return context.outputs


def getImageLabels(context):
    """The labels fed last, even if the images are others; for a native reader the labels of the batch, if it has
    any."""
    return _present(context.labels).copy()


def _present(meta_data):
    if meta_data is None:
        raise RuntimeError(" { labels_meta_data } No meta data has been loaded")
    return meta_data


def getAsciiDatas(context):
    _present(context.ascii)
    return [[np.frombuffer(text, np.uint8) for text in part] for part in context.ascii]


def getRemainingImages(context):
    if context.external:
        return 0 if context.eos else context.batch_size
    return len(context.native) - context.at


def rocalResetLoaders(context):
    if context.waiting:
        raise fault(DoubleHang, "reset: threads wait for input")
    if context.external and context.depth > _DEEPEST:
        raise fault(DoubleHang, "reset: waits for the loader, which waits for input, and holds the interpreter's lock")
    # The counts of the iterator (index, eos) are not reset, and the output memory stays unchanged.
    context.eos, context.ending, context.extra, context.at = False, _traps.choice(_ENDINGS), False, 0
    context.late = []


def rocalRelease(context):
    if context.waiting:
        raise fault(DoubleHang, "release: threads wait for input")
    context.released = True
