"""`packer.upload`: a packed set from a directory to an address, resumable, dataset.json last.

    another set? ──► shards and indexes, in parallel, each unless it exists ──► check of all ──► dataset.json

Each object has the CRC32C of its bytes as user metadata "crc32c". An object with the right size and checksum is not
sent again, so the same command continues after an interruption. dataset.json is written only if none exists
(If-None-Match), so of two concurrent uploads to one address, one fails. To replace a set, its dataset.json is removed
first, and at the end the files that the new set does not name.

Web servers (WebDAV: PUT, MKCOL, DELETE) store no metadata and support no conditions. So each file is read back and its
CRC32C computed, before it counts as sent and again at the end; files are sent from memory, one at a time; and only the
final check detects a concurrent upload.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cache.checksums import crc32c, file_checksum
from cache.errors import DatasetError, ExistsError, MissingError, NoBucketError, OutputError, UnsupportedError
from cache.files import Folder, read_regular
from cache.messages import Silent, Watcher, quoted
from cache.remote import CRC_ATTRIBUTE, Remote, RemoteUrl, Span
from cache.staging.session import work_off
from cache.staging.sources import StagedFile
from packer.documents import differences, read_document
from packer.output import Result
from readers.layout import DATASET_FILE, MAX_JSON_BYTES, parse_dataset_info
from readers.staging import set_files

if TYPE_CHECKING:
    from packer.conversion.result import ConvertResult

__all__ = ["UploadResult", "convert_to_address", "upload"]

_GET_BYTES = 8 << 20
_FILES_AT_ONCE = 4  # each in up to 4 concurrent parts of 8 MiB


@dataclass(frozen=True, slots=True)
class UploadResult(Result):
    """The result of an upload: bytes and objects sent, objects that existed, removed objects of the old set."""

    address: str
    sent_bytes: int
    sent: int
    found: int
    removed: int


def upload(
    directory: str | os.PathLike[str],
    address: str | RemoteUrl,
    *,
    overwrite: bool = False,
    watcher: Watcher | None = None,
) -> UploadResult:
    """Copy a packed set to s3://, gs://, az://, or https:// (WebDAV). overwrite: replace another set at this address.

    Raises DatasetError (not a set), OutputError (another set or foreign objects at the address, or a damaged local
    shard), RemoteError, MissingExtraError.
    """
    remote = Remote(address)
    return _Upload(Path(directory), remote, overwrite, watcher or Silent()).run()


def _committed(remote: Remote) -> bytes | None:
    """The dataset.json at an address; None if there is none. Raises the errors of cache.remote."""
    try:
        return remote.whole(DATASET_FILE, MAX_JSON_BYTES)[0]
    except NoBucketError:
        raise
    except MissingError:
        return None


class _Upload:
    def __init__(self, directory: Path, remote: Remote, overwrite: bool, watcher: Watcher) -> None:
        self._directory, self._remote, self._overwrite, self._watcher = directory, remote, overwrite, watcher
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}
        self._sent_bytes = self._sent = self._found = 0

    def run(self) -> UploadResult:
        manifest = set_files(self._directory).manifest
        files = [file for file in manifest.files if file.path != DATASET_FILE]
        text = read_regular(self._directory / DATASET_FILE, MAX_JSON_BYTES)
        files += self._documents(text)
        existing = _committed(self._remote)
        if existing is not None and existing != text:
            if not self._overwrite:
                raise OutputError(
                    f"{self._remote.url}: holds another set; pass overwrite=True to replace it, or choose another "
                    f"address"
                )
            self._remote.store.delete(DATASET_FILE)
        at_once = 1 if self._remote.url.is_http else _FILES_AT_ONCE
        missing: list[StagedFile] = []
        work_off(files, lambda file: self._search(file, missing), at_once, threading.Event(), lambda: None)
        # Without the bytes of an earlier run: rates and the remaining time refer to this run.
        self._watcher.begin(0, sum(file.bytes for file in missing), lambda: (0, self._sent_bytes))
        try:
            work_off(missing, self._send, at_once, threading.Event(), lambda: None)
            self._check_all(files)
        finally:
            self._watcher.end()
        if existing != text:
            self._commit(text)
        removed = self._remove_old(existing, {file.path for file in files}) if existing not in (None, text) else 0
        return UploadResult(str(self._remote.url), self._sent_bytes, self._sent, self._found, removed)

    def _documents(self, text: bytes) -> list[StagedFile]:
        """README.md and the like, which readers do not need. Raises OutputError if they describe another state."""
        info = parse_dataset_info(text, self._directory / DATASET_FILE)
        for name, problem in differences(partial(read_document, self._directory), text, info, self._directory):
            raise OutputError(f"{self._directory / name}: {problem}")
        with Folder(self._directory) as place:
            statuses = {name: place.lstat(name) for name in info.documents if place.kind(name) == "file"}
        files = [StagedFile(name, status.st_size) for name, status in statuses.items() if status is not None]
        return [file for file in files if not self._is_foreign(file.path)]

    def _is_foreign(self, name: str) -> bool:
        """Whether an object of this name exists that packer did not write; unknown for web servers."""
        try:
            _, attributes = self._remote.head(name)
        except MissingError:
            return False
        if self._remote.url.is_http or attributes.get(CRC_ATTRIBUTE):
            return False
        self._watcher.note(f"{self._remote.url.at(name)}: is kept, because packer did not write it")
        return True

    def _search(self, file: StagedFile, missing: list[StagedFile]) -> None:
        """Count an object that exists with the right content; otherwise append it to `missing`."""
        crc = file_checksum(self._directory / file.path) if file.crc32c is None else file.crc32c
        size, stored = self._look_up(file, crc)
        if size == file.bytes and stored == f"{crc:08x}":
            self._count(file, crc, sent=False)
            return
        if size is not None and not stored and not self._overwrite:
            raise OutputError(
                f"{self._remote.url.at(file.path)}: an object exists that packer did not write (completely); "
                f"remove it, or choose another address (overwrite=True replaces it, and any set that is at the "
                f"address by then)"
            )
        missing.append(file)

    def _send(self, file: StagedFile) -> None:
        """Send a file."""
        path = self._directory / file.path
        crc = file_checksum(path)
        if (file.crc32c is not None and crc != file.crc32c) or path.stat().st_size != file.bytes:
            raise OutputError(f"{path}: does not match dataset.json; run  packer verify {quoted(self._directory)}")
        self._remote.store.put(file.path, path, crc32c=crc)
        self._count(file, crc, sent=True)

    def _look_up(self, file: StagedFile, crc: int) -> tuple[int | None, str]:
        """(bytes, CRC32C in its metadata) of an object; (None, "") if it does not exist.

        A file on a web server is read back instead; its CRC32C is returned if it equals `crc`.
        """
        try:
            facts, attributes = self._remote.head(file.path)
        except MissingError:
            return None, ""
        if self._remote.url.is_http:
            same = facts.bytes == file.bytes and self._read_back(file) == crc
            return facts.bytes, f"{crc:08x}" if same else ""
        return facts.bytes, attributes.get(CRC_ATTRIBUTE, "")

    def _read_back(self, file: StagedFile) -> int:
        crc = 0
        for start in range(0, file.bytes, _GET_BYTES):
            span = Span(file.path, start, min(file.bytes, start + _GET_BYTES), bytes=file.bytes)
            crc = crc32c(self._remote.read(span)[0], crc)
        return crc

    def _check_all(self, files: list[StagedFile]) -> None:
        """Check every object again before the commit: another upload may have replaced some."""
        answers = self._remote.each(lambda file: self._look_up(file, self._sums[file.path]), files)
        for file, (size, stored) in zip(files, answers, strict=True):
            if size != file.bytes or stored != f"{self._sums[file.path]:08x}":
                raise OutputError(
                    f"{self._remote.url.at(file.path)}: differs from the uploaded file; does another upload use the "
                    f"same address? run the same command again when it has ended"
                )

    def _commit(self, text: bytes) -> None:
        sums = crc32c(text)
        try:
            self._remote.store.put(DATASET_FILE, text, crc32c=sums, create=True)
        except UnsupportedError:  # a server without conditional requests
            if _committed(self._remote) not in (None, text):
                raise _another(self._remote) from None
            self._remote.store.put(DATASET_FILE, text, crc32c=sums)
        except ExistsError as error:
            # It is this upload's if the answer to a first attempt was lost.
            if _committed(self._remote) != text:
                raise _another(self._remote) from error

    def _remove_old(self, old_text: bytes | None, new_paths: set[str]) -> int:
        """Remove files of the replaced set that the new one does not name."""
        try:
            info = parse_dataset_info(old_text or b"", str(self._remote.url))
        except DatasetError:
            return 0
        old = [shard.path for split in info.splits.values() for shard in split.shards]
        old += [f"{split.index}/{name}" for split in info.splits.values() for name in info.column_names]
        old += info.documents
        gone = [path for path in dict.fromkeys(old) if path not in new_paths]
        self._remote.each(self._remote.store.delete, gone)
        return len(gone)

    def _count(self, file: StagedFile, crc: int, sent: bool) -> None:
        with self._lock:
            self._sums[file.path] = crc
            self._sent_bytes += file.bytes if sent else 0
            self._sent, self._found = self._sent + sent, self._found + (not sent)


def _another(remote: Remote) -> OutputError:
    return OutputError(f"{remote.url}: another upload has written a set there in the meantime; choose another address")


def _default_work(remote: Remote) -> Path:
    """The default local directory of a set for an address."""
    digest = hashlib.blake2b(str(remote.url).encode(), digest_size=4).hexdigest()
    return Path(f".packer-upload-{remote.url.name}-{digest}")


def convert_to_address(
    convert: Callable[[Path, bool], ConvertResult],
    address: str,
    *,
    work: str | os.PathLike[str] | None,
    overwrite: bool,
    dry_run: bool,
    watcher: Watcher,
) -> ConvertResult:
    """Make a set in a local directory, and upload it. convert: (directory, overwrite) -> result.

    The directory is `work`, or a hidden one that is removed after the upload. Until then the same command continues,
    in the conversion or in the upload. Raises the errors of `convert` and `upload`.
    """
    remote = Remote(address)
    existing = _committed(remote)  # also checks early that the bucket exists and is readable
    if existing is not None and not overwrite:
        watcher.note(f"{remote.url}: has a set; it is kept unless it is the one being made")
    directory = Path(work) if work is not None else _default_work(remote)
    result = _convert(convert, directory, overwrite)
    if dry_run:
        return replace(result, output=str(remote.url))
    watcher.note(f"uploading {directory} to {remote.url}")
    done = upload(directory, remote.url, overwrite=overwrite, watcher=watcher)
    if work is None:
        with Folder(directory.parent) as parent:
            parent.remove_tree(directory.name)
    return replace(result, output=str(remote.url), already_done=done.sent == 0, uploaded_bytes=done.sent_bytes)


def _convert(convert: Callable[[Path, bool], ConvertResult], directory: Path, overwrite: bool) -> ConvertResult:
    """Make the local set. If it is complete and only its upload was interrupted, it is kept despite `overwrite`."""
    if overwrite and (directory / DATASET_FILE).exists():
        try:
            return convert(directory, False)
        except OutputError:  # it is another set
            pass
    try:
        return convert(directory, overwrite)
    except OutputError as error:
        reason, semicolon, advice = str(error).partition(";")
        if not semicolon or "overwrite=True" not in advice:
            raise
        # The advice of the error is about the directory; in this command it would apply to the address as well.
        raise OutputError(
            f"{reason}: the result of an earlier run for the same address still exists; remove {directory}, or name "
            f"another directory with work=DIR (overwrite=True would also replace the set at the address)"
        ) from error
