"""Send what is new, and what the broker would soon take for silent, instead of a whole cluster each second.

A thousand nodes are megabytes a second otherwise. The broker answers only for the devices of a report, so
what it said of the others is remembered here: the agent gets one whole answer. Nothing counts as sent before
it was answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from airflow_gpu_provider.inventory.agent import Report
from airflow_gpu_provider.reports import LeasedDevice, NodeReport, ReportAnswer, ReportBody

#: Less than a third of what makes a node stale (`[gpu] stale_after_s`, 10 s): two reports may be lost.
EVERY_S = 3.0


@dataclass(slots=True)
class _Sent:
    node: NodeReport
    at: float


class SparingReports:
    """Passes reports on to ``send``, without nodes that were sent lately and have not changed."""

    def __init__(
        self, send: Report, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._every_s = every_s
        self._clock = clock
        self._sent: dict[str, _Sent] = {}
        self._leased: dict[str, list[LeasedDevice]] = {}  #: by node

    def __call__(self, body: ReportBody) -> ReportAnswer:
        """Send what is due; return an answer for all devices of the report."""
        now = self._clock()
        due = tuple(node for node in body.nodes if self._is_due(node, now))
        answer = self._send(body.model_copy(update={"nodes": due}))
        leased = {device.id: [] for node in due for device in node.devices}  # type: dict[str, list[LeasedDevice]]
        for device in answer.leased:
            leased[device.id].append(device)
        for node in due:
            self._sent[node.name] = _Sent(node, now)
            self._leased[node.name] = [each for device in node.devices for each in leased[device.id]]
        for gone in self._sent.keys() - {node.name for node in body.nodes}:
            del self._sent[gone], self._leased[gone]
        whole = [device for node in body.nodes for device in self._leased[node.name]]
        return answer.model_copy(update={"leased": whole})

    def _is_due(self, node: NodeReport, now: float) -> bool:
        sent = self._sent.get(node.name)
        return sent is None or now - sent.at >= self._every_s or not _is_alike(sent.node, node)


def _is_alike(sent: NodeReport, node: NodeReport) -> bool:
    """Return whether two reports say the same. Devices are not made anew where nothing changed."""
    same_devices = sent.devices is node.devices or sent.devices == node.devices
    return same_devices and (sent.labels, sent.cpu_cores, sent.memory_mib) == (
        node.labels,
        node.cpu_cores,
        node.memory_mib,
    )
