"""The kinds of fields: their encoded bytes and decoded values.

    kind    bytes                                                    value
    image   an encoded image                                         uint8 [h, w, 3], upright RGB
    mask    a losslessly encoded image of one channel (PNG, TIFF,    uint8, uint16 or int32 [h, w], upright: numbers of
            BMP, GIF); indices, if it has a palette                  classes or instances
    boxes   .npy                                                     float32 [k, 4]: x0, y0, x1, y1
    points  .npy                                                     float32 [..., 2]: x, y; NaN for a missing point
    array   .npy of booleans, integers, floating point or complex    the array
    pixels  raw pixels instead of encoded images                     uint8 [h, w, 3] (`readers.opening.packed`)
    target  .npy of plain numbers, of the same dtype and shape in    the array, [] or [k]: a label that is not a class
            all samples of a set                                     number (`readers.batch`)
    text    UTF-8; several captions are one per line                 str
    json    JSON in UTF-8                                            the decoded value
    file    any bytes                                                bytes

Boxes and points are in pixels of the displayed image, after its EXIF orientation: (0, 0) is the upper left
corner of the first pixel, (width, height) the lower right corner of the last. A mask covers the whole of this image.

Bytes are not trusted. Arrays are parsed by the layout documented in numpy.lib.format (magic, version, header length, a
Python literal, the values), without evaluation or pickle: the literal must have three members of known form, the dtype
must be one of a few plain ones, and the values must fill the rest exactly.

Encoding also accepts encoded bytes, which are checked and stored unchanged.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.decode import decode_image, decode_unchanged
from readers.decode.cpu import bits_of
from readers.decode.region import check_header
from readers.headers import read_header, sniff
from readers.headers.pillow import opened
from readers.table import Buffer, npy_layout, parse_npy

_MAX_JSON_BYTES = 64 << 20
_LOSSLESS = ("png", "tiff", "bmp", "gif")
_PNG_BITS, _PNG_COLOUR = 24, 25


class Kind(NamedTuple):
    """The codec of a kind of fields. All functions raise BadSampleError.

    decode: bytes to the value.
    encode: a value to bytes.
    check: a quick check of bytes before they are packed.
    """

    decode: Callable[[Buffer], Any]
    encode: Callable[[Any], Buffer]
    check: Callable[[Buffer], object]


def decode_field(kind: str, data: Buffer) -> Any:
    """The value of a field of this kind; arrays are writable and own their memory. Raises BadSampleError."""
    return KINDS[kind].decode(data)


def encode_field(kind: str, value: Any) -> Buffer:
    """The bytes of a value of this kind; encoded bytes are checked and returned. Raises BadSampleError."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value) if isinstance(value, bytearray) else value
        KINDS[kind].check(data)
        return data
    return KINDS[kind].encode(value)


def check_field(kind: str, data: Buffer, *, deep: bool = False) -> None:
    """Check the header of encoded bytes or, if deep, decode them completely. Raises BadSampleError."""
    (KINDS[kind].decode if deep else KINDS[kind].check)(data)


# --- arrays -------------------------------------------------------------------------------------------------------
def _write_npy(value: Any) -> bytes:
    array = _as_array(value)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise BadSampleError(f"an array of {array.dtype} cannot be packed, expected plain numbers or booleans")
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return out.getvalue()


def _as_array(value: Any) -> npt.NDArray[Any]:
    """The array of a list, a NumPy array or a torch tensor. An empty list becomes int64, as for the labels of no
    boxes."""
    try:
        array = np.asarray(value)
        return array.astype(np.int64) if not array.size and isinstance(value, list | tuple) else array
    except (ValueError, TypeError) as error:
        raise BadSampleError(f"{type(value).__name__} is not an array: {error}") from error


