"""The stream of requests, and when the mix that placement reckons with is made anew from it.

A window of the latest requests, with the kind of work of each: prices follow from what is known of it now,
not from what was known when it came. A young mix is renewed at each doubling, so that the first arrivals do
not shape a whole window; later after every some hundred requests, so that its cost is spread over them. The
next step is `fragmentation.Mix`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import TypeAlias

from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.throughput import Speeds

#: Requests that make up the mix at most, and arrivals after which it is made anew.
WINDOW = 6000
RENEW_AFTER = 250


#: A request without its kind of work, and that.
_Asked: TypeAlias = tuple[GpuRequest, str | None]


class Stream:
    """The latest requests, counted by class, and the speeds that were ``learned`` by kind of work."""

    def __init__(
        self, requests: Iterable[GpuRequest] = (), learned: Mapping[str, Speeds] | None = None
    ) -> None:
        self._learned = dict(learned or {})
        self._recent: deque[_Asked] = deque()
        self._times: Counter[_Asked] = Counter()
        self._seen = 0
        for request in requests:
            self.add(request)
        self._due = self._seen
        self._in_use: Counter[_Asked] = Counter()  # what the present mix is made of

    def learn(self, learned: Mapping[str, Speeds]) -> tuple[Set[str], Set[str]]:
        """Take other speeds; return the kinds of work that became known or unknown, and all that moved."""
        before, self._learned = self._learned, dict(learned)
        anew = before.keys() ^ learned.keys()
        return anew, anew | {each for each in before.keys() & learned.keys() if before[each] != learned[each]}

    def add(self, request: GpuRequest) -> None:
        """Note a request that came."""
        asked = (replace(request, task_class=None) if request.task_class else request, request.task_class)
        self._seen += 1
        self._recent.append(asked)
        self._times[asked] += 1
        if len(self._recent) > WINDOW:
            oldest = self._recent.popleft()
            self._times[oldest] -= 1
            if not self._times[oldest]:
                del self._times[oldest]

    def renewed(self, layout: Layout) -> Mix | None:
        """Return a new mix if the present one is too old."""
        if self._seen <= self._due and self._in_use:
            return None
        return self.mix(layout)

    def mix(self, layout: Layout) -> Mix:
        """Return the mix of the latest requests."""
        self._due = self._seen + min(RENEW_AFTER, self._seen)
        self._in_use = self._times.copy()
        return Mix.of(layout, self._known())

    def speed_costs(self, layout: Layout) -> SpeedCosts:
        """Return what models cost those requests, by what was learned."""
        costs = SpeedCosts(layout.kinds, self._learned)
        costs.renew(self._known())
        return costs

    def asked(self) -> tuple[GpuRequest, ...]:
        """Return the requests that the present mix is made of."""
        return tuple(self._known().elements())

    def _known(self) -> Counter[GpuRequest]:
        """Return the requests of the present mix, without kinds of work of which nothing is known."""
        found: Counter[GpuRequest] = Counter()
        for (request, task_class), times in self._in_use.items():
            found[replace(request, task_class=task_class) if task_class in self._learned else request] += (
                times
            )
        return found
