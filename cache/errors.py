"""The root of all errors that this project raises on purpose; each is also the builtin that fits it.

It stands here, at the bottom, so that `except PackerError` catches those of `cache` too. The tree is drawn in
`readers.errors`, those of this package in `cache.shared.errors`, `cache.staging.errors` and `cache.remote.errors`.
"""

from __future__ import annotations

__all__ = ["PackerError"]


class PackerError(Exception):
    """The root of all errors that this project raises on purpose."""
