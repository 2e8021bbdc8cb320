"""Leases are taken back by the leader while their holders talk to another replica."""

from __future__ import annotations

import asyncio

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.auth import lease_secret
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimState, ReleaseBody, RenewAnswer, RenewBody

from .conftest import SECRET, ask
from .test_replicas import Replicas, look, replicas, until, until_granted

__all__ = ["replicas"]


def renew(broker: Broker, entry: Entry, **more: float) -> RenewAnswer:
    assert entry.held is not None
    held = entry.held
    secret = lease_secret(SECRET, held.lease_id, held.epoch)
    return asyncio.run(broker.renew(held.lease_id, RenewBody(secret=secret, epoch=held.epoch, **more)))


def stop(broker: Broker, entry: Entry) -> None:
    """Save the work and end, as its holder does."""
    assert entry.held is not None
    secret = lease_secret(SECRET, entry.held.lease_id, entry.held.epoch)
    body = ReleaseBody(secret=secret, epoch=entry.held.epoch, outcome="preempted")
    assert asyncio.run(broker.release(entry.held.lease_id, body))


def at_once(leader: Broker, least_runtime_s: float = 0.0) -> Settings:
    """Let whatever is preemptible be taken back at once."""
    changes = {"preemption_least_runtime_s": least_runtime_s, "preemption_grace_s": 60.0}
    leader.settings = leader.desk.settings = leader.leader._settings = leader.settings.model_copy(
        update=changes
    )
    leader.leader._must_load = True
    return leader.settings


def test_who_renews_at_the_follower_hears_that_its_lease_has_to_end(replicas: Replicas) -> None:
    leader, follower = replicas
    work = until_granted(follower, ask(follower, "work", gpus=2, preemptible=True))
    assert renew(follower, work, saved_s=5.0).ends_in_s is None
    at_once(leader)
    urgent = ask(follower, "urgent", gpus=2, value=9.0)
    until(lambda: renew(follower, work).ends_in_s is not None, "the holder hears nothing")
    answer = renew(follower, work)
    assert answer.reason is not None and urgent in answer.reason
    mark = leader.desk.board.entries[work.claim_id].held
    assert mark is not None and mark.taken_back is not None and mark.checkpoint_at is not None

    stop(follower, work)
    until(lambda: look(leader, urgent).state is ClaimState.GRANTED, "not granted")
    again = look(leader, work.claim_id)
    assert (again.state, again.preemptions, again.preempted_by) == (ClaimState.PENDING, 1, {urgent})
    until_granted(follower, urgent)


def test_a_renewal_at_the_follower_moves_an_end_no_further_than_it_must_be(replicas: Replicas) -> None:
    leader, follower = replicas
    work = until_granted(follower, ask(follower, "work", gpus=2, preemptible=True))
    at_once(leader)
    leader.settings = leader.desk.settings = leader.settings.model_copy(update={"lease_ttl_s": 600.0})
    follower.settings = follower.settings.model_copy(update={"lease_ttl_s": 600.0})
    ask(follower, "urgent", gpus=2, value=9.0)
    until(lambda: renew(follower, work).ends_in_s is not None, "the holder hears nothing")
    answer = renew(follower, work)
    assert answer.ends_in_s is not None
    left_s = (answer.expires_at - follower.clock()).total_seconds()
    assert abs(left_s - answer.ends_in_s) < 5 and left_s < 61


def test_the_follower_takes_over_what_is_being_taken_back(replicas: Replicas) -> None:
    leader, follower = replicas
    pair = [until_granted(leader, ask(leader, name, gpus=1, preemptible=True)) for name in ("a", "b")]
    at_once(leader)
    follower.settings = follower.desk.settings = follower.leader._settings = leader.settings
    urgent = ask(leader, "urgent", gpus=2, value=9.0)
    for each in pair:
        until(lambda each=each: renew(leader, each).ends_in_s is not None, "the holder hears nothing")  # type: ignore[misc]
    stop(leader, pair[0])
    leader.stop()
    until(lambda: follower.desk.is_open, "nobody leads")
    richer = ask(follower, "richer", gpus=1, value=99.0)
    until(lambda: look(follower, richer).reason is not None, "the new leader has not looked")
    assert look(follower, richer).state is ClaimState.PENDING, "what is kept is not given away"
    stop(follower, pair[1])
    until(lambda: look(follower, urgent).state is ClaimState.GRANTED, "not granted")
