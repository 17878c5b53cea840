"""Places of sets and results: a local directory, or an address; results, and errors of outputs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache.errors import OutputError, PackerError
from cache.remote import SCHEMES, Remote, is_remote, parse_url
from readers.opening.remote import RemoteHome

__all__ = ["Result", "local_output", "output_errors", "set_root", "set_title"]

_ADDRESS = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://|(?:{'|'.join(SCHEMES)}):/")  # Path turns "//" into "/"


@dataclass(frozen=True, slots=True)
class Result:
    """The base of results that functions of packer return."""

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON: paths as text."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else [*map(_plain, value)] if isinstance(value, tuple) else value


def local_output(directory: str | os.PathLike[str]) -> Path:
    """The directory to write to. Raises OutputError for an address, which would become a directory called "s3:"."""
    text = os.fspath(directory)
    if _ADDRESS.match(text):
        raise OutputError(
            f"{re.sub('//[^/]*@', '//***@', text)!r} is not a local directory, which results need; only a set "
            f"that is packed or uploaded can go to an address, given as text: "
            f"{', '.join(f'{name}://' for name in SCHEMES)}"
        )
    return Path(directory)


@contextmanager
def output_errors(where: Path | None = None) -> Iterator[None]:
    """Turn system errors about output files into OutputErrors that name the file, or else `where`."""
    try:
        yield
    except PackerError:
        raise
    except OSError as error:
        name = where if error.filename is None else error.filename
        text = str(error) if name is None else f"{name}: cannot be written: {error.strerror or error}"
        output_error = OutputError(text)
        output_error.errno = error.errno
        raise output_error from error


def set_title(path: str | os.PathLike[str]) -> Path | str:
    """The name of a set in results: its directory, or its address without secrets. Raises RemoteError."""
    return str(parse_url(path)) if is_remote(path) else Path(path)


def set_root(path: str | os.PathLike[str]) -> Path:
    """The directory with dataset.json: the set's, or the local one that stands for an address.

    Raises DatasetError, RemoteError.
    """
    return RemoteHome(Remote(str(path))).path if is_remote(path) else Path(path)
