"""Pack image datasets into HDF5, TFRecord or tar shards with one index; verify, inspect and extract them.

    import packer
    packer.convert("imagenette2", to="hdf5")
"""

from __future__ import annotations

from packer.convert.options import Reencode
from packer.convert.run import ConvertResult, convert
from packer.version import VERSION as __version__

__all__ = ["ConvertResult", "Reencode", "__version__", "convert"]
