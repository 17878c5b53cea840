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

for _name in ("readers", "cache"):
    _spec = importlib.util.find_spec(_name)
    if Path((_spec and _spec.origin) or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"packer needs its own package `{_name}`, but {_spec and _spec.origin} hides it; rename that file or "
            f"folder, or run from another directory"
        )
del _name, _spec

__version__ = "0.1.0"  # pyproject.toml has the same

if TYPE_CHECKING:
    from packer.adopted_shard import open_shard
    from packer.adoption import IndexResult, index
    from packer.advising import Advice, advise
    from packer.conversion.plan import Reencode
    from packer.conversion.run import ConvertResult, convert
    from packer.exported_index import ExportResult, export_index
    from packer.extraction import ExtractResult, extract
    from packer.inspection import InspectResult, OrderReport, compare_orders, inspect
    from packer.jpeg_rows import JpegRowsResult, index_jpeg_rows
    from packer.node import CleanResult, StagedCopy, clean_staged, staged_copies
    from packer.sources import open_source
    from packer.uploading import UploadResult, upload
    from packer.verification import VerifyResult, verify

# The public names by module. Each is loaded when it is first used, so that `import packer` is quick.
_MODULES = {
    "packer.advising": ("Advice", "advise"),
    "packer.adoption": ("IndexResult", "index"),
    "packer.conversion.plan": ("Reencode",),
    "packer.conversion.run": ("ConvertResult", "convert"),
    "packer.exported_index": ("ExportResult", "export_index"),
    "packer.extraction": ("ExtractResult", "extract"),
    "packer.inspection": ("InspectResult", "OrderReport", "compare_orders", "inspect"),
    "packer.jpeg_rows": ("JpegRowsResult", "index_jpeg_rows"),
    "packer.node": ("CleanResult", "StagedCopy", "clean_staged", "staged_copies"),
    "packer.adopted_shard": ("open_shard",),
    "packer.sources": ("open_source",),
    "packer.uploading": ("UploadResult", "upload"),
    "packer.verification": ("VerifyResult", "verify"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Advice",
    "CleanResult",
    "ConvertResult",
    "ExportResult",
    "ExtractResult",
    "IndexResult",
    "InspectResult",
    "JpegRowsResult",
    "OrderReport",
    "Reencode",
    "StagedCopy",
    "UploadResult",
    "VerifyResult",
    "__version__",
    "advise",
    "clean_staged",
    "compare_orders",
    "convert",
    "export_index",
    "extract",
    "index",
    "index_jpeg_rows",
    "inspect",
    "open_shard",
    "open_source",
    "staged_copies",
    "upload",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
