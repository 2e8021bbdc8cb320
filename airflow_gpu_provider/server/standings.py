"""Where the next claims stand, worked out once a second and told to the tables a few at a time.

When one claim of a long queue starts, all behind it move up: hundreds of rows. Written at once they would
hold up the grants of the same thread, so that each step of the leader writes a few, between two turns. The
board shows all of them at once; people who ask another replica read the tables and see them a little later.
Used by the leader's thread only.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.server.board import Board, Entry
from airflow_gpu_provider.server.places import WORKED_OUT
from airflow_gpu_provider.store.turns import TurnStore

AT_ONCE = 16  #: rows a step, so that no grant waits for more


class Standings:
    """What the tables still have to be told."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._untold: dict[str, Entry] = {}

    def work_out(self, engine: Engine, board: Board, now: datetime) -> None:
        """Note on the board where the next claims stand, for people and for who wakes before its turn."""
        for waiting in engine.waiting(now, limit=WORKED_OUT):
            entry = board.entries.get(waiting.claim_id)
            if entry is None or entry.held is not None:
                continue
            starts = waiting.starts_in_s
            expected_at = None if starts is None else now + timedelta(seconds=starts)
            if entry.note(waiting, expected_at):
                self._untold[entry.claim_id] = entry

    def tell(self) -> bool:
        """Write some of what changed; return whether more is left. Raise SQLAlchemyError."""
        told = [self._untold.pop(claim_id) for claim_id in list(self._untold)[:AT_ONCE]]
        self._store.note_waiting([entry.note_row() for entry in told if entry.held is None])
        return bool(self._untold)

    def forget(self) -> None:
        """Leave the rest untold: the board was taken from the tables again."""
        self._untold.clear()
