"""Statements collected as text and sent to PostgreSQL in one round trip, which it runs as one transaction.

Each statement is prepared once on the connection, so that a turn costs the database neither parsing nor
planning: half of what it used to do. Behind a pool that hands each transaction to another session, prepared
statements get lost; nothing of that turn is written then, it is sent once more as plain text, and so is every
later one. The next step is `script`, which decides when this is used. For psycopg2.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect, Select, Table
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import UpdateBase

from airflow_gpu_provider.store.engine import BOUNDED

Statement = UpdateBase | Select[Any]
Row = Mapping[str, Any]
_Bind = Callable[[Any], Any] | None

_FAILED = re.compile(r"gpu-requirement-(\d+)")
_LOST = ("26000", "42P05")  # a prepared statement that is not there, or is there unexpectedly
#: All is found by its key. A plan made while the tables were empty would read them whole for ever.
_BY_KEY = f"{BOUNDED};\nSET LOCAL plan_cache_mode = force_generic_plan;\nSET LOCAL enable_seqscan = off"


@dataclass(frozen=True, slots=True)
class Sentence:
    """A statement's text with `%(name)s` for what differs each time, and how to bind that."""

    text: str
    binds: dict[str, _Bind]
    name: str
    prepare: str  #: the statement that prepares it
    execute: str  #: the statement that executes it then


@dataclass(slots=True)
class Prepared:
    """What is prepared on a connection."""

    is_possible: bool = True
    names: set[str] = field(default_factory=set)


class OneTrip:
    """A transaction in the making."""

    def __init__(self, connection: Connection, prepared: Prepared) -> None:
        self._connection = connection
        self._prepared = prepared
        self._cursor: Any = connection.connection.cursor()
        self._parts: list[tuple[Sentence, Row]] = []
        self._otherwise: list[Exception] = []

    def run(self, statement: Statement, **values: Any) -> None:
        """Add a statement."""
        self._add(_sentence(statement, self._connection.dialect), values)

    def run_each(self, statement: Statement, rows: Sequence[Row]) -> None:
        """Add a statement for each row."""
        for row in rows:
            self._add(_sentence(statement, self._connection.dialect), row)

    def require(self, statement: Statement, count: int, otherwise: Exception, **values: Any) -> None:
        """Add a statement that fails the transaction with any other number of rows."""
        sentence = _sentence(statement, self._connection.dialect, is_counted=True)
        self._add(sentence, {**values, **self._requirement(count, otherwise)})

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Add an insert."""
        sentence = _insert(table, tuple(rows[0]), self._connection.dialect)
        self._add(sentence, {"gpu_rows": _as_json(rows)})

    def insert_new(self, table: Table, rows: Sequence[Row], otherwise: Exception) -> None:
        """Add an insert that fails the transaction when a row exists."""
        sentence = _insert(table, tuple(rows[0]), self._connection.dialect, is_counted=True)
        self._add(sentence, {"gpu_rows": _as_json(rows), **self._requirement(len(rows), otherwise)})

    def send(self) -> None:
        """Write everything. Raise what a requirement said, or the database's error."""
        try:
            if self._prepared.is_possible and self._sent_prepared():
                return
            self._execute([sentence.text for sentence, _ in self._parts])
        except DBAPIError as error:
            failed = _FAILED.search(str(error.orig)) if isinstance(error, DataError) else None
            if failed is not None:
                raise self._otherwise[int(failed[1])] from None
            raise
        finally:
            self._cursor.close()

    def _sent_prepared(self) -> bool:
        """Write everything by prepared statements; return False where they get lost."""
        try:
            new = {each.name: each for each, _ in self._parts if each.name not in self._prepared.names}
            if new:
                self._run(";\n".join(sentence.prepare for sentence in new.values()))
                self._prepared.names.update(new)
            self._execute([sentence.execute for sentence, _ in self._parts])
        except DBAPIError as error:
            if getattr(error.orig, "pgcode", None) not in _LOST:
                raise
            self._prepared.is_possible = False
            return False
        return True

    def _execute(self, texts: Sequence[str]) -> None:
        from psycopg2.extensions import encodings

        parts = (
            self._cursor.mogrify(
                text, {name: _bound(bind, row[name]) for name, bind in sentence.binds.items()}
            )
            for text, (sentence, row) in zip(texts, self._parts, strict=True)
        )
        encoding = encodings[self._cursor.connection.encoding]
        self._run(b";\n".join((_BY_KEY.encode(), *parts)).decode(encoding))

    def _run(self, text: str) -> None:
        try:
            self._connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        except DBAPIError as error:
            # The error's text is logged, and would name the values of every request of the turn.
            error.statement = f"{len(self._parts)} statements, {len(text)} characters"
            raise

    def _add(self, sentence: Sentence, values: Row) -> None:
        self._parts.append((sentence, values))

    def _requirement(self, count: int, otherwise: Exception) -> dict[str, Any]:
        self._otherwise.append(otherwise)
        return {"gpu_count": count, "gpu_failed": f"gpu-requirement-{len(self._otherwise) - 1}"}


