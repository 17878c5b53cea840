"""Why a pipeline failed, in terms of samples: DALI's messages tell neither key nor batch.

The batches that may have been under way are read again in this process, which raises what a worker process raised, and
their images are decoded by our own decoder.
"""

from __future__ import annotations

from readers.dali.source import Source, foreign_media
from readers.decode import decode_image
from readers.decode.jpeg import has_clean_header
from readers.errors import BadSampleError, PackerError, WorkerError
from readers.headers import parse_header, read_header
from readers.sample import Buffer

__all__ = ["diagnose"]

_ERROR_CHARACTERS = 400


def diagnose(source: Source, epoch: int, steps: range, error: Exception) -> Exception:
    """The error to raise in place of `error`, which came in DALI's epoch `epoch` with batches `steps` under way.

    An error of the reader, or BadSampleError with the key of the first bad sample; WorkerError where nothing is wrong
    with the samples.
    """
    if isinstance(error, PackerError):
        return error
    for step in steps:
        try:
            arrays, *_ = source.batch(epoch, step)
            _, indices = source.samples_of(epoch, step)
        except StopIteration:
            break
        except Exception as found:
            return found
        for index, array in zip(indices.tolist(), arrays, strict=True):
            reason = _reason(array.data)
            if reason:
                return source.bad(index, reason)
    where = f"batch {steps.start} of epoch {source.start.epoch + epoch}"
    return WorkerError(f"DALI failed at {where}, though our own decoder reads its images: {_essence(error)}")


def _reason(data: Buffer) -> str:
    try:
        media = read_header(data).media
        reason = foreign_media(media)
        if not reason:
            decode_image(data)
    except BadSampleError as error:
        return str(error)
    return reason or _damage(data, media)


def _damage(data: Buffer, media: str) -> str:
    """What stops DALI and not us."""
    try:
        parse_header(data)
    except BadSampleError as error:
        return f"{error}: our decoder goes past this damage, DALI does not"
    if media == "jpeg" and not has_clean_header(data):
        return "jpeg image: stray bytes or a damaged segment before its pixels, which our decoder goes past, not DALI"
    return ""


def _essence(error: Exception) -> str:
    """The lines of a message of DALI's that say what happened, not where in its graph."""
    lines = [line.strip() for line in str(error).splitlines()]
    if "encountered:" in lines:
        lines = lines[lines.index("encountered:") + 1 :]
    told = " ".join(line for line in lines if line and not line.startswith("Current pipeline object"))
    return told[-_ERROR_CHARACTERS:] or type(error).__name__
