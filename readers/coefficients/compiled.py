"""Loads the compiled codec, `readers.coefficients.native`. Its C sources are in the folder `_codec`; it is built when
the package is installed."""

from __future__ import annotations

import shutil
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType

from cache.errors import UnsupportedCpuError
from readers.coefficients.markers import HuffmanTable

__all__ = ["BUILD_BY_CLANG", "codec_if_built", "load_codec", "tables_of", "unsupported_reason"]

_NAME = "readers.coefficients.native"
_VERSION = 5  # version of its functions, as in module.c
_KEPT_TABLES = 16


def load_codec() -> ModuleType:
    """The extension module, described in `native.pyi`. Raises UnsupportedCpuError if it cannot be loaded."""
    try:
        return _import_codec()
    except ImportError as error:
        raise UnsupportedCpuError(
            f"DCT coefficients cannot be kept or decoded here: {unsupported_reason()}; keep='encoded' works"
        ) from error


@cache
def codec_if_built() -> ModuleType | None:
    """The extension module, or None for callers that can do without it."""
    try:
        return _import_codec()
    except ImportError:
        return None


# An isolated build does not see the ziglang package of the environment.
BUILD_BY_CLANG = (
    "pip install -U 'setuptools>=77' ziglang && pip install --no-build-isolation --force-reinstall --no-deps ."
)


@cache
def unsupported_reason() -> str:
    """Why this installation has no usable compiled codec, and how to build it; "" if it has one."""
    try:
        _import_codec()
    except ImportError as error:
        if error.name is not None and not error.path:
            return f"the compiled codec was not built when packer-vision was installed: {_missing_tool()}"
        return f"the compiled codec cannot be loaded ({error})"
    return ""


def _import_codec() -> ModuleType:
    codec = import_module(_NAME)
    if getattr(codec, "VERSION", 1) != _VERSION:
        how = "pip install -e .  builds it again"
        raise ImportError(f"{codec.__file__} was built from other sources than these: {how}", path=codec.__file__)
    return codec


def _missing_tool() -> str:
    if not any(map(shutil.which, ("clang", "gcc", "cc"))):
        return f"no C compiler is on the PATH; install gcc or clang, or in a checkout run  {BUILD_BY_CLANG}"
    return "pip install -v --force-reinstall --no-deps packer-vision  shows what the C compiler says"


@lru_cache(maxsize=_KEPT_TABLES)
def tables_of(used: tuple[tuple[bool, HuffmanTable], ...]) -> bytes:
    """Huffman tables in the format of the codec, one after another.

    used: for each table, True if it is of DC or of a progressive scan, and the table.
    """
    codec = load_codec()
    return b"".join(codec.build_codes(table.counts, table.symbols, is_raw) for is_raw, table in used)
