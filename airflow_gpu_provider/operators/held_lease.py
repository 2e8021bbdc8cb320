"""A lease in the hands of the process that works with it.

While held, a thread renews it and another watches the time. When it is lost, the work must end at once, for
the devices may already be another's: `LeaseLost` is raised in the working thread, and a process that does
not react within the grace period (stuck in a CUDA call, say) is killed. The process also dies with its
parent, so that an orphan of a killed Airflow worker cannot go on using devices that are no longer its own.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from airflow_gpu_provider.broker.units import parse_mib
from airflow_gpu_provider.exceptions import (
    GpuProviderError,
    IdentityRefused,
    InvalidRequest,
    LeaseLost,
    LeasePreempted,
)
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.inventory.lease_mark import lease_mark
from airflow_gpu_provider.operators.device_environment import environment_of, memory_limit_mib
from airflow_gpu_provider.operators.die_with_parent import die_with_parent
from airflow_gpu_provider.operators.lease_time import LeaseTime, renewal_pause_s
from airflow_gpu_provider.operators.lost_now import LostNow, lose_now
from airflow_gpu_provider.operators.offered_move import OfferedMove
from airflow_gpu_provider.operators.run_history import RunHistory, release_body
from airflow_gpu_provider.resizes import MoveBody, OfferView, ResizeAnswer, ResizeBody
from airflow_gpu_provider.training.memory_limit import limit_torch_memory
from airflow_gpu_provider.wire import PREEMPTED, DeviceView, LeaseView, RenewBody

log = logging.getLogger(__name__)


class HeldLease:
    """Devices that this process may use until `raise_if_lost` raises."""

    def __init__(self, view: LeaseView, hook: GpuBrokerHook, *, grace_s: float = 10.0) -> None:
        self.lease_id = view.lease_id
        self.claim_id = view.claim_id
        self.devices: tuple[DeviceView, ...] = tuple(view.devices)
        self.spares: tuple[DeviceView, ...] = tuple(view.spares)
        self.match_degree = view.match_degree
        self.latency_ms = view.latency_ms
        self.lost = threading.Event()
        self._why_lost: LeaseLost | None = None
        self.view = view
        self.hook = hook
        self._grace_s = grace_s
        self._time = LeaseTime(view.ttl_s)
        self._renewals = hook
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._failed_devices: set[str] = set()
        self._history = RunHistory()
        self._worker_thread = threading.get_ident()
        self._keepers = [
            threading.Thread(target=target, name="gpu-lease", daemon=True)
            for target in (self._renew_until_ended, self._end_in_time)
        ]

    # -- for the work
    def environment(self) -> dict[str, str]:
        """Return the environment in which only the leased devices are visible, none if they are simulated.

        On a shared device it also tells the memory that the work may use.
        """
        return environment_of(self.lease_id, (*self.devices, *self.spares))

    def torch_device(self) -> str:
        """Return the first leased device as torch names it here, "cpu" for a simulated one."""
        return "cpu" if self.devices[0].simulated else "cuda:0"

    @property
    def memory_limit_mib(self) -> int | None:
        """The memory of its device that the work may use, the CUDA context included; None = all of it."""
        return memory_limit_mib((*self.devices, *self.spares))

    def limit_torch_memory(self) -> float | None:
        """Keep PyTorch in this process to the leased part of a shared device; return the part, None = all."""
        return limit_torch_memory(self.environment())

    def raise_if_lost(self) -> None:
        """Raise LeaseLost when the devices are no longer ours."""
        if self._why_lost is not None:
            raise self._why_lost

    @property
    def ending(self) -> threading.Event:
        """Set when the devices are being taken back: the work may still save what it did."""
        return self._time.ending

    @property
    def ends_in_s(self) -> float | None:
        """How long the work has to save itself and stop; None = its devices are not taken back."""
        return max(0.0, self._time.left_s() - self._reaction_s()) if self.ending.is_set() else None

    def raise_if_ending(self) -> None:
        """Raise LeasePreempted when the devices are being taken back; to be called once the work is saved.

        The task then waits for devices again within the same try, and its work is called anew.
        """
        self._time.raise_if_ending()

    def note_checkpoint(self) -> None:
        """Tell that the work was saved: what has little to lose is taken back first."""
        self._time.note_checkpoint()

    def report_failed_device(self, device_id: str) -> None:
        """Remember a device that failed: a retry of this task gets others."""
        self._failed_devices.add(device_id)

    def report_work(self, units: float, *, seconds: float | None = None) -> None:
        """Tell how much was done, in any unit that the task class keeps to: products, steps, tokens.

        From that the broker learns on which GPU models such work is fast. ``seconds`` is how long it took;
        by default since the work began, or since the last report: what was done adds up.
        """
        self._history.add_work(units, seconds)

    def report_shards(self, shards: int, *, failed_on: Sequence[str | None] = ()) -> None:
        """Tell of a training how many shards it had, and the node of each that failed (None = not known)."""
        self._history.shards = shards
        self._history.failed_on = tuple(failed_on[:shards])

    def told(self) -> dict[str, Any]:
        """Return what the release will tell of the work so far."""
        return self._history.as_fields()

    # -- more or less of it, while the work runs
    def resize(self, *, memory: str) -> OfferedMove | None:
        """Have so much memory on each device, as "24GiB": at once (None), or by the move that is returned.

        Raise NotResized when neither can be: the lease stays as it is. Asking again returns the same offer.
        """
        answer = self._resize(memory_mib=parse_mib(memory))
        offer = answer.offer
        if offer is None:
            return None
        environment = environment_of(self.lease_id, (*offer.devices, *offer.spares))
        return OfferedMove(offer, environment, lambda verb: self._answer(verb, offer.offer_id))

    def grow(self, gpus: int) -> tuple[DeviceView, ...]:
        """Have ``gpus`` devices in all, and return those that joined; raise NotResized for all or none."""
        before = {device.id for device in self.devices}
        if gpus < len(before):
            raise InvalidRequest(
                f"grow({gpus}) of a lease of {len(before)} devices: give_back(...) names those to give back"
            )
        if gpus > 1 and self.memory_limit_mib is not None:
            raise InvalidRequest(
                f"grow({gpus}) of a share: a gang is made of whole devices; ask for a larger share by "
                "resize(memory=...), or leave shared out"
            )
        self._resize(gpus=gpus)
        return tuple(device for device in self.devices if device.id not in before)

    def give_back(self, devices: Iterable[DeviceView | str]) -> None:
        """Give these devices back at once; nothing of this task may use them any more."""
        named = {device if isinstance(device, str) else device.id for device in devices}
        left = [device for device in self.devices if device.id not in named]
        if not left:
            raise InvalidRequest("give_back(...) of all devices: return from the task, that releases them")
        self._resize(gpus=len(left), leave=tuple(sorted(named)))

    def _resize(self, **wish: Any) -> ResizeAnswer:
        body = ResizeBody(secret=self.view.secret, epoch=self.view.epoch, **wish)
        return self._become(self.hook.resize(self.lease_id, body))

    def _answer(self, verb: str, offer_id: str) -> OfferView | None:
        hook, body = self.hook, MoveBody(secret=self.view.secret, epoch=self.view.epoch, offer_id=offer_id)
        calls = {"accept": hook.accept_move, "commit": hook.commit_move, "decline": hook.decline_move}
        return self._become(calls[verb](self.lease_id, body)).offer

    def _become(self, answer: ResizeAnswer) -> ResizeAnswer:
        """Be what the broker answered, for this process and for those it starts from now on."""
        view, before = answer.lease, set(self.environment())
        self.devices, self.spares = tuple(view.devices), tuple(view.spares)
        self.match_degree = view.match_degree
        if self._keepers[0].is_alive() and not self._ended.is_set():
            after = self.environment()
            for name in before - after.keys():  # a share that became the whole device has no limit
                os.environ.pop(name, None)
            os.environ.update(after)
        return answer

    # -- for the operator
    @contextmanager
    def working(self) -> Iterator[HeldLease]:
        """Renew in the background and end the work when the lease is lost; release at the end."""
        outcome = "failed"
        saved = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())
        self._end_with_parent(really=True)
        self._renewals = self.hook.for_renewals(self.view.ttl_s)
        for keeper in self._keepers:
            keeper.start()
        self._history.begin()
        try:
            # The kernel shows only the environment of a process's start: the mark tells the agent who we are.
            with lease_mark(self.lease_id):
                yield self
            outcome = "done"
        except LeaseLost as error:
            if isinstance(error, LeasePreempted) or self._time.is_preempted:
                outcome = PREEMPTED  # also work that did not stop in time: it has now
                self._time.raise_if_ending()
            if isinstance(error, LostNow):
                raise self._why_lost or LeaseLost("The GPU lease was lost.") from None
            raise
        finally:
            with self._ending:  # after this nothing is raised into what follows the work
                self._ended.set()
            self._end_with_parent(really=False)
            for name in {*saved, *self.environment()}:  # a lease that changed may have set more
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in saved.items() if value is not None})
            self.release(outcome)

    def release(self, outcome: str) -> None:
        """Give the devices back. A failure is logged only: the lease then ends by its TTL."""
        self._ended.set()
        if self.lost.is_set() and outcome != PREEMPTED:
            return
        failed = tuple(sorted(self._failed_devices))
        try:
            self.hook.release(self.lease_id, release_body(self.view, outcome, failed, self._history))
        except GpuProviderError as error:
            log.warning("Could not release lease %s (%s); it ends by its TTL", self.lease_id, error)

    # -- the threads that keep it
    def _renew_until_ended(self) -> None:
        ttl_s = self.view.ttl_s
        pause_s = self._first_pause_s()
        while not self._ended.wait(pause_s):
            asked_at = time.monotonic()
            try:
                self._time.renewed(self._renewals.renew(self.lease_id, self._renewal()), asked_at=asked_at)
                pause_s = renewal_pause_s(ttl_s)
            except LeaseLost as error:
                if (again_s := self._pause_after(error)) is None:
                    return self._lose(error.message)
                pause_s = again_s
            except Exception as error:
                if isinstance(error, IdentityRefused) and error.reason == "lease_secret":
                    return self._lose(error.message)
                # Whatever else it is, the lease lives until its TTL: try again, sooner.
                log.warning("Lease %s not renewed: %s", self.lease_id, error)
                pause_s = renewal_pause_s(ttl_s) / 4

    def _end_in_time(self) -> None:
        """End the work before the lease ends by its TTL, though a renewal hangs meanwhile."""
        # Work that does not react at once must be gone when the devices are another's.
        while (left_s := self._time.left_s() - self._reaction_s()) > 0:
            if self._ended.wait(left_s):
                return
        self._lose(self._time.why_over(self.lease_id))

    # -- what `kept_lease` does otherwise
    def _end_with_parent(self, *, really: bool) -> None:
        die_with_parent(signal.SIGKILL if really else 0)

    def _first_pause_s(self) -> float:
        return renewal_pause_s(self.view.ttl_s)

    def _pause_after(self, refusal: LeaseLost) -> float | None:
        """Return after how long to renew again after a refusal; None = the lease is lost."""

    def _interrupt(self) -> None:
        lose_now(self._worker_thread)

    def _renewal(self) -> RenewBody:
        age_s = self._time.saved_s()
        return RenewBody(secret=self.view.secret, epoch=self.view.epoch, saved_s=age_s)

    def _reaction_s(self) -> float:
        return min(self._grace_s, self.view.ttl_s / 4)

    def _lose(self, why: str) -> None:
        with self._ending:
            if self._ended.is_set() or self.lost.is_set():
                return
            self._why_lost = LeaseLost(f"The work ended because its lease was lost: {why}")
            log.error("Ending the work because its lease was lost: %s", why)
            self.lost.set()
            self._interrupt()
        if not self._ended.wait(self._reaction_s()):
            log.critical("The work went on for %g s without its lease: killing it", self._reaction_s())
            os.kill(os.getpid(), signal.SIGKILL)
