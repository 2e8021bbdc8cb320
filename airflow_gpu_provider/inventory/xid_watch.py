"""Collect XID events, the driver's messages about a GPU that went wrong.

Asked once a read with a timeout of zero, so no thread waits in the driver and a fork finds nothing running.
An XID is remembered until NVML is started again: a GPU that had one is suspect until somebody looked. Events
that happened before the agent started are not seen; counters (`health.HealthSigns`) cover memory errors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

#: At most this many events a read: a storm of events on one GPU must not delay the report.
_MAX_EVENTS = 64

log = logging.getLogger(__name__)


class XidWatch:
    """The XIDs of all boards since NVML was started."""

    def __init__(self) -> None:
        self._start: int | None = None
        self._events: Any = None
        self._registered: set[str] = set()
        self._xids: dict[str, tuple[int, ...]] = {}

    def read(self, nvml: Any, start: int, handles: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Return the XIDs by board. ``start`` counts NVML's starts: a new one needs a new event set."""
        if start != self._start:
            self._start, self._events, self._registered, self._xids = start, None, set(), {}
            try:
                self._events = nvml.nvmlEventSetCreate()
            except nvml.NVMLError as error:
                log.debug("No XID events: %s", error)
        if self._events is not None:
            self._register(nvml, handles)
            self._drain(nvml)
        return self._xids

    def _register(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        for uuid, handle in handles.items():
            if uuid in self._registered:
                continue
            self._registered.add(uuid)
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError as error:
                log.debug("No XID events for %s: %s", uuid, error)

    def _drain(self, nvml: Any) -> None:
        for _ in range(_MAX_EVENTS if self._registered else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = nvml.nvmlDeviceGetUUID(event.device)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    log.debug("XID events: %s", error)
                return
            xid = int(event.eventData)
            log.warning("XID %d on %s", xid, uuid)
            if xid not in self._xids.get(uuid, ()):
                self._xids[uuid] = (*self._xids.get(uuid, ()), xid)
