"""The statements of one transaction, sent to the database together where its driver can.

A turn of the leader makes up to a dozen statements, and waiting for each of them costs more than all they
do. On psycopg2 they are therefore rendered into one text, which PostgreSQL runs as one transaction in one
round trip (`one_trip`); every other driver gets them one by one. In both cases all is written or nothing.

Statements are constants of their modules, compiled once; what differs from turn to turn are named values
(`bindparam`) and lists of ids (`one_of`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.one_trip import OneTrip, Prepared, Row, Statement


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
        self._prepared = Prepared()

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
            script = OneTrip(self._open, self._prepared)
            yield script
            script.send()
            self._open.commit()  # ends what SQLAlchemy takes for a transaction; nothing is sent
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the connection back; the next transaction takes another."""
        if self._open is not None:
            # Not back to the pool: nobody else knows what is prepared on it.
            self._open.invalidate()
            self._open.close()
            self._open = None
            self._prepared.names.clear()


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
