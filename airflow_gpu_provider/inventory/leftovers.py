"""Tell the holders of a device from outsiders, and end what outlived its lease.

A device goes back to the pool only when it is clean. A process of ours whose lease is over gets time to stop
by itself, then SIGTERM, then SIGKILL; until it is gone its device is reported with its pid. A foreign one is
only reported, never touched: we end nothing that does not carry our own lease id in its own environment.
Grace counts only up to the last answer of the broker: while it is silent nobody is condemned.
"""

from __future__ import annotations

import logging
import signal
from collections import defaultdict, deque
from dataclasses import dataclass

from airflow_gpu_provider.inventory.health import Process, Verdict, verdict
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases
from airflow_gpu_provider.inventory.processes import ProcessTable, ProcTable
from airflow_gpu_provider.reports import DeviceReport, NodeReport

#: A new lease reaches the agent with the next answer (1 s); 5 s leaves room for a change of leader, and for a
#: task that is just now stopping by itself.
GRACE_S = 5.0
#: From SIGTERM to SIGKILL: time to write a last checkpoint.
KILL_AFTER_S = 10.0

#: Ended leases that are remembered of each device: those of several that shared it.
_FORMER = 32
_NONE: frozenset[str] = frozenset()

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Overstay:
    """A process without a live lease, and how far we went with it."""

    since: float
    terminated_at: float | None = None
    killed: bool = False


class Leftovers:
    """Remembers which lease each device had, and which processes overstay."""

    def __init__(self, table: ProcessTable | None = None, *, grace_s: float = GRACE_S) -> None:
        self._table = table or ProcTable()
        self._grace_s = grace_s
        self._leases: Leases = NO_LEASES
        self._former: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_FORMER))
        self._answered_at: float | None = None
        self._overstays: dict[tuple[int, int], _Overstay] = {}

    def learn(self, leases: Leases, now: float) -> None:
        """Take over what the broker answered."""
        for device_id, before in self._leases.items():
            self._former[device_id].extend(before - leases.get(device_id, _NONE))
        self._leases = leases
        self._answered_at = now

    def strike_out_holders(self, nodes: tuple[NodeReport, ...], now: float) -> tuple[NodeReport, ...]:
        """Return the reports with only outsiders left in ``foreign_pids``; end leftovers on the way."""
        seen: set[tuple[int, int]] = set()
        judged = tuple(self._node(node, now, seen) for node in nodes)
        self._overstays = {key: self._overstays[key] for key in self._overstays if key in seen}
        return judged

    def _node(self, node: NodeReport, now: float, seen: set[tuple[int, int]]) -> NodeReport:
        # pids of a simulated device are injected for a test: they name no process of this machine
        if not any(device.foreign_pids and not device.simulated for device in node.devices):
            return node
        devices = tuple(
            device if device.simulated or not device.foreign_pids else self._device(device, now, seen)
            for device in node.devices
        )
        return node.model_copy(update={"devices": devices})

    def _device(self, device: DeviceReport, now: float, seen: set[tuple[int, int]]) -> DeviceReport:
        outsiders = tuple(pid for pid in device.foreign_pids if self._is_outsider(pid, device.id, now, seen))
        return device.model_copy(update={"foreign_pids": outsiders})

    def _is_outsider(self, pid: int, device_id: str, now: float, seen: set[tuple[int, int]]) -> bool:
        process = self._table.look(pid)
        if process is None:
            return False
        whose = verdict(
            process,
            leases=self._leases.get(device_id, _NONE),
            former=self._former.get(device_id, ()),
            live=_NONE.union(*self._leases.values()),
        )
        if whose in (Verdict.HOLDER, Verdict.FOREIGN):
            return whose is Verdict.FOREIGN
        key = (process.pid, process.started)
        seen.add(key)
        overstay = self._overstays.setdefault(key, _Overstay(since=now))
        is_proven = self._answered_at is not None and self._answered_at - overstay.since >= self._grace_s
        if is_proven and not process.inherited:
            self._end(process, overstay, device_id, now)
        return is_proven or whose is Verdict.ENDED

    def _end(self, process: Process, overstay: _Overstay, device_id: str, now: float) -> None:
        if overstay.terminated_at is None:
            overstay.terminated_at = now
            number = signal.SIGTERM
        elif not overstay.killed and now - overstay.terminated_at >= KILL_AFTER_S:
            overstay.killed = True
            number = signal.SIGKILL
        else:
            return
        if self._table.signal(process, number):
            log.warning(
                "Sent %s to process %d: it still uses device %s although its lease %s ended",
                number.name,
                process.pid,
                device_id,
                process.lease_id,
            )
