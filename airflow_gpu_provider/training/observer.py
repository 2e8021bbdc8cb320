"""Tells how a run goes: its pace once a second, and a straggler or a stall by name, once each.

Lives in the supervisor and only looks, at what heartbeats brought; whoever has to be ended is found by
`watch`. What it finds is in run.json, in the notes for the task's log, and as a line a second in
telemetry/run.jsonl. Comparing the shards: `pace`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from statistics import fmean, median

from pydantic import JsonValue

from airflow_gpu_provider.training.children import Children
from airflow_gpu_provider.training.line_file import LineFile
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.pace import Counters, Paces, Sample
from airflow_gpu_provider.training.pace_record import RunPace, ShardPace, Stall, Straggler
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunRecord, read_mirror

log = logging.getLogger(__name__)

_LINE_EVERY_S = 1.0
#: times the usual step, and seconds at least, from which a step is called stalled
_STALL_FACTOR, _STALL_LEAST_S = 20.0, 10.0
#: far longer than between two heartbeats
_SILENCE_S = 3.0
_SAMPLES_KEPT = 512
_MIB = 2**20


class Observer:
    """What the supervisor makes of its shards' counters."""

    def __init__(self, plan: RunPlan, children: Children, record: RunRecord) -> None:
        self._plan = plan
        self._children = children
        self._record = record
        self._paces = Paces()
        self._lines = LineFile(plan.paths.run_telemetry)
        self._line_at = 0.0
        self._began: tuple[float, int] | None = None  #: when and at which step the first sample began
        self._step_s: list[float] = []
        self._collective_s: list[float] = []
        self._samples_s = 0.0  #: over which samples were counted
        self._samples = 0.0

    def observe(
        self, counters: Mapping[str, Counters], membership: Membership, liveness: Liveness, now: float
    ) -> None:
        """Bring the record up to date."""
        holders = {rank: uid for uid, rank in membership.members.items() if uid in counters}
        sample = None
        if len(holders) == self._plan.shard_count:
            by_rank = {rank: counters[uid] for rank, uid in holders.items()}
            sample = self._paces.take(by_rank, holders=holders, now=now)
            if sample is not None:
                self._note_sample(sample, by_rank, now)
                self._note_straggler(holders)
        self._note_stall(membership, liveness, now)
        if now - self._line_at >= _LINE_EVERY_S and self._record.step > 0:
            self._line_at = now
            self._note_mirror()
            self._write_line(is_new=sample is not None)

    # -- speed ---------------------------------------------------------------------------------------------

    def _note_sample(self, sample: Sample, counters: Mapping[int, Counters], now: float) -> None:
        if self._began is None:
            self._began = (now - sample.seconds, self._record.step - round(sample.steps))
        self._step_s = [*self._step_s, sample.seconds / sample.steps][-_SAMPLES_KEPT:]
        if sample.collective_s is not None:
            self._collective_s = [*self._collective_s, sample.collective_s][-_SAMPLES_KEPT:]
        if sample.samples_per_s is not None:
            self._samples += sample.samples_per_s * sample.seconds
            self._samples_s += sample.seconds
        losses = [each.loss for each in counters.values() if each.loss is not None]
        norms = [each.gradient_norm for each in counters.values() if each.gradient_norm is not None]
        bus = sample.bus_bytes_per_s
        self._record.pace = RunPace(
            at=datetime.now(timezone.utc),
            steps_per_s=round(sample.steps / sample.seconds, 3),
            samples_per_s=_rounded(sample.samples_per_s, 1),
            loss=fmean(losses) if losses else None,
            gradient_norm=max(norms, default=None),
            waiting_pct=round(100 * fmean(sample.waiting.values()), 1),
            allreduce_ms=_in_ms(sample.collective_s),
            bytes_per_s=round(sample.bytes_per_s),
            bus_mib_per_s=None if bus is None else round(bus / _MIB, 1),
            shards={
                rank: ShardPace(
                    step_ms=round(1000 * own, 3), waiting_pct=round(100 * sample.waiting[rank], 1)
                )
                for rank, own in sorted(sample.own_s.items())
            },
        )
        self._sum_up(now)

    def _sum_up(self, now: float) -> None:
        assert self._began is not None
        began_at, first = self._began
        summary = self._record.summary
        good_s = max(0, self._record.step - first) * median(self._step_s)
        summary.goodput_pct = round(min(100.0, 100 * good_s / max(now - began_at, 1e-9)), 1)
        summary.allreduce_ms = _in_ms(fmean(self._collective_s)) if self._collective_s else None
        summary.samples_per_s = round(self._samples / self._samples_s, 1) if self._samples_s else None

    def _note_straggler(self, holders: Mapping[int, str]) -> None:
        found, known = self._paces.straggler, self._record.straggler
        if found is not None and self._is_crowded(holders, found.rank):
            found = None  # as slow as can be: others have more of a device for themselves
        if found is None:
            if known is not None:
                self._tell(f"Shard {known.rank} no longer keeps the others waiting")
            self._record.straggler = None
            return
        is_known = known is not None and known.uid == holders[found.rank]
        self._record.straggler = Straggler(
            rank=found.rank,
            uid=holders[found.rank],
            device_ids=self._children.slot(holders[found.rank]).device_ids,
            step_ms=round(1000 * found.own_s, 3),
            others_ms=round(1000 * found.others_s, 3),
            factor=round(found.factor, 2),
            since=known.since if known is not None and is_known else datetime.now(timezone.utc),
        )
        if not is_known:
            self._tell(self._record.straggler.sentence)

    def _is_crowded(self, holders: Mapping[int, str], rank: int) -> bool:
        """Say whether a shard of an elastic run shares its device with more shards than others do."""
        on = Counter(self._children.slot(uid).device_ids for uid in holders.values())
        place = self._children.slot(holders[rank]).device_ids
        return self._plan.least_devices is not None and on[place] > min(on.values())

    # -- no speed ------------------------------------------------------------------------------------------

    def _note_mirror(self) -> None:
        known, self._record.mirror = self._record.mirror, read_mirror(self._plan.paths.mirror)
        if (now := self._record.mirror) is not None and now.error and (known is None or not known.error):
            self._tell(now.error)

    def _note_stall(self, membership: Membership, liveness: Liveness, now: float) -> None:
        stall = self._stall(membership, liveness, now)
        known, self._record.stall = self._record.stall, stall
        if stall is not None and (known is None or (known.uid, known.step) != (stall.uid, stall.step)):
            self._tell(stall.sentence)

    def _stall(self, membership: Membership, liveness: Liveness, now: float) -> Stall | None:
        usual_s = median(self._step_s) if self._step_s else None
        limit_s = self._plan.stall_timeout_s
        # The first steps may compile the model; and it is told before it is ended, whatever the limit.
        patience_s = limit_s / 2
        if usual_s is not None:
            patience_s = min(patience_s, max(_STALL_LEAST_S, _STALL_FACTOR * usual_s))
        usual_ms = None if usual_s is None else round(1000 * usual_s, 1)
        longest = max(
            ((liveness.computing_for(uid, now) or 0.0, uid) for uid in membership.members), default=(0.0, "")
        )
        if longest[0] > patience_s:
            for_s, uid = longest
            return Stall(
                rank=membership.members[uid],
                uid=uid,
                device_ids=self._children.slot(uid).device_ids,
                step=liveness.step(uid) or 0,
                for_s=round(for_s),
                usual_ms=usual_ms,
                limit_s=limit_s,
            )
        waited = [liveness.waiting_for(uid, now) for uid in membership.members]
        least = min((each for each in waited if each is not None), default=0.0)
        if None not in waited and least > max(patience_s, self._patience_for_sync_s(usual_s)):
            silent_s, uid = max((liveness.unheard_for(uid, now), uid) for uid in membership.members)
            is_silent = silent_s > _SILENCE_S
            return Stall(
                rank=membership.members[uid] if is_silent else None,
                uid=uid if is_silent else None,
                device_ids=self._children.slot(uid).device_ids if is_silent else (),
                silent_s=round(silent_s) if is_silent else None,
                step=self._record.step,
                for_s=round(least),
                usual_ms=usual_ms,
                limit_s=self._plan.sync_timeout_s,
            )
        return None

    def _patience_for_sync_s(self, usual_s: float | None) -> float:
        usual = fmean(self._collective_s) if self._collective_s else (usual_s or 0.0)
        return max(_STALL_LEAST_S, _STALL_FACTOR * usual)

    # -- telling -------------------------------------------------------------------------------------------

    def _tell(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._record.note(sentence)

    def _write_line(self, *, is_new: bool) -> None:
        record = self._record
        saved_at = record.checkpoint.saved_at if record.checkpoint else None
        age = None if saved_at is None else (datetime.now(timezone.utc) - saved_at).total_seconds()
        line: dict[str, JsonValue] = {
            "at": time.time(),
            "kind": "run",
            "step": record.step,
            "generation": record.generation,
            "checkpoint_step": record.checkpoint.step if record.checkpoint else None,
            "mirrored_step": record.mirror.step if record.mirror else None,
            "checkpoint_age_s": None if age is None else round(age, 1),
            "straggler": record.straggler.rank if record.straggler else None,
        }
        if is_new and record.pace is not None:
            line.update(record.pace.model_dump(mode="json", exclude={"at"}))
        try:
            self._lines.append([line])
        except OSError as error:  # a full disk does not end training
            log.warning("Measurements cannot be written to %s: %s", self._lines.path, error)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
