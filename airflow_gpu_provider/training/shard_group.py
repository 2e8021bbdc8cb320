"""The shards of one generation as a group: collectives that can be given up.

A peer's death leaves a collective pending (gloo's abort does not unblock it), so every wait polls and raises
`GroupLost` as soon as the supervisor has moved on. The old group is kept referenced and never destroyed: its
destructor could block. One attempt per generation: a failed one is told to the supervisor, which makes the
next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from airflow_gpu_provider.training.coordination import LOOPBACK, Control, RunStore
from airflow_gpu_provider.training.interfaces import (
    GLOO_VARIABLE,
    Interface,
    chosen,
    nccl_environment,
    present_interfaces,
)
from airflow_gpu_provider.training.meter import HostClock, Meter
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.pulse import Pulse
from airflow_gpu_provider.training.shard_echo import ShardEcho

log = logging.getLogger(__name__)

#: Numbers from which on a buffer is cut for several paths.
_CUT = 1 << 16
#: peers have announced themselves before the group is built, so connecting takes milliseconds
_CONNECT_TIMEOUT = timedelta(seconds=10)


class _Collectives(Protocol):
    """What is used of torch's process groups; its stubs leave these methods out."""

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work: ...

    def allgather(self, out: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> dist.Work: ...

    def abort(self) -> None: ...


class GroupLost(Exception):
    """This generation is over: roll back and join the next."""


class ShardGroup:
    """Rendezvous and collectives of a shard."""

    def __init__(
        self, uid: str, store: RunStore, pulse: Pulse, plan: RunPlan, *, meter: Meter | None = None
    ) -> None:
        self._uid = uid
        self._store = store
        self._pulse = pulse
        self._plan = plan
        self._meter = meter or Meter(HostClock())
        self._backend = plan.backend
        self._timeout = timedelta(seconds=plan.sync_timeout_s)
        self._paths: tuple[Interface, ...] = ()  #: none = loopback; known once this shard joins
        self._echo = ShardEcho(uid, pulse, store.prefix)
        self._words: _Collectives | None = None  #: gloo, for small numbers on the CPU
        self._data: _Collectives | None = None  #: the same, or NCCL
        self._graveyard: list[object] = []
        self.generation = -1
        self.rank = -1
        self.size = 0

    @property
    def device(self) -> torch.device:
        """Return where buffers for the collectives have to be."""
        return (
            torch.device("cuda", torch.cuda.current_device())
            if self._backend == "nccl"
            else torch.device("cpu")
        )

    def join(self, control: Control) -> None:
        """Become a member of the generation. Raise GroupLost."""
        self.leave()
        self.generation = control.generation
        self.rank = control.members[self._uid]
        self.size = len(control.members)
        self._choose_paths()
        self._store.put(f"ready/{self.generation}/{self._uid}", self._echo.address)
        keys = {uid: f"ready/{self.generation}/{uid}" for uid in control.members}
        self.wait_for(list(keys.values()))
        ring = sorted(control.members, key=control.members.__getitem__)
        self._echo.ask({uid: str(self._store.get(key)) for uid, key in keys.items()}, ring)
        try:
            store = self._store.below(f"group/{self.generation}")
            self._words = self._gloo(dist.PrefixStore("gloo", store))
            self._data = (
                self._nccl(dist.PrefixStore("nccl", store)) if self._backend == "nccl" else self._words
            )
        except RuntimeError as error:
            raise self._fault("joining", error) from error

    def _choose_paths(self) -> None:
        """Find out over which interfaces this shard talks; NCCL reads its choice from the environment."""
        options, present = self._plan.network, present_interfaces()
        asked = None if options.interfaces == "auto" else options.interfaces
        installed = os.environ.get(GLOO_VARIABLE)
        self._paths = chosen(asked, installed, present, spans_hosts=self._plan.spans_hosts)
        os.environ.update(nccl_environment(self._paths, options.ib_hca, os.environ))
        first = next((each.address for each in self._paths), None)
        self._echo.start(first or LOOPBACK)

    def latency(self) -> dict[str, float]:
        """Return the latency to the next shard of the ring for a measurement, nothing while it is unknown."""
        latency_ms = self._echo.to_next()
        return {} if latency_ms is None else {"latency_ms": latency_ms}

    def leave(self) -> None:
        """Give the group up without touching it."""
        if self._backend == "nccl" and self._data is not None:
            # A NCCL collective never fails by itself when a peer dies.
            with contextlib.suppress(RuntimeError):
                self._data.abort()
        self._graveyard += [group for group in (self._words, self._data) if group is not None]
        self._words = self._data = None

    def wait_for(self, keys: list[str]) -> None:
        """Wait until all keys have a value. Raise GroupLost when the generation is replaced meanwhile."""
        while not self._store.has(keys):
            self.raise_if_replaced()
            time.sleep(0.005)

    def raise_if_replaced(self) -> None:
        """Raise GroupLost when the supervisor has moved on."""
        if self._pulse.has_moved_on(self.generation):
            raise GroupLost(f"generation {self.generation} was replaced")

    def average(self, flats: dict[torch.dtype, torch.Tensor]) -> None:
        """Average floating-point buffers over the shards, in place; of whole numbers take the largest."""
        for dtype, flat in flats.items():
            self.reduce(flat, dist.ReduceOp.SUM if dtype.is_floating_point else dist.ReduceOp.MAX)
            if dtype.is_floating_point:
                flat /= self.size

    def reduce(self, flat: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """All-reduce one buffer in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.timeout = self._timeout
        group = self._group()
        # Each collective takes one path of several, the next one the next: a large one is cut into as many.
        parts = flat.chunk(len(self._paths)) if len(self._paths) > 1 and flat.numel() > _CUT else (flat,)
        with self._meter.collective(flat.numel() * flat.element_size()):
            for work, part in [(group.allreduce([part], options), part) for part in parts]:
                self._finish(work, part)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Take ``root``'s values, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self._timeout
        self._finish(self._group().broadcast([flat], options), flat)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every rank."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.zeros_like(mine) for _ in range(self.size)]
        if self._words is None:
            raise GroupLost("not in a group")
        self._finish(self._words.allgather([everyone], [mine]), (mine, everyone))
        return [[int(number) for number in row] for row in everyone]

    def _finish(self, work: dist.Work, buffers: object) -> None:
        polls = 0
        while not work.is_completed():
            polls += 1
            time.sleep(0 if polls < 200 else 0.0005)
            if self._pulse.has_moved_on(self.generation):
                self._graveyard.append((work, buffers))  # still written to by the backend
                raise GroupLost(f"generation {self.generation} was replaced during a collective")
        try:
            work.wait()
        except RuntimeError as error:
            self._graveyard.append((work, buffers))
            raise self._fault("a collective", error) from error

    def _fault(self, where: str, error: RuntimeError) -> GroupLost:
        reason = str(error).strip().splitlines()[0][:200]
        log.warning("Generation %d: %s failed: %s", self.generation, where, reason)
        self._store.put(f"fault/{self.generation}", {"uid": self._uid, "where": where, "reason": reason})
        return GroupLost(f"{where} failed: {reason}")

    def _group(self) -> _Collectives:
        if self._data is None:
            raise GroupLost("not in a group")
        return self._data

    def _gloo(self, store: dist.Store) -> _Collectives:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _CONNECT_TIMEOUT
        make = dist.ProcessGroupGloo.create_device
        options._devices = [make(interface=each.name) for each in self._paths] or [make(hostname=LOOPBACK)]
        options._threads = 2 * len(options._devices)
        return cast(_Collectives, dist.ProcessGroupGloo(store, self.rank, self.size, options))

    def _nccl(self, store: dist.Store) -> _Collectives:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return cast(_Collectives, dist.ProcessGroupNCCL(store, self.rank, self.size, options))
