"""When a blocked claim will start, as far as holders promised when they end.

Claims are asked in queue order and each books what it will take, so that the next one cannot count on the
same devices. A lease without ``max_runtime_s``, or past it, is never counted on. Unknown is None: an
estimate that nothing promises would let later claims pass on a guess. The next step is the hold in
`queue.Walk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from airflow_gpu_provider.broker.capacity import Capacity, Part, Place, part_of
from airflow_gpu_provider.broker.layout import BoolArray
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.releases import Releases


@dataclass(frozen=True, slots=True)
class Expected:
    """In how many seconds a claim starts (None = nothing promises it), and what must be kept for it now."""

    starts_in_s: float | None
    keep: Part


NOTHING = Expected(None, Part((), ()))


class Forecast:
    """The free capacity of the fleet as a function of time to come."""

    def __init__(self, free: Capacity, idle: Capacity, endings: Iterable[tuple[float, Part]]) -> None:
        #: free now and not booked; negative where only a later end makes good what is booked
        self._free = free.copy()
        self._idle = idle
        #: [B, W] devices that a claim of unknown start takes as they come: nobody else can count on them
        self._spoken_for: BoolArray = np.zeros_like(free.open)
        self._booked: dict[int, tuple[int, int]] = {}  # node: milli-cores, MiB of blocked claims
        self._releases = Releases(endings)
        #: free once all has ended of which it is known
        self._at_last = self._releases.until(self._releases.times[-1], self._free)
        self._guess = 0  #: the moment at which the last claim starts: the next one's is near

    def book(self, part: Part, ends_in_s: float | None) -> None:
        """Count a part as taken from now on, until it ends if that is known."""
        self._take(part)
        if ends_in_s is not None:
            self._releases.add(ends_in_s, part)
            self._at_last.give(part)

    def expect(self, request: GpuRequest, groups: Sequence[BoolArray]) -> Expected:
        """Return when the request starts on one of the groups and what to keep for it, and book that."""
        countable = [devices & ~self._spoken_for for devices in groups]
        seconds = self._earliest(request, countable)
        if seconds is None:
            return self.expect_unknown(request, groups)
        then = self._releases.until(seconds, self._free)
        devices = next(each for each in countable if then.fits(request, each))
        places = _nearest(self._free, then, request, devices)
        part = part_of(self._free.layout, request, places)
        keep = Part(part.devices, tuple(self._not_yet_freed(row, then) for row in part.nodes))
        for node, cpu, memory in part.nodes:
            booked_cpu, booked_memory = self._booked.get(node, (0, 0))
            self._booked[node] = (booked_cpu + cpu, booked_memory + memory)
        self.book(part, None if request.max_runtime_s is None else seconds + request.max_runtime_s)
        return Expected(seconds, keep)

    def expect_unknown(self, request: GpuRequest, groups: Sequence[BoolArray]) -> Expected:
        """Return what to keep for a claim whose start nothing promises: it takes devices as they come.

        It waits for the group of which it lacks least, of equal ones for the largest.
        """
        usable = [each for each in groups if self._idle.fits(request, each)] or groups
        near = [(_nearest(self._free, self._idle, request, each), each) for each in usable]
        places, devices = min(near, key=lambda each: (self._lacking(request, each[0]), -int(each[1].sum())))
        partly_free = [place for place in places if self._free.milli[place] > 0]
        keep = part_of(self._free.layout, request, partly_free)
        self._take(keep)
        self._spoken_for |= devices
        return Expected(None, keep)

    def _lacking(self, request: GpuRequest, places: Sequence[Place]) -> int:
        part = part_of(self._free.layout, request, places)
        missing = (request.gpus - len(places)) * request.milli
        free = self._free.milli
        return missing + sum(
            milli - min(milli, max(0, int(free[bank, slot]))) for bank, slot, milli in part.devices
        )

    def _not_yet_freed(self, need: tuple[int, int, int], then: Capacity) -> tuple[int, int, int]:
        """Return what of a node's need no lease brings that ends by ``then``: only that is kept now."""
        node, cpu, memory = need
        booked_cpu, booked_memory = self._booked.get(node, (0, 0))
        freed_cpu = max(0, int(then.cpu[node] - self._free.cpu[node]) - booked_cpu)
        freed_memory = max(0, int(then.memory[node] - self._free.memory[node]) - booked_memory)
        return node, max(0, cpu - freed_cpu), max(0, memory - freed_memory)

    def _take(self, part: Part) -> None:
        self._free.take(part)
        self._at_last.take(part)

    def _earliest(self, request: GpuRequest, groups: Sequence[BoolArray]) -> float | None:
        if not self._at_last.fits_one_of(request, groups):
            return None
        times = self._releases.times

        def fits(moment: int) -> bool:
            return self._releases.until(times[moment], self._free).fits_one_of(request, groups)

        # What is free only grows with time: bookings count from now.
        self._guess = _first(fits, len(times), self._guess)
        return times[self._guess]


def _first(fits: Callable[[int], bool], count: int, guess: int) -> int:
    """Return the first of ``count`` moments that fits, of which the last one does.

    It looks ever farther away from the guess, then halves what is left.
    """
    guess, step = min(guess, count - 1), 1
    low, high = -1, count - 1  # none up to low fits, high does
    if fits(guess):
        high = guess
        while high > 0 and low < 0:
            probe = max(0, guess - step)
            if fits(probe):
                high, step = probe, 2 * step
            else:
                low = probe
    else:
        low = guess
        while (probe := guess + step) < high:
            if fits(probe):
                high = probe
                break
            low, step = probe, 2 * step
    while low + 1 < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _nearest(now: Capacity, then: Capacity, request: GpuRequest, devices: BoolArray) -> tuple[Place, ...]:
    """Return devices usable ``then`` for as much of the gang as fits, those nearest to usable ``now`` first.

    Devices whose node lacks CPU or memory now, and those that others share, are near too: were they not
    held, small claims would take what is freed there again and again.
    """
    layout = now.layout
    bank, slot = np.nonzero(then.free(request, devices))
    node = layout.node_of[bank]
    lacking = np.maximum(layout.shares(request)[layout.kind_of[bank]] - now.milli[bank, slot], 0)
    room = np.minimum(now.room(request, devices), then.host_limit(request))
    order = np.lexsort((bank, -room[node], lacking, room[node] == 0))
    limit = then.host_limit(request)
    places: list[Place] = []
    for index in order:
        if len(places) == request.gpus:
            break
        if limit[node[index]] > 0:
            limit[node[index]] -= 1
            places.append((int(bank[index]), int(slot[index])))
    return tuple(places)
