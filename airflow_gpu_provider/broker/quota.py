"""Whose turn it is among teams: quotas, borrowing, and a weighted fair share of what is borrowed.

Each team owns a number of devices or a part of the fleet. A claim that stays within its team's quota goes
before every claim that borrows; among those that borrow, live runs before backfills, then the team whose
dominant share (the largest of its shares of any GPU model) is least for its weight. What a team holds is
always computed from live leases. Borrowed devices go back when an owner asks: the next step is `preemption`.
Without quotas, order is by urgency alone.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from airflow_gpu_provider.exceptions import InvalidRequest

#: None = the claims and leases of no team; they own nothing and share as one team of weight 1.
Team: TypeAlias = str | None
_Rank: TypeAlias = tuple[bool, bool, float, float, float, str]

_GONE = "gone"  #: model of leased devices that left the fleet
_EXAMPLE = '{"vision": {"devices": 8, "weight": 2}, "text": {"share": 0.25, "limit": 16}}'
_FIELDS = frozenset({"devices", "share", "weight", "limit"})


@dataclass(frozen=True, slots=True)
class Quota:
    """What a team owns: ``devices``, or a ``share`` 0..1 of the fleet; and how it may borrow."""

    devices: float = 0.0
    share: float | None = None
    weight: float = 1.0  #: of its claim to what is borrowed
    limit: float | None = None  #: most devices it may hold, borrowed ones included


_NOTHING = Quota()


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quotas by team; empty = no quotas."""

    by_team: Mapping[str, Quota] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Quotas:
        """Return the quotas written as JSON; raise InvalidRequest that names the team and what to write."""
        if not text.strip():
            return cls()
        try:
            teams = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"quotas are no JSON ({error}): write such as {_EXAMPLE}") from None
        if not isinstance(teams, dict):
            raise InvalidRequest(f"quotas are no JSON object by team: write such as {_EXAMPLE}")
        quotas = cls({team: _quota(team, fields) for team, fields in teams.items()})
        given = sum(each.share or 0.0 for each in quotas.by_team.values())
        if given > 1 + 1e-9:
            raise InvalidRequest(f"the shares of all teams add up to {given:g}: at most 1 can be given")
        return quotas

    def of(self, team: Team) -> Quota:
        """Return a team's quota; one that nobody set owns nothing."""
        return _NOTHING if team is None else self.by_team.get(team, _NOTHING)


