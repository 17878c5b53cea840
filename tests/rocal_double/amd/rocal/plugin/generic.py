"""A double of the iterator for numpy: it takes one batch and runs once a step, and reuses its output arrays."""

import numpy as np
import rocal_pybind as b

from amd.rocal import types


class ROCALGenericIterator:
    def __init__(self, pipeline):
        self.loader = pipeline
        self.batch_size = pipeline._batch_size
        self.output_list = None
        self.iterator_length = b.getRemainingImages(pipeline._handle) // self.batch_size
        self.num_batches = None
        if pipeline._is_external_source_operator:
            self.eos, self.index = False, 0
            self.num_batches = -(-pipeline._external_source.n // self.batch_size)

    def feed(self, *more):
        if self.index + 1 == self.num_batches:
            self.eos = True
        if self.index + 1 <= self.num_batches:
            fed = next(self.loader._external_source)
            raw = self.loader._external_source_mode == types.EXTSOURCE_RAW_COMPRESSED
            lengths = fed[2] if len(fed) > 2 else []
            rois = [b.ROIxywh() for _ in range(self.batch_size)]
            for i, roi in enumerate(rois):
                roi.h = lengths[i] if len(lengths) else 0
            arguments = [self.loader._handle, [] if raw else fed[0], fed[1], fed[0] if raw else [], rois, *more]
            arguments += [self.loader._width, self.loader._height, 3, self.loader._external_source_mode]
            b.externalSourceFeedInput(*arguments, types.NCHW, self.eos)
        self.index += 1

    def __next__(self):
        if self.loader._is_external_source_operator:
            self.feed()
        if self.loader.rocal_run() != 0:
            raise StopIteration
        tensors = self.loader.get_output_tensors()
        if self.output_list is None:
            self.output_list = [np.empty(tensor.dimensions(), tensor.dtype()) for tensor in tensors]
        for tensor, out in zip(tensors, self.output_list, strict=True):
            tensor.copy_data(out)
        labels = None if self.loader._reader == "WebDataset" else self.loader.get_image_labels().astype(np.int_)
        return self.output_list, labels

    def reset(self):
        b.rocalResetLoaders(self.loader._handle)

    def __iter__(self):
        return self

    def __len__(self):
        return self.iterator_length

    def __del__(self):
        b.rocalRelease(self.loader._handle)


class ROCALClassificationIterator(ROCALGenericIterator):
    pass
