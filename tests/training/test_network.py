"""Latency between real hosts (network namespaces): where it puts the relay, the ring and the interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu_provider.echo import written_address
from airflow_gpu_provider.latency import Latency
from airflow_gpu_provider.training.network_options import NetworkOptions
from airflow_gpu_provider.training.plan import Slot
from airflow_gpu_provider.training.ring import matrix_of, relay_of, ring_order
from airflow_gpu_provider.training.run_file import RunState
from tests.training.namespaces import INTERFACE, VARIABLE, hosts, inside, why_not
from tests.training.running import Running

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))

#: One way. The ring 0-2-1-3 has no slow hop, the given one has two; 2 has the least latency to all others.
DELAYS = {(0, 1): 20.0, (2, 3): 20.0, (0, 2): 1.0, (1, 2): 1.0, (1, 3): 6.0, (0, 3): 6.0}
KEY = b"a key of the fleet"


def test_delays_between_hosts_make_the_relay_and_the_ring() -> None:
    with hosts(4, DELAYS) as (names, _):
        at = [f"10.77.0.{number}" for number in range(1, 5)]
        agents = [inside(name, lambda: Latency(KEY, every_s=0.05)) for name in names]
        peers = {
            name: written_address(host, each.port) for name, host, each in zip(names, at, agents, strict=True)
        }
        try:
            for name, agent in zip(names, agents, strict=True):
                agent.ask({other: peers[other] for other in names if other != name}, KEY)
                agent.start()
            ends_at = time.monotonic() + 30
            while any(len(agent.estimates()) < 3 for agent in agents) or time.monotonic() < ends_at - 29:
                assert time.monotonic() < ends_at
                time.sleep(0.05)
            known = {
                name: {peer: each.latency_ms for peer, each in agent.estimates().items()}
                for name, agent in zip(names, agents, strict=True)
            }
        finally:
            for agent in agents:
                agent.stop()
                agent.join(5)
        matrix = matrix_of(names, known)
        for (one, other), delay in DELAYS.items():
            there = matrix[one][other]
            assert there is not None and there >= 2 * delay
        assert relay_of(matrix) == 2
        order = ring_order(matrix)
        assert order[0] == 2 and order[2] == 3, "the slow ways are the diagonals"


@pytest.mark.slow
def test_ranks_follow_the_ring_and_a_raised_latency_lengthens_the_interval_for_a_while(
    training: Callable[..., Running], tmp_path: Path
) -> None:
    with hosts(4, DELAYS) as (names, cable):
        network = NetworkOptions(latency_threshold_ms=30, sync_interval_max=40, interfaces=(INTERFACE,))
        slots = tuple(Slot(environment={VARIABLE: name}) for name in names)
        params = {"steps": 1000, "pause_s": 0.01}
        run = training(
            entrypoint="tests.training.namespaced:train",
            shard_count=4,
            member_slots=slots,
            spare_slots=(),
            sync_interval=10,
            params=params,
            network=network,
        )
        record = run.until(lambda record: record.members.get("u2") == 0, "rank 0 on the relay")
        assert abs(record.members["u0"] - record.members["u1"]) == 2, "they are not neighbours any more"
        run.until(lambda record: record.network.relay == "u2", "the relay in the record")
        cable.delays = dict.fromkeys(DELAYS, 40.0)
        record = run.until(lambda record: bool(record.network.sync_schedule), "a longer interval")
        assert record.network.sync_schedule[-1][1] in (20, 40)
        assert record.network.latency_ms is not None and record.network.latency_ms > 30
        cable.delays = DELAYS
        run.until(lambda record: record.network.sync_schedule[-1][1] == 10, "the interval as it was")
        record = run.end()
    assert record.state is RunState.SUCCEEDED and not record.failures, record.error
    said = " ".join(note.sentence for note in record.notes)
    assert (
        "ring of lower latency" in said
        and "above latency_threshold_ms=30" in said
        and "no longer above" in said
    )
    assert record.checkpoint is not None
    assert record.checkpoint.sync_schedule == record.network.sync_schedule
    again = training(
        shard_count=4,
        member_slots=(Slot(),) * 4,
        spare_slots=(),
        sync_interval=10,
        params={"steps": 1000, "pause_s": 0},
        run_dir=tmp_path / "again",
        checkpoint_dir=tmp_path / "again-checkpoints",
        network=NetworkOptions(sync_schedule=tuple(record.network.sync_schedule)),
    ).end()
    assert again.checkpoint is not None
    assert again.checkpoint.state_sha256 == record.checkpoint.state_sha256, "repeated bitwise from the record"
