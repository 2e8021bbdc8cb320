"""Judge what was measured: can this device be trusted, and whose is this process.

Pure functions of values, so that each rule can be tried without a GPU. A suspect device is one that a new
lease must not get; the sentence says what was seen and what the administrator should do. The next step is
`agent.Agent`, which reports the verdicts, and `leftovers`, which acts on processes that outlived their lease.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

#: XID codes (the driver's error numbers) that mean faulty hardware or a GPU that needs a reset. Codes that a
#: program can cause by itself (13, 31, 43, 45, 68, 69, 109: bad addresses, aborted channels) are left out:
#: they say nothing about the device.
HARDWARE_XIDS: dict[int, str] = {
    46: "the GPU stopped processing",
    48: "uncorrectable memory error",
    62: "the GPU's internal controller halted",
    64: "a failing memory row could not be retired",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of correctable memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's system processor timed out",
    120: "error in the GPU's system processor",
    140: "unrecovered memory error",
    143: "the GPU failed to start",
}


@dataclass(frozen=True, slots=True)
class HealthSigns:
    """What the hardware says about itself. ``None`` = not supported, which is no fault."""

    ecc_uncorrected: int | None = None  #: since the driver was loaded
    remap_failed: bool | None = None  #: a bad memory row could not be replaced by a spare one
    xids: tuple[int, ...] = ()
    lost: str | None = None  #: the driver's own words when it no longer reaches the device


def suspect_reason(signs: HealthSigns) -> str | None:
    """Return why the device must not be given out, or None. The gravest reason comes first."""
    if signs.lost:
        return f"{signs.lost}: the driver no longer reaches the GPU; reset it or restart the node"
    for xid in signs.xids:
        if xid in HARDWARE_XIDS:
            return f"XID {xid}, {HARDWARE_XIDS[xid]}: reset the GPU, replace it if this comes back"
    if signs.remap_failed:
        return "a failing memory row has no spare left: replace the GPU"
    if signs.ecc_uncorrected:
        return (
            f"uncorrectable ECC: {signs.ecc_uncorrected} memory error(s) since the driver was loaded; "
            "reset the GPU"
        )
    return None


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the kernel shows it. ``started`` tells it from a later one with the same pid."""

    pid: int
    started: int
    lease_id: str | None  #: GPU_LEASE_ID of its environment, or of its nearest ancestor that has one
    inherited: bool = False  #: the lease id is an ancestor's
    readable: bool = True  #: False: another user's, or outside this container
    is_mps_server: bool = (
        False  #: NVIDIA's own, which computes for its clients: they are looked at themselves
    )


class Verdict(Enum):
    """Whose a process on a device is."""

    HOLDER = "holder"
    """It belongs to a live lease of this device."""
    FOREIGN = "foreign"
    """It is none of ours, or of ours on a device that it does not hold: reported, never touched."""
    ENDED = "ended"
    """It carries a lease that this device had before: it outlived it."""
    UNPROVEN = "unproven"
    """It carries a lease we never heard of: either so new that no answer named it yet, or long ended."""


def verdict(
    process: Process, *, leases: Collection[str], former: Collection[str], live: Collection[str]
) -> Verdict:
    """Say whose ``process`` is on a device that now has ``leases`` and had ``former`` ones before.

    A process we may not look into gets the benefit of the doubt while its device is leased: calling the
    holder an outsider would take the device away from a task that runs.
    """
    if process.is_mps_server:
        return Verdict.HOLDER
    if process.lease_id is None:
        return Verdict.HOLDER if leases and not process.readable else Verdict.FOREIGN
    if process.lease_id in leases:
        return Verdict.HOLDER
    if process.lease_id in live:
        return Verdict.FOREIGN
    return Verdict.ENDED if process.lease_id in former else Verdict.UNPROVEN
