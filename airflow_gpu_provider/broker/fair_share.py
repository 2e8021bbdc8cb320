"""Whose turn it is among teams: quotas, borrowing, and a weighted fair share of what is borrowed.

A claim that stays within its team's quota goes before every claim that borrows; among those that borrow, live
runs before backfills, then the team whose dominant share (the largest of its shares of any GPU model) is
least for its weight. What a team holds is always computed from live leases. Borrowed devices go back when an
owner asks (`preemption`). A team at its limit waits for itself and keeps nothing from others, not even from
its own smaller claims. Without quotas, order is by rank alone. The next step is `order`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from airflow_gpu_provider.broker import reasons
from airflow_gpu_provider.broker.flavors import canonical_model
from airflow_gpu_provider.broker.model import (
    WHOLE_DEVICE,
    Claim,
    DeviceId,
    Fleet,
    GpuRequest,
    Lease,
    LeaseId,
    Reason,
    ReasonCode,
    RunType,
)
from airflow_gpu_provider.broker.most_taken import MostTaken
from airflow_gpu_provider.broker.quota import Quotas, Team
from airflow_gpu_provider.broker.rank import Rank
from airflow_gpu_provider.broker.throughput import Speeds

#: Sorts the heads of queues, the next one first: borrows, is a backfill that borrows, weighted share, rank.
Place: TypeAlias = tuple[bool, bool, float, Rank]

_GONE = "gone"  #: model of leased devices that left the fleet


class FairShare:
    """What teams hold and may have: `hold` and `drop` follow the leases, `count` assumes a claim is granted.

    For another fleet make a new one: the models of the devices are read once. Without quotas nothing is
    counted, and nobody borrows.
    """

    def __init__(self, quotas: Quotas, fleet: Fleet, leases: Iterable[Lease] = ()) -> None:
        self._quotas = quotas
        self.is_on = bool(quotas.by_team)
        self._model_of: dict[DeviceId, str] = {
            device.id: canonical_model(device.model) for node in fleet.nodes for device in node.devices
        }
        self._total = Counter(self._model_of.values())
        self._size_of = {device.id: device.memory_mib for node in fleet.nodes for device in node.devices}
        self._most = MostTaken(fleet)
        self._leases: dict[LeaseId, Lease] = {}
        #: milli-GPU by team and model: whole numbers, since sums of parts would drift
        self._held: defaultdict[Team, Counter[str]] = defaultdict(Counter)
        #: the same of claims that are assumed to be granted
        self._assumed: defaultdict[Team, Counter[str]] = defaultdict(Counter)
        #: what open offers would add to teams, by lease: within limits, but not theirs yet
        self._offered: dict[LeaseId, tuple[Team, int]] = {}
        self._cached_borrowed: frozenset[LeaseId] | None = None
        self._moved: set[Team] = set()
        for lease in leases:
            self.hold(lease)

    # -- events
    def learn(self, speeds: Callable[[str | None], Speeds]) -> None:
        """Take what was measured of each kind of work: it may get other devices."""
        self._most.learn(speeds)

    def hold(self, lease: Lease) -> None:
        """Count a lease that is new, or that has changed."""
        if not self.is_on:
            return
        self.drop(lease.id)
        self._leases[lease.id] = lease
        self._add(lease, 1)

    def drop(self, lease_id: LeaseId) -> None:
        """Count a lease no more; unknown ones change nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._add(lease, -1)

    def offer(self, lease_id: LeaseId, milli: int) -> None:
        """Count what a lease would hold in all by the move that it is offered; 0 = it is offered none."""
        gone = self._offered.pop(lease_id, None)
        if gone is not None:
            self._moved.add(gone[0])  # its claims may start
        lease = self._leases.get(lease_id)
        if lease is not None and milli > sum(lease.milli):
            self._offered[lease_id] = team_of(lease), milli - sum(lease.milli)

    @property
    def has_moved(self) -> bool:
        """Return whether some team holds more or less than at the last `take_moved`."""
        return bool(self._moved)

    def take_moved(self) -> set[Team] | None:
        """Return the teams that hold more or less than at the last call; None = there are no quotas."""
        moved, self._moved = self._moved, set()
        return moved if self.is_on else None

    def _add(self, lease: Lease, sign: int) -> None:
        self._cached_borrowed = None
        self._moved.add(team_of(lease))
        held = self._held[team_of(lease)]
        for device, milli in zip(lease.devices, lease.milli, strict=True):
            held[self._model_of.get(device, _GONE)] += sign * milli

    # -- facts
    def held(self, team: Team) -> float:
        """Return how many devices a team holds, parts included."""
        return (self._held[team].total() + self._assumed[team].total()) / WHOLE_DEVICE

    def taken(self, team: Team) -> float:
        """Return how many devices count on a team's limit: what it holds and is offered."""
        offered = sum(milli for of, milli in self._offered.values() if of == team) if self._offered else 0
        return self.held(team) + offered / WHOLE_DEVICE

    def owned(self, team: Team) -> float:
        """Return a team's quota in devices; a share is one of the whole fleet."""
        quota = self._quotas.of(team)
        return quota.devices if quota.share is None else quota.share * self._total.total()

    def dominant_share(self, team: Team) -> float:
        """Return the largest share that a team holds of any model."""
        held, total = self._held[team] + self._assumed[team], self._total
        shares = (milli / (total[model] * WHOLE_DEVICE) for model, milli in held.items() if total[model])
        return max(shares, default=0.0)

    def borrows(self, claim: Claim) -> bool:
        """Return whether the claim would take its team above its quota."""
        return self.held(claim.team) + self.asked(claim.request) > self.owned(claim.team) + 1e-9

    def asked(self, request: GpuRequest) -> float:
        """Return the devices that a request needs at most, parts included; spares are what is left over."""
        return request.gpus * self._most.milli(request) / WHOLE_DEVICE

    # -- order
    def place(self, claim: Claim, rank: Rank) -> Place:
        """Return where a claim stands among the heads of queues now; as its team gets more, it moves back."""
        if not self.is_on or not self.borrows(claim):
            return False, False, 0.0, rank
        weighted = self.dominant_share(claim.team) / self._quotas.of(claim.team).weight
        return True, claim.run_type is RunType.BACKFILL, weighted, rank

    def assume(self, claim: Claim, devices: Iterable[DeviceId]) -> None:
        """Count these devices as granted to the claim, until `assume_nothing`."""
        if self.is_on:
            assumed = self._assumed[claim.team]
            for device in devices:
                assumed[self._model_of[device]] += claim.request.milli_on(self._size_of[device])

    def count(self, claim: Claim) -> None:
        """Assume that a claim is granted somewhere: it counts on each of its models by its part of them."""
        models = {canonical_model(model) for model in claim.request.models} or set(self._total)
        present = {model: self._total[model] for model in sorted(models) if self._total[model]}
        milli = claim.request.gpus * self._most.milli(claim.request)
        for model, number in present.items():
            self._assumed[claim.team][model] += round(milli * number / sum(present.values()))

    def assume_nothing(self) -> None:
        """Forget the claims that were assumed to be granted."""
        self._assumed.clear()

    # -- limits
    def is_over_limit(self, claim: Claim) -> bool:
        """Return whether the team's limit keeps a claim from starting now."""
        limit = self._quotas.of(claim.team).limit
        return limit is not None and self.taken(claim.team) + self.asked(claim.request) > limit + 1e-9

    def room(self, claim: Claim) -> int:
        """Return how many more devices the claim may have, spares included."""
        limit = self._quotas.of(claim.team).limit
        if limit is None:
            return sys.maxsize
        free = int((limit - self.taken(claim.team)) * WHOLE_DEVICE + 1e-6)
        return max(0, free // self._most.milli(claim.request))

    def growth_refusal(self, lease: Lease, milli: int) -> str | None:
        """Return why the team's limit keeps a lease from holding so much; None = it does not."""
        team, more = team_of(lease), (milli - sum(lease.milli)) / WHOLE_DEVICE
        limit = self._quotas.of(team).limit
        own = self._offered.get(lease.id, (team, 0))[1] / WHOLE_DEVICE  # the new move is instead of that one
        taken = self.taken(team) - own
        if limit is None or more <= 0 or taken + more <= limit + 1e-9:
            return None
        return (
            f"asked {more:g} device(s) more; team {team} holds {taken:g} and may have {limit:g}; "
            "ask when the team gives devices back, or raise its limit"
        )

    def limit_reason(self, claim: Claim) -> Reason | None:
        """Return why the team's limit keeps a claim from starting now, or ever; None = it does not."""
        if not self.is_over_limit(claim):
            return None
        limit = self._quotas.of(claim.team).limit
        unblocks = "starts when its team gives devices back"
        if self._is_never(claim):
            unblocks = self._way_out(claim.request)
        return Reason(
            ReasonCode.OVER_QUOTA,
            f"asked {reasons.asked(claim.request)}; team {claim.team} holds {self.taken(claim.team):g} "
            f"and may have {limit:g}; {unblocks}",
        )

    def never_reason(self, claim: Claim) -> Reason | None:
        """Return why the team's limit keeps a claim from ever starting; None = it does not."""
        return self.limit_reason(claim) if self._is_never(claim) else None

    def _is_never(self, claim: Claim) -> bool:
        """Return whether the team's limit is below what the claim asks, however little the team holds."""
        # The most that it may take, as in is_over_limit: who passes here would else wait for ever there.
        limit = self._quotas.of(claim.team).limit
        return limit is not None and self.asked(claim.request) > limit + 1e-9

    def _way_out(self, request: GpuRequest) -> str:
        if not request.is_by_memory:
            return "lower gpus or raise the team's limit"
        return (
            f"it counts as {self.asked(request):g}, its part of the smallest devices that suit: name a model "
            "with more memory, ask for less, or raise the team's limit"
        )

    # -- borrowed devices
    def borrowed(self) -> frozenset[LeaseId]:
        """Return the leases that teams hold above their quotas: preemptible ones, then the newest, first."""
        if not self.is_on:
            return frozenset()
        if self._cached_borrowed is not None:
            return self._cached_borrowed
        by_team: defaultdict[Team, list[Lease]] = defaultdict(list)
        for lease in self._leases.values():
            by_team[team_of(lease)].append(lease)
        found: set[LeaseId] = set()
        for team, leases in by_team.items():
            above = sum(_size(lease) for lease in leases) - self.owned(team)
            for lease in sorted(leases, key=_owed_last):
                if above <= 1e-9:
                    break
                found.add(lease.id)
                above -= _size(lease)
        self._cached_borrowed = frozenset(found)
        return self._cached_borrowed

    def reclaimable(self, claim: Claim) -> frozenset[LeaseId]:
        """Return the leases that the claim's team may have taken back: borrowed by others, for its own quota.

        What it then holds is within its quota and is borrowed by nobody, so no team can take it back again.
        """
        if not self.is_on or self.borrows(claim):
            return frozenset()
        return self.borrowed()  # none of its own: it is within its quota

    def protected(self, claim: Claim, leases: Iterable[Lease]) -> frozenset[LeaseId]:
        """Return those of these leases that a claim may not take: of other teams within their quotas."""
        if not self.is_on:
            return frozenset()
        borrowed = self.borrowed()
        return frozenset(
            lease.id for lease in leases if team_of(lease) != claim.team and lease.id not in borrowed
        )


def team_of(lease: Lease) -> Team:
    """Return whose quota a lease counts on."""
    return None if lease.claim is None else lease.claim.team


def _size(lease: Lease) -> float:
    return sum(lease.milli) / WHOLE_DEVICE


def _owed_last(lease: Lease) -> tuple[bool, float, str]:
    is_firm = lease.claim is None or not lease.claim.preemptible
    return is_firm, -lease.granted_at.timestamp(), lease.id
