"""Pack image datasets into HDF5, TFRecord or tar shards with one index; verify, inspect and extract them.

    import packer

    packer.convert("imagenette2", to="hdf5")
    assert packer.verify("imagenette2-hdf5").ok

The command line does the same: `packer --help`.
"""

from __future__ import annotations

from pathlib import Path

import readers

if Path(readers.__file__ or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
    raise ImportError(
        f"packer needs its own package `readers`, but {readers.__file__} hides it; rename that file or folder, or run "
        f"from another directory"
    )

from packer.adoption import IndexResult, index
from packer.conversion.options import Reencode
from packer.conversion.run import ConvertResult, convert
from packer.exported_index import ExportResult, export_index
from packer.extraction import ExtractResult, extract
from packer.inspection import InspectResult, inspect
from packer.orders import OrderReport, compare_orders
from packer.sources import open_source
from packer.staged import CleanResult, StagedCopy, clean_staged, staged_copies
from packer.uploading import UploadResult, upload
from packer.verification import VerifyResult, verify
from packer.version import VERSION as __version__

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
    "open_source",
    "staged_copies",
    "upload",
    "verify",
]
