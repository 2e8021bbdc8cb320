"""Find out which boards of a machine lie near one another: by NVLink, and to which part of its memory.

Boards that are joined by NVLink, directly or over switches, are one domain. Not-supported is unknown, not an
error. Links do not move, but come up late (a switch works only once its fabric manager runs), so they are
looked at again now and then instead of at each read: a board has up to 36 of them. The next step is
`broker.domains`, which places gangs by them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

#: Reads between two looks; about a minute.
_READS = 60
#: Words of 64 bits asked for: enough for 1024 NUMA nodes.
_WORDS = 16

#: PCI domain, bus and device.
_Address: TypeAlias = tuple[int, int, int]

log = logging.getLogger(__name__)


class LinkMap:
    """NVLink domains and NUMA nodes by board, as last looked at."""

    def __init__(self) -> None:
        self.domain_of: Mapping[str, str] = {}  #: without boards that are linked with no other
        self.numa_of: Mapping[str, int] = {}
        self._looked_at: frozenset[str] = frozenset()
        self._reads = 0

    def read(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        """Look again when other boards answer than before, and now and then."""
        if self._looked_at != handles.keys() or self._reads >= _READS:
            self.domain_of = _domains(nvml, handles)
            numa = {uuid: _numa(nvml, handle) for uuid, handle in handles.items()}
            self.numa_of = {uuid: number for uuid, number in numa.items() if number is not None}
            self._looked_at, self._reads = frozenset(handles), 0
        self._reads += 1


def _domains(nvml: Any, handles: Mapping[str, Any]) -> dict[str, str]:
    """Return the connected components of boards and switches, named after their first board's address."""
    root: dict[_Address, _Address] = {}

    def find(address: _Address) -> _Address:
        while (above := root.setdefault(address, address)) != address:
            address = above
        return address

    own = {uuid: _address(_ask(nvml, "nvmlDeviceGetPciInfo", handle)) for uuid, handle in handles.items()}
    boards = {uuid: address for uuid, address in own.items() if address is not None}
    for uuid, address in boards.items():
        for other in _remotes(nvml, handles[uuid]):
            root[find(other)] = find(address)
    members: dict[_Address, list[str]] = {}
    for uuid, address in boards.items():
        members.setdefault(find(address), []).append(uuid)
    found = {}
    for uuids in members.values():
        first = min(boards[uuid] for uuid in uuids)
        if len(uuids) > 1:
            found.update(dict.fromkeys(uuids, "{:04x}:{:02x}:{:02x}".format(*first)))
    return found


def _remotes(nvml: Any, handle: Any) -> Iterator[_Address]:
    """Yield what is at the other end of each link that is up."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:  # the board has no more links
            return
        if state == nvml.NVML_FEATURE_ENABLED:
            address = _address(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            if address is not None:
                yield address


def _address(pci: Any) -> _Address | None:
    return None if pci is None else (pci.domain, pci.bus, pci.device)


def _numa(nvml: Any, handle: Any) -> int | None:
    """Return the NUMA node that a board is attached to; None where that is several or unknown.

    `nvmlDeviceGetNumaNodeId` is another thing: the node that the board's own memory is, where it is one.
    """
    words = _ask(nvml, "nvmlDeviceGetMemoryAffinity", handle, _WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    bits = sum(word << 64 * position for position, word in enumerate(words or ()))
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _ask(nvml: Any, function: str, *args: Any) -> Any:
    """Call NVML; None when that is not supported, or the board is lost: that is for others to tell."""
    try:
        return getattr(nvml, function)(*args)
    except nvml.NVMLError as error:
        log.debug("%s: %s", function, error)
        return None
