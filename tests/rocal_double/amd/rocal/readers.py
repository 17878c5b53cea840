"""A double of rocAL's native readers of tar and TFRecord."""

from rocal_pybind import shards

from amd.rocal import types
from amd.rocal.pipeline import Pipeline


def webdataset(path, index_paths="", ext=None, missing_components_behavior=types.MISSING_COMPONENT_ERROR):
    Pipeline._current_pipeline._reader = "WebDataset"
    return shards.tar_samples(path, index_paths, ext)


def tfrecord(path, user_feature_key_map, features, reader_type=0):
    Pipeline._current_pipeline._reader = "TFRecordReaderClassification"
    keys = [user_feature_key_map[name] for name in ("image/encoded", "image/class/label", "image/filename")]
    features["image/encoded"] = shards.tfrecord_samples(path, *keys)
    return features
