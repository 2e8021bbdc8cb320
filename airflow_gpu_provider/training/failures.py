"""Why a shard failed: from what its process left behind to one cause with its evidence.

A pure function of exit code, the shard's own report, its last lines and the kernel's out-of-memory counter,
so that every row of the table can be tested. The cause decides the next act: whether another process may
take the rank over, or the run ends because the same would happen again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel

#: the shard's exit code after it wrote a report; any other code comes from elsewhere
REPORTED_EXIT = 70

_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
    "insufficient shared memory",  # a data loader's worker, on a small /dev/shm
)
_ASSERT_WORDS = ("device-side assert",)
_GPU_WORDS = (
    "cuda error",
    "cudnn error",
    "cublas",
    "uncorrectable ecc",
    "nvml",
    "cuda driver",
    "gpu is lost",
    "fallen off the bus",
)
#: the driver's own number of a fault, "NVRM: Xid (PCI:0000:3b:00): 79, ..."; not the "xid" of a column
_XID = re.compile(r"\bxid\b\W*(\(pci|\d)")
_STORAGE_WORDS = ("no space left on device", "disk quota exceeded", "read-only file system")
_KILLED_WORKER = re.compile(r"dataloader worker .* killed by signal: (killed|terminated)")
_NETWORK_WORDS = (
    "connection reset",
    "connection closed",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "nccl error",
    "gloo connectfullmesh",
    "tcpstore",
)
_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
_GPU_TYPES = ("RuntimeError", "AcceleratorError", "DistBackendError")
_NETWORK_TYPES = (
    "DistBackendError",  # what NCCL says; a fault of the device is looked for first
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
)


class FailureCause(str, Enum):
    """What ended a shard."""

    GPU_FAULT = "gpu_fault"
    """The device or its driver gave an error; the device is suspect."""
    NETWORK = "network"
    """The shards could not reach each other."""
    OUT_OF_MEMORY = "out_of_memory"
    """Memory of the device or of the host ran out."""
    USER_ERROR = "user_error"
    """The author's code raised or left: it would do so on every device."""
    NON_FINITE = "non_finite"
    """The loss was NaN or infinite: going on would spread it to all shards."""
    HUNG = "hung"
    """Stopped, no heartbeat, or no step for too long; the process was ended."""
    KILLED = "killed"
    """A signal from outside ended the process."""
    CRASHED = "crashed"
    """Native code ended the process."""
    STORAGE = "storage"
    """Something could not be saved: another process would meet the same full or read-only disk."""

    @property
    def is_hopeless(self) -> bool:
        """True when the same would happen again, here and in a retry."""
        return self in (FailureCause.USER_ERROR, FailureCause.NON_FINITE)

    @property
    def ends_run(self) -> bool:
        """True when a spare could not do better, so that none is spent on it."""
        return self.is_hopeless or self is FailureCause.STORAGE

    @property
    def is_helped_by_spares(self) -> bool:
        """True when a spare in another process would not have met the same: memory and disks it shares."""
        return not self.ends_run and self is not FailureCause.OUT_OF_MEMORY


class ShardReport(BaseModel):
    """What a shard writes about itself before it ends with REPORTED_EXIT."""

    error_type: str
    message: str
    traceback: str = ""
    step: int | None = None
    shard: int | None = None
    non_finite: bool = False
    at: float = 0.0  #: by the host's clock, to tell which of several shards failed first


class ShardFailure(BaseModel):
    """One failed shard, for people and for the decision."""

    uid: str
    rank: int | None  #: None: a spare
    step: int | None
    cause: FailureCause
    evidence: str
    is_of_device: bool = False  #: out of memory: the device's, not the host's

    @property
    def sentence(self) -> str:
        """Say it in a line."""
        who = f"shard {self.rank}" if self.rank is not None else "a spare"
        at = f" at step {self.step}" if self.step is not None else ""
        return f"{who} ({self.uid}) failed{at}: {self.cause.value}: {self.evidence}"


