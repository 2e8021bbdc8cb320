"""The folder of a training: checkpoints that all attempts share, and one folder for each attempt.

A retry finds the checkpoints and resumes. A task that was cleared after it had delivered its result starts
anew instead of finding everything done: its old checkpoints are moved to ``previous``. That an attempt has
delivered is written into its own folder and never taken back, so no other one can hand its result over again.
Without torch.
"""

from __future__ import annotations

import re
import shutil
from datetime import datetime, timezone
from pathlib import Path

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.run_file import write_json

_DELIVERED = "delivered.json"


class RunFolder:
    """What lies where for one training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"

    def open_attempt(self, number: int) -> Path:
        """Return a new, empty folder for an attempt. Raise InvalidRequest when the place cannot be used."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            newest = self.last_attempt()
            if newest is not None and self.is_delivered(newest):
                self._put_aside()
            for suffix in ("", *(f"-{again}" for again in range(2, 1000))):
                folder = self.root / "attempts" / f"try-{number}{suffix}"
                if not folder.exists():
                    folder.mkdir(parents=True)
                    return folder
        except OSError as error:
            raise InvalidRequest(
                f"checkpoint_dir={str(self.root)!r} cannot be used: {error.strerror or error}; give a folder "
                "in which the workers may write."
            ) from error
        raise InvalidRequest(f"checkpoint_dir={str(self.root)!r} holds 1000 attempts; clear it.")

    def last_attempt(self) -> Path | None:
        """Return the folder of the newest attempt that got as far as a plan."""
        plans = sorted(self.root.glob("attempts/*/plan.json"), key=lambda plan: plan.stat().st_mtime_ns)
        return plans[-1].parent if plans else None

    @staticmethod
    def is_delivered(attempt: Path) -> bool:
        """Say whether the result of an attempt reached Airflow."""
        return (attempt / _DELIVERED).exists()

    @staticmethod
    def mark_delivered(attempt: Path, result: str) -> None:
        """Note that the result reached Airflow: another run of the same task means to start anew."""
        now = datetime.now(timezone.utc).isoformat()
        write_json(attempt / _DELIVERED, f'{{"at": "{now}", "result": {result}}}')

    def _put_aside(self) -> None:
        """Move what there is; repeated, for a try that was killed before it had a plan, it moves nothing."""
        previous = self.root / "previous"
        if self.checkpoints.exists():
            shutil.rmtree(previous, ignore_errors=True)
            self.checkpoints.rename(previous)


def folder_name(text: str) -> str:
    """Return ``text`` (a run id with its colons, say) as one harmless folder name."""
    return re.sub(r"[^\w.+=-]", "_", text).lstrip(".") or "_"
