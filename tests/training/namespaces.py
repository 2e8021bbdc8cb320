"""Hosts on one machine: network namespaces with a cable between them that delays what it carries.

The kernel's own delay (`tc ... netem`) needs a module that many machines lack. Here each namespace has a TUN
device, and a thread of the test carries the packets from one to the other, each way as late as the test says:
sockets, TCP and gloo are real. Needs root; `why_not` says why it cannot be.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import ipaddress
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

INTERFACE = "tun0"
VARIABLE = "TEST_NETWORK_NAMESPACE"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_MTU = 60_000
_FOLDER = Path("/var/run/netns")

#: Milliseconds one way between two hosts, by their numbers, the smaller first.
Delays = Mapping[tuple[int, int], float]


def why_not() -> str | None:
    """Return why there can be no namespaces here, None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        name = f"agp-try-{os.getpid()}"
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"`ip netns add` fails: {error}"
    return None


def enter(name: str) -> None:
    """Let the calling thread, and those that it starts, be on that host."""
    with (_FOLDER / name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def inside(name: str, act: Callable[[], T]) -> T:
    """Return what ``act`` returns in that namespace."""
    found: list[T] = []

    def run() -> None:
        enter(name)
        found.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


class Cable:
    """Carries packets between the hosts; ``delays`` may be changed at any time."""

    def __init__(self, devices: dict[str, int], delays: Delays) -> None:
        self.delays = dict(delays)
        self._number = {ipaddress.ip_address(at).packed: place for place, at in enumerate(devices)}
        self._devices = list(devices.values())
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = count()
        self._stopping = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cut it."""
        self._stopping = True
        self._thread.join(5)

    def _carry(self) -> None:
        while not self._stopping:
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else 0.1
            for device in select.select(self._devices, [], [], min(0.1, max(0.0, wait)))[0]:
                self._take(os.read(device, _MTU + 100))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                os.write(self._devices[to], packet)

    def _take(self, packet: bytes) -> None:
        source, to = self._number.get(packet[12:16]), self._number.get(packet[16:20])
        if packet[0] >> 4 == 4 and source is not None and to is not None:
            late_s = self.delays.get((min(source, to), max(source, to)), 0.0) / 1000
            heapq.heappush(self._under_way, (time.monotonic() + late_s, next(self._order), to, packet))


@contextmanager
def hosts(number: int, delays: Delays) -> Iterator[tuple[list[str], Cable]]:
    """Yield the names of so many namespaces, with addresses 10.77.0.1 and on, and their cable."""
    names = [f"agp-{os.getpid()}-{at}" for at in range(number)]
    devices: dict[str, int] = {}
    cable = None
    try:
        for at, name in enumerate(names, 1):
            _ip("netns", "add", name)
            devices[f"10.77.0.{at}"] = inside(name, _tun)
            _ip("-n", name, "addr", "add", f"10.77.0.{at}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        cable = Cable(devices, delays)
        yield names, cable
    finally:
        if cable is not None:
            cable.stop()
        for device in devices.values():
            os.close(device)
        for name in names:
            if (_FOLDER / name).exists():
                _ip("netns", "del", name)


def _tun() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _TUN_WITHOUT_HEADER))
    return device


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
