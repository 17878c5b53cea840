"""What can be looked at: a packed set, here or at an address, and any source of `packer convert`, as it is."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import readers
from cache.remote import Remote, is_remote
from packer.viewer.sources import open_unpacked
from readers.layout import DATASET_FILE, DatasetInfo, read_dataset_info
from readers.reader import Reader
from readers.remote import RemoteHome

__all__ = ["Place", "open_place"]


@dataclass(frozen=True)
class Place:
    """What was opened. Closing it closes its readers.

    name: as titles have it. address: as commands take it.
    container: the format of its shards, or what kind of source it is.
    dataset: the content of dataset.json; None of what is not packed.
    """

    name: str
    address: str
    container: str
    splits: dict[str, Reader]
    dataset: DatasetInfo | None = None
    _stack: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_place(place: str | os.PathLike[str], split: str | None = None) -> Place:
    """Open a packed set, by its directory or address, or a source.

    split: only this one.

    Raises DatasetError, UnknownNameError, StaleIndexError, RemoteError, SourceError and MissingExtraError.
    """
    stack = ExitStack()
    try:
        return _opened(place, split, stack)
    except BaseException:
        stack.close()
        raise


def _opened(place: str | os.PathLike[str], split: str | None, stack: ExitStack) -> Place:
    address = str(place) if is_remote(place) else os.path.abspath(os.path.expanduser(place))
    if is_remote(place):
        home = RemoteHome(Remote(address))
        info, shown = home.info, str(home.url)
    elif (Path(address) / DATASET_FILE).is_file():
        info, shown = read_dataset_info(Path(address)), address
    else:
        source, found = open_unpacked(address)
        chosen = found if split is None else {split: _pick(found, split, address)}
        for reader in chosen.values():
            stack.enter_context(reader)
        kind = source.title.removesuffix(address).strip() or "source"
        return Place(_name(address), address, kind, chosen, None, stack)
    names = info.splits if split is None else [info.split(split, address)[0]]
    splits = {one: stack.enter_context(readers.open(address, one)) for one in names}
    return Place(_name(shown), shown, info.format, splits, info, stack)


def _name(address: str) -> str:
    return os.path.basename(address.rstrip("/")) or address


def _pick(found: dict[str, Reader], split: str, address: str) -> Reader:
    if split not in found:
        raise readers.UnknownNameError(f"{address}: no split {split!r}; it has {', '.join(found)}")
    return found[split]
