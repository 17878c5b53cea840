"""The compiled functions: made once per user, machine and version, and loaded from a directory from then on.

    $PACKER_CACHE_DIR/compiled/<key>/      $XDG_CACHE_HOME/packer or ~/.cache/packer without the variable
        done                               all functions are there
        lock                               held while they are made, so that one process of a machine makes them
        ...                                numba's own files

The key is of the source of the functions, the versions of numba, LLVM and Python, and the CPU with its instructions, so
nodes of different kinds may share a home directory, and an update never loads what another version made. What is in the
directory is executed, so it is private, and nobody else may put another in its place: as ssh has it, no directory above
it may be written by others, either, unless files in it can be renamed by their owners alone, as in /tmp. Where that is
not so, the directory without PACKER_CACHE_DIR is taken, and where that cannot be written, every process compiles for
itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cache.errors import MissingExtraError, StagingError, UnsupportedCpuError
from cache.files import atomic_write
from cache.locks import call_after_fork, locked

__all__ = ["Functions", "load_functions", "private_folder", "unsupported_reason"]

_log = logging.getLogger(__name__)
_LOCK_SECONDS = 300.0
_INSTRUCTIONS = ("avx2", "bmi2", "fma")
_SLOW_PDEP = ("znver1", "znver2", "bdver4")  # they have BMI2, but take it apart bit by bit
_DONE = b"all functions are compiled\n"
_PURPOSE = "decoding JPEGs by compiled functions"


class Functions(NamedTuple):
    """See `readers.coefficients.kernels`."""

    find_marker: Callable[..., int]
    unstuff: Callable[..., int]
    build_table: Callable[..., None]
    read_sequential: Callable[..., int]
    read_progressive: Callable[..., int]
    encode_lines: Callable[..., int]
    decode_box: Callable[..., int]
    resize_box: Callable[..., int]
    copy_clean: Callable[..., int]
    build_codes: Callable[..., None]
    decode_strips: Callable[..., int]


class _Loader:
    """Loads the functions once per process."""

    def __init__(self) -> None:
        self._functions: Functions | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def load(self) -> Functions:
        if self._functions is None:
            with self._lock:
                if self._functions is None:
                    self._functions = _load()
        return self._functions


def load_functions() -> Functions:
    """The compiled functions, compiled first where that has not been done: about 30 s, which is logged.

    Raises MissingExtraError without numba, UnsupportedCpuError where `unsupported_reason` has something to say.
    """
    return _loader.load()


@cache
def unsupported_reason(purpose: str = _PURPOSE) -> str:
    """Why this machine can neither make nor decode coefficients, "" where it can. Raises MissingExtraError.

    purpose: what needs it, for that error.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{platform.machine()} has no AVX2 and BMI2 instructions"
    _, cpu, features = _target(purpose)
    missing = [name.upper() for name in _INSTRUCTIONS if f"+{name}" not in features.split(",")]
    if missing:
        return f"the CPU ({cpu}) has no {' and '.join(missing)} instructions, or NUMBA_CPU_FEATURES excludes them"
    return f"the CPU ({cpu}) is slow at BMI2 instructions" if cpu in _SLOW_PDEP else ""


def _target(purpose: str = _PURPOSE) -> tuple[str, str, str]:
    """What numba compiles for: (triple, CPU, its features, comma-separated). Raises MissingExtraError."""
    try:
        from numba.core.registry import cpu_target
    except ImportError as error:
        raise MissingExtraError("numba", "coefficients", purpose) from error
    target: tuple[str, str, str] = cpu_target.target_context.codegen().magic_tuple()
    return target


def _load() -> Functions:
    reason = unsupported_reason()
    if reason:
        raise UnsupportedCpuError(f"DCT coefficients cannot be kept or decoded here: {reason}; keep='encoded' works")
    with ExitStack() as stack:
        folder = private_folder(stack)
        done = folder / "done"
        if not done.is_file():
            try:
                stack.enter_context(locked(folder / "lock", _LOCK_SECONDS))
            except StagingError as error:
                _log.warning("%s; compiling without a lock", error)
            if not done.is_file():
                _log.warning(
                    "compiling the decoder of DCT coefficients for this machine, once, in about 30 s (%s)", folder
                )
        functions = _import_functions(folder)
        if not done.is_file():
            atomic_write(done, _DONE)
        return functions


def private_folder(stack: ExitStack) -> Path:
    """A private directory for what is compiled; a temporary one, removed with `stack`, where none can be written."""
    from readers.opening.remote import default_cache_folder, index_cache_folder

    tried: list[Path] = []
    for choose in (index_cache_folder, default_cache_folder):
        try:
            folder = choose() / "compiled" / _key()
            if folder in tried:
                continue
            tried.append(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            real = folder.resolve()
            shared = _open_to_others(real)
            if not shared and os.access(real, os.W_OK):
                return real
            reason = f"it is not private to this user: others may write to {shared}" if shared else "cannot be written"
        except OSError as error:
            reason = error.strerror or str(error)
        except RuntimeError:  # there is no home directory
            continue
        _log.warning("%s: %s; choose another directory with PACKER_CACHE_DIR", folder, reason)
    return Path(stack.enter_context(TemporaryDirectory(prefix="packer-compiled-")))


def _open_to_others(folder: Path) -> Path | None:
    """The directory, `folder` or one above it, by which other users could change what is in it; None where none is."""
    # In a container without rights of its own the directories of root belong to nobody, as / does.
    trusted = {os.getuid(), 0, Path("/").stat().st_uid}
    for place in (folder, *folder.parents):
        found = place.stat()
        is_sticky = place != folder and found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted or (found.st_mode & 0o022 and not is_sticky):
            return place
    return None if folder.stat().st_uid == os.getuid() else folder


def _key() -> str:
    """Of everything that the compiled functions depend on."""
    import llvmlite
    import numba

    digest = hashlib.sha256()
    for part in (numba.__version__, llvmlite.__version__, sys.version, *_target()):
        digest.update(part.encode() + b"\0")
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        # numba compiles again for another path or time of change
        digest.update(f"{path} {path.stat().st_mtime_ns}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _import_functions(folder: Path) -> Functions:
    """The functions; importing their modules compiles them, or loads them from the directory."""
    with _numba_caches_in(folder):
        from readers.coefficients.kernels.boxes import decode_box
        from readers.coefficients.kernels.codes import build_codes, copy_clean
        from readers.coefficients.kernels.encoding import encode_lines
        from readers.coefficients.kernels.entropy import build_table, find_marker, read_sequential, unstuff
        from readers.coefficients.kernels.progressive import read_progressive
        from readers.coefficients.kernels.resizing import resize_box
        from readers.coefficients.kernels.strips import decode_strips

    reading = find_marker, unstuff, build_table, read_sequential, read_progressive
    of_scans = copy_clean, build_codes, decode_strips
    return Functions(*reading, encode_lines, decode_box, resize_box, *of_scans)


@contextmanager
def _numba_caches_in(folder: Path) -> Iterator[None]:
    """Functions that are defined meanwhile are cached there; the user's own settings are back afterwards."""
    from numba.core import config

    settings: Any = config
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        settings.CACHE_DIR = before


_loader = _Loader()