def _bound(bind: _Bind, value: Any) -> Any:
    return value if bind is None else bind(value)


def _as_json(rows: Sequence[Row]) -> str:
    return json.dumps([dict(row) for row in rows], default=_moment)


def _moment(value: object) -> str:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{value!r} is no aware moment")
    return value.isoformat()


@lru_cache(maxsize=256)
def _sentence(statement: Statement, dialect: Dialect, is_counted: bool = False) -> Sentence:
    """Return a statement's text; `is_counted`: it fails with another number of rows than `gpu_count`."""
    from psycopg2.extensions import QuotedString

    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    text, binds = compiled.string, {}
    for parameter, name in compiled.bind_names.items():
        bind = parameter.type.dialect_impl(dialect).bind_processor(dialect)
        if parameter.required:
            binds[name] = bind
        else:
            value = _bound(bind, parameter.effective_value)
            fixed = QuotedString(value).getquoted().decode() if isinstance(value, str) else _literal(value)
            text = text.replace(f"%({name})s", fixed.replace("%", "%%"))
    if is_counted and not isinstance(statement, Select):
        text += " RETURNING 1"
    return _made(text, binds, is_counted)


def _literal(value: Any) -> str:
    from psycopg2.extensions import adapt

    return str(adapt(value).getquoted().decode())


@lru_cache(maxsize=64)
def _insert(table: Table, names: tuple[str, ...], dialect: Dialect, is_counted: bool = False) -> Sentence:
    """Return an insert of rows that are given as JSON, which costs less than to quote each value."""
    quote = dialect.identifier_preparer.quote
    columns, into = ", ".join(quote(name) for name in names), quote(table.name)
    rows = f"json_populate_recordset(CAST(NULL AS {into}), CAST(%(gpu_rows)s AS json))"
    text = f"INSERT INTO {into} ({columns}) SELECT {columns} FROM {rows}"
    if is_counted:
        text += " ON CONFLICT DO NOTHING RETURNING 1"
    return _made(text, {"gpu_rows": None}, is_counted)


def _made(text: str, binds: Mapping[str, _Bind], is_counted: bool) -> Sentence:
    if is_counted:
        # A number that is none is an error, and its text says which requirement failed.
        verdict = "CAST(CASE WHEN count(*) = %(gpu_count)s THEN '0' ELSE %(gpu_failed)s END AS integer)"
        text = f"WITH done AS ({text}) SELECT {verdict} FROM done"
        binds = {**binds, "gpu_count": None, "gpu_failed": None}
    numbered = text % {name: f"${number}" for number, name in enumerate(binds, 1)}
    name = f"gpu_{hashlib.sha256(numbered.encode()).hexdigest()[:20]}"
    values = f" ({', '.join(f'%({each})s' for each in binds)})" if binds else ""
    return Sentence(text, dict(binds), name, f"PREPARE {name} AS {numbered}", f"EXECUTE {name}{values}")
