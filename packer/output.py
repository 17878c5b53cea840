"""Where sets are and where results go: a directory of this machine, or an address; and what is wrong with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.errors import OutputError, PackerError
from cache.remote import SCHEMES, Remote, is_remote, parse_url
from readers.remote import RemoteHome

__all__ = ["local_output", "output_errors", "place_told", "set_root"]

_ADDRESS = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|(?:{'|'.join(SCHEMES)}):/")  # a Path has made one slash of two


def local_output(place: str | os.PathLike[str]) -> Path:
    """The directory to write to. Raises OutputError for an address, which would become a directory called "s3:"."""
    text = os.fspath(place)
    if _ADDRESS.match(text):
        raise OutputError(
            f"{re.sub('//[^/]*@', '//***@', text)!r} is not a directory of this machine. Results go to one; a set "
            f"that is packed or uploaded also goes to an address, given as text: "
            f"{', '.join(f'{name}://' for name in SCHEMES)}"
        )
    return Path(place)


@contextmanager
def output_errors() -> Iterator[None]:
    """Have what the system says of the files of an output be an OutputError that names the file."""
    try:
        yield
    except PackerError:
        raise
    except OSError as error:
        told = f"{error.filename}: cannot be written: {error.strerror}" if error.filename is not None else str(error)
        wrong = OutputError(told)
        wrong.errno = error.errno
        raise wrong from error


def place_told(path: str | os.PathLike[str]) -> Path | str:
    """What results call a set: its directory, or its address without secrets. Raises RemoteError."""
    if not is_remote(path):
        return Path(path)
    return str(parse_url(path))


def set_root(path: str | os.PathLike[str]) -> Path:
    """The directory with dataset.json: the set's, or the one that keeps it for an address.

    Raises DatasetError, RemoteError.
    """
    if not is_remote(path):
        return Path(path)
    return RemoteHome(Remote(str(path))).path
