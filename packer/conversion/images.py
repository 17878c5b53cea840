"""Check an image before it is packed, and re-encode it on request.

The checks depend on how images will be decoded: an image that `readers.decode` cannot decode in that way is refused
here, by name, instead of in the middle of training. An image of which it decodes only a part causes a remark.

Re-encoding: Pillow decodes, resizes with its antialiasing Lanczos filter, and encodes. The result is upright, with its
EXIF and colour profile if they still apply. 16-bit grey keeps its depth in a PNG, and is shifted to 8 bits in a JPEG or
WebP. Animations, 16-bit colour in a PNG and floating point would lose more than size, and are refused. An image that
needs no change keeps its bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError
from cache.messages import plural
from packer.conversion.options import Images, Reencode
from packer.conversion.plan import renamed
from readers.coefficients.compiled import codec_if_built
from readers.decode import decode_image, decode_unchanged
from readers.decode.cpu import ISO, bits_of, bits_of_grey, without_all_bits, without_rgb
from readers.decode.region import check_coding, check_header
from readers.fields import check_field, decode_field, encode_field
from readers.headers import ImageHeader, frames, parse_header, read_header, sniff
from readers.headers import bits_of as stated_bits
from readers.headers.base import shrunk, upright_size
from readers.headers.formats import EXIF_PREFIX, header_of_facts, parse_frame
from readers.headers.pillow import opened
from readers.layout import PIXELS
from readers.table import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "FieldChecks",
    "adopted_image",
    "check_image",
    "decode_fully",
    "encode_pixels",
    "prepare_image",
    "reencode",
    "remarks_of",
]


# ------------------------------------------------------------------------------
# Check the other fields of a sample before they are packed, and transform boxes and points with a resized image.


WITHOUT_AREA, BEYOND = "boxes_without_area", "boxes_beyond_the_image"
_PIXELS = ("boxes", "points")
_TOLERANCE = 1.0  # pixels; covers rounding, and coordinates that count from 1


class FieldChecks:
    """The checks for fields of these kinds; files and JSON are packed without checks.

    deep: decode masks, instead of parsing only their headers.
    targets: dtype and shape of each target field; all samples of a set have the same.
    """

    def __init__(self, kinds: Mapping[str, str], deep: bool) -> None:
        named = ((number, name, kind) for number, (name, kind) in enumerate(kinds.items()))
        self._checked = [each for each in named if each[1] != "image" and each[2] not in ("file", "json")]
        self._deep = deep
        self.targets: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._checked)

    @property
    def in_pixels(self) -> bool:
        """Whether any field has pixel coordinates of the image."""
        return any(kind in _PIXELS for _, _, kind in self._checked)

    def check(self, payloads: Sequence[Buffer | None]) -> None:
        """Raise BadSampleError for the first field with invalid bytes."""
        for number, name, kind in self._checked:
            payload = payloads[number]
            if payload is None and kind == "target":
                raise BadSampleError(f"has no {name}, which is its label")
            if payload is not None:
                try:
                    if kind == "target":
                        self._check_target(name, payload)
                    check_field(kind, payload, deep=self._deep)
                except BadSampleError as error:
                    raise BadSampleError(f"field {name}: {error}") from error

    def remarks(self, payloads: Sequence[Buffer | None], header: ImageHeader) -> tuple[str, ...]:
        """Remarks on boxes that are packed unchanged, but that training code may reject. header: of the image."""
        height, width = header.upright_size
        kinds = set()
        for number, _, kind in self._checked:
            payload = payloads[number]
            if kind == "boxes" and payload is not None:
                boxes = decode_field(kind, payload)
                if (boxes[:, :2] >= boxes[:, 2:]).any():
                    kinds.add(WITHOUT_AREA)
                if (boxes < -_TOLERANCE).any() or (boxes > np.array([width, height] * 2) + _TOLERANCE).any():
                    kinds.add(BEYOND)
        return tuple(sorted(kinds))

    def check_pixels(self, header: ImageHeader, name: str) -> None:
        """Raise SourceError for raw pixels of another size than those before. name: of the file."""
        shape = f"{header.height} x {header.width} pixels"
        expected = self.targets.setdefault("image", shape)
        if shape != expected:
            raise SourceError(
                f"{name}: has {shape}, expected {expected} like the images before it; raw images of a set have one "
                f"size: set it by ops, such as  --op Resize:256 --op CenterCrop:256  (in Python "
                f"ops=[Resize(256), CenterCrop(256)])"
            )

    def _check_target(self, name: str, payload: Buffer) -> None:
        values = decode_field("target", payload)
        form = f"{values.dtype} {list(values.shape)}"
        expected = self.targets.setdefault(name, form)
        if form != expected:
            raise BadSampleError(f"is {form}, expected {expected}: all labels of a set have one dtype and shape")

    def resized(
        self, payloads: Sequence[Buffer | None], before: ImageHeader, after: ImageHeader
    ) -> Sequence[Buffer | None]:
        """The payloads, with boxes and points in pixels of the resized image. A mask is unchanged, since it covers the
        image in any size."""
        (height, width), (rows, columns) = before.upright_size, after.upright_size
        if (height, width) == (rows, columns):
            return payloads
        scale = np.array([columns / width, rows / height])
        changed = list(payloads)
        for number, _, kind in self._checked:
            payload = payloads[number]
            if kind in _PIXELS and payload is not None:
                values = decode_field(kind, payload)
                factors = np.tile(scale, 2) if kind == "boxes" else scale
                changed[number] = encode_field(kind, (values * factors).astype(np.float32))
        return changed


_DAMAGED, _DEEP, _FRAMES, _NO_RGB = "damaged", "over_8_bits", "further_frames", "without_rgb"
# The warning for a number of images; the first is named.
_REMARKS = {
    "unnumbered": "{images} (the first: {first}) with a class name but no number, which an index leaves out; "
    "packer convert  gives them numbers",
    _DAMAGED: "{images} with damage that costs no pixels (the first: {first}): kept unchanged, decoded by Pillow",
    _DEEP: "{images} with more than 8 bits per channel (the first: {first}): decoding to RGB takes the upper 8 bits, "
    "decode='unchanged' keeps all",
    _FRAMES: "{images} with further frames or pages (the first: {first}): readers decode the first one only; all "
    "pages of a TIFF are packed as an array:  numpy.save('x.npy', tifffile.imread(path))",
    WITHOUT_AREA: "{images} with boxes without area (the first: {first}): packed as they are; detectors refuse them",
    BEYOND: "{images} with boxes that reach beyond the image (the first: {first}): packed as they are",
    _NO_RGB: "{images} that readers cannot decode to RGB (the first: {first}); some can with decode='unchanged'",
}
_FAST_PIXELS = 1 << 25  # below Pillow's own limit
_QUALITY = 90
_PILLOW = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
_PNG_BITS, _PNG_COLOUR, _COLOURS = 24, 25, (2, 4, 6)
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")
_ORIENTATION = 0x0112
_RAW_EXIF = "Raw profile type exif"
_PROFILE_SPACE = slice(16, 20)


class _Prepared(NamedTuple):
    """The bytes to pack, their header, the matching file name, and the kinds of remarks."""

    image: Buffer
    header: ImageHeader
    name: str
    remarks: tuple[str, ...]


def prepare_image(image: Buffer, name: str, key: str, options: Images) -> _Prepared:
    """Check an image, and re-encode it as `options` say. key: of its sample. Raises BadSampleError."""
    header, remarks = check_image(image, options.decode)
    if options.check == "decode":
        decode_fully(image, options.decode)
    if options.reencode is None:
        return _Prepared(image, header, name, remarks)
    if options.is_raw:
        return _Prepared(
            *encode_pixels(image, decode_image(image), header, (name, key), options.reencode, changed=True), ()
        )
    made, header, name = reencode(image, header, name, key, options.reencode)
    return _Prepared(made, header, name, remarks if made is image else ())


def check_image(image: Buffer, decode: str) -> tuple[ImageHeader, tuple[str, ...]]:
    """The header of an image to be decoded like this, and remarks. Raises BadSampleError."""
    codec = codec_if_built()
    if codec is not None and (facts := codec.read_jpeg_facts(image)) is not None:
        header = header_of_facts(image, facts)
        if decode != "none":
            check_header(header)
        return header, ()
    media, frame = sniff(image), 0
    remarks: tuple[str, ...] = ()
    try:
        if media == "jpeg":
            header, frame = parse_frame(image)
        else:
            header = parse_header(image)
    except BadSampleError:
        header, remarks = read_header(image), (_DAMAGED,)
    if decode == "none":
        return header, remarks
    check_header(header)
    if frame:
        check_coding(image, header, frame)
        return header, remarks
    bits = image[_PNG_BITS] if media == "png" else stated_bits(image) if media in ISO else 8
    if media == "tiff" or (media in ISO and bits > 8) or header.height * header.width > _FAST_PIXELS:
        with opened(image, media) as picture:
            reason = without_rgb(picture) if decode == "RGB" else without_all_bits(picture, bits)
            if reason:
                other = decode == "RGB" and not without_all_bits(picture)
                raise BadSampleError(reason + ("; decode='unchanged' packs such images" if other else ""))
            bits = max(bits, bits_of(picture))
    if bits > 8 and decode == "RGB":
        remarks += (_DEEP,)
    if frames(image, media) > 1:
        remarks += (_FRAMES,)
    return header, remarks


def adopted_image(image: Buffer) -> tuple[ImageHeader | None, tuple[str, ...]]:
    """`check_image` for an image in an adopted shard: refuses nothing; None if its header cannot be read."""
    try:
        return check_image(image, "RGB")
    except BadSampleError:
        pass
    try:
        return read_header(image), (_NO_RGB,)
    except BadSampleError:
        return None, ()


def remarks_of(shards: Iterable[Mapping[str, tuple[int, str]]]) -> tuple[str, ...]:
    """Warnings from the remarks on the images of each shard: kind -> (number, name of the first)."""
    counts: dict[str, tuple[int, str]] = {}
    for remarks in shards:
        for kind, (count, first) in remarks.items():
            total, earliest = counts.get(kind, (0, first))
            counts[kind] = (total + count, earliest)
    return tuple(
        _REMARKS[kind].format(images=plural(count, "image"), first=first)
        for kind, (count, first) in sorted(counts.items())
    )


def decode_fully(image: Buffer, decode: str) -> None:
    """Decode every pixel, as readers will. Raises BadSampleError if that fails."""
    try:
        if decode == "RGB":
            decode_image(image)
        elif decode == "unchanged":
            decode_unchanged(image)
    except BadSampleError as error:
        raise BadSampleError(f"does not decode: {error}") from error


def _target_size(width: int, height: int, options: Reencode) -> tuple[int, int]:
    """(width, height) after resizing; never larger than before, never 0."""
    if options.max_side is not None:
        factor = options.max_side / max(width, height)
    elif options.resize_short is not None:
        factor = options.resize_short / min(width, height)
    else:
        return width, height
    return shrunk(width, height, factor)


def reencode(
    image: Buffer, header: ImageHeader, name: str, key: str, options: Reencode
) -> tuple[Buffer, ImageHeader, str]:
    """Re-encode the image: its bytes, its header, and its name with the suffix of the new codec.

    key: of its sample. Raises BadSampleError.
    """
    height, width = header.upright_size
    size = _target_size(width, height, options)
    kept = header.media if header.media in _PILLOW else "png"
    codec = kept if options.codec == "keep" else options.codec
    resizes = size != (width, height)
    lossy_again = options.quality is not None and codec in ("jpeg", "webp")
    if codec == header.media and not resizes and not lossy_again:
        return image, header, name
    data = _encode(image, header, size if resizes else None, codec, options.quality or _QUALITY)
    if codec == header.media and not resizes and len(data) >= len(image):
        return image, header, name
    return data, read_header(data), name if codec == header.media else renamed(name, key, codec)


def encode_pixels(
    image: Buffer,
    pixels: npt.NDArray[np.uint8],
    header: ImageHeader,
    called: tuple[str, str],
    options: Reencode,
    *,
    changed: bool,
) -> tuple[Buffer, ImageHeader, str]:
    """Encode pixels that were made from an image: bytes, header, and the name with the suffix of the codec.

    pixels: uint8 [height, width, 3], upright. header: of the image. called: its name, and the key of its sample.
    changed: whether the pixels differ from those of the image; if not, it keeps its bytes where possible.
    Raises BadSampleError.
    """
    from PIL import Image

    kept = header.media if header.media in _PILLOW else "png"
    codec = kept if options.codec == "keep" else options.codec
    if codec == "raw":
        height, width, _ = pixels.shape
        packed = ImageHeader(PIXELS, height, width, 3, 0, 1)
        return np.ascontiguousarray(pixels).tobytes(), packed, renamed(*called, codec)
    if not changed and codec == header.media and options.quality is None:
        return image, header, called[0]
    is_grey = header.components == 1 and bool((pixels[..., :1] == pixels).all())
    made = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if is_grey else pixels))
    out = io.BytesIO()
    with opened(image, header.media) as picture:
        exif = picture.getexif()
        if exif.pop(_ORIENTATION, None) is not None:
            picture.info["exif"] = exif.tobytes()
        metadata = _metadata(picture, made.mode)
    if codec != "png":
        metadata["quality"] = options.quality or _QUALITY
    made.save(out, _PILLOW[codec], **metadata)
    data = out.getvalue()
    return data, read_header(data), called[0] if codec == header.media else renamed(*called, codec)


def _encode(image: Buffer, header: ImageHeader, size: tuple[int, int] | None, codec: str, quality: int) -> bytes:
    """size: (width, height) of the upright result; None to keep the size."""
    from PIL import Image, ImageOps

    count = frames(image, header.media)
    if count > 1:
        raise BadSampleError(f"has {count} frames or pages, of which re-encoding would keep one")
    out = io.BytesIO()
    with opened(image, header.media) as picture:
        _check_loss(image, header, picture, codec)
        bits = bits_of_grey(picture)
        if size:  # JPEG: let the DCT do the first part of the reduction
            least = upright_size(size[1] * 2, size[0] * 2, header.orientation)
            picture.draft(None, (least[1], least[0]))
        ImageOps.exif_transpose(picture, in_place=True)
        converted = _of_16_bits(picture, bits, codec) if bits else _in_mode(picture, codec, size is not None)
        if size and converted.size != size:
            converted = _resized(converted, size, Image.Resampling.LANCZOS)
        options = _metadata(picture, converted.mode)
        if codec != "png":
            options["quality"] = quality
        converted.save(out, _PILLOW[codec], **options)
    return out.getvalue()


def _check_loss(image: Buffer, header: ImageHeader, picture: Image, codec: str) -> None:
    reason = without_rgb(picture)
    colour = image[_PNG_COLOUR] in _COLOURS if header.media == "png" else picture.mode not in ("1", "L", "P", "LA")
    bits = image[_PNG_BITS] if header.media == "png" else bits_of(picture)
    if not reason and codec == "png" and bits > 8 and colour and not bits_of_grey(picture):
        reason = f"has {bits} bits per channel, but Pillow writes at most 8 into a PNG"
    if reason:
        raise BadSampleError(f"cannot be re-encoded: {reason}")


def _of_16_bits(picture: Image, bits: int, codec: str) -> Image:
    from PIL import Image

    values = np.asarray(picture).astype(np.uint16)
    if codec == "png":
        return Image.fromarray(values << (16 - bits))
    return Image.fromarray((values >> (bits - 8)).astype(np.uint8))


def _resized(picture: Image, size: tuple[int, int], how: Any) -> Image:
    from PIL import Image

    if picture.mode != "I;16":
        return picture.resize(size, how)
    # Not every version of Pillow resizes 16 bits, so convert to floating point and back.
    values = np.asarray(Image.fromarray(np.asarray(picture).astype(np.float32)).resize(size, how))
    return Image.fromarray(np.clip(np.rint(values), 0, 65535).astype(np.uint16))


def _in_mode(picture: Image, codec: str, resizes: bool) -> Image:
    """The picture in a mode that the codec can write and the filter can resize."""
    mode = picture.mode
    transparent = mode in _TRANSPARENT or "transparency" in picture.info
    if codec == "jpeg":
        return picture.convert("L") if mode in ("1", "L") else picture.convert("RGB")
    if codec == "webp":
        return picture.convert("RGBA" if transparent else "RGB")
    if (mode in ("P", "PA") and resizes) or mode in ("CMYK", "YCbCr", "LAB", "HSV", "PA", "RGBa", "La"):
        return picture.convert("RGBA" if transparent else "RGB")
    if mode == "1" and resizes:
        return picture.convert("L")
    picture.load()
    return picture


def _metadata(picture: Image, mode: str) -> dict[str, Any]:
    """EXIF, in the form that every codec accepts, and the colour profile if it matches the mode."""
    options: dict[str, Any] = {}
    exif = picture.info.get("exif", b"")
    if not exif and _RAW_EXIF in picture.info:
        exif = picture.getexif().tobytes()
    if exif:
        options["exif"] = exif if exif.startswith(EXIF_PREFIX) else EXIF_PREFIX + exif
    profile = picture.info.get("icc_profile") or b""
    space = "GRAY" if mode in ("1", "L", "LA", "I;16") else "RGB "
    if profile[_PROFILE_SPACE] == space.encode():
        options["icc_profile"] = profile
    return options
