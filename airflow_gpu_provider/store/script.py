"""The statements of one transaction, sent to the database together where its driver can.

A turn of the leader makes up to a dozen statements, and waiting for each of them costs more than all they
do. On psycopg2 they are therefore rendered into one text, which PostgreSQL runs as one transaction in one
round trip; every other driver gets them one by one. In both cases all of it is written or nothing.

Statements are constants of their modules, compiled once; what differs from turn to turn are named values
(`bindparam`) and lists of ids (`one_of`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Select,
    String,
    Table,
    TypeDecorator,
    bindparam,
    insert,
    literal_column,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from airflow_gpu_provider.store.engine import writing

Statement = UpdateBase | Select[Any]
Row = Mapping[str, Any]

_FAILED = re.compile(r"gpu-requirement-(\d+)")


class Script(Protocol):
    """A transaction in the making."""

    def run(self, statement: Statement, **values: Any) -> None:
        """Change rows, however many."""

    def run_each(self, statement: Statement, rows: Sequence[Row]) -> None:
        """Run a statement once with the values of each row."""

    def require(self, statement: Statement, count: int, otherwise: Exception, **values: Any) -> None:
        """Change or lock `count` rows; with any other number nothing is written and `otherwise` raised."""

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Add rows, which all have the same columns."""

    def insert_new(self, table: Table, rows: Sequence[Row], otherwise: Exception) -> None:
        """Add rows of which none may exist; else nothing is written and `otherwise` raised."""


class Scripts:
    """Makes transactions, one at a time. On psycopg2 they share a connection that stays open."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Script]:
        """Yield a script whose statements are written, all or none, when the block ends."""
        if self._engine.driver != "psycopg2":
            with writing(self._engine) as connection:
                yield StepByStep(connection)
            return
        if self._open is None:
            # No BEGIN and COMMIT of their own: PostgreSQL makes one transaction of statements sent as one.
            self._open = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            script = OneTrip(self._open)
            yield script
            script.send()
            self._open.commit()  # ends what SQLAlchemy takes for a transaction; nothing is sent
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the connection back; the next transaction takes another."""
        if self._open is not None:
            self._open.close()
            self._open = None


class StepByStep:
    """Executes each statement at once, in a transaction that its owner began."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, statement: Statement, **values: Any) -> None:
        """Execute a statement."""
        self._connection.execute(statement, values)

    def run_each(self, statement: Statement, rows: Sequence[Row]) -> None:
        """Execute a statement with many rows."""
        self._connection.execute(statement, rows)

    def require(self, statement: Statement, count: int, otherwise: Exception, **values: Any) -> None:
        """Execute a statement and count its rows."""
        result = self._connection.execute(statement, values)
        if (len(result.all()) if isinstance(statement, Select) else result.rowcount) != count:
            raise otherwise

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Execute an insert."""
        self._connection.execute(insert(table), rows)

    def insert_new(self, table: Table, rows: Sequence[Row], otherwise: Exception) -> None:
        """Execute an insert and count what was new."""
        of_dialect = postgresql if self._connection.dialect.name == "postgresql" else sqlite
        new = of_dialect.insert(table).on_conflict_do_nothing().returning(literal_column("1"))
        if len(self._connection.execute(new, rows).all()) != len(rows):
            raise otherwise


