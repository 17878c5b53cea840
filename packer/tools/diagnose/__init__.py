"""The stage of the input pipeline that limits training, the gain without it, and the evidence.

    result = packer.diagnose(loader, train_step, device="cuda")
    print(result.verdict)

Works on any iterable of batches; a torch DataLoader is cut into its stages, whatever its data set is.
"""

from __future__ import annotations

from packer.tools.diagnose.diagnose import diagnose
from packer.tools.diagnose.ladder import Advice, Diagnosis, Rung, StageCost, StepTime
from packer.tools.diagnose.pipeline import Pipeline, Stage

__all__ = ["Advice", "Diagnosis", "Pipeline", "Rung", "Stage", "StageCost", "StepTime", "diagnose"]
