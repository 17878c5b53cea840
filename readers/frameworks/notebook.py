"""HTML of readers and samples for notebooks: counts, classes and thumbnails.

Thumbnails are decoded, reduced and encoded again, so that damaged or malicious images do not reach the browser, and
saved notebooks remain small. Names, keys and texts are escaped.
"""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

import numpy as np

from cache.errors import BadSampleError, PackerError
from cache.messages import human_bytes, plural, printable, shortened
from readers.decode import decode_image
from readers.headers import read_header, sniff
from readers.table import NO_LABEL, Buffer, Sample, parse_npy

if TYPE_CHECKING:
    from readers.reader import Reader

_SMALL, _LARGE = 96, 256  # longest side in pixels
_PICTURES, _CLASSES = 8, 10
_MOST_PIXELS = 50_000_000  # larger images are not shown
_MOST_TEXT, _TEXT_BYTES = 300, 1 << 20  # characters shown; larger fields are not decoded
_NPY = b"\x93NUMPY"


def html_of(shown: Reader | Sample) -> str:
    """The HTML of a reader or a sample; reads the samples of which a reader shows thumbnails."""
    return _sample(shown) if isinstance(shown, Sample) else _reader(shown)


def _reader(reader: Reader) -> str:
    """The HTML of a reader: counts, classes, and thumbnails of samples at equal distances, which are read for it."""
    count = len(reader)
    facts = [f"{plural(count, 'sample')}, fields {', '.join(reader.fields)}"]
    if "image" in reader.fields and count:
        facts.append(f"{human_bytes(int(reader.sizes().sum()))} of images")
    parts = [f"<p><b>{_text(repr(reader))}</b><br>{_text('; '.join(facts))}</p>"]
    if reader.classes and count:
        parts.append(_classes(reader))
    if "image" in reader.fields and count:
        shown = sorted({int(number) for number in np.linspace(0, count - 1, _PICTURES)})
        parts.append("".join(_figure(reader, index) for index in shown))
    return f"<div>{''.join(parts)}</div>"


def _sample(sample: Sample) -> str:
    """The HTML of a sample: key, label, and each field as a thumbnail, an array shape, or the start of a text."""
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_field(data, _LARGE)}</td></tr>" for name, data in sample.fields.items()
    )
    return f"<div><p><b>{_text(sample.key)}</b>, label {sample.label}</p><table>{rows}</table></div>"


def _classes(reader: Reader) -> str:
    labels = reader.labels
    counts = np.bincount(labels[labels != NO_LABEL], minlength=len(reader.classes))
    names = [f"{name} {number:,}" for name, number in zip(reader.classes, counts.tolist(), strict=False)]
    more = f", … {plural(len(names), 'class')}" if len(names) > _CLASSES else ""
    return f"<p>{_text(', '.join(names[:_CLASSES]) + more)}</p>"


def _figure(reader: Reader, index: int) -> str:
    label = int(reader.labels[index])
    name = reader.classes[label] if 0 <= label < len(reader.classes) else "" if label == NO_LABEL else str(label)
    try:
        picture = _picture(reader.read(index), _SMALL)
    except (PackerError, OSError) as error:
        picture = _text(shortened(str(error), _SMALL))
    style = "display:inline-block;margin:2px;text-align:center;vertical-align:top"
    caption = f"<figcaption>{index}: {_text(shortened(name, 16))}</figcaption>"
    return f'<figure style="{style}" title="{_text(reader.keys[index])}">{picture}{caption}</figure>'


def _field(data: Buffer, side: int) -> str:
    size = f"{len(data):,} bytes"
    try:
        if bytes(data[: len(_NPY)]) == _NPY:
            array = parse_npy(data)
            return _text(f"{array.dtype} {list(array.shape)}, {size}")
        if sniff(data):
            return f"{_picture(data, side)}<br>{_text(f'{sniff(data)}, {size}')}"
        return _text(size if len(data) > _TEXT_BYTES else f"{shortened(bytes(data).decode(), _MOST_TEXT)}  ({size})")
    except UnicodeDecodeError:
        return _text(size)
    except BadSampleError as error:
        return _text(f"{error}, {size}")


def _picture(data: Buffer, side: int) -> str:
    """An <img> element of at most `side` pixels per side. Raises BadSampleError."""
    from PIL import Image

    header = read_header(data)
    if header.height * header.width > _MOST_PIXELS:
        raise BadSampleError(f"{header.width} x {header.height} pixels are too many to show here")
    image = Image.fromarray(decode_image(data))
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    code = base64.b64encode(file.getvalue()).decode()
    return f'<img width="{image.width}" height="{image.height}" alt="" src="data:image/jpeg;base64,{code}">'


def _text(text: str) -> str:
    return html.escape(printable(text))
