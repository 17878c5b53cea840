"""The header of a JPEG: its segments up to the first scan, and whether an end marker follows.

    FF D8                       start of image
    FF xx, uint16 n, n-2 bytes  segments: APPn, DQT, DHT, ...; any number of FF may come before a marker
    FF Cx, uint16 n, uint8 precision, uint16 height, uint16 width, uint8 components, 3 bytes each: the frame
    FF DA, uint16 n, n-2 bytes  start of scan, then entropy-coded data, in which FF D9 cannot occur
    FF D9                       end of image; bytes after it are legal and common

Source: ITU-T T.81, annex B. Big-endian. Like libjpeg, this skips stray bytes between segments and takes no
height from a DNL segment. Like Pillow, it joins several APP1 segments with EXIF, and takes the last of those with XMP.

A progressive JPEG may have any number of scans, and a decoder goes through all pixels in each of them, however few
bytes it has: a scan of a dozen bytes can cost as much as an image. So their number is limited where images are large,
as libjpeg-turbo's authors advise (doc/usage.txt, "-maxscans"). Writers make some ten scans, and 20 at most.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from readers.headers.base import Buffer, ImageHeader, RefusedImageError, bad, check_size, truncated
from readers.headers.tiff import EXIF_PREFIX, UPRIGHT, orientation, xmp_orientation

__all__ = ["check_scans", "parse_frame", "parse_jpeg", "stores_rgb"]

_SCAN = 0xFFDA
_APP1 = 0xFFE1
_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_SKIPPED = frozenset((0xFFC4, 0xFFCC, 0xFFDB, 0xFFDC, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0))) - {_APP1}
_XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"
_PROGRESSIVE = 2  # the lower bits of the SOF markers of progressive images
_STANDALONE = frozenset((0xFF01, *range(0xFFD0, 0xFFD8)))
# Metadata beyond 64 kB is split into segments of 64 kB: 65,536 of them are 4 GB.
_MAX_SEGMENTS = 1 << 16
_SEARCH_BYTES = 4096
# As many scans as an image of any size may have, and pixels that the scans of an image with more may go through: a few
# seconds of work.
_MOST_SCANS, _MOST_SCANNED_PIXELS = 32, 1 << 31
_LEAST_SCAN_BYTES = 10

_segment = struct.Struct(">HH").unpack_from
_frame = struct.Struct(">5xHHB").unpack_from
_next_marker = re.compile(rb"\xff[^\x00\xff]").search
_adobe = re.compile(rb"\xff\xee..Adobe.{6}(.)", re.DOTALL).search
_RGB = [ord(name) for name in "RGB"]


def parse_jpeg(data: Buffer, *, exif_only: bool = False) -> ImageHeader:
    """The header of a JPEG, of which bytes 0 to 2 are known to be FF D8 FF; raises BadSampleError.

    exif_only: take the orientation from EXIF alone, and not from XMP; then the end is not looked for.
    """
    return parse_frame(data, exif_only=exif_only)[0]


def parse_frame(data: Buffer, *, exif_only: bool = False) -> tuple[ImageHeader, int]:
    """The same, and the byte at which the frame states the height (uint16, big-endian)."""
    # Runs once per sample of a conversion, so: one loop, the frequent segments first, local names, no slices.
    segment = _segment
    skipped = _SKIPPED
    height = width = components = process = frame = 0
    exif: list[tuple[int, int]] = []
    xmp = (0, 0)
    at = 2
    try:
        for _ in range(_MAX_SEGMENTS):
            code, size = segment(data, at)
            if code in skipped:
                pass
            elif code == _SCAN:
                break
            elif code in _FRAMES:
                if process:
                    raise bad("jpeg", at, "one frame (SOF) before the scan", "a second one")
                height, width, components = _read_frame(data, at, size)
                process, frame = code & 0xFF, at + 5
            elif code == _APP1:
                if data[at + 4 : at + 10] == EXIF_PREFIX:
                    exif.append((at + 10, at + 2 + size))
                elif data[at + 4 : at + 4 + len(_XMP_PREFIX)] == _XMP_PREFIX:
                    xmp = (at + 4 + len(_XMP_PREFIX), at + 2 + size)
            else:
                at = _resume(data, at, code)
                continue
            if size < 2:
                raise bad("jpeg", at + 2, "a segment of 2 bytes or more", size)
            at += size + 2
        else:
            raise bad("jpeg", at, f"a scan (SOS) within {_MAX_SEGMENTS} segments", "more segments")
    except struct.error as error:
        raise truncated("jpeg", at, "a segment", data) from error
    if not process:
        raise bad("jpeg", at, "a frame (SOF) before the scan", "none")
    scan = at + 2 + size
    if process & 3 == _PROGRESSIVE or data[at + 4 : at + 5] != bytes((components,)):
        check_scans(data, at, height * width)
    if not exif_only and (data[-1] != 0xD9 or data[-2] != 0xFF or len(data) < scan + 3):
        _find_end(data, scan)
    rotated = 0
    if len(exif) == 1:
        rotated = orientation(data, *exif[0])
    elif exif:
        blob = b"".join(bytes(data[start:stop]) for start, stop in exif)
        rotated = orientation(blob, 0, len(blob))
    if not rotated and xmp[0] and not exif_only:
        rotated = xmp_orientation(data, *xmp)
    return ImageHeader("jpeg", height, width, components, process, rotated or UPRIGHT), frame


def stores_rgb(data: Buffer, frame: int) -> bool:
    """Whether a JPEG, with its frame as `parse_frame` says, stores red, green and blue in place of YCbCr.

    As libjpeg decides (jdapimin.c): by Adobe's segment, of transform 0, or by the names of the components. Where that
    is in doubt, as with a thumbnail in front that has such a segment, the answer is yes.
    """
    if data[frame + 4] != 3:
        return False
    adobe = _adobe(data, 2, frame + _SEARCH_BYTES)
    return adobe[1] == b"\0" if adobe is not None else [data[frame + at] for at in (5, 8, 11)] == _RGB


def check_scans(data: Buffer, start: int, pixels: int) -> None:
    """Raise RefusedImageError for an image of so many pixels whose scans, from byte `start` on, take too long."""
    if (len(data) - start) // _LEAST_SCAN_BYTES * pixels <= _MOST_SCANNED_PIXELS:
        return  # not looked at: some 2% of the time that decoding takes
    codes = np.frombuffer(data, np.uint8)[start:]
    scans = np.count_nonzero((codes[1:] == _SCAN & 0xFF) & (codes[:-1] == 0xFF))
    if scans > _MOST_SCANS and scans * pixels > _MOST_SCANNED_PIXELS:
        limit = max(_MOST_SCANS, _MOST_SCANNED_PIXELS // pixels)
        most = f"at most {limit} scans of {pixels:,} pixels, which are decoded"
        raise RefusedImageError(str(bad("jpeg", start, most, f"{scans} scans")))


def _read_frame(data: Buffer, at: int, size: int) -> tuple[int, int, int]:
    """Height, width and components of the frame segment at byte `at`; struct.error where it is cut off."""
    height, width, components = _frame(data, at)
    if not 1 <= components <= 4:
        raise bad("jpeg", at + 9, "1 to 4 components", components)
    if size != 8 + 3 * components:
        raise bad("jpeg", at + 2, f"a frame of {8 + 3 * components} bytes", size)
    check_size("jpeg", at + 5, height, width)
    return height, width, components


def _resume(data: Buffer, at: int, code: int) -> int:
    """The byte beyond `at`, where no known segment begins, at which to continue."""
    if code in _STANDALONE:
        return at + 2
    match = _next_marker(data, at)
    if match is None:
        raise truncated("jpeg", at, "a marker", data)
    if match.start() == at:
        raise bad("jpeg", at, "a segment that may come before the scan", f"marker {code:04X}")
    return match.start()


def _find_end(data: Buffer, scan: int) -> None:
    """Raise BadSampleError unless an end marker follows a byte or more of the scan, which begins at `scan`.

    Searches backwards in small copies, since a memoryview cannot search and little follows the marker.
    """
    stop = len(data)
    while stop >= scan + 3:
        start = max(scan + 1, stop - _SEARCH_BYTES)
        if bytes(data[start:stop]).rfind(b"\xff\xd9") >= 0:
            return
        stop = start + 1
    raise truncated("jpeg", scan, "a scan and an end marker (FFD9)", data)
