"""When a lease may be taken back for other work: the settings of preemption.

Apart from the code that decides, so that whoever only reads settings imports none of it. The next step is
`preemption`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """When a lease may be taken back."""

    grace: timedelta = timedelta(seconds=30)  #: time for a last checkpoint
    least_runtime: timedelta = timedelta(minutes=5)  #: nobody is preempted before it has run so long
    budget: int = 3  #: work that was preempted so often runs on
    least_gain: float = 0.0  #: a claim must be worth more by this
    backfill_penalty: float = 1000.0  #: as in the order of the queue


#: Nobody is preempted.
NO_PREEMPTION = PreemptionPolicy(budget=0)