def _as_floats(values: npt.NDArray[Any], subject: str) -> npt.NDArray[np.float32]:
    if values.dtype.kind not in "iuf":
        raise BadSampleError(f"{subject} are numbers, not {values.dtype}")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _as_boxes(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if not values.size and values.ndim == 1:
        return np.zeros((0, 4), np.float32)
    boxes = _as_floats(values, "boxes")
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise BadSampleError(f"boxes are [k, 4], not {list(boxes.shape)}")
    if not np.isfinite(boxes).all():
        raise BadSampleError(
            f"box {int(np.flatnonzero(~np.isfinite(boxes).all(1))[0])} has a number that is not finite"
        )
    if (boxes[:, 2:] < boxes[:, :2]).any():
        row = int(np.flatnonzero((boxes[:, 2:] < boxes[:, :2]).any(1))[0])
        raise BadSampleError(f"box {row} is {boxes[row].tolist()}, expected x0, y0, x1, y1 with x0 <= x1 and y0 <= y1")
    return boxes


def _as_points(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if not values.size and values.ndim == 1:
        return np.zeros((0, 2), np.float32)
    points = _as_floats(values, "points")
    if not points.ndim or points.shape[-1] != 2:
        raise BadSampleError(f"points are [..., 2], not {list(points.shape)}")
    return points


def _decode_boxes(data: Buffer) -> npt.NDArray[np.float32]:
    return _as_boxes(parse_npy(data))


def _decode_points(data: Buffer) -> npt.NDArray[np.float32]:
    return _as_points(parse_npy(data))


def _decode_target(data: Buffer) -> npt.NDArray[Any]:
    values = parse_npy(data)
    if values.ndim > 1 or values.dtype.kind not in "iuf":
        raise BadSampleError(f"a target is a number or a vector, not {values.dtype} {list(values.shape)}")
    return values


def _encode_target(value: Any) -> bytes:
    """The .npy of a target; Python numbers, float64 and booleans become float32, the usual dtype for training."""
    values = _as_array(float(value) if isinstance(value, int) else value)
    if values.dtype.kind == "b" or values.dtype == np.float64:
        values = _as_floats(values.astype(np.float64), "targets")
    data = _write_npy(values)
    _decode_target(data)
    return data


# --- images and masks ---------------------------------------------------------------------------------------------
def _decode_mask(data: Buffer) -> npt.NDArray[Any]:
    _check_mask(data)
    pixels = decode_unchanged(data)
    if pixels.ndim != 2 or pixels.dtype not in (np.uint8, np.uint16, np.int32):
        raise BadSampleError(f"a mask has one channel of integers, not {pixels.dtype} {list(pixels.shape)}")
    bits = _grey_bits(data)
    return pixels // (255 // ((1 << bits) - 1)) if bits < 8 else pixels  # Pillow scales them to 0..255


def _check_mask(data: Buffer) -> None:
    header = read_header(data)
    if header.media not in _LOSSLESS:
        raise BadSampleError(f"a mask is losslessly encoded (PNG, TIFF, BMP or GIF), not {header.media}")
    if header.components != 1:
        raise BadSampleError(f"{header.media} image: has {header.components} channels, expected one for a mask")
    check_header(header)


def _grey_bits(data: Buffer) -> int:
    """Bit depth of a grey image whose values Pillow scales to 8 bits; 8 for all other images."""
    media = sniff(data)
    if media == "png":
        return data[_PNG_BITS] if not data[_PNG_COLOUR] else 8
    with opened(data, media) as image:
        return 1 if image.mode == "1" else bits_of(image) if image.mode == "L" else 8


def _encode_mask(value: Any) -> bytes:
    """PNG of 8 or 16 bits by the dtype; TIFF of 32 bits for int32, and for other integers that need 32 bits."""
    mask = _as_array(value)
    if mask.ndim != 2 or not mask.size or mask.dtype.kind not in "biu":
        raise BadSampleError(f"a mask is [h, w] of integers, not {mask.dtype} {list(mask.shape)}")
    if mask.dtype == np.bool_:
        mask = mask.astype(np.uint8)
    if mask.dtype not in (np.uint8, np.uint16, np.int32):
        low, high = int(mask.min()), int(mask.max())
        if low < -(1 << 31) or high >= 1 << 31:
            raise BadSampleError(f"the values of a mask must fit into int32, found {low} to {high}")
        fits = np.uint8 if low >= 0 and high < 1 << 8 else np.uint16 if low >= 0 and high < 1 << 16 else np.int32
        mask = mask.astype(fits)
    return _encode_pixels(mask, "TIFF" if mask.dtype == np.int32 else "PNG")


def _encode_image(value: Any) -> bytes:
    """PNG."""
    pixels = _as_array(value)
    is_deep_grey = pixels.ndim == 2 and pixels.dtype == np.uint16
    is_plain = pixels.dtype == np.uint8 and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4)))
    if not pixels.size or not (is_plain or is_deep_grey):
        raise BadSampleError(
            f"an image is encoded bytes, uint8 [h, w], [h, w, 3] or [h, w, 4], or uint16 [h, w], not {pixels.dtype} "
            f"{list(pixels.shape)}"
        )
    return _encode_pixels(pixels, "PNG")


def _encode_pixels(pixels: npt.NDArray[Any], codec: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    native = np.asarray(pixels, pixels.dtype.newbyteorder("="), order="C")
    Image.fromarray(native).save(out, codec, **({"compression": "tiff_adobe_deflate"} if codec == "TIFF" else {}))
    return out.getvalue()


# --- text ---------------------------------------------------------------------------------------------------------
def _decode_text(data: Buffer) -> str:
    try:
        return bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSampleError(f"not text in UTF-8: {error}") from error


def _encode_text(value: Any) -> bytes:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise BadSampleError(f"a text is a str, or a list of str with one per line, not {value!r:.80}")
    if len(lines) > 1 and any("\n" in line for line in lines):
        raise BadSampleError("a text in a list has a line break, but lists of texts are stored one per line")
    try:
        return "\n".join(lines).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSampleError(f"a text cannot be encoded as UTF-8: {error}") from error


def _decode_json(data: Buffer) -> Any:
    if len(data) > _MAX_JSON_BYTES:
        raise BadSampleError(f"JSON of {len(data):,} bytes, expected at most {_MAX_JSON_BYTES:,}")
    try:
        return json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"not JSON in UTF-8: {error}") from error


def _encode_json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadSampleError(f"cannot be written as JSON (which has no NaN or infinity): {error}") from error


def _encode_file(value: Any) -> bytes:
    raise BadSampleError(f"a file is bytes, not {type(value).__name__}")


KINDS: Mapping[str, Kind] = {
    "image": Kind(decode_image, _encode_image, read_header),
    "mask": Kind(_decode_mask, _encode_mask, _check_mask),
    "boxes": Kind(_decode_boxes, lambda value: _write_npy(_as_boxes(_as_array(value))), _decode_boxes),
    "points": Kind(_decode_points, lambda value: _write_npy(_as_points(_as_array(value))), _decode_points),
    "array": Kind(parse_npy, _write_npy, npy_layout),
    "pixels": Kind(decode_image, _encode_image, read_header),
    "target": Kind(_decode_target, _encode_target, _decode_target),
    "text": Kind(_decode_text, _encode_text, _decode_text),
    "json": Kind(_decode_json, _encode_json, _decode_json),
    "file": Kind(bytes, _encode_file, len),
}
