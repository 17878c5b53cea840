"""Converting to an address: made whole in a directory of this machine, then uploaded.

The directory is `work`, or `.packer-upload-<name>-<address>` where the command runs; that one is removed when the
upload is done. Until then the same command goes on where it was, in the conversion or in the upload.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.files import Folder
from cache.remote import Remote
from packer.sources import Source
from packer.uploading import committed, upload
from packer.watch import Silent, Watcher
from readers.errors import OutputError
from readers.layout import DATASET_FILE
from readers.remote import remote_errors

if TYPE_CHECKING:
    from packer.conversion.run import ConvertResult

__all__ = ["convert_to_address", "default_work"]


def default_work(remote: Remote) -> Path:
    """Where a set for an address is made if nobody says so."""
    digest = hashlib.blake2b(str(remote.url).encode(), digest_size=4).hexdigest()
    return Path(f".packer-upload-{remote.url.name}-{digest}")


def convert_to_address(
    convert: Callable[..., ConvertResult],
    source: str | os.PathLike[str] | Source,
    to: str,
    address: str,
    *,
    work: str | os.PathLike[str] | None,
    overwrite: bool,
    dry_run: bool,
    watcher: Watcher | None,
    **options: Any,
) -> ConvertResult:
    """Convert to an address. convert: `packer.convert`, for the local set. Raises what that and `packer.upload` do."""
    with remote_errors():
        remote = Remote(address)
        there = committed(remote)  # also: is there a bucket, and may we read it? better now than after hours
    watcher = watcher or Silent()
    if there is not None and not overwrite:
        watcher.note(f"{remote.url}: holds a set; it will stay unless it is the one that is being made")
    place = Path(work) if work is not None else default_work(remote)
    made = _made(convert, source, to, place, overwrite, dry_run=dry_run, watcher=watcher, **options)
    if dry_run:
        return replace(made, output=str(remote.url))
    watcher.note(f"uploading {place} to {remote.url}")
    done = upload(place, remote.url, overwrite=overwrite, watcher=watcher)
    if work is None:
        with Folder(place.parent) as here:
            here.remove_tree(place.name)
    return replace(made, output=str(remote.url), already_done=done.sent == 0, uploaded_bytes=done.sent_bytes)


def _made(
    convert: Callable[..., ConvertResult],
    source: str | os.PathLike[str] | Source,
    to: str,
    place: Path,
    overwrite: bool,
    **options: Any,
) -> ConvertResult:
    """The local set. overwrite does not make it anew where it is whole and only its upload was cut off."""
    if overwrite and (place / DATASET_FILE).exists():
        try:
            return convert(source, to, place, **options)
        except OutputError:  # it is another set
            pass
    try:
        return convert(source, to, place, overwrite=overwrite, **options)
    except OutputError as error:
        reason, semicolon, advice = str(error).partition(";")
        if not semicolon or "--overwrite" not in advice:
            raise
        # That advice is about the directory here; given to this command it is about the address as well.
        raise OutputError(
            f"{reason}: what an earlier run made for the same address is still there; remove {place}, or name another "
            f"directory with --work (--overwrite would also replace what is at the address)"
        ) from error
