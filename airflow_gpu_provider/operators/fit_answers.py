"""Answers a run that takes idle devices and gives them back, for whoever holds its lease.

Both questions name what the lease should be, so that either may be put again. A device of another host is
given back at once, since the run has no processes there. Used by `growth_answers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from airflow_gpu_provider.exceptions import NotResized
from airflow_gpu_provider.training.growth_words import Answer, GrownDevice, Outcome, Question
from airflow_gpu_provider.wire import DeviceView


class FittingLease(Protocol):
    """What is used of a `KeptLease`."""

    @property
    def devices(self) -> Sequence[DeviceView]:
        """Those of the members."""

    def fit(self, least: int, most: int) -> int:
        """Have as many devices as are idle; return how many of the last ones others wait for."""

    def give_back(self, devices: Iterable[DeviceView | str]) -> None:
        """Give devices back. Raise NotResized."""


def fit(lease: FittingLease, question: Question) -> Answer:
    """Let the lease have what is idle, and tell what others want of it."""
    host = lease.devices[0].host
    try:
        wanted_back = lease.fit(*question.bounds)
        if strangers := [device for device in lease.devices if device.host != host]:
            lease.give_back(strangers)
            wanted_back = 0  # of others than those that are left; asked again soon
    except NotResized as refused:  # it is being taken back
        return Answer(number=question.number, outcome=Outcome.REFUSED, sentence=refused.message)
    return Answer(
        number=question.number,
        outcome=Outcome.IN_PLACE,
        sentence=f"{len(lease.devices)} device(s), others wait for {wanted_back} of them",
        devices=grown(lease.devices),
        wanted_back=wanted_back,
    )


def leave(lease: FittingLease, question: Question) -> Answer:
    """Give devices back; those that went already count as done."""
    here = [device for device in lease.devices if device.id in question.leave]
    done = Answer(number=question.number, outcome=Outcome.DONE, sentence="they are given back")
    try:
        if here:
            lease.give_back(here)
    except NotResized as refused:
        return done.model_copy(update={"outcome": Outcome.REFUSED, "sentence": refused.message})
    return done


def grown(devices: Iterable[DeviceView]) -> tuple[GrownDevice, ...]:
    """Return devices as a run is told of them."""
    return tuple(
        GrownDevice(
            id=device.id, simulated=device.simulated, memory_mib=device.memory_mib, milli=device.milli
        )
        for device in devices
    )
