"""The table of tips: a row for each thing that could be changed, with what triggers it.

data      raw data: storage, files, caches          copying   the copy to the device, the step
work      decoding, augmenting, workers, the GPU    base      a row
"""

from readers.diagnosis.tips.base import Suggestion, Tip
from readers.diagnosis.tips.copying import COPYING
from readers.diagnosis.tips.data import DATA
from readers.diagnosis.tips.work import WORK

__all__ = ["TIPS", "Suggestion", "Tip"]

TIPS: tuple[Tip, ...] = (*DATA, *WORK, *COPYING)
