"""The latency from this process to its peers: each is asked every half second, and answers like we do.

One thread with one UDP socket, for IPv6 and IPv4, asks and answers. What is told of a peer is an estimate
over the last answers (`Window`), with the share that got none; a peer that was asked too seldom yet is "not
measured", which is not 0. Used by the agent (`inventory.neighbours`) and by shards (`training.shard_echo`).
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_gpu_provider.echo import (
    NONCE_BYTES,
    SIZE,
    Allowance,
    answer_to,
    answered,
    parse_address,
    question,
)

ASK_EVERY_S = 0.5
#: Questions that an estimate looks back on, and how many it needs.
SAMPLES = 10
LEAST_SAMPLES = 4
#: What has not come back by then is lost.
LOST_AFTER_S = 1.0
_BATCH = 256  # datagrams read before it is time to ask again

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the way to a peer is like. Without a latency none of the questions was answered."""

    latency_ms: float | None
    loss: float


class Window:
    """The last questions to one peer: the milliseconds of each answer, None for a lost one."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._samples: deque[float | None] = deque(maxlen=size)

    def add(self, sample: float | None) -> None:
        """Note what became of one more question."""
        self._samples.append(sample)

    def estimate(self) -> Estimate | None:
        """Return the lower quartile of the answers and the share of losses; None while there are too few.

        The quartile, since a busy host delays answers by many times what the network takes: it holds as long
        as a quarter of the answers met neither host busy.
        """
        if len(self._samples) < LEAST_SAMPLES:
            return None
        answers = sorted(each for each in self._samples if each is not None)
        loss = 1 - len(answers) / len(self._samples)
        return Estimate(answers[(len(answers) - 1) // 4] if answers else None, loss)


class Latency(threading.Thread):
    """Asks peers and answers theirs until `stop`; a daemon, since nothing is lost with it."""

    def __init__(
        self,
        key: bytes = b"",
        *,
        host: str = "",
        port: int = 0,
        every_s: float = ASK_EVERY_S,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the socket, without ``host`` to any address. Raise OSError. Who has no key answers nobody.

        ``on_round`` is called before each round of questions, by this thread.
        """
        super().__init__(name="latency", daemon=True)
        self._socket = _bound(host, port)
        self._family = self._socket.family
        self._key = key
        self._every_s = every_s
        self._on_round = on_round
        self._allowance = Allowance()
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[Any, ...]] = {}  #: by name, as the socket takes it
        self._texts: Mapping[str, str] = {}
        self._windows: dict[str, Window] = {}
        self._asked: dict[bytes, tuple[str, float]] = {}
        self._stopping = False

    @property
    def port(self) -> int:
        """The port that answers."""
        return int(self._socket.getsockname()[1])

    def ask(self, peers: Mapping[str, str], key: bytes) -> None:
        """Ask these from now on, by name and address; forget the others."""
        if peers == self._texts and key == self._key:
            return
        found = {
            name: place for name, text in peers.items() if (place := self._place(name, text)) is not None
        }
        with self._lock:
            self._windows = {
                name: self._windows[name]
                if name in self._windows and self._peers.get(name) == place
                else Window()
                for name, place in found.items()
            }
            self._peers, self._key, self._texts = found, key, dict(peers)

    def estimates(self) -> dict[str, Estimate]:
        """Return what is known of each peer that was asked often enough."""
        with self._lock:
            known = {name: window.estimate() for name, window in self._windows.items()}
        return {name: estimate for name, estimate in known.items() if estimate is not None}

    def stop(self) -> None:
        """End soon."""
        self._stopping = True

    def run(self) -> None:
        """Ask and answer, again and again."""
        due, sockets = time.monotonic(), select.poll()  # `select` knows no descriptor above 1023
        with self._socket:
            sockets.register(self._socket, select.POLLIN)
            while not self._stopping:
                if time.monotonic() >= due:
                    self._on_round()
                    self._ask_all()
                    due = max(due + self._every_s, time.monotonic())
                if sockets.poll(1000 * max(0.0, due - time.monotonic())):
                    self._read()

    def _ask_all(self) -> None:
        now = time.monotonic()
        with self._lock:
            for nonce, (name, sent_at) in list(self._asked.items()):
                if now - sent_at >= LOST_AFTER_S:
                    del self._asked[nonce]
                    self._note(name, None)
            peers = list(self._peers.items())
        for name, place in peers:
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._asked[nonce] = (name, time.monotonic())
            try:
                self._socket.sendto(question(self._key, nonce), place)
            except OSError as error:  # no route, or a full buffer: as good as lost
                log.debug("%s cannot be asked: %s", name, error)

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                datagram, source = self._socket.recvfrom(SIZE + 1)
            except (BlockingIOError, ConnectionError):  # nothing left, or word that a peer's port is closed
                return
            now = time.monotonic()
            nonce = answered(self._key, datagram) if self._key else None
            if nonce is not None:
                self._take(nonce, now)
            elif self._key and (reply := answer_to(self._key, datagram)) is not None:
                self._reply(reply, source, now)

    def _reply(self, reply: bytes, source: tuple[Any, ...], now: float) -> None:
        # Only who knows the key gets here: strangers must not use up what a peer may ask.
        if not self._allowance.spend(source[0], now):
            return
        try:
            self._socket.sendto(reply, source)
        except OSError as error:
            log.debug("%s cannot be answered: %s", source[0], error)

    def _take(self, nonce: bytes, now: float) -> None:
        asked = self._asked.pop(nonce, None)
        if asked is not None:
            with self._lock:
                self._note(asked[0], (now - asked[1]) * 1000)

    def _note(self, name: str, sample: float | None) -> None:
        window = self._windows.get(name)
        if window is not None:
            window.add(sample)

    def _place(self, name: str, text: str) -> tuple[Any, ...] | None:
        """Return an address as the socket takes it; None for one that it cannot reach."""
        try:
            host, port = parse_address(text)
            flags = socket.AI_NUMERICHOST  # a name server must not hold the thread up
            if self._family == socket.AF_INET6:
                flags |= socket.AI_V4MAPPED
            return socket.getaddrinfo(host, port, self._family, socket.SOCK_DGRAM, flags=flags)[0][4]
        except (ValueError, OSError) as error:
            log.warning("The latency to %s at %s cannot be measured: %s", name, text, error)
            return None


def _bound(host: str, port: int) -> socket.socket:
    """Return a datagram socket; one for both families where no host is given and the system has both."""
    if host:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        choices = [(family, address)]
    else:
        choices = [(socket.AF_INET6, ("::", port, 0, 0)), (socket.AF_INET, ("0.0.0.0", port))]
    failure: OSError | None = None
    for family, address in choices:
        try:
            made = socket.socket(family, socket.SOCK_DGRAM)
        except OSError as error:
            failure = error
            continue
        try:
            if family == socket.AF_INET6 and not host:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind(address)
            made.setblocking(False)
            return made
        except OSError as error:
            made.close()
            failure = error
    assert failure is not None
    raise failure
