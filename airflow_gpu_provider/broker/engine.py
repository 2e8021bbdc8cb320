"""The broker's state between turns: what `cycle.decide` decides, at a cost per event.

The owner tells what happened (`submit`, `withdraw`, `end`, `renew`, `set_fleet`) and asks for a `turn`. A
turn takes the devices of its placements at once, so the next one cannot give them out again; the owner
answers each placement with `granted`, or with `not_granted` when it could not be written. A turn looks at
the request classes that an event could have unblocked, never at each claim or node. Pure: no clock, no
store, no chance. The next step is the transaction of the server's leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

import numpy as np

from airflow_gpu_provider.broker.admission import Admission
from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.classes import Classing, ClassKey
from airflow_gpu_provider.broker.diagnosis import Outlook
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.fleet_changes import changed_nodes, is_other_offer
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.holdings import Holdings
from airflow_gpu_provider.broker.intake import Intake
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import (
    NO_PREEMPTION,
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
    Preemption,
    PreemptionPolicy,
    Rejection,
    Waiting,
)
from airflow_gpu_provider.broker.move import Offer
from airflow_gpu_provider.broker.pending import Pending
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import Holds, Walk
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quotas
from airflow_gpu_provider.broker.rank import rank
from airflow_gpu_provider.broker.regions import Regions
from airflow_gpu_provider.broker.reservation import Reservation
from airflow_gpu_provider.broker.resizing import Resizing
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.standing import World, standings
from airflow_gpu_provider.broker.stream import Stream
from airflow_gpu_provider.broker.takeovers import Search, Takeovers
from airflow_gpu_provider.broker.throughput import Speeds

_NEVER = datetime.max.replace(tzinfo=timezone.utc)
#: Standings that are this old may be told again.
_STANDING_S = 1.0


class Engine:
    """Fleet, live leases, granted placements and the queue; each call tells one event."""

    def __init__(
        self,
        policy: CyclePolicy,
        fleet: Fleet,
        leases: Iterable[Lease] = (),
        claims: Iterable[Claim] = (),
        recent: Iterable[GpuRequest] = (),
        learned: Mapping[str, Speeds] | None = None,
        offers: Iterable[Offer] = (),
        keeping: Keeping | None = None,
        quotas: Quotas = NO_QUOTAS,
        preemption: PreemptionPolicy = NO_PREEMPTION,
        taken_back: Iterable[Lease] = (),
    ) -> None:
        leases, claims = list(leases), list(claims)
        self._policy = policy
        self._quotas = quotas
        self._learned = dict(learned or {})
        self._classing = Classing(bool(quotas.by_team), frozenset(self._learned))
        asked = list(recent) or [*(lease.request for lease in leases), *(claim.request for claim in claims)]
        self._stream = Stream(map(self._classing.request, asked))
        self._intake = Intake(policy)
        self._pending = Pending()
        #: placed by a turn, not yet answered
        self._placed: dict[ClaimId, Claim] = {}
        self.keeping = keeping or Keeping(policy.reservation_notice)
        self._told: tuple[datetime, tuple[Waiting, ...]] | None = None
        self._dirty = 0  # kinds of devices to which something happened
        layout = Layout.of(fleet)
        self._takeovers = Takeovers(preemption, layout, leases, taken_back)
        self._build(layout, leases, offers)
        for claim in claims:
            self._intake.add(claim)

    # -- events
    def set_fleet(self, fleet: Fleet, now: datetime) -> None:
        """Take the fleet as it is now; cheap when only load or availability of some nodes changed."""
        changed = changed_nodes(self._layout.nodes, fleet)
        if changed is None:
            self._requeue()
            self._build(Layout.of(fleet), list(self._holdings), self._holdings.offers())
            self.keeping.see_fleet()
        elif changed:
            if is_other_offer(self._layout.nodes, changed):
                self.keeping.see_fleet()
            self._reopen(changed)

    def reserve(
        self, reservations: Iterable[Reservation], before: Mapping[str, frozenset[DeviceId]] | None = None
    ) -> None:
        """Take what people reserved, instead of what they had reserved before."""
        self.keeping.reserve(reservations, before)
        self._requeue()

    def submit(self, claim: Claim) -> None:
        """Add a claim to the queue; a claim that is known already changes nothing."""
        if claim.id in self._pending or claim.id in self._intake or self._holdings.serves(claim.id):
            return
        self._intake.add(claim)
        self._stream.add(self._classing.request(claim.request))

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits; unknown ones change nothing."""
        self._intake.remove(claim_id)
        self._takeovers.stop(claim_id)
        of_class = self._pending.remove(claim_id)
        if of_class is not None:
            self._touch(of_class.kinds)  # what it held may serve others

    def end(self, lease_id: LeaseId) -> None:
        """Free the devices of a lease that was released, expired or revoked.

        What was taken back for a claim is kept for that.
        """
        self._takeovers.end(lease_id)

    def renew(self, lease_id: LeaseId, expires_at: datetime) -> None:
        """Move the end of a lease; unknown ones change nothing."""
        self._holdings.renew(lease_id, expires_at)

    def note_checkpoint(self, lease_id: LeaseId, moment: datetime) -> None:
        """Note when the holder of a lease last saved its work; unknown ones change nothing."""
        self._holdings.note_checkpoint(lease_id, moment)

    def pass_on(self, lease_id: LeaseId, claim: Claim) -> None:
        """Let a live lease be another claim's from now on, without an open offer."""
        found = self._holdings.remove(lease_id)
        if found is not None:
            self._capacity.give(found[1])
            self._capacity.take(self._holdings.add(replace(found[0], claim_id=claim.id, claim=claim)))
            self._touch_part(found[1])

    def granted(self, placement: Placement, lease: Lease) -> None:
        """Confirm that a placement was written as this lease, or learn a lease that was made elsewhere."""
        self._placed.pop(placement.claim_id, None)
        self.withdraw(placement.claim_id)
        self.end(lease.id)
        mine = self._holdings.remove(_placed_id(placement.claim_id))
        if mine is None or mine[0].devices != lease.devices or mine[0].request != lease.request:
            if mine is not None:
                self._capacity.give(mine[1])
                self._touch(self._regions.of_part(mine[1]))
            self._capacity.take(self._holdings.add(lease))
        else:
            self._holdings.add(lease, mine[1])

    def not_granted(self, claim_id: ClaimId) -> None:
        """Take a placement back that could not be written: its claim waits again."""
        claim = self._placed.pop(claim_id)
        self.end(_placed_id(claim_id))
        self._intake.again([claim])

    def learn(self, learned: Mapping[str, Speeds]) -> None:
        """Take what was measured of each class of tasks (`throughput.ThroughputTable`) instead of before."""
        self._learned = dict(learned)
        if self._classing.learned != learned.keys():
            self._classing = replace(self._classing, learned=frozenset(learned))
            self._requeue()  # other claims are alike now
        self._placer.learn(self._speed_costs())

    # -- decisions
    def turn(self, now: datetime) -> Decisions:
        """Return what to write now: ended leases, rejections and placements; ``waiting`` stays empty."""
        expired = self._holdings.expired(now)
        for lease_id in expired:
            self.end(lease_id)
        for part in self._holdings.broken(now):
            self._touch_part(part)
        lapsed = self.resizing.lapse(now)
        if self.keeping.is_due(now):
            self._keep(now)
        rejections = self._take_in(now) if self._intake.is_due(now) else ()
        search = self._search(now) if len(self._pending) else None
        placements = self._place(now, search) if self._dirty or self._share.has_moved else ()
        preemptions = () if search is None else self._set_apart(search, now)
        spared = self._takeovers.take_spared()
        return Decisions(placements, rejections, (), expired, lapsed, preemptions, spared)

    def waiting(self, now: datetime, limit: int | None = None) -> tuple[Waiting, ...]:
        """Return where the claims stand that the last turn left, the next one first.

        The first `limit` of a long queue are worked out without the others. Those that are impossible at
        present come last, all of them.
        """
        stuck = self._intake.waiting(len(self._pending))
        if self._told is not None and abs((now - self._told[0]).total_seconds()) < _STANDING_S:
            return self._told[1][:limit] + stuck
        judges = self._share, self._classing, self.keeping, self._takeovers.back
        world = World(self._capacity, self._placer, self._outlook, *judges, now)
        heads = (each.first for each in self._pending.heads(self._share))
        claims = self._pending.ordered(self._share, limit)
        found = standings(claims, heads, world, self._holdings.endings(now))
        if limit is None:
            self._told = (now, found)
        return found + stuck

    def claims(self) -> Iterator[Claim]:
        """Yield the claims that wait, as they were let in."""
        yield from self._intake
        yield from (replace(claim, admitted=True) for claim in self._pending.ordered(self._share))

    @property
    def is_settled(self) -> bool:
        """Whether all that happened was decided on: who waits now cannot start."""
        return not self._intake.has_new and not self._dirty and not self._share.has_moved

    @property
    def resizing(self) -> Resizing:
        """Changes of live leases; growing only when `is_settled`."""
        queue = self._pending, self._share, self.keeping, self._regions, self._touch
        return Resizing(self._holdings, self._capacity, self._placer, self._outlook, *queue)

    def overstayers(self, now: datetime) -> frozenset[LeaseId]:
        """Return the leases on devices that are reserved for others by now; a preemption may end them."""
        return self.keeping.overstayers(lambda: self._holdings, now)

    @property
    def mix_of(self) -> tuple[GpuRequest, ...]:
        """The requests that placement reckons with now."""
        return tuple(self._stream.in_use.elements())

    @property
    def mix(self) -> Mix:
        """The mix of them."""
        return self._placer.mix

    @property
    def capacity(self) -> Capacity:
        """What is free. Other tenants take cores and memory of it; devices are the engine's own."""
        return self._capacity

    def validate(self) -> None:
        """Raise `AssertionError` when the state contradicts itself."""
        parts = [*self._holdings.parts(), *self._takeovers.back.parts()]
        self._capacity.validate(parts, max_load=self._policy.max_load)
        waits = {claim.id for claim in self.claims()}
        if any(map(self._holdings.serves, waits)) or waits & self._placed.keys():
            raise AssertionError("a claim both waits and holds devices")

    # -- parts of a turn
    def _take_in(self, now: datetime) -> tuple[Rejection, ...]:
        """Judge and rank what was submitted since the last turn."""
        judge = self._admission, self._layout, now, self._share.never_reason
        admitted, rejections = self._intake.judge(*judge, self._holdings.serves)
        for claim_id in (*(each.claim_id for each in rejections), *(each.id for each in self._intake)):
            self._takeovers.stop(claim_id)  # what is impossible keeps nothing
        for claim in admitted:
            self._file(claim, now)
        return tuple(rejections)

    def _file(self, claim: Claim, now: datetime) -> None:
        """Put a claim into its class."""
        key = self._takeovers.back.key_for(claim, self._classing.key(claim))
        kinds = self._regions.of_kinds(self._placer.kinds(key.request, key.excluded))
        owned = self.keeping.owned_by(claim)
        self._pending.add(claim, key, kinds, rank(claim, now, self._policy), owned)
        self.keeping.expect(claim.request.max_runtime_s, now)
        self._touch(kinds)

    def _place(self, now: datetime, search: Search | None) -> tuple[Placement, ...]:
        """Walk along the classes whose devices something happened to, or who share devices with those."""
        teams = self._share.take_moved()
        classes = self._regions.around(self._dirty, teams, self._pending.classes.values())
        self._dirty, self._told = 0, None
        if not classes:
            return ()
        mix = self._stream.renewed(self._layout)
        if mix is not None:
            self._placer.renew(mix)
            self._placer.learn(self._speed_costs())
        holds = Holds(self._capacity, self._placer, self._outlook, partial(self._holdings.endings, now))
        back = self._takeovers.back

        def look(claim: Claim, key: ClassKey) -> bool:
            is_owner = bool(self.keeping.owned_by(claim))
            return search is not None and search.look(claim, key, is_owner=is_owner)

        walk = Walk(self._capacity, self._placer, holds, self._share, back, look)

        def visit(claim: Claim, key: ClassKey) -> bool:
            return walk.visit(claim, self.keeping.key_for(claim, key, now))

        begun = self._pending.take(classes, self._share, visit)
        return tuple(self._note(begun[made.claim_id], made, part, now) for made, part in walk.end())

    def _note(self, claim: Claim, placement: Placement, part: Part, now: datetime) -> Placement:
        devices, shares = placement.devices + placement.spares, placement.shares
        lease = Lease(_placed_id(claim.id), claim.id, devices, claim.request, now, _NEVER, shares, claim)
        self._holdings.add(lease, part)
        self._placed[claim.id] = claim
        self._takeovers.stop(claim.id, is_placed=True)
        return placement

    # -- taking back
    def _search(self, now: datetime) -> Search | None:
        """Return what looks for leases to take back; all who wait are looked at then."""
        stay = partial(self.overstayers, now)
        search = self._takeovers.search(self._placer, self._share, stay, now)
        if search is not None:
            self._dirty |= self._regions.of_kinds(range(len(self._layout.kinds)))
        return search

    def _set_apart(self, search: Search, now: datetime) -> tuple[Preemption, ...]:
        """Let the claims for which leases are taken back wait by themselves, and the others no longer."""
        for _, found in search.found:
            self._takeovers.back.begin(found)
        for claim in search.given_up:
            self._takeovers.stop(claim.id)
        for claim in (*(claim for claim, _ in search.found), *search.given_up):
            self._pending.remove(claim.id)
            self._file(claim, now)
        return tuple(found for _, found in search.found)

    # -- the fleet
    def _keep(self, now: datetime) -> None:
        """Choose what is kept, and let those look again who may start or must let go."""
        runtimes = [each.key.request.max_runtime_s for each in self._pending.classes.values()]
        moved = self.keeping.renew(now, Fleet(self._layout.nodes), self._holdings, runtimes)
        banks = {self._layout.place_of[name][0] for name in moved if name in self._layout.place_of}
        self._touch(self._regions.of_kinds(set(self._layout.kind_of[list(banks)].tolist())))

    def _requeue(self) -> None:
        """Let the claims that wait be judged and sorted anew."""
        self._intake.again(self._pending.ordered(self._share))
        self._pending = Pending()

    def _build(self, layout: Layout, leases: list[Lease], offers: Iterable[Offer]) -> None:
        self._layout = layout
        self._admission = Admission(layout)
        self._capacity = Capacity.idle(layout, max_load=self._policy.max_load)
        self._share = FairShare(self._quotas, Fleet(layout.nodes))
        self._holdings = Holdings(layout, leases, offers, self._share, self.keeping.see_lease)
        self._capacity.take_all(self._holdings.parts())
        self._takeovers.build(layout, self._holdings, self._capacity, self._touch_part)
        mix, band = self._stream.mix(layout), self._policy.cost_band
        self._placer = Placer(self._capacity, mix, cost_band=band, speeds=self._speed_costs())
        self._outlook = Outlook(layout, max_load=self._policy.max_load)
        self._regions = Regions(layout)
        self._dirty = 0
        self._told = None

    def _speed_costs(self) -> SpeedCosts:
        costs = SpeedCosts(self._layout.kinds, self._learned)
        costs.renew(self._stream.in_use)
        return costs

    def _reopen(self, changed: Mapping[int, Node]) -> None:
        before, nodes = (self._capacity.open, self._layout.offered), self._layout.nodes
        moved = [number for number, node in changed.items() if node.artifacts != nodes[number].artifacts]
        self._layout = self._layout.renewed(changed)
        held = [*self._holdings.parts_on(changed), *self._takeovers.back.parts_on(changed)]
        self._capacity.reopen(self._layout, list(changed), held, max_load=self._policy.max_load)
        banks = ((before[0] != self._capacity.open) | (before[1] != self._layout.offered)).any(axis=1)
        if moved:
            self._placer.see_artifacts()
            banks |= np.isin(self._layout.node_of, moved)
        if banks.any():
            self._outlook = Outlook(self._layout, max_load=self._policy.max_load)
            self._touch(self._regions.of_kinds(set(self._layout.kind_of[banks].tolist())))
        self._told = None

    def _touch_part(self, part: Part) -> None:
        self._touch(self._regions.of_part(part))

    def _touch(self, kinds: int) -> None:
        self._dirty |= kinds
        self._told = None


def _placed_id(claim_id: ClaimId) -> LeaseId:
    return LeaseId(f"placed:{claim_id}")
