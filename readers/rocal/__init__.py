"""rocAL pipelines over any reader: an external source, ready-made pipelines, and a loader that checks their results.

    from readers.rocal import RocalLoader, external_source, resnet_train
    source = external_source(readers.open("imagenette2-hdf5", split="train"), 128, seed=1)
    with RocalLoader(resnet_train(source), source) as loader:
        for images, labels in loader:       # float32 [128, 3, 224, 224], int64 [128]
            ...

`external_source` works without rocAL; pipelines and loaders need it. rocAL is part of ROCm; see docs/dali.md.
"""

from readers.feed import BadSample
from readers.rocal.pipelines import MissingRocalError, RocalLoader, celeba, resnet_eval, resnet_train
from readers.rocal.source import RocalSource, external_source

__all__ = [
    "BadSample",
    "MissingRocalError",
    "RocalLoader",
    "RocalSource",
    "celeba",
    "external_source",
    "resnet_eval",
    "resnet_train",
]
