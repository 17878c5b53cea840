"""A double of rocAL's extension module: what its CPU backend was seen to do, written anew, with its traps.

Where rocAL would wait for ever, this raises DoubleHang; where it reads wrong memory, DoubleAbort. Both are kept in
`FAULTS` too, since one raised in a `__del__` is lost. What goes wrong at the end of an epoch is drawn from a generator:
`seed_traps(n)` says which.
"""

from rocal_pybind.engine import (
    FAULTS,
    SLIPS,
    DoubleAbort,
    DoubleHang,
    ROIxywh,
    createIntParameter,
    createIntRand,
    externalFileSource,
    externalSourceFeedInput,
    getAsciiDatas,
    getImageLabels,
    getOutputTensors,
    getRemainingImages,
    node,
    rocalCreate,
    rocalRelease,
    rocalResetLoaders,
    rocalRun,
    rocalVerify,
    seed_traps,
    setOutputs,
    shardSource,
)

__all__ = [
    "FAULTS",
    "SLIPS",
    "DoubleAbort",
    "DoubleHang",
    "ROIxywh",
    "createIntParameter",
    "createIntRand",
    "externalFileSource",
    "externalSourceFeedInput",
    "getAsciiDatas",
    "getImageLabels",
    "getOutputTensors",
    "getRemainingImages",
    "node",
    "rocalCreate",
    "rocalRelease",
    "rocalResetLoaders",
    "rocalRun",
    "rocalVerify",
    "seed_traps",
    "setOutputs",
    "shardSource",
]
