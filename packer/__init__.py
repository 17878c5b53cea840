"""Pack image datasets into HDF5, TFRecord or tar shards with one index; verify, inspect and extract them.

    import packer

    packer.convert("imagenette2", to="hdf5")
    assert packer.verify("imagenette2-hdf5").ok

The command line does the same: `packer --help`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packer.version import VERSION as __version__

for _name in ("readers", "cache"):
    _spec = importlib.util.find_spec(_name)
    if Path((_spec and _spec.origin) or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"packer needs its own package `{_name}`, but {_spec and _spec.origin} hides it; rename that file or "
            f"folder, or run from another directory"
        )
del _name, _spec

if TYPE_CHECKING:
    from packer.adoption import IndexResult, index
    from packer.conversion.options import Reencode
    from packer.conversion.run import ConvertResult, convert
    from packer.exported_index import ExportResult, export_index
    from packer.extraction import ExtractResult, extract
    from packer.inspection import InspectResult, OrderReport, compare_orders, inspect
    from packer.node import CleanResult, StagedCopy, clean_staged, staged_copies
    from packer.opened_shard import open_shard
    from packer.sources import open_source
    from packer.uploading import UploadResult, upload
    from packer.verification import VerifyResult, verify

# What is public, and where it is: loaded when it is first used, so that `import packer`, and the command line's start,
# wait for no library.
_HOMES = {
    "CleanResult": "packer.node",
    "ConvertResult": "packer.conversion.run",
    "ExportResult": "packer.exported_index",
    "ExtractResult": "packer.extraction",
    "IndexResult": "packer.adoption",
    "InspectResult": "packer.inspection",
    "OrderReport": "packer.inspection",
    "Reencode": "packer.conversion.options",
    "StagedCopy": "packer.node",
    "UploadResult": "packer.uploading",
    "VerifyResult": "packer.verification",
    "clean_staged": "packer.node",
    "compare_orders": "packer.inspection",
    "convert": "packer.conversion.run",
    "export_index": "packer.exported_index",
    "extract": "packer.extraction",
    "index": "packer.adoption",
    "inspect": "packer.inspection",
    "open_shard": "packer.opened_shard",
    "open_source": "packer.sources",
    "staged_copies": "packer.node",
    "upload": "packer.uploading",
    "verify": "packer.verification",
}

__all__ = [
    "CleanResult",
    "ConvertResult",
    "ExportResult",
    "ExtractResult",
    "IndexResult",
    "InspectResult",
    "OrderReport",
    "Reencode",
    "StagedCopy",
    "UploadResult",
    "VerifyResult",
    "__version__",
    "clean_staged",
    "compare_orders",
    "convert",
    "export_index",
    "extract",
    "index",
    "inspect",
    "open_shard",
    "open_source",
    "staged_copies",
    "upload",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
