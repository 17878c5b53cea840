"""Reading at scale, before there is a job: who reads what, when and from where, for each order and each cache.

    found = readers.simulate("imagenet-hdf5", readers.simulation.Job(nodes=1000, ranks=8), caches=[0.0, 0.3])
    print(found.rows[found.best].name, found.reason)

No payload is read. Positions come from the schedules of all ranks, samples from the orders, extents from the index,
requests from the rule that merges reads, what caches keep from `readers.caching`, and what is staged from
`readers.staging`: the functions that a training runs, called for all nodes in one process. Only times are a model, of
the bandwidths that are given (`readers.simulation.timing`).

job        what is simulated                 subject    the set                deal     positions by step and rank
reads      requests of batches               holding    what nodes keep        tally    bytes by step and node
timing     the time of an epoch              advice     which to take          result   what is returned
"""

from __future__ import annotations

from readers.simulation.job import ORDERS, Job, Machine, Shuffles
from readers.simulation.result import Epoch, Memory, Row, Simulation, Spread
from readers.simulation.run import simulate
from readers.simulation.subject import Subject, planned_set, subject_of

__all__ = [
    "ORDERS",
    "Epoch",
    "Job",
    "Machine",
    "Memory",
    "Row",
    "Shuffles",
    "Simulation",
    "Spread",
    "Subject",
    "planned_set",
    "simulate",
    "subject_of",
]
