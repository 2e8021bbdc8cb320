"""Whatever happens in whatever order, the engine decides what the reference cycle decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from airflow_gpu_provider.broker.cycle import decide
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    Decisions,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Node,
    Placement,
    Reason,
    ReasonCode,
    RunType,
    Snapshot,
)
from airflow_gpu_provider.broker.preemption import after_preemption, worth
from airflow_gpu_provider.broker.preemption_policy import PreemptionPolicy
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quota, Quotas
from airflow_gpu_provider.broker.reservation import Kept, Reservation

from .builders import NOW, STEPWISE, claim
from .invariants import check, fits_empty
from .test_cycle_properties import artifacts, nodes, reading

POLICY = CyclePolicy(reservation_notice=timedelta(seconds=60), impossible_for=timedelta(seconds=100))

PREEMPTION = PreemptionPolicy(
    grace=timedelta(seconds=20), least_runtime=timedelta(seconds=10), budget=2, backfill_penalty=2
)

waits = st.integers(0, 5)
teams = st.sampled_from([None, "vision", "text"])
quotas = st.sampled_from(
    [
        NO_QUOTAS,
        NO_QUOTAS,
        Quotas({"text": Quota(2)}),
        Quotas({"text": Quota(1, limit=3), "vision": Quota(share=0.25, weight=2)}),
        Quotas({"vision": Quota(3, limit=5)}),
    ]
)
named = st.sampled_from([("n0/0",), ("n0/0", "n0/1"), ("n1/0", "n2/0")])


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[int, int, tuple[str, ...], int, str | None]]:
    """Start and length in seconds, named devices or a number of a model."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        start, length = draw(st.integers(-20, 200)), draw(st.integers(30, 200))
        number = draw(st.integers(0, 4))
        model = draw(st.sampled_from([None, "A100", "V100"])) if number else None
        found.append((start, length, () if number else draw(named), number, model))
    return found


excluded = st.sampled_from([(), (), (), ("n0/0", "n0/1"), ("n1/0", "n1/1", "n1/2")])


