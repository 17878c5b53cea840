"""A double of the pipeline: the current one is a class attribute, and a failed build ends the interpreter."""

import rocal_pybind as b

from amd.rocal import types


class Pipeline:
    _current_pipeline = None

    def __init__(
        self,
        batch_size=-1,
        num_threads=0,
        device_id=0,
        seed=1,
        prefetch_queue_depth=2,
        rocal_cpu=False,
        tensor_layout=types.NCHW,
        tensor_dtype=types.FLOAT,
    ):
        mode = types.CPU if rocal_cpu else types.GPU
        self._handle = b.rocalCreate(batch_size, mode, device_id, num_threads, prefetch_queue_depth, seed)
        print("Pipeline has been created succesfully")
        self._batch_size = batch_size
        self._name = self._reader = None
        self._is_external_source_operator = False
        self._external_source = self._external_source_mode = None

    def __enter__(self):
        Pipeline._current_pipeline = self
        return self

    def __exit__(self, *_):
        pass

    def set_outputs(self, *nodes):
        b.setOutputs(self._handle, len(nodes), nodes)

    def build(self):
        if b.rocalVerify(self._handle) != types.OK:
            print("Verify graph failed")
            exit(0)
        return self

    def rocal_run(self):
        return b.rocalRun(self._handle)

    def get_output_tensors(self):
        return b.getOutputTensors(self._handle)

    def get_image_labels(self):
        return b.getImageLabels(self._handle)

    def get_ascii_datas(self):
        return b.getAsciiDatas(self._handle)
