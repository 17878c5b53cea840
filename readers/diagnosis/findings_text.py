"""Payload, advice and applied changes as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from cache.messages import human_bytes
from readers.diagnosis.findings import Advice, Applied, Payload
from readers.diagnosis.ladder import Diagnosis

__all__ = ["advice_lines", "applied_lines", "findings_lines", "payload_lines"]

_FACTS = 2  # lines for each field
_WORTH_SAYING = 0.01  # of the bytes of a step


def findings_lines(result: Diagnosis) -> list[str]:
    """All of them that a diagnosis has, each after an empty line."""
    parts = [
        payload_lines(result.payload) if result.payload is not None else [],
        advice_lines(result.advice),
        applied_lines(result.applied),
    ]
    return [line for part in parts if part for line in ("", *part)]


def payload_lines(payload: Payload) -> list[str]:
    """The payload for a terminal: a line for each field, and what of it could be saved."""
    least = _WORTH_SAYING * payload.bytes
    saved = f", {human_bytes(payload.saves)} of which need not be copied" if payload.saves > least else ""
    lines = [f"payload: {human_bytes(payload.bytes)} a step{saved}"]
    for field in payload.fields:
        shape = "×".join("?" if n is None else str(n) for n in field.shape)
        lines.append(f"  {field.path or 'the batch':16s} {field.dtype:9s} {shape:18s} {human_bytes(field.bytes):>8s}")
        lines += [
            f"      {fact.text} (saves {human_bytes(fact.saves)})"
            for fact in field.facts[:_FACTS]
            if fact.saves > least
        ]
    return [*lines, *(f"note: {note}" for note in payload.notes)]


def advice_lines(advice: Iterable[Advice]) -> list[str]:
    """Advice for a terminal: what, why, how, and what it is to bring."""
    lines = list[str]()
    for number, each in enumerate(advice, 1):
        if number == 1:
            lines.append("advice, the largest predicted gain first:")
        gain = "" if each.seconds is None or not each.gain else f" (to {1e3 * each.seconds:.1f} ms a step)"
        lines.append(f"{number}. {each.title}{gain}")
        lines.append(f"   why: {each.why}")
        lines += [f"   {'    ' if above else 'how:'} {line}" for above, line in enumerate(each.how.split("\n"))]
    return lines


def applied_lines(applied: Iterable[Applied]) -> list[str]:
    """The changes for a terminal: predicted and measured."""
    lines = list[str]()
    for each in applied:
        if not lines:
            lines.append("applied, each on top of those that were kept:")
        before = f"{1e3 * each.before:.1f} ms"
        if each.measured is None:
            lines.append(f"{each.change.what}: not possible here: {each.problem}")
            continue
        parts = [f"{before} a step before, {1e3 * each.measured:.1f} ms measured"]
        if each.predicted is not None and each.error is not None:
            parts.append(f"{1e3 * each.predicted:.1f} ms predicted ({each.error:+.0%})")
        lines.append(f"{each.change.what}: {', '.join(parts)}; {'kept' if each.kept else 'not kept'}")
    return lines
