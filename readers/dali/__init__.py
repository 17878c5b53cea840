"""Samples of any reader in NVIDIA DALI pipelines. Using it needs DALI: `pip install 'packer-vision[dali]'`.

from readers.dali import DaliLoader, classification, external_source

for images, labels in DaliLoader(reader, 256, augment=classification(224), seed=7):     # a ready-made pipeline
    ...

@pipeline_def(batch_size=256, num_threads=8, device_id=0)                                # or your own pipeline
def training(reader):
    encoded, label = external_source(reader, 256, seed=7)
    return fn.decoders.image(encoded, device="mixed"), label.gpu()
"""

from readers.augment import celeba, classification
from readers.dali.loader import DaliLoader
from readers.dali.pipelines import PipelineOptions, external_source, pipeline
from readers.dali.source import BatchSource, SampleSource, Source

__all__ = [
    "BatchSource",
    "DaliLoader",
    "PipelineOptions",
    "SampleSource",
    "Source",
    "celeba",
    "classification",
    "external_source",
    "pipeline",
]
