"""Test suites for formats, sources, stores, readers and engines, both packer's and those of other packages.

A test class derives from a suite (`formats.FormatSuite`, `sources.SourceSuite`, …) and supplies its fixtures;
docs/extending.md has examples. The suites need pytest and hypothesis: pip install 'packer-vision[testing]'.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import pytest
except ImportError as error:
    raise MissingExtraError("pytest", "testing", "packer.testing") from error

__all__: list[str] = []

for _name in ("children", "engines", "formats", "readers", "samples", "sources", "stores"):
    pytest.register_assert_rewrite(f"packer.testing.{_name}")