@dataclass(frozen=True, slots=True)
class Remains:
    """What is known of a process that ended or was given up."""

    exit_code: int | None = None  #: negative: the signal; None: it was still there
    report: ShardReport | None = None
    log_tail: Sequence[str] = ()
    stopped_for_s: float | None = None  #: by a signal, when that is why it was given up
    silent_for_s: float | None = None  #: since its last heartbeat, when that is why it was given up
    stalled_for_s: float | None = None  #: since its last step, likewise
    unjoined_for_s: float | None = None  #: since it was started, without reaching its loop, likewise
    kernel_oom_kills: int = 0  #: by which the host's or cgroup's counter rose since the process started


def classify(remains: Remains) -> tuple[FailureCause, str]:
    """Return the cause and the evidence for it."""
    if remains.stopped_for_s is not None:
        return FailureCause.HUNG, f"stopped by a signal (SIGSTOP?) for {remains.stopped_for_s:.1f} s"
    if remains.silent_for_s is not None:
        return FailureCause.HUNG, f"no heartbeat for {remains.silent_for_s:.1f} s"
    if remains.stalled_for_s is not None:
        return FailureCause.HUNG, f"no step ended for {remains.stalled_for_s:.0f} s while it was computing"
    if remains.unjoined_for_s is not None:
        return FailureCause.HUNG, (
            f"it did not reach ctx.steps() within {remains.unjoined_for_s:.0f} s and the others wait for it; "
            "where building the model takes longer, raise join_timeout"
        )
    if remains.report is not None:
        return _from_report(remains.report)
    return _from_exit(remains)


def _from_report(report: ShardReport) -> tuple[FailureCause, str]:
    evidence = f"{report.error_type}: {report.message}"
    text = evidence.lower()
    if report.non_finite:
        return FailureCause.NON_FINITE, report.message
    if report.error_type == "CheckpointNotWritten":
        return FailureCause.STORAGE, report.message
    return _from_error(report.error_type, text), evidence


def cause_of(error: BaseException) -> FailureCause:
    """Return what an exception tells of its cause; USER_ERROR when it tells nothing else."""
    name = type(error).__name__
    return _from_error(name, f"{name}: {error}".lower())


def _from_error(error_type: str, text: str) -> FailureCause:
    if error_type in _MEMORY_TYPES or _has(text, _MEMORY_WORDS):
        return FailureCause.OUT_OF_MEMORY
    if _has(text, _ASSERT_WORDS):
        return FailureCause.USER_ERROR
    if error_type in _GPU_TYPES and _tells_gpu_fault(text):
        return FailureCause.GPU_FAULT
    if error_type in _NETWORK_TYPES or (error_type == "RuntimeError" and _has(text, _NETWORK_WORDS)):
        return FailureCause.NETWORK
    if error_type in ("OSError", "RuntimeError") and _has(text, _STORAGE_WORDS):
        return FailureCause.STORAGE
    if error_type == "RuntimeError" and _KILLED_WORKER.search(text):
        return FailureCause.KILLED
    return FailureCause.USER_ERROR


def _from_exit(remains: Remains) -> tuple[FailureCause, str]:
    code = remains.exit_code
    last = next((line for line in reversed(remains.log_tail) if line.strip()), "")
    hint = f"; its last line: {last.strip()[:200]}" if last else ""
    if code == -signal.SIGKILL and remains.kernel_oom_kills > 0:
        return FailureCause.OUT_OF_MEMORY, "killed by the kernel because the host's memory ran out"
    if code is not None and code < 0:
        name = _signal_name(-code)
        if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return FailureCause.KILLED, f"ended by {name} from outside"
        return _crash_cause(remains), f"ended by {name} in native code{hint}"
    if code == 0:
        return FailureCause.USER_ERROR, f"the process ended before train() returned (os._exit?){hint}"
    return _crash_cause(remains), f"exit code {code} without a report{hint}"


def _crash_cause(remains: Remains) -> FailureCause:
    text = " ".join(remains.log_tail).lower()
    return FailureCause.GPU_FAULT if _tells_gpu_fault(text) else FailureCause.CRASHED


def _tells_gpu_fault(text: str) -> bool:
    return _has(text, _GPU_WORDS) or _XID.search(text) is not None


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
