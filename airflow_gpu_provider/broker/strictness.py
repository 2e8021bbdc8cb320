"""Which speed a strict claim is held against: the measured one, unless that would leave it nothing.

What was measured of a kind of work overrides the ratings: a strict claim gets only devices on which such work
reaches what it asks. But learning alone makes no claim impossible: where all devices of the fleet that are
fast enough by measurement are too few for it, it is judged by the ratings, as it was let in, and told so. The
next step is the queue.
"""

from __future__ import annotations

from dataclasses import replace

from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.model import Claim, Reason
from airflow_gpu_provider.broker.placement import Placer


def judged_by(key: ClassKey, placer: Placer) -> ClassKey:
    """Return a claim's class; without its kind of work where only the ratings leave it enough devices."""
    request = key.request
    if not request.strict or request.task_class is None:
        return key
    anywhere = replace(request, artifacts=frozenset(), artifacts_required=False)  # those can be brought
    if placer.fits_empty(anywhere, key.excluded):
        return key
    return key._replace(request=replace(request, task_class=None))


def told(reason: Reason, claim: Claim, own: ClassKey, placer: Placer) -> Reason:
    """Return why a claim of this class waits, with the speeds that a strict one is held against."""
    speeds = placer.speeds(claim.task_class).by_model
    if not claim.request.strict or not speeds:
        return reason
    by = f"by what was measured of {claim.task_class}"
    if own.request.task_class is None:
        by = f"by the ratings: {by} too few reach that on the whole fleet"
    return replace(reason, text=f"{reason.text}; judged {by}")
