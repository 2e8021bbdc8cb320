"""Entries as the tables have them: for replicas that do not lead, and for a leader that starts anew.

Each answer is of one moment: a claim and what it holds are read together, so that no lease which ends or
passes on meanwhile shows as held by nobody. The next step is the board, or a view.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.server.board import Entry, entry_of
from airflow_gpu_provider.store.repository import Repository


class StoredEntries:
    """The claims of the tables."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def waiting_or_held(self) -> list[Entry]:
        """Return the claims that wait, next first, then those that hold devices, oldest first."""
        return [entry_of(row, held) for row, held in self._repository.open_claims()]

    def of(self, claim_ids: Sequence[str]) -> list[Entry]:
        """Return these claims, unknown ones left out."""
        return [entry_of(row, held) for row, held in self._repository.claims_and_leases(claim_ids)]

    def one(self, claim_id: str) -> Entry:
        """Return a claim; raise InvalidRequest for an unknown one."""
        for entry in self.of([claim_id]):
            return entry
        raise InvalidRequest(f"The broker knows no claim {claim_id}.", reason="unknown_claim")
