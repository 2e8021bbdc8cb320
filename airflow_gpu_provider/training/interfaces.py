"""Over which network interfaces the shards of a run talk.

On one host that is loopback. Over several hosts it is every interface that is up and leads out, or those that
the author or the installation names; gloo makes one path of each, and NCCL is told the same names.
InfiniBand is NCCL's own choice unless someone says otherwise. `chosen` decides, the rest reads this machine.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from airflow_gpu_provider.exceptions import InvalidRequest

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
_IB_VARIABLE = "NCCL_IB_HCA"

#: Of containers and virtual machines on this host; none leads to another shard.
_INSIDE = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "flannel",
    "cali",
    "tunl",
    "kube-ipvs",
    "dummy",
    "ifb",
    "tap",
)
_NET = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this machine."""

    name: str
    address: str | None  #: IPv4, None where it has none
    is_up: bool
    is_loopback: bool = False

    @property
    def leads_out(self) -> bool:
        """Whether another host can be reached over it, as far as its name and state tell."""
        return (
            self.is_up
            and not self.is_loopback
            and self.address is not None
            and not self.name.startswith(_INSIDE)
        )


def chosen(
    asked: Sequence[str] | None, installed: str | None, present: Sequence[Interface], *, spans_hosts: bool
) -> tuple[Interface, ...]:
    """Return the interfaces to talk over, none = loopback. Raise InvalidRequest for one that is not there.

    ``asked`` are the author's, None = "auto"; ``installed`` is the value of ``GLOO_SOCKET_IFNAME``.
    """
    names = list(asked) if asked is not None else [name for name in (installed or "").split(",") if name]
    if not names:
        return tuple(each for each in present if each.leads_out) if spans_hosts else ()
    by_name = {each.name: each for each in present}
    missing = [name for name in names if name not in by_name or by_name[name].address is None]
    if missing:
        known = ", ".join(f"{each.name} ({each.address})" for each in present if each.address)
        raise InvalidRequest(
            f"The network interface(s) {', '.join(missing)} have no address where this shard runs; there are "
            f"{known or 'none'}. Name those in network={{'interfaces': [...]}} or {GLOO_VARIABLE}, or leave "
            "both out."
        )
    return tuple(by_name[name] for name in names)


def present_interfaces(net: Path = _NET) -> tuple[Interface, ...]:
    """Return the interfaces of this machine, as the calling thread sees it."""
    return tuple(_read(name, net) for _, name in socket.if_nameindex())


def nccl_environment(
    paths: Sequence[Interface], ib_hca: str | None, present: Mapping[str, str]
) -> dict[str, str]:
    """Return what NCCL has to be told; what the installation has set already stays unless the author says."""
    found = {}
    if paths and NCCL_VARIABLE not in present:
        found[NCCL_VARIABLE] = "=" + ",".join(each.name for each in paths)  # "=": these, no prefixes
    if ib_hca is not None:
        found[_IB_VARIABLE] = ib_hca
    return found


def _read(name: str, net: Path) -> Interface:
    try:
        flags = int((net / name / "flags").read_text(), 16)
    except OSError:  # not Linux, or it has just gone
        flags = _IFF_UP
    return Interface(
        name, _address(name), is_up=bool(flags & _IFF_UP), is_loopback=bool(flags & _IFF_LOOPBACK)
    )


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
