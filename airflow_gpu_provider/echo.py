"""The question and the answer by which one process measures the way to another: 32 bytes of UDP each.

Both carry a tag made with a key that only the processes of one fleet (or of one run) know, so a stranger gets
no answer. An answer is never larger than its question, and a source gets only so many a second: a forged
sender address brings nobody more than what was sent. Pure, apart from addresses; `latency` has the socket.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections import OrderedDict

SIZE = 32
NONCE_BYTES = 8
LEAST_PORT = 1024
#: Answers a second for one source; a peer asks twice a second, and hosts may share an address behind a NAT.
PER_SOURCE = 200
_SOURCES = 4096
_QUESTION, _ANSWER = b"AGP?", b"AGP!"
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
_TAG_BYTES = SIZE - NONCE_BYTES - len(_QUESTION)


def question(key: bytes, nonce: bytes) -> bytes:
    """Return the datagram that asks."""
    return _datagram(key, _QUESTION, nonce)


def answer_to(key: bytes, datagram: bytes) -> bytes | None:
    """Return the answer to a question, None for anything that is none."""
    nonce = _nonce(key, _QUESTION, datagram)
    return None if nonce is None else _datagram(key, _ANSWER, nonce)


def answered(key: bytes, datagram: bytes) -> bytes | None:
    """Return the nonce of the question that this answers, None for anything that is no answer."""
    return _nonce(key, _ANSWER, datagram)


class Allowance:
    """How many more answers each source gets within this second."""

    def __init__(self, per_source: int = PER_SOURCE) -> None:
        self._per_source = per_source
        self._given: OrderedDict[str, int] = OrderedDict()
        self._second = 0

    def spend(self, source: str, now: float) -> bool:
        """Take one answer; False when the source, or all sources together, have had enough."""
        if int(now) != self._second:
            self._second = int(now)
            self._given.clear()
        given = self._given.get(source, 0)
        if given >= self._per_source or (not given and len(self._given) >= _SOURCES):
            return False
        self._given[source] = given + 1
        return True


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``10.0.0.5:9339`` or ``[fd00::5]:9339``; raise ValueError."""
    host, _, port = text.rpartition(":")
    if not host.startswith("[") and ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [fd00::5]:9339")
    number = int(port)
    if not host or not 0 < number < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), number


def checked_address(text: str) -> str:
    """Return where a host says that it answers; raise ValueError for what other hosts must not be sent to.

    Whoever reports a node could else let the whole fleet send datagrams to all of a network or to a port of
    the system.
    """
    teach = "write an IP address of the host itself and its UDP port, 10.0.0.5:9339 or [fd00::5]:9339"
    try:
        host, port = parse_address(text)
        found: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{text!r} is not IP:PORT; {teach}") from None
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_multicast or found.is_unspecified or found == _BROADCAST:
        raise ValueError(f"{text!r} is the address of no host (multicast, broadcast or none at all); {teach}")
    if port < LEAST_PORT:
        raise ValueError(f"{text!r}: ports below {LEAST_PORT} are the system's; give --latency-port another")
    return text


def written_address(host: str, port: int) -> str:
    """Return an address as `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address_towards(host: str, port: int) -> str | None:
    """Return the address of this machine on its way to another one; None where there is no way.

    Nothing is sent: connecting a datagram socket only looks up the route.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _datagram(key: bytes, kind: bytes, nonce: bytes) -> bytes:
    return kind + nonce + hmac.digest(key, kind + nonce, "sha256")[:_TAG_BYTES]


def _nonce(key: bytes, kind: bytes, datagram: bytes) -> bytes | None:
    if len(datagram) != SIZE or not datagram.startswith(kind):
        return None
    nonce = datagram[len(kind) : len(kind) + NONCE_BYTES]
    return nonce if hmac.compare_digest(_datagram(key, kind, nonce), datagram) else None
