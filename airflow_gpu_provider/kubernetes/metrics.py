"""Ask DCGM exporters, or one Prometheus that has asked them, for what the GPUs do.

In a thread of its own, since an exporter that hangs must not keep a report back. Measurements that are older
than three rounds are unknown again. `dcgm` reads the answers; `probe` shows them with the slots.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from urllib.parse import urlencode

import httpx

from airflow_gpu_provider.kubernetes.dcgm import METRICS, Reading, readings
from airflow_gpu_provider.kubernetes.mirror import ClusterMirror
from airflow_gpu_provider.kubernetes.pods import PodName

_EXPORTER_PORT = 9400
_AT_ONCE = 32
_TIMEOUT_S = 5.0
_ROUNDS = 3

log = logging.getLogger(__name__)


class Metrics:
    """The newest readings of each node of a cluster.

    ``prometheus`` is the address of a Prometheus; without it each node's exporter is asked at its pod's
    address, which this process must be able to reach.
    """

    def __init__(
        self,
        mirror: ClusterMirror,
        *,
        prometheus: str | None = None,
        every_s: float = 15.0,
        port: int = _EXPORTER_PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror = mirror
        self._prometheus = prometheus
        self._every_s = every_s
        self._port = port
        self._clock = clock
        self._found: dict[str, tuple[float, tuple[Reading, ...]]] = {}
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dcgm metrics", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """End; return when the thread has ended."""
        self._stopping.set()
        self._thread.join()

    def of(self, node: str) -> tuple[Reading, ...]:
        """Return what was measured on a node lately."""
        at, found = self._found.get(node, (0.0, ()))
        return found if found and self._clock() - at <= _ROUNDS * self._every_s else ()

    def read_once(self) -> None:
        """Ask all, once."""
        exporters = self._mirror.exporters()
        if self._prometheus is not None:
            query = urlencode({"match[]": f'{{__name__=~"{"|".join(METRICS)}"}}'})
            addresses = {"": f"{self._prometheus.rstrip('/')}/federate?{query}"}
        else:
            addresses = {
                pod.node: f"http://{_host(pod.exporter_ip)}:{self._port}/metrics" for pod in exporters
            }
        own = {pod.name for pod in exporters}
        for node, text in asyncio.run(_texts(addresses, self._failed)).items():
            for name, found in _by_node(node, readings(text), own).items():
                self._found[name] = (self._clock(), found)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s if self._found else min(1.0, self._every_s)):
            try:
                self.read_once()
            except Exception:  # a text that cannot be read must not end all measuring
                if not self._is_failing:
                    log.exception("DCGM metrics cannot be read; trying again every %g s", self._every_s)
                self._is_failing = True
            else:
                self._is_failing = False

    def _failed(self, address: str, error: Exception) -> None:
        log.debug("No metrics from %s: %s", address, error)


async def _texts(addresses: Mapping[str, str], failed: Callable[[str, Exception], None]) -> dict[str, str]:
    """Return what each address answers; those that do not are left out."""
    limits = httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=0)
    texts: dict[str, str] = {}

    async def ask(node: str, address: str) -> None:
        try:
            answer = await client.get(address)
            texts[node] = answer.raise_for_status().text
        except httpx.HTTPError as error:
            failed(address, error)

    timeout = httpx.Timeout(_TIMEOUT_S, pool=None)  # those that wait for their turn are not late
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
        await asyncio.gather(*(ask(node, address) for node, address in addresses.items()))
    return texts


def _by_node(node: str, found: Iterable[Reading], exporters: set[PodName]) -> dict[str, tuple[Reading, ...]]:
    """Return readings by node; ``node`` is whose exporter told them, empty where the text has to tell.

    Prometheus puts the exporter's own pod where a GPU has none.
    """
    by_node: defaultdict[str, list[Reading]] = defaultdict(list)
    for reading in found:
        own = reading if reading.pod not in exporters else replace(reading, pod=None)
        by_node[node or reading.node].append(own)
    return {name: tuple(each) for name, each in by_node.items()}


def _host(address: str | None) -> str:
    return f"[{address}]" if address and ":" in address else str(address)
