"""Which stage of the input starves the training, what it would gain, and what the evidence is.

    result = readers.diagnose(loader, train_step, device="cuda")
    print(result.verdict)

Works on any iterable of batches; a torch DataLoader is cut into its stages, whatever its data set is.
"""

from __future__ import annotations

from readers.diagnosis.diagnose import diagnose
from readers.diagnosis.ladder import Advice, Diagnosis, Rung, StageCost
from readers.diagnosis.pipeline import Pipeline, Stage
from readers.diagnosis.timing import StepTime

__all__ = ["Advice", "Diagnosis", "Pipeline", "Rung", "Stage", "StageCost", "StepTime", "diagnose"]
