"""Choose devices for a request: best match first, then least cost, then least load within the cost band.

Before the load, a gang that fits on one node looks for NVLink domains that suit it (`domains.harm`).
A gang gets all its devices or none: on one bank if any has room, else on the nodes of one host, else
anywhere (`spread`); of one speed where it can be (`alike`). A worse match degree is looked at only when no
better one can take the whole gang. A request that reads artifacts is looked for on the nodes that hold them
first (`artifact_affinity`). Costs are kept per request class and shape of bank, and computed again
only for shapes not seen before: the time of a choice depends on how many shapes there are, not on how many
nodes. The placer chooses; `capacity.Capacity.take` makes it so.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from airflow_gpu_provider.broker.artifact_affinity import EVERYWHERE, Level, Nearness
from airflow_gpu_provider.broker.capacity import Capacity, Place
from airflow_gpu_provider.broker.costs import Banks, CostFunction, is_share
from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import BoolArray, FloatArray, IntArray, millicores
from airflow_gpu_provider.broker.model import WHOLE_DEVICE, DeviceId, GpuRequest
from airflow_gpu_provider.broker.request_class import RequestClass
from airflow_gpu_provider.broker.shapes import Shapes
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.spread import Spread, slot_of_share, slots_of
from airflow_gpu_provider.broker.throughput import Speeds

#: Request classes whose costs are kept.
_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class Found:
    """Devices for a whole request; the degree is the weakest member's."""

    places: tuple[Place, ...]
    match_degree: float


