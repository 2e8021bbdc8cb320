"""Where the next claims stand reaches the tables a few rows at a time."""

from __future__ import annotations

from typing import Any, cast

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import CyclePolicy
from airflow_gpu_provider.server.board import Board, Entry
from airflow_gpu_provider.server.standings import AT_ONCE, Standings
from airflow_gpu_provider.store.turns import TurnStore
from tests.broker.builders import NOW, fleet

from .test_hard_cases import body

WAITING = 2 * AT_ONCE + 1


class Tables:
    """What is written, one list of rows each time."""

    def __init__(self) -> None:
        self.writes: list[list[dict[str, Any]]] = []

    def note_waiting(self, rows: list[dict[str, Any]]) -> None:
        self.writes.append(rows)


def queue() -> tuple[Engine, Board]:
    """Return a fleet of one device that is taken, and who waits for it."""
    board = Board()
    for number in range(WAITING + 1):
        board.add(Entry(f"c{number:03}", body(f"t{number}"), NOW))
    claims = [entry.claim(admitted=True) for entry in board.entries.values()]
    engine = Engine(CyclePolicy(), fleet(1, 1), [], claims)
    (placement,) = engine.turn(NOW).placements
    del board.entries[placement.claim_id]
    return engine, board


def test_a_step_writes_a_few_rows_and_each_claim_once() -> None:
    engine, board = queue()
    tables = Tables()
    standings = Standings(cast("TurnStore", tables))
    standings.work_out(engine, board, NOW)
    assert all(entry.position for entry in board.entries.values()), "the board shows all at once"
    assert standings.tell() and standings.tell() and not standings.tell()
    assert [len(rows) for rows in tables.writes] == [AT_ONCE, AT_ONCE, 1]
    assert sorted(row["key"] for rows in tables.writes for row in rows) == sorted(board.entries)
    standings.work_out(engine, board, NOW)
    standings.tell()
    assert tables.writes[3:] == [[]], "what did not change is not told again"


def test_what_the_tables_were_loaded_for_is_not_told() -> None:
    engine, board = queue()
    tables = Tables()
    standings = Standings(cast("TurnStore", tables))
    standings.work_out(engine, board, NOW)
    standings.forget()
    assert not standings.tell()
    assert tables.writes == [[]]
