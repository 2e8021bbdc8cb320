"""The outcome of each stage of each product, written once and read by retries, reruns and the summary.

One small JSON file per (stage, sku) and run, replaced atomically. An attempt is written *before* its work
begins: a process that is killed leaves a RUNNING outcome, so a product that kills its process is counted and
put aside after `MAX_ATTEMPTS` like one that raises. Next step: `summary`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from airflow_gpu_provider.catalog.atomic import write_json
from airflow_gpu_provider.catalog.layout import RunFolders

log = logging.getLogger(__name__)

#: A third failure of the same product on the same input is the product's fault, not bad luck.
MAX_ATTEMPTS = 3


class Status(str, Enum):
    """How far one stage of one product came."""

    RUNNING = "running"
    """Begun; when nobody works on it any more, its process was killed."""
    DONE = "done"
    """The stage function returned."""
    UNUSABLE = "unusable"
    """The input is bad; never tried again in this run."""
    FAILED = "failed"
    """The stage function raised, or killed its process too often."""
    INTERRUPTED = "interrupted"
    """Stopped from outside (lease lost, disk full); the attempt does not count."""

    @property
    def is_final(self) -> bool:
        """Whether a retry leaves it alone."""
        return self in (Status.DONE, Status.UNUSABLE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one stage of one product version. Times are ISO 8601 in UTC."""

    sku: str
    version: str
    stage: str
    status: Status
    attempt: int
    fingerprint: str
    started_at: str
    finished_at: str | None = None
    seconds: float | None = None
    device: str = "cpu"
    device_model: str = "CPU"
    figures: Mapping[str, object] = field(default_factory=dict)
    reason: str | None = None
    run_id: str = ""

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Outcome:
        """Read what `as_json` wrote; unknown keys of a later version are ignored."""
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        return replace(cls(**known), status=Status(known["status"]))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Ledger:
    """All outcomes of one run."""

    folders: RunFolders

    def read(self, stage: str, sku: str) -> Outcome | None:
        """Return the outcome, or None when the stage was never begun."""
        return read_outcome(self.folders.outcome(stage, sku))

    def write(self, outcome: Outcome) -> None:
        """Replace the outcome."""
        write_json(self.folders.outcome(outcome.stage, outcome.sku), outcome.as_json())


def read_outcome(path: Path) -> Outcome | None:
    """Read one outcome. A damaged file counts as none: the work is then done again, never believed."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return Outcome.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        log.warning("outcome %s is damaged (%s); its product is done again", path, error)
        return None


def now_text() -> str:
    """Return the time as the ledger writes it."""
    return datetime.now(timezone.utc).isoformat()