class Placer:
    """Chooses places on a capacity; keeps costs between calls."""

    def __init__(
        self, capacity: Capacity, mix: Mix, *, cost_band: float, speeds: SpeedCosts | None = None
    ) -> None:
        self._capacity = capacity
        self._empty = Capacity.empty(capacity.layout)
        self._speeds = speeds or SpeedCosts(capacity.layout.kinds)
        self._size = int(capacity.layout.offered.sum()) * WHOLE_DEVICE
        self._cost_band = cost_band
        self._scarcity = np.zeros(len(capacity.layout.kinds))
        self._shapes = Shapes(capacity)
        self._classes: dict[Hashable, RequestClass] = {}
        self._nearness = Nearness(capacity.layout.nodes)
        self._short: dict[GpuRequest, GpuRequest] = {}
        self._every = np.ones((1, capacity.layout.width), np.bool_)
        self.renew(mix)

    def renew(self, mix: Mix) -> None:
        """Judge by another mix from now on."""
        self.mix = mix
        self._cost = CostFunction(self._capacity.layout, mix)
        self._fragments = np.full(len(self._shapes.load), np.nan)
        self._fragments_read = (self._shapes.generation, len(self._shapes.renamed))
        for kept in self._classes.values():
            kept.generation = -1

    def learn(self, speeds: SpeedCosts) -> None:
        """Reckon with other speeds from now on."""
        self._speeds = speeds
        self._classes.clear()

    def see_artifacts(self) -> None:
        """Take what nodes hold from the layout as it is now."""
        self._nearness = Nearness(self._capacity.layout.nodes)
        self._classes = {key: kept for key, kept in self._classes.items() if not kept.request.artifacts}

    def there(self, request: GpuRequest) -> float:
        """Return the part 0..1 of what a request reads that the node with most of it holds."""
        return 1.0 - self._nearness.levels(request)[0].lack if request.artifacts else 1.0

    def place(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> Found | None:
        """Return devices for all of the gang, or None; takes nothing."""
        if not request.artifacts or request.artifacts_required:
            return self._place(self._of_class(request, excluded))
        best: Found | None = None
        worth = -np.inf
        for near in self._nearness.levels(request):
            if near.worth(1.0) <= worth:  # nothing farther away can be better
                break
            found = self._place(self._of_class(request, excluded, near))
            if found is not None and near.worth(found.match_degree) > worth:
                best, worth = found, near.worth(found.match_degree)
        return best

    def _place(self, kept: RequestClass) -> Found | None:
        if self._is_hopeless(kept):
            return None
        self._refresh(kept)
        self._scarcity = self._dearness(kept)
        for degree in kept.degrees:
            found = self._on_one_bank(kept, degree) or self._over_nodes(kept, degree)
            if found is not None:
                return found
        return None

    def _dearness(self, kept: RequestClass) -> FloatArray:
        """Return what scarcity and measured speed add on each kind for this class, as things are now."""
        free = self._capacity.free_of_kind
        taken = kept.request.gpus * kept.shares
        scarce = self.mix.dearness(free, taken, millicores(kept.request.cpu_cores))
        by_speed = self._speeds.of(kept.request, 1.0 - sum(free) / max(1, self._size))
        return scarce if by_speed is None else scarce + by_speed * taken

    def speeds(self, task_class: str | None) -> Speeds:
        """Return what was measured of a kind of work; empty = nothing is known."""
        return self._speeds.speeds(task_class)

    def suitable(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> BoolArray:
        """Return the devices that suit a request, free or not."""
        return self._of_class(request, excluded).suits.devices

    def groups(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> list[BoolArray]:
        """Return the groups of suitable devices, of which one must serve the whole request."""
        return [group.devices for group in self._of_class(request, excluded).groups]

    def fits_empty(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> bool:
        """Return whether the whole fleet, empty, has room for a request where its artifacts are now."""
        return self._empty.fits_one_of(request, self.groups(request, excluded))

    def kinds(self, request: GpuRequest, excluded: frozenset[DeviceId] = frozenset()) -> tuple[int, ...]:
        """Return the kinds of the devices that suit a request, wherever the artifacts are that it reads."""
        if request.artifacts:
            request = replace(request, artifacts=frozenset(), artifacts_required=False)
        return self._of_class(request, excluded).kinds

    def _is_hopeless(self, kept: RequestClass) -> bool:
        """Tell at once what the sums of free shares rule out: most looks at a full fleet."""
        free = self._capacity.free_of_kind
        return max(sum(free[kind] for kind in group.kinds) for group in kept.groups) < kept.least

    # -- classes
    def _of_class(
        self, request: GpuRequest, excluded: frozenset[DeviceId], near: Level = EVERYWHERE
    ) -> RequestClass:
        short = self._short.get(request)
        if short is None:
            if len(self._short) > 10 * _CLASSES:
                self._short.clear()
            short = self._short[request] = replace(request, spares=0, max_runtime_s=None)
        key = (short, excluded) if near.nodes is None else (short, excluded, near.lack)
        kept = self._classes.get(key)
        if kept is None:
            if len(self._classes) >= _CLASSES:
                del self._classes[next(iter(self._classes))]
            kept = self._classes[key] = self._class(short, excluded, near)
        return kept

    def _class(self, request: GpuRequest, excluded: frozenset[DeviceId], near: Level) -> RequestClass:
        speeds = self.speeds(request.task_class)
        if near.nodes is None:
            nodes = self._nearness.holders(request)
            return RequestClass.of(self._empty, request, excluded, speeds=speeds, nodes=nodes)
        groups = self._of_class(request, excluded).groups
        return RequestClass.of(self._empty, request, excluded, speeds=speeds, nodes=near.nodes, groups=groups)

    # -- costs of shapes not seen before
    def _refresh(self, kept: RequestClass) -> None:
        shapes = self._shapes
        shapes.follow()
        if len(kept.cost) < shapes.number:
            more = len(shapes.load) - len(kept.cost)
            kept.cost = np.append(kept.cost, np.full(more, np.nan))
            kept.share = np.append(kept.share, np.zeros(more, np.int64))
        if kept.generation != shapes.generation:
            kept.generation = shapes.generation
            kept.cost[:] = np.nan
            unknown = shapes.alive()
        else:
            for shape in shapes.renamed[kept.renamed :]:
                kept.cost[shape] = np.nan
            seen = {shape for shape in shapes.revived[kept.revived :] if kept.cost[shape] != kept.cost[shape]}
            unknown = np.fromiter(sorted(seen), np.int64, len(seen))
        kept.renamed, kept.revived = len(shapes.renamed), len(shapes.revived)
        if len(unknown):
            self._judge(kept, unknown)

    def _judge(self, kept: RequestClass, shape: IntArray) -> None:
        kept.cost[shape] = np.inf
        shape = shape[kept.by_kind[self._shapes.kind[shape]] < np.inf]
        if len(shape):
            found = self._cost(kept.request, kept.shares, kept.by_kind, self._banks(shape, self._every))
            kept.cost[shape], kept.share[shape] = found.cost, found.share

    def _banks(self, shape: IntArray, allowed: BoolArray) -> Banks:
        shapes = self._shapes
        kind, cpu, milli = shapes.kind[shape], shapes.cpu[shape], shapes.milli[shape]
        return Banks(kind, cpu, shapes.memory[shape], milli, allowed, self._fragments_of(shape))

    def _fragments_of(self, shape: IntArray) -> FloatArray:
        shapes, known = self._shapes, self._fragments
        generation, read = self._fragments_read
        if generation != shapes.generation or len(known) < shapes.number:
            known = self._fragments = np.full(len(shapes.load), np.nan)
        elif read < len(shapes.renamed):
            known[shapes.renamed[read:]] = np.nan
        self._fragments_read = (shapes.generation, len(shapes.renamed))
        unknown = shape[np.isnan(known[shape])]
        if len(unknown):
            kind, cpu, milli = shapes.kind[unknown], shapes.cpu[unknown], shapes.milli[unknown]
            known[unknown] = self.mix.fragments(kind, cpu, milli)
        return known[shape]

    # -- choices
    def _on_one_bank(self, kept: RequestClass, degree: float) -> Found | None:
        chosen = self._of_shapes(kept, degree) if kept.banks is None else self._of_banks(kept, degree)
        if chosen is None:
            return None
        bank, share = chosen
        request, capacity = kept.request, self._capacity
        if is_share(request):
            return Found((slot_of_share(capacity, bank, kept.suits.devices, share),), degree)
        return Found(tuple(slots_of(capacity, bank, request, kept.suits.devices, request.gpus)), degree)

    def _of_shapes(self, kept: RequestClass, degree: float) -> tuple[int, int] | None:
        shapes = self._shapes
        kind = shapes.kind[: shapes.number]
        cost = kept.cost[: shapes.number] + shapes.absent[: shapes.number]
        if len(kept.kinds) > 1:
            cost += np.round(self._scarcity, 6)[kind]
        if len(kept.degrees) > 1:
            cost[kept.degree_of_kind[kind] != degree] = np.inf
        # Of shapes that never had a bank since the class looked, the cost is unknown (NaN): they are absent.
        least = np.fmin.reduce(cost) if len(cost) else np.inf
        if not least < np.inf:
            return None
        near = np.flatnonzero(cost <= least + self._cost_band)
        if (harm := shapes.harm(near, kept.request)) is not None:
            near = near[harm == harm.min()]
        load = shapes.load[near]
        near = near[load == load.min()]
        if len(near) > 1:
            near = near[cost[near] == cost[near].min()]
        bank, shape = min((shapes.least_loaded(int(each)), int(each)) for each in near)
        return bank, int(kept.share[shape])

    def _of_banks(self, kept: RequestClass, degree: float) -> tuple[int, int] | None:
        """Choose among banks one by one: some devices of its kinds are not for this class."""
        shapes = self._shapes
        assert kept.banks is not None
        shape = shapes.of_bank[kept.banks]
        cost, share, bank = kept.cost[shape], kept.share[shape], kept.banks
        if len(kept.partial):
            costs = self._cost(kept.request, kept.shares, kept.by_kind, self._partial(kept))
            cost, share = np.append(cost, costs.cost), np.append(share, costs.share)
            bank = np.append(bank, kept.partial)
        cost = cost + np.round(self._scarcity, 6)[self._capacity.layout.kind_of[bank]]
        cost = np.where(kept.suits.degree[bank] == degree, cost, np.inf)
        least = cost.min(initial=np.inf)
        if not least < np.inf:
            return None
        near = np.flatnonzero(cost <= least + self._cost_band)
        if (harm := shapes.harm(shapes.of_bank[bank[near]], kept.request)) is not None:
            near = near[harm == harm.min()]
        best = near[np.lexsort((bank[near], cost[near], shapes.load_of_bank[bank[near]]))[0]]
        return int(bank[best]), int(share[best])

    def _partial(self, kept: RequestClass) -> Banks:
        capacity, bank = self._capacity, kept.partial
        node = capacity.layout.node_of[bank]
        fragments = self._fragments_of(self._shapes.of_bank[bank])
        kind, allowed = capacity.layout.kind_of[bank], kept.suits.devices[bank]
        return Banks(
            kind, capacity.cpu[node], capacity.memory[node], capacity.milli[bank], allowed, fragments
        )

    def _over_nodes(self, kept: RequestClass, degree: float) -> Found | None:
        if kept.request.gpus < 2 or not self._may_fit(kept, degree):
            return None
        by_kind = kept.by_kind + self._scarcity
        spread, good = Spread(self._capacity, kept.request, by_kind), kept.suits.of_degree(degree)
        for group in sorted(kept.groups, key=lambda group: by_kind[list(group.kinds)].min(initial=np.inf)):
            places = spread.places(group.devices & good)
            if places:
                return Found(tuple(places), min(float(kept.suits.degree[bank]) for bank, _ in places))
        return None

    def _may_fit(self, kept: RequestClass, degree: float) -> bool:
        """Bound the members from above by the shapes: a look at every node is worth it only below that."""
        shapes = self._shapes
        alive = shapes.alive()
        alive = alive[np.isin(shapes.kind[alive], kept.kinds)]
        alive = alive[kept.degree_of_kind[shapes.kind[alive]] >= degree]
        free = (shapes.milli[alive] >= kept.shares[shapes.kind[alive]][:, None]).sum(axis=1)
        return int(free @ shapes.count()[alive]) >= kept.request.gpus
