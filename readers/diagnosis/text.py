"""A diagnosis as lines for a terminal."""

from __future__ import annotations

from readers.diagnosis.ladder import Diagnosis

__all__ = ["diagnosis_lines"]

_BAR = 30


def diagnosis_lines(result: Diagnosis) -> list[str]:
    """The ladder with bars, the costs of the stages in both readings, and the verdict."""
    longest = max(rung.time.seconds for rung in result.rungs)
    images = "" if result.batch_size is None else "  images/s"
    lines = [f"{'with':12s} {'ms/step':>9s} {'from':>9s} {'to':>9s} {'steps/s':>8s}{images}"]
    for rung in result.rungs:
        time = rung.time
        rate = "" if result.batch_size is None else f"{result.batch_size * time.per_second:10,.0f}"
        bar = "█" * max(1, round(_BAR * time.seconds / longest))
        times = " ".join(f"{1e3 * seconds:9.2f}" for seconds in (time.seconds, time.low, time.high))
        lines.append(f"{rung.stage:12s} {times} {time.per_second:8.2f}{rate}  {bar}")
    lines += ["", f"{'stage':12s} {'added':>9s} {'if free':>9s}  ms a step"]
    for cost in result.costs[1:]:
        how = "" if cost.measured else " (computed)"
        waits = ""
        if cost.busy and cost.cpu is not None:
            waits = (
                f"; {1e3 * cost.busy:.1f} ms a batch in a worker, {min(1.0, cost.cpu / cost.busy):.0%} of it on the CPU"
            )
        reason = f"; {cost.reason}" if cost.reason else ""
        lines.append(
            f"{cost.stage:12s} {1e3 * cost.added:9.2f} {1e3 * cost.freed:9.2f}  {cost.what}{how}{waits}{reason}"
        )
    lines += ["", f"the device has work {result.utilization:.0%} of the time"]
    if result.workers_needed is not None:
        lines.append(f"workers: {result.workers}, {result.workers_needed:.1f} would keep up with the training")
    if result.cpus_needed is not None:
        lines.append(f"CPUs: {result.cpus} may be used, {result.cpus_needed:.1f} would keep up")
    lines += [f"note: {note}" for note in result.notes]
    if result.culprit:
        lines.append(f"bound: {1e3 * result.bound:.1f} ms a step, if {result.culprit} cost nothing")
    return [*lines, "", result.verdict]
