"""A double of the decoder behind rocAL's native readers."""

import rocal_pybind as b

from amd.rocal.pipeline import Pipeline


def image(
    samples,
    user_feature_key_map=None,
    path="",
    file_root="",
    index_path="",
    random_shuffle=False,
    max_decoded_width=1000,
    max_decoded_height=1000,
):
    return b.shardSource(
        Pipeline._current_pipeline._handle, samples, random_shuffle, max_decoded_width, max_decoded_height
    )
