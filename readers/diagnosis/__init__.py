"""Which stage of the input starves the training, what it would gain, and what the evidence is.

    result = readers.diagnose(loader, train_step, device="cuda")
    print(result.verdict)

Works on any iterable of batches; a torch DataLoader is cut into its stages, whatever its data set is.
"""

from __future__ import annotations

from readers.diagnosis.batch_sizes import BatchSize, BatchSizes, measure_batch_sizes
from readers.diagnosis.diagnose import diagnose
from readers.diagnosis.findings import Advice, Applied, Change, Payload, PayloadFact, PayloadField
from readers.diagnosis.ladder import Diagnosis, Rung, StageCost
from readers.diagnosis.pipeline import Pipeline, Stage
from readers.diagnosis.places import Place, Places, measure_places
from readers.diagnosis.timing import StepTime

__all__ = [
    "Advice",
    "Applied",
    "BatchSize",
    "BatchSizes",
    "Change",
    "Diagnosis",
    "Payload",
    "PayloadFact",
    "PayloadField",
    "Pipeline",
    "Place",
    "Places",
    "Rung",
    "Stage",
    "StageCost",
    "StepTime",
    "diagnose",
    "measure_batch_sizes",
    "measure_places",
]
