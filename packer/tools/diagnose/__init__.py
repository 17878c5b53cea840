"""Diagnosis of an input pipeline: the stage that limits training, the gain without it, and the evidence.

    result = packer.diagnose(loader, train_step, device="cuda")
    print(result.verdict)

It works on any iterable of batches; an `ImageLoader` or a torch DataLoader, with any data set, is cut into stages.
"""

from __future__ import annotations

from packer.tools.diagnose.diagnose import diagnose
from packer.tools.diagnose.ladder import Advice, Diagnosis, Rung, StageCost, StepTime
from packer.tools.diagnose.pipeline import Pipeline, Stage

__all__ = ["Advice", "Diagnosis", "Pipeline", "Rung", "Stage", "StageCost", "StepTime", "diagnose"]
