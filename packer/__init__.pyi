"""The public names of packer and where they are; `packer/__init__.py` reads this file to load each on first use."""

from .adoption import IndexResult, index, open_shard
from .conversion.options import Choose, Images, Reencode, Run, Shards
from .conversion.result import ConvertResult
from .conversion.run import commit, convert
from .engines import open_engine
from .exported_index import ExportResult, export_index
from .extraction import ExtractResult, extract
from .inspection import InspectResult, OrderAdvice, OrderReport, compare_orders, inspect, recommend_order
from .node import CleanResult, StagedCopy, clean_staged, staged_copies
from .sets.duplicates import DedupResult, dedup
from .sets.erase import CopyLeft, EraseResult, erase
from .sets.packing import add_field, append, reshard
from .sets.table import PruneResult, SaveResult, SetTable, drop, merge, prune, relabel, split, subset, table
from .sources import open_source
from .tools.advise import Advice, advise
from .tools.diagnose import Diagnosis, diagnose
from .tools.monitor import monitor
from .tools.simulate import Simulation, simulate
from .tools.view import ViewExport, Viewing, export_view, view
from .uploading import UploadResult, upload
from .verification import VerifyResult, verify
from .writing import SetWriter, writer

__version__: str

__all__ = [
    "Advice",
    "Choose",
    "CleanResult",
    "ConvertResult",
    "CopyLeft",
    "DedupResult",
    "Diagnosis",
    "EraseResult",
    "ExportResult",
    "ExtractResult",
    "Images",
    "IndexResult",
    "InspectResult",
    "OrderAdvice",
    "OrderReport",
    "PruneResult",
    "Reencode",
    "Run",
    "SaveResult",
    "SetTable",
    "SetWriter",
    "Shards",
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
    "recommend_order",
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