class OneTrip:
    """Collects statements as text and sends them together. For psycopg2."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._cursor: Any = connection.connection.cursor()
        self._parts: list[bytes] = []
        self._otherwise: list[Exception] = []

    def run(self, statement: Statement, **values: Any) -> None:
        """Add a statement."""
        self._parts.append(self._text(statement, values))

    def run_each(self, statement: Statement, rows: Sequence[Row]) -> None:
        """Add a statement for each row."""
        self._parts.extend(self._text(statement, row) for row in rows)

    def require(self, statement: Statement, count: int, otherwise: Exception, **values: Any) -> None:
        """Add a statement that fails the transaction with any other number of rows."""
        text = self._text(statement, values)
        if not isinstance(statement, Select):
            text += b" RETURNING 1"
        self._require(text, count, otherwise)

    def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Add an insert."""
        self._parts.append(self._insert(table, rows))

    def insert_new(self, table: Table, rows: Sequence[Row], otherwise: Exception) -> None:
        """Add an insert that fails the transaction when a row exists."""
        text = self._insert(table, rows) + b" ON CONFLICT DO NOTHING RETURNING 1"
        self._require(text, len(rows), otherwise)

    def send(self) -> None:
        """Write everything. Raise what a requirement said, or the database's error."""
        from psycopg2.extensions import encodings

        text = b";\n".join(self._parts).decode(encodings[self._cursor.connection.encoding])
        self._cursor.close()
        try:
            self._connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        except DBAPIError as error:
            failed = _FAILED.search(str(error.orig)) if isinstance(error, DataError) else None
            if failed is not None:
                raise self._otherwise[int(failed[1])] from None
            # The error's text is logged, and would name the values of every request of the turn.
            error.statement = f"{len(self._parts)} statements, {len(text)} characters"
            raise

    def _require(self, text: bytes, count: int, otherwise: Exception) -> None:
        # A number that is none is an error, and its text says which requirement failed.
        failed = f"gpu-requirement-{len(self._otherwise)}"
        verdict = f"SELECT CAST(CASE WHEN count(*) = {count} THEN '0' ELSE '{failed}' END AS integer)"
        self._parts.append(b"WITH done AS (" + text + b") " + verdict.encode() + b" FROM done")
        self._otherwise.append(otherwise)

    def _text(self, statement: Statement, values: Row) -> bytes:
        text, fixed, binds = _compiled(statement, self._connection.dialect)
        bound = {name: _bound(bind, values[name]) for name, bind in binds.items()}
        return bytes(self._cursor.mogrify(text, {**fixed, **bound}))

    def _insert(self, table: Table, rows: Sequence[Row]) -> bytes:
        head, places, binds = _insert_into(table, tuple(rows[0]), self._connection.dialect)
        made = (
            self._cursor.mogrify(places, [_bound(bind, row[name]) for name, bind in binds.items()])
            for row in rows
        )
        return head + b",".join(made)


_Bind = Callable[[Any], Any] | None


def _bound(bind: _Bind, value: Any) -> Any:
    return value if bind is None else bind(value)


@lru_cache(maxsize=256)
def _compiled(statement: Statement, dialect: Dialect) -> tuple[str, dict[str, Any], dict[str, _Bind]]:
    """Return a statement's text, the values that it always has, and how to bind the others."""
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    fixed: dict[str, Any] = {}
    binds: dict[str, _Bind] = {}
    for parameter, name in compiled.bind_names.items():
        bind = parameter.type.dialect_impl(dialect).bind_processor(dialect)
        if parameter.required:
            binds[name] = bind
        else:
            fixed[name] = _bound(bind, parameter.effective_value)
    return compiled.string, fixed, binds


@lru_cache(maxsize=64)
def _insert_into(
    table: Table, names: tuple[str, ...], dialect: Dialect
) -> tuple[bytes, str, dict[str, _Bind]]:
    """Return an insert's beginning, the places of a row, and how to bind each column."""
    quote = dialect.identifier_preparer.quote
    columns = ", ".join(quote(name) for name in names)
    head = f"INSERT INTO {quote(table.name)} ({columns}) VALUES "
    places = f"({', '.join('%s' for _ in names)})"
    binds: dict[str, _Bind] = {
        name: table.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in names
    }
    return head.encode(), places, binds


class _Ids(TypeDecorator[Sequence[str]]):
    """A list of ids as one value: an array, or JSON where there are no arrays."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the array type of PostgreSQL, text elsewhere."""
        return dialect.type_descriptor(
            postgresql.ARRAY(String()) if dialect.name == "postgresql" else String()
        )

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        """Return what the database takes."""
        return list(value or ()) if dialect.name == "postgresql" else json.dumps(list(value or ()))


class _OneOf(FunctionElement[bool]):
    """Whether a column is one of the ids in a value."""

    inherit_cache = True
    type = Boolean()


def one_of(column: Column[str], name: str) -> ColumnElement[bool]:
    """Return the condition that `column` is one of the ids given as `name`: always the same statement."""
    return _OneOf(column, bindparam(name, type_=_Ids()))


@compiles(_OneOf)
def _in_json(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    column, ids = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({ids}))"


@compiles(_OneOf, "postgresql")
def _in_array(element: _OneOf, compiler: SQLCompiler, **options: Any) -> str:
    column, ids = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} = ANY ({ids})"
