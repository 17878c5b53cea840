"""Import: the time of `import readers` after NumPy, compared with other libraries.

    python benchmarks/import_time.py [--rounds 15] …

Each round starts a new interpreter that imports NumPy first and times the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

from harness import REPOSITORY, Benchmark, Contender, NotHere, contender, main
from report import Claim, Column

__all__ = ["BENCHMARK"]

_CODE = """
import sys, time
started = time.perf_counter()
import numpy
mid = time.perf_counter()
modules = len(sys.modules)
import {module}
print(mid - started, time.perf_counter() - mid, len(sys.modules) - modules)
"""
_MODULES = {
    "ours: readers": "readers",
    "ours: packer": "packer",
    "h5py": "h5py",
    "lmdb": "lmdb",
    "array_record": "array_record.python.array_record_data_source",
    "webdataset": "webdataset",
    "litdata": "litdata",
    "MosaicML MDS": "streaming",
    "tfrecord package": "tfrecord",
    "Parquet (pyarrow)": "pyarrow.parquet",
}

for _name, _module in _MODULES.items():
    contender(_name, module=_module)(lambda: None)
contender("FFCV", python="ffcv", module="ffcv")(lambda: None)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Import once so that the byte code is written, then again with timing."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, "-c", _CODE.format(module=chosen.options["module"])]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise NotHere(f"not installed ({done.stderr.strip().splitlines()[-1]})")
    numpy_s, module_s, modules = map(float, done.stdout.split()[-3:])
    return {"import_ms": 1e3 * module_s, "numpy_ms": 1e3 * numpy_s, "modules": modules}


BENCHMARK = Benchmark(
    title="Import, over NumPy",
    columns=(
        Column("import_ms", "ms over numpy (min–max)", "{:,.1f}"),
        Column("modules", "modules"),
        Column("numpy_ms", "numpy itself, ms", "{:,.1f}"),
    ),
    key="import_ms",
    limits=(("import_ms", "ours: readers"),),
    measure=measure,
    less_is_better=True,
    claims=(Claim("ours: readers", "import_ms", at_most=100),),
)

if __name__ == "__main__":
    main(BENCHMARK, __doc__)
