"""Pack image datasets into HDF5, TFRecord or tar shards with one index; verify, inspect and extract them.

    import packer

    packer.convert("imagenette2", to="hdf5")
    assert packer.verify("imagenette2-hdf5").ok

The command line does the same: `packer --help`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import lazy_loader

for _name in ("readers", "cache"):
    _spec = importlib.util.find_spec(_name)
    if Path((_spec and _spec.origin) or "").resolve().parent.parent != Path(__file__).resolve().parent.parent:
        raise ImportError(
            f"packer needs its own package `{_name}`, but {_spec and _spec.origin} hides it; rename that file or "
            f"folder, or run from another directory"
        )
del _name, _spec

__version__ = "0.1.0"  # the same as in pyproject.toml

# The public names are in __init__.pyi. Each is imported on first use, so that `import packer` is fast.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = ["__version__", *__all__]
