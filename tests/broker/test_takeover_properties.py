"""On a full fleet leases are taken back again and again, and the engine decides what the cycle decides."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Claim, ClaimId, Fleet, GpuRequest, Lease, LeaseId, RunType
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quota, Quotas

from .builders import NOW, STEPWISE, fleet_of, node
from .test_engine_properties import POLICY, PREEMPTION, EngineAgainstCycle

sizes = st.builds(
    GpuRequest,
    gpus=st.sampled_from([1, 1, 2, 2, 3, 4]),
    milli=st.sampled_from([1000, 1000, 1000, 500]),
    cpu_cores=st.sampled_from([0.0, 0.0, 3.0]),
    max_runtime_s=st.sampled_from([None, None, 60.0]),
)
owners = st.sampled_from(
    [NO_QUOTAS, Quotas({"text": Quota(2)}), Quotas({"text": Quota(1), "vision": Quota(2)})]
)


class Crowded(EngineAgainstCycle):
    """Claims of all values for the devices of two small nodes."""

    @initialize(gpus=st.integers(2, 4), quotas=owners)
    def begin(self, gpus: int, quotas: Quotas) -> None:  # type: ignore[override]
        self.now = NOW
        self.fleet: Fleet = fleet_of(node("n0", gpus, cpu_cores=8), node("n1", 2, cpu_cores=4))
        self.leases: dict[LeaseId, Lease] = {}
        self.claims: dict[ClaimId, Claim] = {}
        self.number = 0
        self.reservations = ()
        self.quotas = quotas
        self.engine = Engine(POLICY, self.fleet, quotas=quotas, preemption=PREEMPTION)

    @rule(
        asked=sizes,
        value=st.integers(0, 9),
        team=st.sampled_from([None, "text", "vision"]),
        run_type=st.sampled_from([RunType.LIVE, RunType.LIVE, RunType.BACKFILL]),
        preemptible=st.sampled_from([True, True, True, False]),
        times=st.integers(1, 3),
    )
    def submit(  # type: ignore[override]
        self,
        asked: GpuRequest,
        value: int,
        team: str | None,
        run_type: RunType,
        preemptible: bool,
        times: int,
    ) -> None:
        for _ in range(times):
            worth = value + self.number // 4  # what comes later is worth more
            self.engine.submit(self._make(asked, worth, 0, (), team, run_type, preemptible))

    @rule(seconds=st.lists(st.sampled_from([4, 9, 15]), min_size=1, max_size=6))
    def wait(self, seconds: list[int]) -> None:
        """Holders renew."""
        for each in seconds:
            self.turn(each, [])
            for lease_id in self.leases:
                self._renew(lease_id, self.now + timedelta(seconds=30))

    @precondition(lambda self: any(each.ends_for for each in self.leases.values()))
    @rule(index=st.integers(0, 99))
    def give_up(self, index: int) -> None:
        """Who is being preempted saves its work and ends."""
        ending = sorted(each.id for each in self.leases.values() if each.ends_for)
        lease_id = ending[index % len(ending)]
        self.engine.end(lease_id)
        self._end(lease_id)
        self.turn(1, [])

    @precondition(lambda self: any(each.ends_for for each in self.leases.values()))
    @rule()
    def lose_interest(self) -> None:
        """The claim that it was for is withdrawn."""
        (claim_id, *_) = sorted(each.ends_for for each in self.leases.values() if each.ends_for)
        self._withdraw(claim_id)
        self.turn(1, [])

    submit_alike = reserve = bring = rebuild = None  # type: ignore[assignment]


Crowded.TestCase.settings = STEPWISE
TestCrowded = Crowded.TestCase
