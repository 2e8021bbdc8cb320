"""Whatever holders, claims, time and the fleet do: no share is booked twice, no old place is lost first."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from airflow_gpu_provider.broker.classes import ClassKey
from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    CyclePolicy,
    DeviceId,
    Fleet,
    Lease,
    LeaseId,
    Node,
)
from airflow_gpu_provider.broker.move import Offer, OfferPhase, Resized, ResizeRefused, held_by
from airflow_gpu_provider.broker.resize import Decision, Wish

from .builders import NOW, STEPWISE, claim, node

POLICY = CyclePolicy()
GIB = 1024

NODES = (
    node("n0", 4, "V100", cpu_cores=8, host="h"),
    node("n1", 2, "A100", cpu_cores=8, host="h"),
    node("n2", models=("V100", "A100"), cpu_cores=6),
)


numbers = st.integers(0, 99)
answers = st.sampled_from(["accept", "accept", "commit", "commit", "decline"])
shapes = st.fixed_dictionaries(
    {
        "gpus": st.integers(1, 4),
        "milli": st.sampled_from([250, 500, 1000, 1000]),
        "cpu_cores": st.sampled_from([0, 2, 3]),
        "spares": st.sampled_from([0, 0, 1]),
        "max_runtime_s": st.sampled_from([None, 100.0]),
    }
)


class Dynamic(RuleBasedStateMachine):
    """The model is what the tables would hold: leases as they were last written, and open offers."""

    @initialize(sizes=st.lists(shapes, min_size=1, max_size=3))
    def begin(self, sizes: list[dict[str, Any]]) -> None:
        self.now: datetime = NOW
        self.leases: dict[LeaseId, Lease] = {}
        self.offers: dict[LeaseId, Offer] = {}
        self.claims: dict[ClaimId, Claim] = {}
        self.number = 0
        # The first ones get small devices, or few of them would ever move.
        self.nodes: dict[str, Node] = {NODES[0].name: NODES[0]}
        self.engine = Engine(POLICY, self.fleet)
        for size in sizes:
            self._submit(size)
        self.turn(0, True)
        self.nodes = {each.name: each for each in NODES}
        self.engine.set_fleet(self.fleet, self.now)

    @property
    def fleet(self) -> Fleet:
        return Fleet(tuple(self.nodes.values()))

    # -- claims
    @rule(size=shapes)
    def submit(self, size: dict[str, Any]) -> None:
        self._submit(size)

    @rule(seconds=st.sampled_from([0, 1, 30, 61, 300]), writes=st.booleans())
    def turn(self, seconds: int, writes: bool) -> None:
        self.now += timedelta(seconds=seconds)
        decisions = self.engine.turn(self.now)
        assert set(decisions.expired) == {
            each.id for each in self.leases.values() if each.expires_at <= self.now
        }
        for lease_id in decisions.expired:
            self._forget(lease_id)
        over = {lease_id for lease_id, offer in self.offers.items() if offer.is_over(self.now)}
        assert set(decisions.lapsed) == over
        for lease_id in over:
            del self.offers[lease_id]
        for rejection in decisions.rejections:
            del self.claims[rejection.claim_id]
        for placement in decisions.placements:
            if not writes:
                self.engine.not_granted(placement.claim_id)
                continue
            request = self.claims.pop(placement.claim_id).request
            lease = Lease(
                LeaseId(f"lease-{placement.claim_id}"),
                placement.claim_id,
                placement.devices + placement.spares,
                request,
                self.now,
                self.now + timedelta(seconds=400),
                placement.shares,
            )
            self.leases[lease.id] = lease
            self.engine.granted(placement, lease)

    # -- holders
    @rule(index=numbers, gib=st.sampled_from([1, 4, 8, 16, 31, 33, 70, 90]))
    def ask_memory(self, index: int, gib: int) -> None:
        self._ask(index, Wish(memory_mib=gib * GIB))

    @rule(index=numbers, gpus=st.integers(0, 4), named=st.booleans())
    def ask_members(self, index: int, gpus: int, named: bool) -> None:
        leave: tuple[DeviceId, ...] = ()
        if named and self.leases:
            lease = self._pick(index)
            leave = lease.devices[: max(0, lease.request.gpus - gpus)]
        self._ask(index, Wish(gpus=gpus, leave=leave))

    @rule(index=numbers, gib=st.sampled_from([16, 33, 70]), answers=st.lists(answers, max_size=4))
    def move(self, index: int, gib: int, answers: list[str]) -> None:
        """Holders that ask for much, and do something with the offer."""
        self._ask(index, Wish(memory_mib=gib * GIB))
        for each in answers:
            self.answer(index, each)

    @rule(index=numbers, what=answers)
    def answer(self, index: int, what: str) -> None:
        if self.offers:
            lease_id = sorted(self.offers)[index % len(self.offers)]
            {"accept": self._accept, "commit": self._commit, "decline": self._decline}[what](lease_id)

    @rule(index=numbers)
    def release(self, index: int) -> None:
        if not self.leases:
            return
        lease_id = self._pick(index).id
        self.engine.end(lease_id)
        self._forget(lease_id)

    @rule(index=numbers)
    def renew(self, index: int) -> None:
        if not self.leases:
            return
        lease = self._pick(index)
        until = self.now + timedelta(seconds=400)
        self.leases[lease.id] = replace(lease, expires_at=until)
        self.engine.renew(lease.id, until)

    # -- the fleet
    @rule(index=st.integers(0, 2), why=st.sampled_from([None, "drained"]))
    def report(self, index: int, why: str | None) -> None:
        name = NODES[index].name
        if name in self.nodes:
            self.nodes[name] = replace(self.nodes[name], unavailable=why)
            self.engine.set_fleet(self.fleet, self.now)

    @rule(index=st.integers(0, 2), there=st.booleans())
    def rebuild(self, index: int, there: bool) -> None:
        each = NODES[index]
        if there:
            self.nodes[each.name] = each
        elif len(self.nodes) > 1:
            self.nodes.pop(each.name, None)
        self.engine.set_fleet(self.fleet, self.now)

    # -- what holds after each step
    @invariant()
    def the_engine_has_what_was_written(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.validate()
        holdings = self.engine.floor.holdings
        assert {each.id: each for each in holdings} == self.leases
        assert {each.lease_id: each for each in holdings.offers()} == self.offers

    @invariant()
    def no_share_and_no_core_is_booked_twice(self) -> None:
        if not hasattr(self, "engine"):
            return
        used: Counter[DeviceId] = Counter()
        for lease in self.leases.values():
            used.update(dict(zip(lease.devices, lease.milli, strict=True)))
        for offer in self.offers.values():
            used.update(dict(held_by(offer)))
        assert all(milli <= 1000 for milli in used.values()), used

    @invariant()
    def an_open_offer_leaves_its_lease_as_it_is(self) -> None:
        for lease_id, offer in getattr(self, "offers", {}).items():
            lease = self.leases[lease_id]
            assert (lease.devices, lease.request) == (offer.from_devices, offer.from_request)

    # -- parts
    def _submit(self, size: dict[str, Any]) -> None:
        self.number += 1
        made = claim(f"c{self.number:03}", memory_mib=size["milli"] * 16, **size)
        self.claims[made.id] = made
        self.engine.submit(made)

    def _ask(self, index: int, wish: Wish) -> None:
        self.turn(0, True)
        self.turn(0, True)  # spares and releases of the first one are decided on
        if not self.leases:
            return
        before = self._pick(index)
        starts = self._standing()
        found: Decision | None = self.engine.resizing.resize(before.id, wish, self.now)
        if isinstance(found, Resized):
            assert len(found.lease.devices) == len(set(found.lease.devices))
            self.leases[before.id] = found.lease
        elif isinstance(found, Offer):
            assert self.offers.get(before.id, found) == found, "the same wish has the same offer"
            self.offers[before.id] = found
        else:
            assert isinstance(found, ResizeRefused) and found.reason
        later = self._standing()
        assert all(later[claim_id] <= stood for claim_id, stood in starts.items()), "growing delays nobody"

    def _standing(self) -> dict[ClaimId, tuple[float, int]]:
        """Return when the first of each class starts, and what the head of an unknown start lacks now."""
        heads = {each.first.id: each.key for each in self.engine._pending.classes.values()}
        standing = {}
        for each in self.engine.waiting(self.now):
            if each.claim_id in heads:
                start = math.inf if each.starts_in_s is None else each.starts_in_s
                lacks = self._lacks(heads[each.claim_id]) if each.position == 1 and start == math.inf else 0
                standing[each.claim_id] = (start, lacks)
        return standing

    def _lacks(self, key: ClassKey) -> int:
        engine, request = self.engine, key.request
        groups = engine.floor.placer.groups(request, key.excluded)
        if not engine.floor.outlook.starts_by_waiting(key, request, groups):
            return 0  # it waits for people, and keeps nothing
        able = [each for each in groups if engine.floor.outlook.idle.fits(request, each)]
        rooms = [int(engine.floor.capacity.room(request, devices).sum()) for devices in able]
        return -min(request.gpus, max(rooms, default=0))

    def _pick(self, index: int) -> Lease:
        return self.leases[sorted(self.leases)[index % len(self.leases)]]

    def _accept(self, lease_id: LeaseId) -> None:
        offer, found = self.offers[lease_id], self.engine.resizing.accept(lease_id, self.now)
        assert isinstance(found, Offer) is not offer.is_over(self.now)
        if isinstance(found, Offer):
            assert found == replace(offer, phase=OfferPhase.ACCEPTED, expires_at=found.expires_at)
            self.offers[lease_id] = found

    def _commit(self, lease_id: LeaseId) -> None:
        offer, before = self.offers[lease_id], self.leases[lease_id]
        found = self.engine.resizing.commit(lease_id, self.now)
        may = offer.phase is OfferPhase.ACCEPTED and not offer.is_over(self.now)
        assert isinstance(found, Resized) is may
        if isinstance(found, Resized):
            assert set(found.freed) == set(before.devices) - set(found.lease.devices)
            self.leases[lease_id] = found.lease
            del self.offers[lease_id]

    def _decline(self, lease_id: LeaseId) -> None:
        assert self.engine.resizing.decline(lease_id) == self.offers.pop(lease_id)
        assert self.engine.resizing.decline(lease_id) is None

    def _forget(self, lease_id: LeaseId) -> None:
        del self.leases[lease_id]
        self.offers.pop(lease_id, None)


Dynamic.TestCase.settings = settings(STEPWISE, max_examples=150)
TestDynamic = Dynamic.TestCase
