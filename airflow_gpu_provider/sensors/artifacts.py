"""Wait until pretrained models and data sets are there and complete.

A task that starts on half a data set trains on half a data set; `artifact_state` says what complete means.
Waits in the triggerer when deferrable, in the worker otherwise, and always says what it waits for. Airflow's
``timeout`` is the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, conf
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.sensors.artifact_state import ArtifactWatch
from airflow_gpu_provider.triggers.artifacts import ArtifactTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class ArtifactSensor(BaseSensorOperator):
    """
    Succeed when every path holds a complete file or folder.

    A folder is complete at once when it holds ``_SUCCESS`` or a ``SHA256SUMS`` that fits; anything else when
    it did not change between two looks. Files that end in .tmp, .incomplete or .part are still being written.

    :param paths: absolute paths of files or folders on this worker's (and, when deferrable, the triggerer's)
        disk or a shared one; a path, a list of them, or a mapping of names to paths (templated)
    :param deferrable: wait in the triggerer instead of a worker slot
    """

    template_fields: Sequence[str] = ("paths",)
    ui_color = "#e6f1d8"

    def __init__(
        self,
        *,
        paths: str | Sequence[str] | dict[str, str],
        deferrable: bool | None = None,
        poke_interval: float = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.paths = paths
        if deferrable is None:
            deferrable = conf.getboolean("operators", "default_deferrable", fallback=False)
        self.deferrable = deferrable
        self._watch: ArtifactWatch | None = None

    def execute(self, context: Context) -> Any:
        """Look once; what is not complete is waited for."""
        if not self.deferrable:
            return super().execute(context)
        paths = self._checked_paths()
        if not (missing := ArtifactWatch(paths).look()):
            self.log.info("Complete: %s", ", ".join(paths))
            return None
        self.log.info("Waiting for artifacts: %s", "; ".join(missing))
        self.defer(
            trigger=ArtifactTrigger(paths, self._interval_s()),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )
        return None

    def poke(self, context: Context) -> bool:
        """Look once more."""
        if self._watch is None:
            self._watch = ArtifactWatch(self._checked_paths())
        missing = self._watch.look()
        if missing:
            self.log.info("Waiting for artifacts: %s", "; ".join(missing))
        return not missing

    def execute_complete(self, context: Context, event: dict[str, Any]) -> None:
        """Go on when the trigger has fired."""
        self.log.info("Complete: %s", ", ".join(event["paths"]))

    def _interval_s(self) -> float:
        interval = self.poke_interval
        return interval.total_seconds() if isinstance(interval, timedelta) else float(interval)

    def _checked_paths(self) -> list[str]:
        given = self.paths
        paths = (
            [given] if isinstance(given, str) else list(given.values() if isinstance(given, dict) else given)
        )
        wrong = [path for path in paths if not isinstance(path, str) or not path.startswith("/")]
        if wrong or not paths:
            raise AirflowFailException(
                f"paths={given!r}: allowed are absolute paths of files or folders, at least one; "
                f"{f'correct {wrong[0]!r}' if wrong else 'name one'}, for example '/data/datasets/wikitext'."
            )
        return paths
