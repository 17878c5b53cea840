"""A double of the operators in use, with their defaults: `crop=[0, 0]` hides crop_w and crop_h."""

import rocal_pybind as b

from amd.rocal import decoders, random, readers, types
from amd.rocal.pipeline import Pipeline

__all__ = ["decoders", "random", "readers"]


def external_source(source, mode=types.EXTSOURCE_FNAME, max_width=2000, max_height=2000):
    pipeline = Pipeline._current_pipeline
    pipeline._is_external_source_operator = True
    pipeline._external_source = iter(source)
    pipeline._external_source_mode = mode
    pipeline._width, pipeline._height = max_width, max_height
    return b.externalFileSource(pipeline._handle, max_width, max_height, mode), []


def _mirror(mirror):
    return b.createIntParameter(1 if mirror else 0) if isinstance(mirror, int) else mirror


def crop(image, crop=[0, 0], crop_pos_x=0.5, crop_pos_y=0.5, output_layout=types.NHWC, output_dtype=types.UINT8):
    """Positions are pixels, although the defaults look like fractions."""
    return b.node("crop", image, output_layout, output_dtype, crop, (crop_pos_x, crop_pos_y))


def random_crop(
    image,
    crop_area_factor=[0.08, 1],
    crop_aspect_ratio=[0.75, 1.333333],
    crop_pox_x=0,
    crop_pox_y=0,
    output_layout=types.NHWC,
    output_dtype=types.UINT8,
):
    if any(option is not None for option in (crop_area_factor, crop_aspect_ratio, crop_pox_x, crop_pox_y)):
        raise TypeError("randomCrop(): incompatible function arguments")
    return b.node("random_crop", image, output_layout, output_dtype)


def resize(
    image,
    resize_shorter=0,
    resize_width=0,
    resize_height=0,
    scaling_mode=types.SCALING_MODE_DEFAULT,
    interpolation_type=types.LINEAR_INTERPOLATION,
    output_layout=types.NHWC,
    output_dtype=types.UINT8,
):
    return b.node("resize", image, output_layout, output_dtype, resize_height, resize_width, resize_shorter)


def crop_mirror_normalize(
    image, crop=[0, 0], mean=[0.0], std=[1.0], mirror=1, output_layout=types.NHWC, output_dtype=types.UINT8
):
    cut = b.node("center_crop", image, types.NHWC, types.UINT8, crop)
    return b.node("mirror_normalize", cut, output_layout, output_dtype, _mirror(mirror), mean, std)


def resize_mirror_normalize(
    image,
    resize_width=0,
    resize_height=0,
    mean=[0.0],
    std=[1.0],
    mirror=1,
    output_layout=types.NHWC,
    output_dtype=types.UINT8,
):
    small = b.node("resize", image, types.NHWC, types.UINT8, resize_height, resize_width, 0)
    return b.node("mirror_normalize", small, output_layout, output_dtype, _mirror(mirror), mean, std)
