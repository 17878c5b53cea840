"""Advice: the tips that the evidence of a diagnosis calls for, the largest predicted gain first."""

from __future__ import annotations

from collections.abc import Iterable

from readers.diagnosis.evidence import Evidence
from readers.diagnosis.ladder import Advice
from readers.diagnosis.tips import TIPS, Suggestion, Tip

__all__ = ["advise"]

_WORTH_SAYING = 0.03  # of a step


def advise(evidence: Evidence, tips: Iterable[Tip] = TIPS) -> tuple[Advice, ...]:
    """The advice of a diagnosis. If the data keep up with the training, only that of tips marked `idle`."""
    full = evidence.diagnosis.full.seconds
    found = list[Advice]()
    for tip in tips:
        if not evidence.diagnosis.culprit and not tip.idle:
            continue
        answer = tip.check(evidence)
        if answer is None or (answer.seconds is not None and _is_useless(answer, full) and not tip.idle):
            continue
        gain = max(0.0, full - answer.seconds) if answer.seconds is not None else 0.0
        found.append(Advice(tip.id, tip.title, answer.why, answer.how, answer.seconds, gain))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _is_useless(answer: Suggestion, full: float) -> bool:
    return answer.seconds is not None and answer.seconds > (1 - _WORTH_SAYING) * full