class FairShare:
    """What teams hold and may have: `hold` and `drop` follow the leases, `count` assumes a claim is granted.

    For another fleet make a new one: the models of the devices are read once.
    """

    def __init__(self, quotas: Quotas, fleet: Fleet, leases: Iterable[Lease]) -> None:
        self._quotas = quotas
        self._model_of: dict[DeviceId, str] = {
            device.id: canonical_model(device.model) for node in fleet.nodes for device in node.devices
        }
        self._total = Counter(self._model_of.values())
        self._sizes = frozenset(device.memory_mib for node in fleet.nodes for device in node.devices)
        self._leases: dict[LeaseId, Lease] = {}
        #: milli-GPU by team and model: whole numbers, since sums of parts would drift
        self._held: defaultdict[Team, Counter[str]] = defaultdict(Counter)
        #: the same of claims that are assumed to be granted
        self._assumed: defaultdict[Team, Counter[str]] = defaultdict(Counter)
        self._cached_borrowed: frozenset[LeaseId] | None = None
        for lease in leases:
            self.hold(lease)

    # -- events
    def hold(self, lease: Lease) -> None:
        """Count a lease that is new, or that has changed."""
        self.drop(lease.id)
        self._leases[lease.id] = lease
        self._add(lease, 1)

    def drop(self, lease_id: LeaseId) -> None:
        """Count a lease no more; unknown ones change nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._add(lease, -1)

    def assume_nothing(self) -> None:
        """Forget the claims that were assumed to be granted."""
        self._assumed.clear()

    def _add(self, lease: Lease, sign: int) -> None:
        self._cached_borrowed = None
        held = self._held[team_of(lease)]
        for device, milli in zip(lease.devices, lease.milli, strict=True):
            held[self._model_of.get(device, _GONE)] += sign * milli

    # -- facts
    def held(self, team: Team) -> float:
        """Return how many devices a team holds, parts included."""
        return (self._held[team].total() + self._assumed[team].total()) / WHOLE_DEVICE

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
        return request.gpus * max(self._shares(request)) / WHOLE_DEVICE

    def _shares(self, request: GpuRequest) -> list[int]:
        """Return what a member would take of a device of each size that is large enough."""
        return [request.milli_on(s) for s in self._sizes if s >= request.memory_mib] or [request.milli]

    # -- order
    def ordered(self, claims: Iterable[Claim], urgency: Callable[[Claim], float]) -> list[Claim]:
        """Return the claims, the next one first: as if each were granted before the next is chosen."""
        by_urgency = sorted(claims, key=lambda claim: (-urgency(claim), claim.submitted_at, claim.id))
        if not self._quotas.by_team:
            return by_urgency
        queues: dict[Team, list[Claim]] = {}
        for claim in by_urgency:
            queues.setdefault(claim.team, []).append(claim)
        return list(self.merged(queues, urgency))

    def merged(
        self, queues: Mapping[Team, Sequence[Claim]], urgency: Callable[[Claim], float]
    ) -> Iterator[Claim]:
        """Yield the claims of queues by team, each already in order, and count each as granted."""
        heads = [(self.rank(queue[0], urgency), team, 0) for team, queue in queues.items() if queue]
        heap = [(rank, number, team, place) for number, (rank, team, place) in enumerate(heads)]
        heapq.heapify(heap)
        while heap:
            _, number, team, place = heap[0]
            claim = queues[team][place]
            yield claim
            self.count(claim)
            if place + 1 < len(queues[team]):
                rank = self.rank(queues[team][place + 1], urgency)
                heapq.heapreplace(heap, (rank, number, team, place + 1))
            else:
                heapq.heappop(heap)

    def rank(self, claim: Claim, urgency: Callable[[Claim], float]) -> _Rank:
        """Return the place of a claim among the heads of all teams; the least goes first."""
        value, since = -urgency(claim), claim.submitted_at.timestamp()
        if not self.borrows(claim):
            return False, False, 0.0, value, since, claim.id
        weighted = self.dominant_share(claim.team) / self._quotas.of(claim.team).weight
        return True, claim.run_type is RunType.BACKFILL, weighted, value, since, claim.id

    def count(self, claim: Claim) -> None:
        """Assume that a claim is granted; on several models it counts on each by its part of them."""
        models = {canonical_model(model) for model in claim.request.models} or set(self._total)
        present = {model: self._total[model] for model in sorted(models) if self._total[model]}
        milli = claim.request.gpus * max(self._shares(claim.request))
        for model, number in present.items():
            self._assumed[claim.team][model] += round(milli * number / sum(present.values()))

    # -- limits
    def limit_reason(self, claim: Claim) -> Reason | None:
        """Return why the team's limit keeps a claim from starting now, or ever; None = it does not."""
        limit = self._quotas.of(claim.team).limit
        if limit is None or self.held(claim.team) + self.asked(claim.request) <= limit + 1e-9:
            return None
        unblocks = "starts when its team gives devices back"
        if self.is_never(claim):
            unblocks = "lower gpus or raise the team's limit"
        return Reason(
            ReasonCode.OVER_QUOTA,
            f"asked {reasons.asked(claim.request)}; team {claim.team} holds {self.held(claim.team):g} "
            f"and may have {limit:g}; {unblocks}",
        )

    def is_never(self, claim: Claim) -> bool:
        """Return whether the team's limit is below what the claim asks, however little the team holds."""
        limit = self._quotas.of(claim.team).limit
        least = claim.request.gpus * min(self._shares(claim.request))
        return limit is not None and least / WHOLE_DEVICE > limit + 1e-9

    # -- borrowed devices
    def borrowed(self) -> frozenset[LeaseId]:
        """Return the leases that teams hold above their quotas: preemptible ones, then the newest, first."""
        if not self._quotas.by_team:
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
        if not self._quotas.by_team or self.borrows(claim):
            return frozenset()
        return self.borrowed()  # none of its own: it is within its quota

    def protected(self, claim: Claim) -> frozenset[LeaseId]:
        """Return the leases that this claim may not take: those of other teams within their quotas."""
        if not self._quotas.by_team:
            return frozenset()
        borrowed = self.borrowed()
        return frozenset(
            lease.id
            for lease in self._leases.values()
            if team_of(lease) != claim.team and lease.id not in borrowed
        )


def team_of(lease: Lease) -> Team:
    """Return whose quota a lease counts on."""
    return None if lease.claim is None else lease.claim.team


def _size(lease: Lease) -> float:
    return sum(lease.milli) / WHOLE_DEVICE


def _owed_last(lease: Lease) -> tuple[bool, float, str]:
    is_firm = lease.claim is None or not lease.claim.preemptible
    return is_firm, -lease.granted_at.timestamp(), lease.id


def _quota(team: str, fields: object) -> Quota:
    if not isinstance(fields, dict) or not fields or fields.keys() - _FIELDS:
        raise InvalidRequest(
            f"quota of team {team!r} is {fields!r}: write an object of {', '.join(sorted(_FIELDS))}, "
            f"such as {_EXAMPLE}"
        )
    for name, value in fields.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (name == "weight" and value == 0):
            raise InvalidRequest(
                f"{name} of team {team!r} is {value!r}: write 0 or more, and a weight above 0"
            )
    quota = Quota(**{name: float(value) for name, value in fields.items()})
    if quota.share is not None and (quota.share > 1 or "devices" in fields):
        raise InvalidRequest(
            f"team {team!r} has share={quota.share:g}"
            + (" and devices: give one of them" if "devices" in fields else ": the whole fleet is 1")
        )
    return quota
