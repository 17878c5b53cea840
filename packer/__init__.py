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
    from packer.adoption import IndexResult, index, open_shard
    from packer.conversion.plan import Reencode
    from packer.conversion.result import ConvertResult
    from packer.conversion.run import commit, convert
    from packer.engines import open_engine
    from packer.exported_index import ExportResult, export_index
    from packer.extraction import ExtractResult, extract
    from packer.inspection import InspectResult, OrderReport, compare_orders, inspect
    from packer.node import CleanResult, StagedCopy, clean_staged, staged_copies
    from packer.sets.duplicates import DedupResult, dedup
    from packer.sets.erase import CopyLeft, EraseResult, erase
    from packer.sets.packing import add_field, append, reshard
    from packer.sets.table import PruneResult, SaveResult, SetTable, drop, merge, prune, relabel, split, subset, table
    from packer.sources import open_source
    from packer.tools.advise import Advice, advise
    from packer.tools.diagnose import Diagnosis, diagnose
    from packer.tools.monitor import monitor
    from packer.tools.simulate import Simulation, simulate
    from packer.tools.view import ViewExport, Viewing, export_view, view
    from packer.uploading import UploadResult, upload
    from packer.verification import VerifyResult, verify
    from packer.writing import SetWriter, writer

# The public names by module. Each is loaded when it is first used, so that `import packer` is quick.
_MODULES = {
    "packer.adoption": ("IndexResult", "index", "open_shard"),
    "packer.conversion.plan": ("Reencode",),
    "packer.conversion.result": ("ConvertResult",),
    "packer.conversion.run": ("commit", "convert"),
    "packer.engines": ("open_engine",),
    "packer.exported_index": ("ExportResult", "export_index"),
    "packer.extraction": ("ExtractResult", "extract"),
    "packer.inspection": ("InspectResult", "OrderReport", "compare_orders", "inspect"),
    "packer.node": ("CleanResult", "StagedCopy", "clean_staged", "staged_copies"),
    "packer.sets.duplicates": ("DedupResult", "dedup"),
    "packer.sets.erase": ("CopyLeft", "EraseResult", "erase"),
    "packer.sets.packing": ("add_field", "append", "reshard"),
    "packer.sets.table": (
        "PruneResult",
        "SaveResult",
        "SetTable",
        "drop",
        "merge",
        "prune",
        "relabel",
        "split",
        "subset",
        "table",
    ),
    "packer.sources": ("open_source",),
    "packer.tools.advise": ("Advice", "advise"),
    "packer.tools.diagnose": ("Diagnosis", "diagnose"),
    "packer.tools.monitor": ("monitor",),
    "packer.tools.simulate": ("Simulation", "simulate"),
    "packer.tools.view": ("ViewExport", "Viewing", "export_view", "view"),
    "packer.uploading": ("UploadResult", "upload"),
    "packer.verification": ("VerifyResult", "verify"),
    "packer.writing": ("SetWriter", "writer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Advice",
    "CleanResult",
    "ConvertResult",
    "CopyLeft",
    "DedupResult",
    "Diagnosis",
    "EraseResult",
    "ExportResult",
    "ExtractResult",
    "IndexResult",
    "InspectResult",
    "OrderReport",
    "PruneResult",
    "Reencode",
    "SaveResult",
    "SetTable",
    "SetWriter",
    "Simulation",
    "StagedCopy",
    "UploadResult",
    "VerifyResult",
    "ViewExport",
    "Viewing",
    "__version__",
    "add_field",
    "advise",
    "append",
    "clean_staged",
    "commit",
    "compare_orders",
    "convert",
    "dedup",
    "diagnose",
    "drop",
    "erase",
    "export_index",
    "export_view",
    "extract",
    "index",
    "inspect",
    "merge",
    "monitor",
    "open_engine",
    "open_shard",
    "open_source",
    "prune",
    "relabel",
    "reshard",
    "simulate",
    "split",
    "staged_copies",
    "subset",
    "table",
    "upload",
    "verify",
    "view",
    "writer",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
