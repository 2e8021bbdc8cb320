"""The sentence for each reason: what was asked, what there is, what would help.

Numbers are counted over the fleet, never listed a line a node, so a sentence has the same length for two
nodes and for ten thousand. The codes are in `model.ReasonCode`; `admission` and `diagnosis` count, this
module only words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from airflow_gpu_provider.broker.model import WHOLE_DEVICE, GpuRequest, Reason, ReasonCode
from airflow_gpu_provider.broker.units import show

#: Names listed in a sentence before the rest is only counted.
_NAMES = 6


def asked(request: GpuRequest) -> str:
    """Return the request for people: "4 x A100 or H100 with 40GiB each on host gpu-1"."""
    what = " or ".join(sorted(request.models)) or ("GPU" if request.gpus == 1 else "GPUs")
    of = "shared " if request.is_shared else ""
    text = f"{request.gpus} x {of}{what}" if request.models else f"{request.gpus} {of}{what}"
    if request.memory_mib:
        text += f" with {show(request.memory_mib)}{' each' if request.gpus > 1 else ''}"
    if request.is_shared:
        least = "at least " if request.memory_mib else ""
        text += f" ({least}{request.milli / WHOLE_DEVICE:g} of {'each' if request.gpus > 1 else 'it'})"
    if request.strict:
        text += f" of at least {request.min_tflops:g} TFLOPS"
    if request.node_labels:
        text += f" on nodes with {_some(request.node_labels)}"
    if request.host is not None:
        text += f" on host {request.host}"
    return text


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - _NAMES
    return ", ".join(listed[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def _models(counts: Mapping[str, int]) -> str:
    return _some(f"{number} x {model}" for model, number in counts.items())


def _where(request: GpuRequest) -> str:
    return "the fleet" if request.host is None else f"host {request.host}"


# -- rejected: the whole fleet, empty, could not serve it
def no_devices(request: GpuRequest) -> Reason:
    """Say that there is nothing to lease at all."""
    return Reason(
        ReasonCode.NO_DEVICES,
        f"asked {asked(request)}; the fleet has no devices: start an agent on a node with GPUs",
    )


def unknown_host(request: GpuRequest, hosts: Iterable[str]) -> Reason:
    """Say that the host never reported."""
    return Reason(
        ReasonCode.UNKNOWN_HOST,
        f"asked {asked(request)}; no node on that host has reported, known hosts: {_some(hosts)}; "
        "start an agent there or let the task run on one of these",
    )


def unknown_model(request: GpuRequest, here: Mapping[str, int], elsewhere: int) -> Reason:
    """Say that no device is of these models; ``elsewhere`` counts those on other hosts."""
    other = f" ({elsewhere} on other hosts)" if elsewhere else ""
    return Reason(
        ReasonCode.UNKNOWN_MODEL,
        f"asked {asked(request)}; {_where(request)} has {_models(here)} and none of that model{other}; "
        "ask for one of these models or add nodes",
    )


def exceeds_fleet(request: GpuRequest, available: int, largest_node: int) -> Reason:
    """Say that there are fewer devices than members."""
    return Reason(
        ReasonCode.EXCEEDS_FLEET,
        f"asked {asked(request)}{' in one gang' if request.gpus > 1 else ''}; the fleet has {available}, "
        f"the largest node {largest_node}; lower gpus or add nodes",
    )


def no_gang_of_slices(request: GpuRequest, whole: int, slices: int) -> Reason:
    """Say that there are slices enough, maybe, but that no gang can be made of them."""
    return Reason(
        ReasonCode.EXCEEDS_FLEET,
        f"asked {asked(request)} in one gang; {_where(request)} has {whole} whole one(s) of these, and its "
        f"{slices} MIG slice(s) serve tasks of one GPU each; lower gpus to 1, or add whole GPUs",
    )


def host_has_too_few(request: GpuRequest, available: int, in_fleet: int) -> Reason:
    """Say that the gang is bound to a host with fewer devices than members."""
    return Reason(
        ReasonCode.EXCEEDS_HOST,
        f"asked {asked(request)}; that host has {available}, the fleet {in_fleet}; "
        "lower gpus or use a launcher that may span hosts",
    )


def exceeds_memory(request: GpuRequest, available: int, of: int, largest_mib: int) -> Reason:
    """Say that too few devices are large enough."""
    return Reason(
        ReasonCode.EXCEEDS_MEMORY,
        f"asked {asked(request)}; {available} of {of} devices have so much memory, the largest has "
        f"{show(largest_mib)}; lower memory or gpus, or add larger devices",
    )


def exceeds_tflops(request: GpuRequest, available: int, of: int, fastest: float) -> Reason:
    """Say that too few devices are fast enough for a strict request."""
    return Reason(
        ReasonCode.EXCEEDS_TFLOPS,
        f"asked {asked(request)}; {available} of {of} devices reach that, the fastest has {fastest:g}; "
        "lower min_tflops, or leave strict out to accept slower devices",
    )


def exceeds_labels(request: GpuRequest, available: int, of: int, taints: Mapping[str, int]) -> Reason:
    """Say that too few devices are on nodes with its labels and without a taint against it."""
    named = f"; of the others, nodes are tainted {_models(taints)}" if taints else ""
    change = "leave labels out" if request.node_labels else "let the task tolerate that"
    return Reason(
        ReasonCode.EXCEEDS_LABELS,
        f"asked {asked(request)}; {available} of {of} devices are on nodes that it may use by their labels"
        f"{named}; {change}, or add nodes",
    )


def exceeds_nodes(request: GpuRequest, members: int, cores: float, memory_mib: int) -> Reason:
    """Say that the nodes' CPU or memory cannot feed the gang, even empty."""
    return Reason(
        ReasonCode.EXCEEDS_HOST,
        f"asked {asked(request)} and for all of them {_host_share(request)}; the nodes, all empty, can feed "
        f"{members} of {request.gpus}, the largest has {cores:g} cores and {show(memory_mib)}; "
        "lower cpu_cores or host_memory",
    )


