"""Who takes over, who is silent, why a shard failed, which devices it gets: decided without a process."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.failures import FailureCause, Remains, ShardReport, cause_of, classify
from airflow_gpu_provider.training.liveness import Liveness
from airflow_gpu_provider.training.membership import Membership
from airflow_gpu_provider.training.process_state import ProcessState, parse_stat
from airflow_gpu_provider.training.respawns import RespawnBudget
from airflow_gpu_provider.training.slots import assign_slots, spare_count, training_shape
from airflow_gpu_provider.training.sync_retries import GRACE_S, MAX_TRIES, SyncRetries, Verdict
from tests.training.running import make_plan

# -- membership


def test_a_lost_rank_goes_to_a_warm_spare_before_a_cold_one() -> None:
    membership = Membership.first(("u0", "u1"), ("u2", "u3"))
    after, taken = membership.lose(frozenset({"u1"})).fill(parked=frozenset({"u3"}))
    assert taken == {"u3": 1}
    assert after.members == {"u0": 0, "u3": 1} and after.spares == ("u2",)
    assert after.generation == membership.generation + 1


def test_nothing_is_published_while_a_rank_has_no_holder() -> None:
    membership = Membership.first(("u0", "u1", "u2"), ("u3",))
    after, _ = membership.lose(frozenset({"u0", "u2"})).fill(parked=frozenset())
    assert not after.is_complete and after.generation == membership.generation
    healed, taken = after.add_spare("u4").fill(parked=frozenset())
    assert healed.is_complete and healed.generation == membership.generation + 1
    assert sorted(healed.members.values()) == [0, 1, 2] and list(taken) == ["u4"]


@given(
    shards=st.integers(1, 6),
    spares=st.integers(0, 4),
    losses=st.lists(st.sets(st.integers(0, 9), max_size=4), max_size=6),
)
def test_ranks_are_never_doubled_and_never_lost(shards: int, spares: int, losses: list[set[int]]) -> None:
    names = [f"u{index}" for index in range(shards + spares)]
    membership = Membership.first(tuple(names[:shards]), tuple(names[shards:]))
    for lost in losses:
        before = membership
        membership, _ = membership.lose(frozenset(f"u{index}" for index in lost)).fill(frozenset())
        held = [*membership.members.values(), *membership.vacant]
        assert sorted(held) == list(range(shards))
        assert not set(membership.members) & set(membership.spares)
        for uid, rank in membership.members.items():  # whoever held a rank keeps it
            assert before.members.get(uid, rank) == rank


# -- liveness


@pytest.fixture
def liveness(tmp_path: Path) -> Liveness:
    plan = make_plan(tmp_path, heartbeat_timeout_s=2, startup_timeout_s=60, stall_timeout_s=100)
    liveness = Liveness(plan)
    liveness.watch("u0", 0.0)
    return liveness


def hear(liveness: Liveness, beat: int, now: float, *, step: int = 0, phase: str = "computing") -> None:
    liveness.hear("u0", beat=beat, phase=phase, step=step, version=step, now=now)


def test_a_starting_process_has_longer_than_a_running_one(liveness: Liveness) -> None:
    assert liveness.silent_for("u0", 59.0) is None
    assert liveness.silent_for("u0", 61.0) == 61.0
    hear(liveness, 1, 61.0)
    assert liveness.silent_for("u0", 62.9) is None
    assert liveness.silent_for("u0", 63.5) == 2.5


def test_the_same_heartbeat_read_twice_is_one_heartbeat(liveness: Liveness) -> None:
    hear(liveness, 1, 1.0)
    hear(liveness, 1, 5.0)
    assert liveness.silent_for("u0", 5.0) == 4.0


def test_a_shard_that_beats_without_ending_a_step_is_stuck(liveness: Liveness) -> None:
    for second in range(150):
        hear(liveness, second + 1, float(second), step=7)
    assert liveness.silent_for("u0", 149.0) is None
    assert liveness.stalled_for("u0", 149.0) == 149.0


def test_a_shard_that_waits_for_others_is_not_stuck(liveness: Liveness) -> None:
    for second in range(150):
        hear(liveness, second + 1, float(second), step=7, phase="waiting")
    assert liveness.stalled_for("u0", 149.0) is None


def test_a_pause_of_the_supervisor_itself_is_no_silence(liveness: Liveness) -> None:
    hear(liveness, 1, 1.0)
    liveness.tick(1.0)
    liveness.tick(61.0)  # the machine was suspended
    assert liveness.silent_for("u0", 61.0) is None
    assert liveness.silent_for("u0", 63.5) == 2.5


def test_a_stopped_process_is_lost_before_its_silence_would_tell(liveness: Liveness) -> None:
    stopped = ProcessState(is_stopped=True, cpu_s=1.0)
    hear(liveness, 1, 1.0)
    liveness.observe("u0", stopped, now=1.0)
    assert liveness.stopped_for("u0", 2.0) is None
    liveness.observe("u0", stopped, now=2.5)
    assert liveness.stopped_for("u0", 2.5) == 1.5 and liveness.silent_for("u0", 2.5) is None


def test_a_process_that_was_continued_is_not_stopped(liveness: Liveness) -> None:
    liveness.observe("u0", ProcessState(is_stopped=True, cpu_s=1.0), now=1.0)
    liveness.observe("u0", ProcessState(is_stopped=False, cpu_s=1.0), now=1.5)
    liveness.observe("u0", ProcessState(is_stopped=True, cpu_s=1.0), now=9.0)
    assert liveness.stopped_for("u0", 9.5) is None


def test_silence_of_a_process_that_computes_is_no_death(liveness: Liveness) -> None:
    hear(liveness, 1, 0.0)
    for second in range(59):  # it holds the GIL: the heartbeat has to wait
        liveness.observe("u0", ProcessState(is_stopped=False, cpu_s=second / 2), now=float(second))
        assert liveness.silent_for("u0", float(second)) is None
    assert liveness.silent_for("u0", 61.0) == 61.0, "not for ever"


def test_silence_of_a_process_that_waits_is_death_however_long_it_computed_before(liveness: Liveness) -> None:
    liveness.observe("u0", ProcessState(is_stopped=False, cpu_s=1000.0), now=0.0)
    hear(liveness, 1, 0.0)
    liveness.observe("u0", ProcessState(is_stopped=False, cpu_s=1000.0), now=2.5)
    assert liveness.silent_for("u0", 2.5) == 2.5


def test_the_state_of_a_process_is_read_whatever_its_name_is() -> None:
    stat = "42 (shard) T u0) {} 1 42 42 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 3 0 77 1 1"
    assert parse_stat(stat.format("T"), ticks_per_s=100) == ProcessState(is_stopped=True, cpu_s=2.0)
    assert not parse_stat(stat.format("S"), ticks_per_s=100).is_stopped
    assert not parse_stat(stat.format("t"), ticks_per_s=100).is_stopped, "somebody debugs it"


# -- respawns


def test_respawns_are_used_up_without_progress_and_come_back_with_it() -> None:
    budget = RespawnBudget(2)
    assert budget.left(-1) == 2, "before the first shared state too"
    for left in (1, 0):
        budget.spend(50)
        assert budget.left(50) == left
    assert budget.left(60) == 2
    budget.spend(60)
    assert (budget.left(60), budget.left(70)) == (1, 2)


# -- retries


def test_a_broken_synchronisation_is_retried_until_there_is_no_progress() -> None:
    retries = SyncRetries()
    now = 0.0

    def verdict(version: int) -> Verdict:
        nonlocal now
        assert retries.judge(version=version, now=now) is Verdict.WAIT, "its cause may still show"
        now += GRACE_S
        return retries.judge(version=version, now=now)

    assert [verdict(10) for _ in range(MAX_TRIES)] == [Verdict.RETRY] * MAX_TRIES
    assert verdict(20) is Verdict.RETRY, "there was progress"
    assert [verdict(20) for _ in range(MAX_TRIES)][-1] is Verdict.GIVE_UP


def test_a_break_that_a_death_explains_starts_no_clock() -> None:
    retries = SyncRetries()
    retries.judge(version=10, now=0.0)
    retries.explained()
    assert retries.judge(version=10, now=GRACE_S) is Verdict.WAIT


# -- causes


def report(error_type: str, message: str) -> Remains:
    return Remains(exit_code=70, report=ShardReport(error_type=error_type, message=message))


@pytest.mark.parametrize(
    ("remains", "cause"),
    [
        (
            report("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"),
            FailureCause.OUT_OF_MEMORY,
        ),
        (report("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), FailureCause.OUT_OF_MEMORY),
        (
            report("RuntimeError", "CUDA error: an illegal memory access was encountered"),
            FailureCause.GPU_FAULT,
        ),
        (report("AcceleratorError", "CUDA error: uncorrectable ECC error"), FailureCause.GPU_FAULT),
        (report("RuntimeError", "CUDA error: device-side assert triggered"), FailureCause.USER_ERROR),
        (report("DistNetworkError", "The client socket has timed out"), FailureCause.NETWORK),
        (report("RuntimeError", "Connection reset by peer"), FailureCause.NETWORK),
        (report("CheckpointNotWritten", "No space left on device"), FailureCause.STORAGE),
        (report("OSError", "[Errno 28] No space left on device: 'x'"), FailureCause.STORAGE),
        (report("RuntimeError", "PytorchStreamWriter failed: Disk quota exceeded"), FailureCause.STORAGE),
        (report("FileNotFoundError", "[Errno 2] No such file: 'x'"), FailureCause.USER_ERROR),
        (
            report("DistBackendError", "NCCL error: remote process exited, ncclRemoteError"),
            FailureCause.NETWORK,
        ),
        (report("DistBackendError", "NCCL error: unhandled cuda error"), FailureCause.GPU_FAULT),
        (report("ConnectionRefusedError", "[Errno 111]"), FailureCause.NETWORK),
        (report("BrokenPipeError", "[Errno 32]"), FailureCause.NETWORK),
        (report("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), FailureCause.OUT_OF_MEMORY),
        (
            report(
                "RuntimeError", "DataLoader worker is killed: bus error, insufficient shared memory (shm)"
            ),
            FailureCause.OUT_OF_MEMORY,
        ),
        (
            report("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. "),
            FailureCause.KILLED,
        ),
        (report("RuntimeError", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen"), FailureCause.GPU_FAULT),
        (report("RuntimeError", "column taxid 5 is missing"), FailureCause.USER_ERROR),
        (report("RuntimeError", "xid is no column of the table"), FailureCause.USER_ERROR),
        (report("KeyError", "'price'"), FailureCause.USER_ERROR),
        (report("ValueError", "cuda error in my own words"), FailureCause.USER_ERROR),
        (Remains(exit_code=-signal.SIGKILL, kernel_oom_kills=1), FailureCause.OUT_OF_MEMORY),
        (Remains(exit_code=-signal.SIGKILL), FailureCause.KILLED),
        (Remains(exit_code=-signal.SIGTERM), FailureCause.KILLED),
        (Remains(exit_code=-signal.SIGSEGV), FailureCause.CRASHED),
        (Remains(exit_code=-signal.SIGABRT, log_tail=["CUDA error: unspecified"]), FailureCause.GPU_FAULT),
        (Remains(exit_code=3, log_tail=["Fatal Python error"]), FailureCause.CRASHED),
        (Remains(exit_code=1, log_tail=["cuda driver: GPU is lost"]), FailureCause.GPU_FAULT),
        (Remains(exit_code=0), FailureCause.USER_ERROR),
        (Remains(stopped_for_s=1.1), FailureCause.HUNG),
        (Remains(silent_for_s=2.5), FailureCause.HUNG),
        (Remains(stalled_for_s=900), FailureCause.HUNG),
    ],
)
def test_each_end_of_a_shard_has_its_cause(remains: Remains, cause: FailureCause) -> None:
    found, evidence = classify(remains)
    assert found is cause
    assert evidence


def test_the_last_line_of_a_crash_is_told() -> None:
    assert "Fatal Python error" in classify(Remains(exit_code=3, log_tail=["Fatal Python error", " "]))[1]


def test_only_what_would_come_again_is_hopeless() -> None:
    hopeless = {cause for cause in FailureCause if cause.is_hopeless}
    assert hopeless == {FailureCause.USER_ERROR, FailureCause.NON_FINITE}
    assert {cause for cause in FailureCause if cause.ends_run} == {*hopeless, FailureCause.STORAGE}
    shared = {cause for cause in FailureCause if not cause.is_helped_by_spares}
    assert shared == {*hopeless, FailureCause.STORAGE, FailureCause.OUT_OF_MEMORY}


def test_an_exception_tells_its_cause_outside_a_training_too() -> None:
    assert cause_of(RuntimeError("CUDA error: unspecified launch failure")) is FailureCause.GPU_FAULT
    assert cause_of(MemoryError()) is FailureCause.OUT_OF_MEMORY
    assert cause_of(ConnectionResetError("by peer")) is FailureCause.NETWORK
    assert cause_of(ValueError("CUDA error")) is FailureCause.USER_ERROR


# -- slots


@dataclass
class FakeDevice:
    id: str
    simulated: bool = False
    memory_mib: int = 40_960
    milli: int = 1000
    memory_limit_mib: int | None = None


def devices(count: int, *, simulated: bool = False, start: int = 0) -> list[FakeDevice]:
    return [FakeDevice(f"GPU-{index}", simulated) for index in range(start, start + count)]


def test_each_shard_sees_its_own_devices_by_uuid() -> None:
    slots = assign_slots(devices(4), devices(2, start=4), shard_count=2, spares=1)
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in (*slots.members, *slots.spares)]
    assert seen == ["GPU-0,GPU-1", "GPU-2,GPU-3", "GPU-4,GPU-5"]
    assert all(slot.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for slot in slots.members)
    assert slots.backend == "nccl" and slots.members[0].torch_device == "cuda:0"


def test_simulated_devices_hide_real_ones_and_spares_share_them() -> None:
    slots = assign_slots(devices(2, simulated=True), [], shard_count=2, spares=1)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots.members] == ["", ""]
    assert slots.backend == "gloo" and slots.spares == slots.members[:1]
    assert "share the members' devices" in slots.sentence


def test_nccl_gets_no_spare_on_a_members_gpu_and_says_so() -> None:
    slots = assign_slots(devices(2), [], shard_count=2, spares=1)
    assert slots.spares == ()
    assert "started anew" in slots.sentence


def test_nccl_on_simulated_devices_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"backend='nccl' needs real GPUs.*'auto' or 'gloo'"):
        assign_slots(devices(2, simulated=True), [], shard_count=2, spares=0, backend="nccl")


def test_devices_that_cannot_be_dealt_out_are_refused_with_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"3 GPUs .* 2 shards; .* 4"):
        training_shape(3, shard_count=2, sync_interval=1, redundancy="auto")


@pytest.mark.parametrize(
    ("shards", "redundancy", "spares"),
    [(2, "auto", 1), (25, "auto", 3), (4, 0, 0), (4, 0.25, 1), (5, 0.25, 2), (3, 1, 3), (100, 0.07, 7)],
)
def test_redundancy_is_a_share_rounded_up(shards: int, redundancy: float | str, spares: int) -> None:
    assert spare_count(shards, redundancy) == spares  # type: ignore[arg-type]


def test_auto_is_what_history_says_and_at_least_one_spare() -> None:
    def spares(auto: float, redundancy: object = "auto") -> int:
        asked = {"shard_count": 20, "sync_interval": 1, "redundancy": redundancy}
        return training_shape(20, **asked, auto=auto).spares  # type: ignore[arg-type]

    assert [spares(share) for share in (0.0, 0.1, 0.15, 0.151)] == [1, 2, 3, 4]
    assert spares(0.5, redundancy=0.05) == 1, "what the author says counts"


@pytest.mark.parametrize("redundancy", ["much", -0.1, 1.5, None, True])
def test_wrong_redundancy_is_refused_with_what_is_allowed(redundancy: object) -> None:
    with pytest.raises(InvalidRequest, match="allowed are 'auto'"):
        training_shape(2, shard_count=2, sync_interval=1, redundancy=redundancy)


@pytest.mark.parametrize("count", [0, -1, "two", 1.5, True])
def test_wrong_shard_counts_are_refused(count: object) -> None:
    with pytest.raises(InvalidRequest, match="shard_count="):
        training_shape(2, shard_count=count, sync_interval=1, redundancy=0)


def test_numbers_may_come_as_text_from_a_template() -> None:
    shape = training_shape(4, shard_count="2", sync_interval="50", redundancy="0.5")
    assert (shape.shards, shape.devices_per_shard, shape.sync_interval, shape.spares) == (2, 2, 50, 1)