class EngineAgainstCycle(RuleBasedStateMachine):
    """The model is the snapshot that the tables would hold."""

    @initialize(some=nodes(), asked=st.lists(reading, max_size=3), quotas=quotas)
    def begin(self, some: tuple[Node, ...], asked: list[GpuRequest], quotas: Quotas) -> None:
        self.now: datetime = NOW
        self.fleet = Fleet(some)
        self.leases: dict[LeaseId, Lease] = {}
        self.claims: dict[ClaimId, Claim] = {}
        self.number = 0
        for each in asked:
            self._make(each, 0, 0, ())
        self.reservations: tuple[Reservation, ...] = ()
        self.quotas = quotas
        self.engine = Engine(
            POLICY, self.fleet, (), self.claims.values(), quotas=quotas, preemption=PREEMPTION
        )

    @rule(
        asked=reading,
        value=waits,
        waited=waits,
        without=excluded,
        team=teams,
        run_type=st.sampled_from(RunType),
        preemptible=st.booleans(),
    )
    def submit(
        self,
        asked: GpuRequest,
        value: int,
        waited: int,
        without: tuple[str, ...],
        team: str | None,
        run_type: RunType,
        preemptible: bool,
    ) -> None:
        self.engine.submit(self._make(asked, value, waited, without, team, run_type, preemptible))

    @rule(asked=reading, of=st.lists(teams, min_size=2, max_size=4))
    def submit_alike(self, asked: GpuRequest, of: list[str | None]) -> None:
        for value, team in enumerate(of):
            self.engine.submit(self._make(asked, value, 0, (), team))

    @rule(some=windows(), team=st.sampled_from(["vision", "text"]))
    def reserve(self, some: list[tuple[int, int, tuple[str, ...], int, str | None]], team: str) -> None:
        self.reservations = tuple(
            Reservation(
                f"r{number}",
                self.now + timedelta(seconds=start),
                self.now + timedelta(seconds=start + length),
                by="ada",
                team=team,
                devices=frozenset(map(DeviceId, devices)),
                number=count,
                model=model,
            )
            for number, (start, length, devices, count, model) in enumerate(some)
        )
        self.engine.reserve(self.reservations)

    @rule(index=st.integers(0, 99))
    def withdraw(self, index: int) -> None:
        self.turn(1, [])
        if self.claims:
            self._withdraw(sorted(self.claims)[index % len(self.claims)])
            self.turn(1, [])

    @rule(index=st.integers(0, 99))
    def release(self, index: int) -> None:
        self.turn(1, [])
        if self.leases:
            lease_id = sorted(self.leases)[index % len(self.leases)]
            self.engine.end(lease_id)
            self._end(lease_id)
            self.turn(1, [])

    @rule(seconds=st.lists(st.sampled_from([4, 9, 28]), max_size=6))
    def wait(self, seconds: list[int]) -> None:
        """Time alone: leases expire and promises break."""
        for each in seconds:
            self.turn(each, [])

    @rule(index=st.integers(0, 99), seconds=st.integers(-5, 60))
    def renew(self, index: int, seconds: int) -> None:
        if self.leases:
            lease_id = sorted(self.leases)[index % len(self.leases)]
            self._renew(lease_id, self.now + timedelta(seconds=seconds))

    @rule(
        index=st.integers(0, 3),
        load=st.sampled_from([None, 0.1, 0.3, 0.9]),
        state=st.sampled_from([None, None, "drained"]),
        bad=st.sampled_from([None, None, "suspect"]),
    )
    def report(self, index: int, load: float | None, state: str | None, bad: str | None) -> None:
        number = index % len(self.fleet.nodes)
        old = self.fleet.nodes[number]
        first, *others = old.devices
        devices = (replace(first, unavailable=bad, utilisation=0.5), *others)
        new = replace(old, load=load, unavailable=state, devices=devices)
        self.turn(1, [])
        self._see(Fleet((*self.fleet.nodes[:number], new, *self.fleet.nodes[number + 1 :])))
        self.turn(1, [])

    @rule(index=st.integers(0, 3), held=artifacts)
    def bring(self, index: int, held: frozenset[str]) -> None:
        number = index % len(self.fleet.nodes)
        new = replace(self.fleet.nodes[number], artifacts=held)
        self.turn(1, [])
        self._see(Fleet((*self.fleet.nodes[:number], new, *self.fleet.nodes[number + 1 :])))
        self.turn(1, [])

    @rule(some=nodes())
    def rebuild(self, some: tuple[Node, ...]) -> None:
        self._see(Fleet(some))

    @rule(seconds=st.integers(1, 70), writes=st.lists(st.sampled_from([True, True, True, False]), max_size=3))
    def turn(self, seconds: int, writes: list[bool]) -> None:
        self.now += timedelta(seconds=seconds)
        before = Snapshot(
            self.fleet,
            tuple(self.leases.values()),
            tuple(self.claims.values()),
            reservations=self.reservations,
            kept={each.reservation.id: each.devices for each in self.engine.keeping.kept},
            taken_back=tuple(self.engine._takeovers.back.ended()),
        )
        mine = self.engine.turn(self.now)
        before = replace(before, recent=self.engine.stream.asked())
        reference = decide(before, self.now, POLICY, self.quotas)
        assert set(mine.rejections) == set(reference.rejections)
        assert set(mine.expired) == set(reference.expired)
        if not mine.preemptions:  # of which the reference knows nothing
            assert set(mine.placements) == set(reference.placements)
        stuck = tuple(each for each in reference.waiting if each.impossible_since is not None)
        queued = reference.waiting[: len(reference.waiting) - len(stuck)]
        if not (mine.preemptions or mine.spared or self._has_given_up(before)):
            assert self.engine.waiting(self.now, limit=2) == queued[:2] + stuck
            assert self.engine.waiting(self.now) == reference.waiting
        check(before, replace(mine, waiting=self.engine.waiting(self.now)), self.now, POLICY)
        self._check_preemptions(before, mine)
        for placement in mine.placements:
            for each in self.engine.keeping.kept:
                self._is_let_in(placement, each)
        self.engine.validate()
        for each in stuck:
            asker = self.claims[each.claim_id]
            assert not fits_empty(asker.request, self.fleet, asker.excluded)
        self._become(mine, writes)

    def _become(self, mine: Decisions, writes: list[bool]) -> None:
        """Write what was decided."""
        for lease_id in mine.expired:
            self._end(lease_id)
        self._spare(mine.spared)
        for found in mine.preemptions:
            for lease_id in found.victims:
                taken = replace(self.leases[lease_id], ends_for=found.for_claim, must_end_at=found.end_by)
                self.leases[lease_id] = replace(taken, expires_at=min(taken.expires_at, found.end_by))
        for rejection in mine.rejections:
            self._was_told(self.claims.pop(rejection.claim_id), rejection.reason)
        for number, placement in enumerate(mine.placements):
            self._write(placement, is_written=number >= len(writes) or writes[number])
        waiting = {each.id: each for each in self.engine.claims()}
        assert waiting.keys() == self.claims.keys()
        self.claims = waiting  # what a claim went through is part of the snapshot

    @invariant()
    def state_agrees(self) -> None:
        if hasattr(self, "engine"):
            self.engine.validate()

    def _check_preemptions(self, before: Snapshot, mine: Decisions) -> None:
        """Only what may be taken is, once, of those who ran long enough; what is kept is for nobody else."""
        live = {each.id: each for each in before.leases if each.expires_at > self.now}
        waits = {each.id: each for each in before.claims}
        for found in mine.preemptions:
            asker = waits[found.for_claim]
            assert found.end_by == self.now + PREEMPTION.grace
            for lease_id in found.victims:
                lease = live.pop(lease_id)  # in no two of them
                victim = lease.claim
                assert victim is not None and lease.ends_for is None
                assert self.now - lease.granted_at >= PREEMPTION.least_runtime
                assert victim.preemptions < PREEMPTION.budget and victim.id not in asker.preempted_by
                by_value = victim.preemptible and worth(victim, PREEMPTION) < worth(asker, PREEMPTION)
                owes = bool(self.quotas.by_team) and victim.team != asker.team
                overstays = any(each.is_for(asker) for each in self.reservations)
                assert by_value or owes or overstays
        over = (each for each in before.leases if each.expires_at <= self.now)
        kept = [each for each in (*before.taken_back, *over) if each.ends_for in waits]
        for placement in mine.placements:
            given = {*placement.devices, *placement.spares}
            for each in kept:
                is_whole = not each.request.is_shared
                assert each.ends_for == placement.claim_id or not is_whole or given.isdisjoint(each.devices)

    def _withdraw(self, claim_id: ClaimId) -> None:
        del self.claims[claim_id]
        self.engine.withdraw(claim_id)
        self._spare([each.id for each in self.leases.values() if each.ends_for == claim_id])

    def _renew(self, lease_id: LeaseId, expires_at: datetime) -> None:
        lease = self.leases[lease_id]
        until = min(expires_at, lease.must_end_at or expires_at)
        self.leases[lease_id] = replace(lease, expires_at=until)
        self.engine.renew(lease_id, expires_at)

    def _has_given_up(self, before: Snapshot) -> bool:
        """Whether a claim still waits for which all that was taken back has ended, in vain."""
        waits = {each.id for each in self.claims.values()} - set(self.engine._placed)
        kept_for = {each.ends_for for each in (*before.taken_back, *before.leases)}
        return any(claim_id in kept_for and claim_id not in self.engine._takeovers.back for claim_id in waits)

    def _end(self, lease_id: LeaseId) -> None:
        """What was preempted waits again."""
        lease = self.leases.pop(lease_id)
        if lease.ends_for in self.claims and lease.claim is not None:
            again = after_preemption(lease.claim, lease.ends_for)
            self.claims[again.id] = again
            self.engine.submit(again)

    def _spare(self, lease_ids: Iterable[LeaseId]) -> None:
        for lease_id in lease_ids:
            if lease_id in self.leases:
                self.leases[lease_id] = replace(self.leases[lease_id], ends_for=None, must_end_at=None)

    def _is_let_in(self, placement: Placement, kept: Kept) -> None:
        """Claims of others are on a kept device only if they end in time, or start long before."""
        asker, start = self.claims[placement.claim_id], kept.reservation.starts_at
        if asker.team == kept.reservation.team or kept.devices.isdisjoint(
            placement.devices + placement.spares
        ):
            return
        runtime = asker.request.max_runtime_s
        if runtime is None:
            assert self.now < start - POLICY.reservation_notice
        else:
            assert self.now + timedelta(seconds=runtime) <= start

    def _was_told(self, rejected: Claim, reason: Reason) -> None:
        """A claim that was let in once is rejected only after it was impossible for long enough."""
        if rejected.admitted and reason.code is not ReasonCode.OVER_QUOTA:
            assert rejected.impossible_since is not None
            assert self.now >= rejected.impossible_since + POLICY.impossible_for
            assert "impossible since" in reason.text

    def _make(
        self,
        asked: GpuRequest,
        value: int,
        waited: int,
        without: tuple[str, ...],
        team: str | None = None,
        run_type: RunType = RunType.LIVE,
        preemptible: bool = False,
    ) -> Claim:
        self.number += 1
        made = claim(f"c{self.number:03}", value=value, excluded=without, run_type=run_type)
        asked = replace(asked, task_class=f"dag.task{self.number}")  # nothing is learned of it
        submitted_at = self.now - timedelta(minutes=waited)
        made = replace(made, request=asked, submitted_at=submitted_at, team=team, preemptible=preemptible)
        self.claims[made.id] = made
        return made

    def _see(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.engine.set_fleet(fleet, self.now)

    def _write(self, placement: Placement, *, is_written: bool) -> None:
        if not is_written:
            self.engine.not_granted(placement.claim_id)
            return
        asker = self.claims.pop(placement.claim_id)
        devices = placement.devices + placement.spares
        lease_id = LeaseId(f"lease-{placement.claim_id}")
        expires_at = self.now + timedelta(seconds=90)
        lease = Lease(
            lease_id, asker.id, devices, asker.request, self.now, expires_at, placement.shares, asker
        )
        self.leases[lease_id] = lease
        self.engine.granted(placement, lease)


EngineAgainstCycle.TestCase.settings = STEPWISE
TestEngineAgainstCycle = EngineAgainstCycle.TestCase
