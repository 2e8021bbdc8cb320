"""What run.json says of a run's speed, for people and for the page: the last second, the whole, who is slow.

Unknown is None. Filled by `observer`, part of `run_file.RunRecord`.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel


class ShardPace(BaseModel):
    """One shard in the last second."""

    step_ms: float  #: its own work for a step, without waiting for others
    waiting_pct: float  #: of its time, in synchronisations


class RunPace(BaseModel):
    """The last second in which all shards made steps."""

    at: datetime
    steps_per_s: float
    samples_per_s: float | None  #: of all shards; None: `ctx.report` is not told of samples
    loss: float | None  #: mean over the shards, the newest that was read
    gradient_norm: float | None  #: the largest of the shards
    waiting_pct: float  #: of all shards' time: what the slowest costs, and the exchange itself
    allreduce_ms: float | None  #: for each collective, without waiting
    bytes_per_s: float  #: of the buffers that each shard had reduced
    bus_mib_per_s: float | None
    shards: dict[int, ShardPace]


class RunSummary(BaseModel):
    """The run so far, for the XCom."""

    samples_per_s: float | None = None
    allreduce_ms: float | None = None
    goodput_pct: float | None = None  #: steps that count, at the usual speed, of the time since the first
    checkpoints: int = 0


class Straggler(BaseModel):
    """The shard that keeps the others waiting."""

    rank: int
    uid: str
    device_ids: tuple[str, ...]
    step_ms: float
    others_ms: float
    factor: float
    since: datetime

    @property
    def sentence(self) -> str:
        """Say it in a line."""
        return (
            f"Straggler: shard {self.rank} ({self.uid}) on {on(self.device_ids)} computes "
            f"{self.step_ms:.1f} ms for a step, {self.factor:.1f} times the median of the others "
            f"({self.others_ms:.1f} ms); they wait for it. See whether that device "
            "is shared, hot or throttled, or its samples are longer."
        )


class Stall(BaseModel):
    """A shard, or a synchronisation, that does not get on; nothing was ended for it yet."""

    rank: int | None  #: None: no shard computes, all wait in the synchronisation
    uid: str | None
    device_ids: tuple[str, ...]
    step: int
    for_s: float
    silent_s: float | None = None  #: since the shard that is named in a synchronisation was heard of last
    usual_ms: float | None
    limit_s: float  #: after which it is given up

    @property
    def sentence(self) -> str:
        """Say it in a line."""
        usual = "" if self.usual_ms is None else f"; a step usually takes {self.usual_ms:.0f} ms"
        end = f"It is given up after {self.limit_s:.0f} s."
        if self.rank is None or self.silent_s is not None:
            look = "Look at the network between the devices."
            if self.silent_s is not None:
                who = f"shard {self.rank} ({self.uid}) on {on(self.device_ids)}"
                look = f"Nothing is heard of {who} since {self.silent_s:.0f} s."
            return (
                f"Stalled: all shards wait in the synchronisation after step {self.step} since "
                f"{self.for_s:.0f} s{usual}. {look} {end}"
            )
        return (
            f"Stalled: shard {self.rank} ({self.uid}) on {on(self.device_ids)} computes at step {self.step} "
            f"since {self.for_s:.0f} s{usual}. {end}"
        )


def on(device_ids: tuple[str, ...]) -> str:
    """Name devices."""
    return ", ".join(device_ids) or "the CPU"
