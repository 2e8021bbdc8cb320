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

from airflow_gpu_provider.broker.capacity import Part
from airflow_gpu_provider.broker.classes import Classing, ClassKey
from airflow_gpu_provider.broker.fleet_changes import changed_nodes, is_other_offer
from airflow_gpu_provider.broker.floor import Floor, Held
from airflow_gpu_provider.broker.intake import Intake
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
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
    Placement,
    Preemption,
    Rejection,
    Waiting,
)
from airflow_gpu_provider.broker.move import Offer
from airflow_gpu_provider.broker.pending import Pending
from airflow_gpu_provider.broker.preemption_policy import NO_PREEMPTION, PreemptionPolicy
from airflow_gpu_provider.broker.quota import NO_QUOTAS, Quotas
from airflow_gpu_provider.broker.rank import rank
from airflow_gpu_provider.broker.reservation import Reservation
from airflow_gpu_provider.broker.resizing import Resizing
from airflow_gpu_provider.broker.standing import Told, standings
from airflow_gpu_provider.broker.stream import Stream
from airflow_gpu_provider.broker.strictness import judged_by
from airflow_gpu_provider.broker.takeovers import Search, Takeovers
from airflow_gpu_provider.broker.throughput import Speeds

_NEVER = datetime.max.replace(tzinfo=timezone.utc)


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
        self._classing = Classing(bool(quotas.by_team), frozenset(learned or ()))
        asked = list(recent) or [*(lease.request for lease in leases), *(claim.request for claim in claims)]
        self.stream = Stream(asked, learned)
        self._intake = Intake(policy)
        self._pending = Pending()
        self._placed: dict[ClaimId, Claim] = {}  #: by a turn, not yet answered
        self.keeping = keeping or Keeping(policy.reservation_notice)
        self._told = Told()
        layout = Layout.of(fleet)
        self._takeovers = Takeovers(preemption, layout, leases, taken_back)
        self.floor = self._build(layout, leases, offers)
        for claim in claims:
            self._intake.add(claim)

    # -- events
    def set_fleet(self, fleet: Fleet, now: datetime) -> None:
        """Take the fleet as it is now; cheap when only load or availability of some nodes changed."""
        changed = changed_nodes(self.floor.layout.nodes, fleet)
        if changed is None:
            self._again(self._pending.all())
            held = self.floor.holdings
            self.floor = self._build(Layout.of(fleet), list(held), held.offers())
            self.keeping.see_fleet()
        elif changed:
            if is_other_offer(self.floor.layout.nodes, changed):
                self.keeping.see_fleet()
            if self.floor.reopen(changed):
                for claim in self._pending.reread(self.floor.placer.there):
                    self._file(claim, now)  # more or less ready than it was

    def reserve(
        self, reservations: Iterable[Reservation], before: Mapping[str, frozenset[DeviceId]] | None = None
    ) -> None:
        """Take what people reserved, instead of what they had reserved before."""
        self.keeping.reserve(reservations, before)
        self._again(self._pending.owned_otherwise(self.keeping.owned_by))

    def submit(self, claim: Claim) -> None:
        """Add a claim to the queue; a claim that is known already changes nothing."""
        if claim.id in self._pending or claim.id in self._intake or self.floor.holdings.serves(claim.id):
            return
        self._intake.add(claim)
        self.stream.add(claim.request)

    def withdraw(self, claim_id: ClaimId) -> None:
        """Forget a claim that waits; unknown ones change nothing."""
        self._intake.remove(claim_id)
        self._takeovers.stop(claim_id)
        of_class = self._pending.remove(claim_id)
        if of_class is not None:
            self.floor.touch(of_class.kinds)  # what it held may serve others

    def end(self, lease_id: LeaseId) -> None:
        """Free the devices of a lease that was released, expired or revoked.

        What was taken back for a claim is kept for that.
        """
        self._takeovers.end(lease_id)

    def renew(self, lease_id: LeaseId, expires_at: datetime) -> None:
        """Move the end of a lease; unknown ones change nothing."""
        self.floor.holdings.renew(lease_id, expires_at)

    def note_checkpoint(self, lease_id: LeaseId, moment: datetime) -> None:
        """Note when the holder of a lease last saved its work; unknown ones change nothing."""
        self.floor.holdings.note_checkpoint(lease_id, moment)

    def pass_on(self, lease_id: LeaseId, claim: Claim) -> None:
        """Let a live lease be another claim's from now on, without an open offer."""
        self.floor.pass_on(lease_id, claim)

    def granted(self, placement: Placement, lease: Lease) -> None:
        """Confirm that a placement was written as this lease, or learn a lease that was made elsewhere."""
        self._placed.pop(placement.claim_id, None)
        self.withdraw(placement.claim_id)
        self.end(lease.id)
        self.floor.confirm(_placed_id(placement.claim_id), lease)

    def not_granted(self, claim_id: ClaimId) -> None:
        """Take a placement back that could not be written: its claim waits again."""
        claim = self._placed.pop(claim_id)
        self.end(_placed_id(claim_id))
        self._intake.again([claim])

    def learn(self, learned: Mapping[str, Speeds]) -> None:
        """Take what was measured of each class of tasks (`throughput.ThroughputTable`) instead of before."""
        anew, moved = self.stream.learn(learned)
        self._classing = replace(self._classing, learned=frozenset(learned))
        self.floor.learn(self.stream.speed_costs(self.floor.layout))
        self._again(self._pending.judged_otherwise(anew, moved))

    # -- decisions
    def turn(self, now: datetime) -> Decisions:
        """Return what to write now: ended leases, rejections and placements; ``waiting`` stays empty."""
        for lease_id in (expired := self.floor.holdings.expired(now)):
            self.end(lease_id)
        for part in self.floor.holdings.broken(now):
            self.floor.touch_part(part)
        lapsed = self.resizing.lapse(now)
        if self.keeping.is_due(now):
            self._keep(now)
        rejections = self._take_in(now) if self._intake.is_due(now) else ()
        search = self._takeovers.search(self.floor, self.keeping, now) if len(self._pending) else None
        placements = self._place(now, search) if self.floor.is_dirty else ()
        preemptions = () if search is None else self._set_apart(search, now)
        spared = self._takeovers.take_spared()
        return Decisions(placements, rejections, (), expired, lapsed, preemptions, spared)

    def waiting(self, now: datetime, limit: int | None = None) -> tuple[Waiting, ...]:
        """Return where the claims stand that the last turn left, the next one first.

        The first `limit` of a long queue are worked out without the others. Those that are impossible at
        present come last, all of them.
        """
        stuck = self._intake.waiting(len(self._pending))
        floor, told = self.floor, self._told.again(now, self.floor.version)
        if told is not None:
            return told[:limit] + stuck
        world = floor.world(self._classing, self.keeping, now)
        heads = (each.first for each in self._pending.heads(floor.share))
        claims = self._pending.ordered(floor.share, limit)
        found = standings(claims, heads, world, floor.holdings.endings(now))
        if limit is None:
            self._told.note(now, floor.version, found)
        return found + stuck

    def claims(self) -> Iterator[Claim]:
        """Yield the claims that wait, as they were let in."""
        yield from self._intake
        yield from (replace(claim, admitted=True) for claim in self._pending.ordered(self.floor.share))

    @property
    def is_settled(self) -> bool:
        """Whether all that happened was decided on: who waits now cannot start."""
        return not self._intake.has_new and not self.floor.has_freed

    @property
    def resizing(self) -> Resizing:
        """Changes of live leases; growing only when `is_settled`."""
        return Resizing(self.floor, self._pending, self.keeping)

    def validate(self) -> None:
        """Raise `AssertionError` when the state contradicts itself."""
        self.floor.validate()
        waits = {claim.id for claim in self.claims()}
        if any(map(self.floor.holdings.serves, waits)) or waits & self._placed.keys():
            raise AssertionError("a claim both waits and holds devices")

    # -- parts of a turn
    def _take_in(self, now: datetime) -> tuple[Rejection, ...]:
        """Judge and rank what was submitted since the last turn."""
        judge = self.floor.admission, self.floor.layout, now, self.floor.share.never_reason
        admitted, rejections = self._intake.judge(*judge, self.floor.holdings.serves)
        for claim_id in (*(each.claim_id for each in rejections), *(each.id for each in self._intake)):
            self._takeovers.stop(claim_id)  # what is impossible keeps nothing
        for claim in admitted:
            self._file(claim, now)
        return tuple(rejections)

    def _file(self, claim: Claim, now: datetime) -> None:
        """Put a claim into its class."""
        key = self._takeovers.back.key_for(claim, judged_by(self._classing.key(claim), self.floor.placer))
        kinds = self.floor.kinds_of(key)
        owned, there = self.keeping.owned_by(claim), self.floor.placer.there(claim.request)
        place = rank(claim, now, self._policy, there)
        self._pending.add(claim, key, kinds, place, owned=owned, there=there)
        self.keeping.expect(claim.request.max_runtime_s, now)
        self.floor.touch(kinds)

    def _place(self, now: datetime, search: Search | None) -> tuple[Placement, ...]:
        """Walk along the classes whose devices something happened to, or who share devices with those."""
        floor = self.floor
        teams = floor.share.take_moved()
        classes = floor.regions.around(floor.take_dirty(), teams, self._pending.classes.values())
        if not classes:
            return ()
        mix = self.stream.renewed(floor.layout)
        if mix is not None:
            floor.placer.renew(mix)
            floor.placer.learn(self.stream.speed_costs(floor.layout))
        walk = floor.walk(now, search)

        def visit(claim: Claim, key: ClassKey) -> bool:
            return walk.visit(claim, self.keeping.key_for(claim, key, now))

        begun = self._pending.take(classes, floor.share, visit)
        return tuple(self._note(begun[made.claim_id], made, part, now) for made, part in walk.end())

    def _note(self, claim: Claim, placement: Placement, part: Part, now: datetime) -> Placement:
        devices, shares = placement.devices + placement.spares, placement.shares
        lease = Lease(_placed_id(claim.id), claim.id, devices, claim.request, now, _NEVER, shares, claim)
        self.floor.holdings.add(lease, part)
        self._placed[claim.id] = claim
        self._takeovers.stop(claim.id, is_placed=True)
        return placement

    def _set_apart(self, search: Search, now: datetime) -> tuple[Preemption, ...]:
        """Let the claims for which leases are taken back wait by themselves, and the others no longer."""
        for claim in self._takeovers.begin(search):
            self._pending.remove(claim.id)
            self._file(claim, now)
        return tuple(found for _, found in search.found)

    # -- the fleet
    def _keep(self, now: datetime) -> None:
        """Choose what is kept, and let those look again who may start or must let go."""
        runtimes = [each.key.request.max_runtime_s for each in self._pending.classes.values()]
        moved = self.keeping.renew(now, self.floor.fleet, self.floor.holdings, runtimes)
        self.floor.touch_devices(moved)

    def _again(self, claims: Iterable[Claim]) -> None:
        """Let claims that wait be judged and sorted anew."""
        claims = list(claims)
        for claim in claims:
            self._pending.remove(claim.id)
        self._intake.again(claims)

    def _build(self, layout: Layout, leases: list[Lease], offers: Iterable[Offer]) -> Floor:
        held, mix = Held(leases, offers, self._takeovers), self.stream.mix(layout)
        speeds, seen = self.stream.speed_costs(layout), self.keeping.see_lease
        self._told = Told()
        return Floor(self._policy, self._quotas, layout, held, mix, speeds, seen)


def _placed_id(claim_id: ClaimId) -> LeaseId:
    return LeaseId(f"placed:{claim_id}")
