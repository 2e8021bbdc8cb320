"""The broker of one replica: its tables, its view of the fleet, its bell and its part in the election.

The routes are thin: what they do is a method here, so that the same broker can be driven without HTTP.
Deciding happens in `leader`, on the thread that `start` starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.auth import check_lease_secret, lease_secret
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.leader import Leader
from airflow_gpu_provider.server.reconciler import TaskStates
from airflow_gpu_provider.server.wakeup import Wakeup
from airflow_gpu_provider.store.decisions import DecisionStore
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.leadership import Leadership
from airflow_gpu_provider.store.nodes import NodeStore
from airflow_gpu_provider.store.repository import ClaimRow, Repository, StoredLease, task_key
from airflow_gpu_provider.wire import (
    ClaimBody,
    ClaimState,
    ClaimView,
    DeviceReport,
    DeviceView,
    LeasedDevice,
    LeaseView,
    NodeReport,
    ReleaseBody,
    RenewBody,
    ReportAnswer,
    ReportBody,
)

_SQLITE_LEADER_TTL_S = 6.0


def utc_now() -> datetime:
    """Return the time; the only clock of the broker."""
    return datetime.now(timezone.utc)


class Broker:
    """One replica."""

    def __init__(
        self,
        settings: Settings,
        *,
        task_states: TaskStates | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self.settings = settings
        self.signing_key = settings.signing_key()
        self.clock = clock
        self.engine = make_engine(settings.database_url())
        self.repository = Repository(self.engine)
        self.nodes = NodeStore(self.engine)
        self.wakeup = Wakeup()
        self.mirror = FleetMirror(
            stale_after_s=settings.stale_after_s, forget_after_s=settings.forget_nodes_after_s
        )
        # One process writes to SQLite: fewer heartbeats disturb Airflow's own writes less.
        ttl_s = settings.leader_ttl_s
        if self.engine.dialect.name == "sqlite":
            ttl_s = max(ttl_s, _SQLITE_LEADER_TTL_S)
        holder = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
        self.leadership = Leadership(self.engine, holder, ttl_s)
        self.leader = Leader(
            settings=settings,
            leadership=self.leadership,
            decisions=DecisionStore(self.engine),
            repository=self.repository,
            nodes=self.nodes,
            mirror=self.mirror,
            wakeup=self.wakeup,
            clock=clock,
            task_states=task_states,
        )

    def start(self) -> None:
        """Load the fleet and start the leader's loop."""
        self.mirror.merge(self.nodes.load())
        self.leader.start()

    def stop(self) -> None:
        """Stop the loop, resign and close the database."""
        self.leader.stop()
        self.engine.dispose()

    # -- claims
    def submit(self, body: ClaimBody) -> str:
        """Store a claim; return its id."""
        now = self.clock()
        claim_id = self.repository.submit(body, now=now, usable=self._usable(now))
        self.wakeup.ring_leader()
        return claim_id

    def views(self, claim_ids: Sequence[str], *, with_lease: bool = False) -> list[ClaimView]:
        """Return where these claims stand; `with_lease` collects the leases of the granted ones."""
        return [self._view(row, with_lease) for row in self.repository.claims(claim_ids)]

    def cancel(self, claim_id: str) -> bool:
        """Withdraw a claim and whatever it holds."""
        cancelled = self.repository.cancel(claim_id, now=self.clock())
        self.wakeup.ring_leader()
        self.wakeup.ring_waiters()
        return cancelled

    # -- leases
    def renew(self, lease_id: str, body: RenewBody) -> datetime:
        """Keep a lease. Raise IdentityRefused or LeaseLost."""
        check_lease_secret(self.signing_key, lease_id, body.epoch, body.secret)
        return self.repository.renew(lease_id, body.epoch, now=self.clock(), ttl_s=self.settings.lease_ttl_s)

    def release(self, lease_id: str, body: ReleaseBody) -> bool:
        """Give a lease back. Raise IdentityRefused or LeaseLost."""
        check_lease_secret(self.signing_key, lease_id, body.epoch, body.secret)
        released = self.repository.release(
            lease_id,
            body.epoch,
            now=self.clock(),
            outcome=body.outcome,
            failed_devices=body.failed_devices,
        )
        self.wakeup.ring_leader()
        return released

    # -- agents
    def report(self, body: ReportBody) -> ReportAnswer:
        """Fold an agent's report; answer which of its devices are leased."""
        now = self.clock()
        if self.mirror.fold(body.nodes, now):
            self.wakeup.ring_leader()
        reported = {device.id for node in body.nodes for device in node.devices}
        leased = [
            LeasedDevice(id=device, lease_id=held.row.id)
            for held, _claim in self.repository.live_leases()
            for device in (*held.devices, *held.spares)
            if device in reported
        ]
        return ReportAnswer(leased=leased, report_interval_s=self.settings.report_interval_s)

    def _usable(self, now: datetime) -> set[str]:
        fleet = self.mirror.fleet(now)
        return {d.id for n in fleet.nodes if not n.unavailable for d in n.devices if not d.unavailable}

    def _view(self, row: ClaimRow, with_lease: bool) -> ClaimView:
        now = self.clock()
        lease = self._collect(row.id, now) if with_lease and row.state == ClaimState.GRANTED.value else None
        expected_at = row.expected_at
        return ClaimView(
            claim_id=row.id,
            key=task_key(row),
            state=ClaimState(row.state),
            reason_code=row.reason_code,
            reason=row.reason,
            position=row.position,
            starts_in_s=None if expected_at is None else max(0.0, (expected_at - now).total_seconds()),
            lease=lease,
        )

    def _collect(self, claim_id: str, now: datetime) -> LeaseView | None:
        held = self.repository.lease_of(claim_id, now=now, ttl_s=self.settings.lease_ttl_s)
        if held is None:
            return None
        known = {
            device.id: _device_view(device, stored.report)
            for stored in self.mirror.stored(now)
            for device in stored.report.devices
        }
        if any(device not in known for device in (*held.devices, *held.spares)):
            # The agent stopped reporting a leased device: nobody can work on it.
            self.repository.cancel(claim_id, now=now, reason="device_gone")
            return None
        return self._lease_view(held, known)

    def _lease_view(self, held: StoredLease, known: Mapping[str, DeviceView]) -> LeaseView:
        row = held.row
        return LeaseView(
            lease_id=row.id,
            claim_id=row.claim_id,
            epoch=row.epoch,
            secret=lease_secret(self.signing_key, row.id, row.epoch),
            devices=[known[d] for d in held.devices],
            spares=[known[d] for d in held.spares],
            match_degree=row.match_degree,
            granted_at=row.granted_at,
            expires_at=row.expires_at,
            ttl_s=self.settings.lease_ttl_s,
        )


def _device_view(device: DeviceReport, node: NodeReport) -> DeviceView:
    return DeviceView(
        id=device.id,
        node=node.name,
        host=node.host,
        model=device.model,
        memory_mib=device.memory_mib,
        tflops=device.tflops,
        simulated=device.simulated,
    )