def all_excluded(request: GpuRequest, excluded: int, left: int) -> Reason:
    """Say that the fleet would do, but for the devices on which earlier tries failed."""
    return Reason(
        ReasonCode.DEVICES_EXCLUDED,
        f"asked {asked(request)}; earlier tries failed on {excluded} suitable device(s), which "
        f"leaves {left}; repair or add devices, then run the task anew",
    )


def _host_share(request: GpuRequest) -> str:
    parts = []
    if request.cpu_cores:
        parts.append(f"{request.cpu_cores:g} cores")
    if request.host_memory_mib:
        parts.append(f"{show(request.host_memory_mib)} of host memory")
    return " and ".join(parts)


# -- pending: it fits the fleet, not now
@dataclass(frozen=True, slots=True)
class Counts:
    """The suitable devices of the fleet, each counted once."""

    free: int
    leased: int = 0
    held: int = 0  #: free, but kept for a claim ahead
    busy: int = 0  #: on nodes whose load is too high
    unavailable: int = 0
    excluded: int = 0
    alike: int | None = None  #: the most free ones of one speed, for a gang that may not mix speeds
    reserved: int = 0  #: for others, free or not
    why_unavailable: Mapping[str, int] = field(default_factory=dict)

    @property
    def suitable(self) -> int:
        """All of them."""
        return (
            self.free + self.leased + self.held + self.busy + self.unavailable + self.excluded + self.reserved
        )

    def __str__(self) -> str:
        why = _some(f"{number} {text[:40]}" for text, number in self.why_unavailable.items())
        named = (
            (self.leased, "leased"),
            (self.held, "held for a claim ahead"),
            (self.busy, "on busy nodes"),
            (self.unavailable, f"unavailable ({why})"),
            (self.excluded, "excluded after a failed try"),
            (self.reserved, "reserved for others"),
        )
        rest = [f"{number} {state}" for number, state in named if number]
        return ", ".join([f"of {self.suitable} suitable devices {self.free} free", *rest])


def waits(
    code: ReasonCode, request: GpuRequest, counts: Counts, *, max_load: float, rivals: str = ""
) -> Reason:
    """Return the reason of a claim that fits the fleet but cannot start now."""
    missing = max(1, request.gpus - (counts.free if counts.alike is None else counts.alike))
    of_one = "" if counts.alike is None else " of one speed"
    unblocks = {
        ReasonCode.DEVICES_LEASED: f"starts when {missing} more{of_one} can be had",
        ReasonCode.DEVICES_UNAVAILABLE: "leased ones alone are too few: undrain or repair devices",
        ReasonCode.NODES_BUSY: f"starts when the load of nodes falls below {max_load:.0%}",
        ReasonCode.HOST_FULL: f"their nodes lack {_host_share(request) or 'CPU or memory'} until leases end",
        ReasonCode.BEHIND_HEAD: "a max_runtime that ends before the claim ahead starts would let it pass",
        ReasonCode.DEVICES_EXCLUDED: "earlier tries of the task failed on the free ones; starts on others",
        ReasonCode.RESERVED: rivals,
    }
    return Reason(code, f"asked {asked(request)}; {counts}; {unblocks[code]}")
