"""The stream of requests, and when the mix that placement reckons with is made anew from it.

A window of the latest requests. A young mix is renewed at each doubling, so that the first arrivals do not
shape a whole window; later after every some hundred requests, so that its cost is spread over them. The
next step is `fragmentation.Mix`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from airflow_gpu_provider.broker.fragmentation import Mix
from airflow_gpu_provider.broker.layout import Layout
from airflow_gpu_provider.broker.model import GpuRequest
from airflow_gpu_provider.broker.speed_costs import SpeedCosts
from airflow_gpu_provider.broker.throughput import Speeds

#: Requests that make up the mix at most, and arrivals after which it is made anew.
WINDOW = 6000
RENEW_AFTER = 250


class Stream:
    """The latest requests, counted by class."""

    def __init__(self, requests: Iterable[GpuRequest] = ()) -> None:
        self._recent: deque[GpuRequest] = deque()
        self._times: Counter[GpuRequest] = Counter()
        self._seen = 0
        for request in requests:
            self.add(request)
        self._due = self._seen
        self.in_use: Counter[GpuRequest] = Counter()  #: what the present mix is made of

    def add(self, request: GpuRequest) -> None:
        """Note a request that came."""
        self._seen += 1
        self._recent.append(request)
        self._times[request] += 1
        if len(self._recent) > WINDOW:
            oldest = self._recent.popleft()
            self._times[oldest] -= 1
            if not self._times[oldest]:
                del self._times[oldest]

    def renewed(self, layout: Layout) -> Mix | None:
        """Return a new mix if the present one is too old."""
        if self._seen <= self._due and self.in_use:
            return None
        return self.mix(layout)

    def mix(self, layout: Layout) -> Mix:
        """Return the mix of the latest requests."""
        self._due = self._seen + min(RENEW_AFTER, self._seen)
        self.in_use = self._times.copy()
        return Mix.of(layout, self.in_use)

    def speed_costs(self, layout: Layout, learned: Mapping[str, Speeds]) -> SpeedCosts:
        """Return what models cost those requests, by what was learned."""
        costs = SpeedCosts(layout.kinds, learned)
        costs.renew(self.in_use)
        return costs

    def asked(self) -> tuple[GpuRequest, ...]:
        """Return the requests that the present mix is made of."""
        return tuple(self.in_use.elements())
