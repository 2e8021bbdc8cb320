"""The folder of a training: checkpoints that all attempts share, and one folder for each attempt.

A retry finds the checkpoints and resumes. A task that was cleared after it had delivered its result starts
anew instead of finding everything done: its old checkpoints are moved to ``previous``. That an attempt has
delivered, and to which round of tries, is written into its own folder and never taken back. A result that
Airflow did not store is asked for by another try of the same round; only another round starts anew.
"""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime, timezone
from pathlib import Path

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.run_file import write_json

DELIVERED = "delivered.json"


class RunFolder:
    """What lies where for one training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"

    def open_attempt(self, number: int, tries: str) -> Path:
        """Return a new, empty folder for an attempt. Raise InvalidRequest when the place cannot be used."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            newest = self.last_attempt()
            if newest is not None and self.is_over(newest, tries):
                self._put_aside()
            for suffix in ("", *(f"-{again}" for again in range(2, 1000))):
                folder = self.root / "attempts" / f"try-{number}{suffix}"
                if not folder.exists():
                    folder.mkdir(parents=True)
                    return folder
        except OSError as error:
            raise unusable(self.root, error) from error
        raise InvalidRequest(f"checkpoint_dir={str(self.root)!r} holds 1000 attempts; clear it.")

    def last_attempt(self) -> Path | None:
        """Return the folder of the newest attempt that got as far as a plan."""
        return next(iter(self.attempts()), None)

    def attempts(self) -> list[Path]:
        """Return the folders of all that did, of whatever task, the newest first."""
        plans = sorted(self.root.glob("attempts/*/plan.json"), key=lambda plan: plan.stat().st_mtime_ns)
        return [plan.parent for plan in reversed(plans)]

    @staticmethod
    def is_over(attempt: Path, tries: str) -> bool:
        """Say whether an attempt gave its result to another round of tries than this one."""
        file = attempt / DELIVERED
        return file.exists() and delivered_to(file.read_bytes()) != tries

    @staticmethod
    def mark_delivered(attempt: Path, result: str, tries: str) -> None:
        """Note that a round of tries was given the result: another round means to start anew."""
        write_json(attempt / DELIVERED, delivery(result, tries))

    def _put_aside(self) -> None:
        """Move what there is; repeated, for a try that was killed before it had a plan, it moves nothing."""
        previous = self.root / "previous"
        if self.checkpoints.exists():
            shutil.rmtree(previous, ignore_errors=True)
            self.checkpoints.rename(previous)


def unusable(root: Path, error: OSError) -> InvalidRequest:
    """Return what to say when a training's folder cannot be used."""
    return InvalidRequest(
        f"checkpoint_dir={str(root)!r} cannot be used: {error.strerror or error}; give a folder in which the "
        "workers may write."
    )


def delivery(result: str, tries: str) -> str:
    """Return what is noted of a result that was handed over; no two notes are alike."""
    now = datetime.now(timezone.utc).isoformat()
    return f'{{"at": "{now}", "tries": {json.dumps(tries)}, "result": {result}}}'


def delivered_to(note: bytes) -> str | None:
    """Return to which round of tries that was; None = it cannot be read."""
    try:
        return str(json.loads(note)["tries"])
    except (ValueError, KeyError, TypeError):
        return None


def folder_name(text: str) -> str:
    """Return ``text`` (a run id with its colons, say) as one harmless folder name."""
    return re.sub(r"[^\w.+=-]", "_", text).lstrip(".") or "_"
