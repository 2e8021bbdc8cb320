"""The agent: one process a host that tells the broker, once a second, what its devices are doing.

It holds no truth: whatever it missed while the broker was away is in the next report. It keeps trying when
the broker is down, and stops only when told to or when its token is refused. `Agent` is the loop with clock,
probe and transport passed in; `agent_cli` is the command line, `reporter` the HTTP side.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping

from airflow_gpu_provider import __version__
from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused
from airflow_gpu_provider.inventory.artifacts import ArtifactShelf
from airflow_gpu_provider.inventory.leftovers import Leftovers
from airflow_gpu_provider.inventory.neighbours import Neighbours
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases, Probe
from airflow_gpu_provider.reports import ReportAnswer, ReportBody

#: A broker that is back must hear of its fleet soon, so the pause between tries never grows beyond this.
MAX_BACKOFF_S = 5.0

Report = Callable[[ReportBody], ReportAnswer]
#: Waits so many seconds; True when the agent should stop.
Wait = Callable[[float], bool]

log = logging.getLogger(__name__)


class Agent:
    """Measures, judges, reports, again and again."""

    def __init__(
        self,
        probe: Probe,
        report: Report,
        *,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        leftovers: Leftovers | None = None,
        shelf: ArtifactShelf | None = None,
        labels: Mapping[str, str] | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        """Without ``interval_s`` the broker's answer sets the pace, starting at once a second."""
        self._probe = probe
        self._report = report
        self._fixed_interval_s = interval_s
        self._interval_s = interval_s or 1.0
        self._clock = clock
        self._leftovers = leftovers or Leftovers()
        self._shelf = shelf or ArtifactShelf()
        self._labels = labels or {}
        self._neighbours = neighbours or Neighbours()
        self._leases: Leases = NO_LEASES
        self._failures = 0
        self._down_since = 0.0
        self._last_error: str | None = None

    def measure(self) -> ReportBody:
        """Return what would be reported now; ends leftovers of ended leases."""
        nodes = self._leftovers.strike_out_holders(self._probe.read(self._leases), self._clock())
        self._neighbours.measure()
        more = {"agent_version": __version__, "artifacts": self._shelf.news(self._clock())}
        return ReportBody(
            nodes=tuple(
                self._neighbours.added_to(
                    node.model_copy(update={**more, "labels": {**self._labels, **node.labels}})
                )
                for node in nodes
            ),
            peer_plan=self._neighbours.plan,
        )

    def step(self) -> ReportAnswer:
        """Measure and report once; raises what the transport raises."""
        answer = self._report(self.measure())
        self._shelf.told()
        self._neighbours.told()
        self._neighbours.learn(answer)
        leases: dict[str, frozenset[str]] = {}
        for device in answer.leased:
            leases[device.id] = leases.get(device.id, frozenset()) | {device.lease_id}
        self._leases = leases
        self._leftovers.learn(self._leases, self._clock())
        if self._fixed_interval_s is None:
            self._interval_s = answer.report_interval_s
        return answer

    def run(self, wait: Wait) -> None:
        """Report until ``wait`` says stop. `IdentityRefused` ends it: another try cannot help.

        The schedule is absolute, so the time a report takes does not slow the pace; a slot that was missed
        (a slow broker, a suspended machine) is skipped, not made up for.
        """
        due = self._clock()
        while True:
            due = max(due + self._try_step(), self._clock())
            if wait(due - self._clock()):
                return

    def _try_step(self) -> float:
        """Take a step; return the pause from its due time to the next."""
        try:
            self.step()
        except BrokerUnavailable as error:
            return self._broker_failed(error)
        except IdentityRefused:
            raise
        except Exception as error:  # the agent must outlive whatever a driver does
            # Nothing is sent: the broker must see the node go stale rather than get a guess.
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.exception("Devices could not be measured; trying again every %g s", self._interval_s)
            return self._interval_s
        if self._failures:
            away_s = self._clock() - self._down_since
            log.info("Broker answers again after %.0f s (%d failed tries)", away_s, self._failures)
        self._failures, self._last_error = 0, None
        return self._interval_s

    def _broker_failed(self, error: BrokerUnavailable) -> float:
        """Note a failed try; one line for an outage, however long it lasts."""
        if not self._failures:
            self._down_since = self._clock()
            log.warning("%s Trying again until it answers.", error.message)
        self._failures += 1
        return float(min(self._interval_s * 2 ** min(self._failures - 1, 10), MAX_BACKOFF_S))


def main() -> int:
    """Run the command line."""
    from airflow_gpu_provider.inventory.agent_cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
