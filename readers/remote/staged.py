"""Which files of a remote set a node needs: the same plain list as of a local one, with the address as their source."""

from __future__ import annotations

import hashlib
import json

from crc32c import crc32c

from cache.remote import Remote
from cache.staging import Manifest, StagedFile
from cache.staging.remote import RemoteSource
from readers.index import column_names
from readers.layout import DATASET_FILE
from readers.remote.home import RemoteHome
from readers.staged_files import SetFiles, all_files, column_checksum

__all__ = ["remote_set_files"]


def remote_set_files(url: str) -> SetFiles:
    """The files of the set at an address; its indexes are fetched for that.

    The fingerprint covers dataset.json, with it the CRC32C of every shard, what the server says of it, and the sizes of
    the index columns. Raises DatasetError, RemoteError, StaleIndexError, OutputError, MissingExtraError.
    """
    remote = Remote(url)
    home = RemoteHome(remote)
    digest = hashlib.blake2b(home.text + home.state.encode(), digest_size=16)
    indexes = {}
    for name, split in home.info.splits.items():
        folder = home.fetch_index(name)
        indexes[name] = [
            StagedFile(f"{split.index}/{column}", (folder / column).stat().st_size, column_checksum(split, column))
            for column in sorted(column_names(home.info.fields))
        ]
        digest.update(json.dumps([name, [(file.path, file.bytes) for file in indexes[name]]]).encode())
    head = StagedFile(DATASET_FILE, len(home.text), crc32c(home.text))
    from_here = frozenset([DATASET_FILE, *(file.path for found in indexes.values() for file in found)])
    source = RemoteSource(remote, home.path, from_here)
    files = all_files(home.info, indexes, head)
    manifest = Manifest(source, remote.url.name, digest.hexdigest(), files, last=DATASET_FILE)
    return SetFiles(home.path, home.info, manifest, head, indexes)
