"""One fleet as the engine sees it: what is free, who holds what, how claims are judged and placed on it.

Whatever frees or takes devices goes through here and is noted by kind of device, so that a turn looks only at
those who may have to do with it. For another fleet there is another floor. The next step is `engine.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

import numpy as np

from airflow_gpu_provider.broker.admission import Admission
from airflow_gpu_provider.broker.capacity import Capacity, Part
from airflow_gpu_provider.broker.classes import Classing, ClassKey
from airflow_gpu_provider.broker.diagnosis import Outlook
from airflow_gpu_provider.broker.fair_share import FairShare
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.holdings import Holdings
from airflow_gpu_provider.broker.keeping import Keeping
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import Claim, CyclePolicy, DeviceId, Fleet, Lease, LeaseId, Node
from airflow_gpu_provider.broker.move import Offer
from airflow_gpu_provider.broker.placement import Placer
from airflow_gpu_provider.broker.queue import Holds, Walk, nobody
from airflow_gpu_provider.broker.quota import Quotas
from airflow_gpu_provider.broker.regions import Regions
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.standing import World
from airflow_gpu_provider.broker.takeovers import Search, Takeovers


@dataclass(frozen=True, slots=True)
class Held:
    """What is on a floor when it is made: leases, offers to move, and what was taken back."""

    leases: Iterable[Lease]
    offers: Iterable[Offer]
    takeovers: Takeovers


class Floor:
    """The fleet of one layout. ``seen`` is told each lease that comes, goes or breaks its promise."""

    def __init__(
        self,
        policy: CyclePolicy,
        quotas: Quotas,
        layout: Layout,
        held: Held,
        mix: Mix,
        speeds: SpeedCosts,
        seen: Callable[[Lease], None],
    ) -> None:
        self._max_load = policy.max_load
        self.layout = layout
        self.admission = Admission(layout)
        self.capacity = Capacity.idle(layout, max_load=policy.max_load)
        self.share = FairShare(quotas, self.fleet)
        self.share.learn(speeds.speeds)
        self.holdings = Holdings(layout, held.leases, held.offers, self.share, seen)
        self.capacity.take_all(self.holdings.parts())
        self.takeovers = held.takeovers
        self.takeovers.build(layout, self.holdings, self.capacity, self.touch_part)
        self.placer = Placer(self.capacity, mix, cost_band=policy.cost_band, speeds=speeds)
        self.outlook = Outlook(layout, max_load=policy.max_load)
        self.regions = Regions(layout)
        self._dirty = 0  # kinds of devices to which something happened
        self.version = 0  #: grows with whatever happens to devices

    @property
    def fleet(self) -> Fleet:
        """All nodes as they are now."""
        return Fleet(self.layout.nodes)

    # -- what happened
    @property
    def is_dirty(self) -> bool:
        """Whether something happened since the last `take_dirty`."""
        return self.has_freed or self.share.has_moved

    @property
    def has_freed(self) -> bool:
        """Whether devices came free or claims came since then: without that, nobody more can start.

        A team that got more stands further back; that lets nobody start who could not before.
        """
        return bool(self._dirty)

    def take_dirty(self) -> int:
        """Return the kinds to which something happened since the last call."""
        dirty, self._dirty = self._dirty, 0
        self.version += 1
        return dirty

    def touch(self, kinds: int) -> None:
        """Note that something happened to devices of these kinds."""
        self._dirty |= kinds
        self.version += 1

    def touch_part(self, part: Part) -> None:
        """Note that something happened to these devices or beside them."""
        self.touch(self.regions.of_part(part))

    def touch_all(self) -> None:
        """Let the next turn look at everybody."""
        self.touch(self.regions.of_kinds(range(len(self.layout.kinds))))

    def touch_devices(self, devices: Iterable[DeviceId]) -> None:
        """Note that something happened to these devices or beside them."""
        self.touch(self.kinds_around(devices))

    # -- leases
    def confirm(self, placed_id: LeaseId, lease: Lease) -> None:
        """Hold a lease in the place of what was placed under that id, wherever that was."""
        mine = self.holdings.remove(placed_id)
        if mine is None or mine[0].devices != lease.devices or mine[0].request != lease.request:
            if mine is not None:
                self.capacity.give(mine[1])
                self.touch_part(mine[1])
            self.capacity.take(self.holdings.add(lease))
        else:
            self.holdings.add(lease, mine[1])

    def pass_on(self, lease_id: LeaseId, claim: Claim) -> None:
        """Let a live lease be another claim's from now on, without an open offer."""
        found = self.holdings.remove(lease_id)
        if found is not None:
            self.capacity.give(found[1])
            self.capacity.take(self.holdings.add(replace(found[0], claim_id=claim.id, claim=claim)))
            self.touch_part(found[1])

    def learn(self, speeds: SpeedCosts) -> None:
        """Reckon with other measured speeds from now on."""
        self.placer.learn(speeds)
        self.share.learn(speeds.speeds)
        self.version += 1

    # -- on what a turn and a report are made
    def holds(self, now: datetime) -> Holds:
        """Return what blocked claims keep, from nothing on."""
        return Holds(self.capacity, self.placer, self.outlook, partial(self.holdings.endings, now))

    def walk(self, now: datetime, search: Search | None) -> Walk:
        """Return a walk along the queue; ``search`` looks for leases to take back for those it blocks."""
        take_back = nobody if search is None else search.look
        return Walk(self.capacity, self.placer, self.holds(now), self.share, self.takeovers.back, take_back)

    def world(self, classing: Classing, keeping: Keeping, now: datetime) -> World:
        """Return what tells claims where they stand."""
        judges = self.share, classing, keeping, self.takeovers.back
        return World(self.capacity, self.placer, self.outlook, *judges, now)

    def kinds_of(self, key: ClassKey) -> int:
        """Return the kinds of devices that a class has to do with."""
        return self.regions.of_kinds(self.placer.kinds(key.request, key.excluded))

    def kinds_around(self, devices: Iterable[DeviceId]) -> int:
        """Return the kinds of these devices and those beside them, without devices that left the fleet."""
        layout = self.layout
        banks = {layout.place_of[name][0] for name in devices if name in layout.place_of}
        return self.regions.of_kinds({int(layout.kind_of[bank]) for bank in banks})

    # -- the fleet
    def reopen(self, changed: Mapping[int, Node]) -> bool:
        """Take nodes as they are now: load, availability, artifacts; return whether artifacts moved."""
        before, nodes = (self.capacity.open, self.layout.offered), self.layout.nodes
        moved = [number for number, node in changed.items() if node.artifacts != nodes[number].artifacts]
        self.layout = self.layout.renewed(changed)
        held = [*self.holdings.parts_on(changed), *self.takeovers.back.parts_on(changed)]
        self.capacity.reopen(self.layout, list(changed), held, max_load=self._max_load)
        banks = ((before[0] != self.capacity.open) | (before[1] != self.layout.offered)).any(axis=1)
        if moved:
            self.placer.see_artifacts()
            banks |= np.isin(self.layout.node_of, moved)
        if banks.any():
            self.outlook = Outlook(self.layout, max_load=self._max_load)
            self.touch(self.regions.of_kinds(set(self.layout.kind_of[banks].tolist())))
        self.version += 1
        return bool(moved)

    def validate(self) -> None:
        """Raise `AssertionError` when what is free is not what leases, offers and takeovers leave."""
        parts = [*self.holdings.parts(), *self.takeovers.back.parts()]
        self.capacity.validate(parts, max_load=self._max_load)
