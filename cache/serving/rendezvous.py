"""A folder of the file system that the nodes of a job share: a token, and where each node listens.

    <folder>/<job>-<set>-<nodes>/     mode 0700: of one user alone, who may read and write it
      token                           64 hex digits and a line end, mode 0600; the first process makes it
      0, 1, …                         the address at which the node of this number listens, one line

The token is sent to what these files name, so a folder in which others can write is refused. A node that was started
again writes its file again.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from cache.errors import AddressError, ServingError
from cache.files import Folder, PathError, atomic_write, read_regular
from cache.remote.url import RemoteUrl, parse_url

__all__ = ["Rendezvous", "read_token"]

_TOKEN_BYTES = 32
_MOST_BYTES = 4096
_LEAST_TOKEN = 16
_MAKING_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Rendezvous:
    """The folder of one set, as one job shares it among its nodes. Raises ServingError."""

    path: Path
    nodes: int

    @classmethod
    def make(cls, folder: str | os.PathLike[str], job: str, name: str, nodes: int) -> Rendezvous:
        """The folder, made where it is missing. name: of the set, in letters and digits."""
        plain = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in job)[:64].lstrip(".")
        path = Path(folder).expanduser().absolute() / f"{plain or '0'}-{name}-{nodes}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise ServingError(f"{path}: cannot be made: {error.strerror}; name a folder that all nodes see") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ServingError(
                f"{path}: is not a directory that belongs to this user alone (mode 0700), so the token is not safe "
                f"there; remove it, or name another folder"
            )
        return cls(path, nodes)

    def token(self) -> str:
        """The token that all nodes share; the first process makes it."""
        text = secrets.token_hex(_TOKEN_BYTES)
        try:
            with Folder(self.path) as folder, folder.create("token") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(f"{text}\n".encode())
            return text
        except FileExistsError:
            pass
        except OSError as error:
            raise ServingError(f"{self.path / 'token'}: cannot be written: {error.strerror}") from error
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return read_token(self.path / "token", 2 * _TOKEN_BYTES)
            except ServingError:
                if time.monotonic() > until:
                    raise
            time.sleep(_POLL_SECONDS)  # the process that makes it is about to write it

    def publish(self, node: int, url: str) -> None:
        """Say where a node listens."""
        try:
            atomic_write(self.path / str(node), f"{url}\n".encode(), mode=0o600)
        except OSError as error:
            raise ServingError(f"{self.path / str(node)}: cannot be written: {error.strerror}") from error

    def withdraw(self, node: int, url: str) -> None:
        """Remove the address of a node, if it is still this one."""
        found = self.find(node)
        if found is not None and str(found) == url:
            try:
                (self.path / str(node)).unlink(missing_ok=True)
            except OSError:
                pass  # others find nothing that listens there

    def find(self, node: int) -> RemoteUrl | None:
        """Where a node listens; None where it has not said so, or nothing of use."""
        try:
            url = parse_url(read_regular(self.path / str(node), _MOST_BYTES).decode("ascii").strip())
        except (OSError, ValueError, AddressError):
            return None
        return url if url.is_http and not url.userinfo else None

    def wait(self, seconds: float) -> list[int]:
        """Wait until every node has said where it listens; the nodes that have not by then."""
        until = time.monotonic() + seconds
        while missing := [node for node in range(self.nodes) if self.find(node) is None]:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        return missing


def read_token(path: Path, length: int | None = None) -> str:
    """The token in a file of this user alone: one line of 16 letters and digits at least, `length` where it is given.

    Raises ServingError, which does not show it.
    """
    try:
        status = os.stat(path)
        text = read_regular(path, _MOST_BYTES).decode("ascii").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, PathError) else getattr(error, "strerror", None) or "not plain text"
        raise ServingError(f"{path}: the token cannot be read: {reason}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ServingError(
            f"{path}: others may read or change this token (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}); run  chmod 600 {path} , or remove it to have another one made"
        )
    if len(text) < _LEAST_TOKEN or not (text.isascii() and text.isalnum()) or len(text) != (length or len(text)):
        raise ServingError(
            f"{path}: is not a token, which is one line of {_LEAST_TOKEN} or more letters and digits; remove it to "
            f"have another one made"
        )
    return text
