"""The service's store, in SQLite or any other database that SQLAlchemy supports: nine tables, no weights.

A request is stored before it is acknowledged. Every row has a tenant, and every look-up for a client names the tenant.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import sqlalchemy as sql
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

from echo2.core.errors import UserError

Row: TypeAlias = sql.Row[Any]
#: Columns, and how each is compared: equal | in | null.
Kinds: TypeAlias = tuple[tuple[str, str], ...]

metadata = MetaData()
#: 64-bit integers in every database. SQLite's INTEGER has 64 bits, and is the only type that auto-increments.
Number = BigInteger().with_variant(Integer, "sqlite")

keys = Table(
    "keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", String, unique=True, nullable=False),  # SHA-256 of the key, which is 32 random bytes
    Column("tenant", String, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("per_minute", Number, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Float),
)
#: `seen` of a session: its client is done with it; its models' directories are gone.
DONE, TIDIED = 0.0, -1.0

sessions = Table(
    "sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("finished", Float),
    Column("labels", JSON),
    Index("sessions_tenant", "tenant"),
)
models = Table(
    "models",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False),
    Column("next_number", Number, nullable=False),  # expected of the client's next request
    Column("next_operation", Number, nullable=False),  # of the next call to the back end
    Column("inflight", String),  # the directory that the model's inflight samplers read
    Column("labels", JSON),
    Index("models_tenant", "tenant"),
    Index("models_session", "session"),
)
#: Errors of a database that is gone for a while, or full.
UNREACHED = (sql.exc.OperationalError, sql.exc.InterfaceError)
OPEN = ("held", "queued")
requests = Table(
    "requests",
    metadata,
    Column("arrival", Number, primary_key=True, autoincrement=True),
    Column("id", String, unique=True, nullable=False),
    Column("tenant", String, nullable=False),
    Column("session", String, nullable=False),
    Column("target", String, nullable=False),  # a model or a sampler
    Column("kind", String, nullable=False),
    Column("number", Number),
    Column("digest", String, nullable=False),
    Column("body", LargeBinary),
    Column("operation", Number),
    Column("state", String, nullable=False),  # held | queued | done | failed; the first two are OPEN
    Column("answer", LargeBinary),
    Column("error", Text),
    Column("category", String),
    Column("created", Float, nullable=False),
    Column("ended", Float),
    Index("requests_again", "target", "number", "kind", "digest"),
    Index("requests_open", "state"),
    Index("requests_ended", "ended"),
    Index("requests_kept", "tenant", "kind", "state"),
)
samplers = Table(
    "samplers",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("base", String, nullable=False),
    Column("model", String),  # of an inflight sampler
    Column("path", String),
    Column("directory", String),
    Index("samplers_tenant", "tenant"),
    Index("samplers_session", "session"),
)
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", String, primary_key=True),
    Column("model", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("kind", String, nullable=False),  # weights | sampler_weights
    Column("name", String, nullable=False),
    Column("directory", String, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("size", Number, nullable=False),
    Column("expires", Float),
    Column("public", Boolean, nullable=False),
    Column("labels", JSON),
    Index("checkpoints_name", "model", "kind", "name", unique=True),
    Index("checkpoints_tenant", "tenant"),
)
bills = Table(
    "bills",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("requests", Number, nullable=False),
    Column("tokens", Number, nullable=False),
    Column("usd", Float, nullable=False),
)
spending = Table(  # of the sessions that have cost anything
    "spending",
    metadata,
    Column("session", String, primary_key=True),
    Column("usd", Float, nullable=False),
)
steps = Table(  # points of the curves of a model
    "steps",
    metadata,
    Column("model", String, primary_key=True),
    Column("step", Number, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("ended", Float, nullable=False),
    Column("tokens", Number, nullable=False),
    Column("loss", Float),  # of a token, mean
    Column("grad_norm", Float),
    Column("usd", Float, nullable=False),  # of the model's session so far
    Index("steps_tenant", "tenant"),
)


class Database:
    """Short statements, and transactions of several statements. For one thread."""

    def __init__(self, url: str) -> None:
        """`url`: as SQLAlchemy reads it, `sqlite:///FILE` or `postgresql+psycopg://...`.

        Raises:
            UserError: there is no such database.
        """
        try:
            self._engine = sql.create_engine(
                url, pool_pre_ping=True, hide_parameters=True
            )  # the server may have restarted
            if self._engine.dialect.name == "sqlite":
                sql.event.listen(self._engine, "connect", _prepare_sqlite)
            metadata.create_all(self._engine)
            for table in metadata.tables.values():
                for index in table.indexes:  # an earlier version's database lacks some
                    index.create(self._engine, checkfirst=True)
        except (sql.exc.SQLAlchemyError, ImportError) as error:
            raise UserError(f"The database {url!r} cannot be opened: {error}") from error
        self._open: sql.Connection | None = None
        self._when_stored: list[Callable[[], object]] = []

    def beside(self) -> Database:
        """Return another one over the same database, for another thread."""
        other = copy.copy(self)
        other._open, other._when_stored = None, []
        return other

    @contextmanager
    def transaction(self) -> Iterator[sql.Connection]:
        """Carry out all statements in the block, or none. A nested transaction is part of the outer one.

        Raises:
            UserError: a value that this kind of database does not accept, such as text with a NUL.
        """
        if self._open is not None:
            yield self._open
            return
        try:
            with self._engine.begin() as self._open:
                yield self._open
        except sql.exc.DataError as error:
            raise UserError(f"A value cannot be stored: {error.orig}") from error
        finally:
            self._open = None
            acts, self._when_stored = self._when_stored, []
        for act in acts:
            act()

    def when_stored(self, act: Callable[[], object]) -> None:
        """Call `act` once the open transaction is committed, and never if it fails; at once if none is open."""
        if self._open is None:
            act()
        else:
            self._when_stored.append(act)

    def find(self, table: Table, columns: Sequence[str] = (), **where: Any) -> Row | None:
        """Return the row with these values; None if there is none. A tuple matches any of its values."""
        rows = self.select(table, limit=1, columns=columns, **where)
        return rows[0] if rows else None

    def select(
        self,
        table: Table,
        order: str = "",
        limit: int = 1_000_000,
        offset: int = 0,
        columns: Sequence[str] = (),
        **where: Any,
    ) -> list[Row]:
        """Return the rows with these values. `order`: a column, descending after "-". `columns`: empty means all;
        `X_bytes` is the size of X.
        """
        query = _selection(table, order, tuple(columns), _kinds(where))
        with self.transaction() as connection:
            return list(connection.execute(query, {**_bound(where), "most": limit, "skipped": offset}))

    def values(self, column: Column[Any], **where: Any) -> set[Any]:
        """Return all values of a column in the rows with these values, however many. Other threads go on meanwhile, for
        they are read in parts.
        """
        query, distinct = sql.select(column).where(*_conditions(column.table, _kinds(where))), set[Any]()
        with self.transaction() as connection:
            rows = connection.execute(query.execution_options(yield_per=1000), _bound(where))
            for part in rows.scalars().partitions():
                distinct.update(part)
        return distinct

    def count(self, table: Table, **where: Any) -> int:
        """Return the number of rows with these values."""
        query = sql.select(sql.func.count()).select_from(table).where(*_conditions(table, _kinds(where)))
        with self.transaction() as connection:
            return int(connection.execute(query, _bound(where)).scalar_one())

    def count_untidied(self, table: Table, tenant: str) -> int:
        """Return the number of a tenant's sessions, or models of sessions, whose models are not deleted yet."""
        session = table.c.id if table is sessions else table.c.session
        untidied = sql.select(sessions.c.id).where(sessions.c.tenant == tenant, sessions.c.seen != TIDIED)
        query = sql.select(sql.func.count()).select_from(table).where(session.in_(untidied))
        with self.transaction() as connection:
            return int(connection.execute(query).scalar_one())

    def older(
        self, table: Table, column: str, than: float, limit: int = 1000, *, columns: Sequence[str], **where: Any
    ) -> list[Row]:
        """Return these columns of the rows with these values whose time in `column` is before `than`."""
        conditions = _conditions(table, _kinds(where))
        query = sql.select(*_columns(table, columns)).where(table.c[column] < than, *conditions).limit(limit)
        with self.transaction() as connection:
            return list(connection.execute(query, _bound(where)))

    def grouped(
        self, table: Table, by: Sequence[str], figures: Mapping[str, sql.ColumnElement[Any]], **where: Any
    ) -> list[Row]:
        """Return these figures, such as a sum, for each combination of the columns `by`."""
        groups = _columns(table, by)
        query = sql.select(*groups, *(figure.label(name) for name, figure in figures.items())).group_by(*groups)
        with self.transaction() as connection:
            return list(connection.execute(query.where(*_conditions(table, _kinds(where))), _bound(where)))

    def delete_sessions(self, ids: tuple[str, ...]) -> None:
        with self.transaction():
            self.delete(samplers, session=ids)
            self.delete(spending, session=ids)
            self.delete(sessions, id=ids)

    def delete_orphans(self, limit: int = 1000) -> None:
        """Delete the models whose session is gone and of which there is no checkpoint, with their curves."""
        is_live = sql.exists().where(sessions.c.id == models.c.session)
        is_saved = sql.exists().where(checkpoints.c.model == models.c.id)
        with self.transaction() as connection:
            rows = connection.execute(sql.select(models.c.id).where(~is_live, ~is_saved).limit(limit))
            orphans = tuple(row.id for row in rows)
            self.delete(steps, model=orphans)
            self.delete(models, id=orphans)

    def checkpoints_that_fit(
        self,
        tenant: str,
        paths: Sequence[tuple[str, str, str]] | None,
        model: str | None,
        before: float,
        keep_newest: int,
    ) -> list[str]:
        """Return the ids of all checkpoints of a tenant that fit all of this. `paths`: model, kind and name of each,
        and `model`: None: any; `keep_newest`: all but so many of each model and kind.
        """
        c = checkpoints.c
        rank = sql.func.row_number().over(partition_by=(c.model, c.kind), order_by=(c.created.desc(), c.id))
        ranked = sql.select(c.id, c.model, c.kind, c.name, c.created, rank.label("rank")).where(c.tenant == tenant)
        if model is not None:
            ranked = ranked.where(c.model == model)
        of = ranked.subquery().c
        query = sql.select(of.id).where(of.created < before, of.rank > keep_newest)
        if paths is not None:
            query = query.where(sql.tuple_(of.model, of.kind, of.name).in_(paths))
        with self.transaction() as connection:
            ids = connection.execute(query.execution_options(yield_per=1000)).scalars()
            return [one for part in ids.partitions() for one in part]

    def newest(self, ids: Sequence[str]) -> list[Row]:
        """Return the newest checkpoint of each kind of these models."""
        of_these = checkpoints.c.model.in_(ids)
        groups = checkpoints.c.model, checkpoints.c.kind
        last = sql.select(*groups, sql.func.max(checkpoints.c.created).label("at")).where(of_these).group_by(*groups)
        latest = last.subquery()
        query = sql.select(checkpoints).join(
            latest,
            sql.and_(groups[0] == latest.c.model, groups[1] == latest.c.kind, checkpoints.c.created == latest.c.at),
        )
        with self.transaction() as connection:
            return list(connection.execute(query))

    def insert(self, table: Table, **values: Any) -> None:
        with self.transaction() as connection:
            connection.execute(_insertion(table), values)

    def update(self, table: Table, where: dict[str, Any], **values: Any) -> int:
        """Change rows and return their number. A value may be an expression of columns."""
        computed = {name: value for name, value in values.items() if isinstance(value, sql.ColumnElement)}
        plain = {name: value for name, value in values.items() if name not in computed}
        query = _change(table, _kinds(where))
        if computed:
            query = query.values(computed)
        with self.transaction() as connection:
            return connection.execute(query, {**_bound(where), **plain}).rowcount

    def delete(self, table: Table, **where: Any) -> int:
        """Delete rows and return their number."""
        with self.transaction() as connection:
            query = sql.delete(table).where(*_conditions(table, _kinds(where)))
            return connection.execute(query, _bound(where)).rowcount

    def close(self) -> None:
        self._engine.dispose()


# Statements are built once and take their values as parameters: building one takes twice as long as carrying it out.


@functools.cache
def _selection(table: Table, order: str, columns: tuple[str, ...], kinds: Kinds) -> sql.Select[Any]:
    query = sql.select(*_columns(table, columns)).where(*_conditions(table, kinds))
    query = query.limit(sql.bindparam("most")).offset(sql.bindparam("skipped"))
    if order:
        column = table.c[order.removeprefix("-")]
        query = query.order_by(column.desc() if order.startswith("-") else column)
    return query


def _columns(table: Table, names: Sequence[str]) -> list[sql.ColumnElement[Any]]:
    """Return the columns of these names; all if there are none."""
    columns: list[sql.ColumnElement[Any]] = []
    for name in names or table.c.keys():
        measured = table.c.get(name.removesuffix("_bytes"))
        is_size = name not in table.c and measured is not None
        columns.append(sql.func.coalesce(sql.func.length(measured), 0).label(name) if is_size else table.c[name])
    return columns


@functools.cache
def _insertion(table: Table) -> sql.Insert:
    return sql.insert(table)


@functools.cache
def _change(table: Table, kinds: Kinds) -> sql.Update:
    return sql.update(table).where(*_conditions(table, kinds))


def _kinds(where: dict[str, Any]) -> Kinds:
    """Return how each column is compared."""
    return tuple(
        (name, "null" if value is None else "in" if isinstance(value, tuple) else "equal")
        for name, value in where.items()
    )


def _conditions(table: Table, kinds: Kinds) -> list[sql.ColumnElement[bool]]:
    conditions: list[sql.ColumnElement[bool]] = []
    for name, kind in kinds:
        column = table.c[name]
        if kind == "null":
            conditions.append(column.is_(None))
        elif kind == "in":
            conditions.append(column.in_(sql.bindparam(f"where_{name}", expanding=True)))
        else:
            conditions.append(column == sql.bindparam(f"where_{name}"))
    return conditions


def _bound(where: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the conditions."""
    return {f"where_{name}": value for name, value in where.items() if value is not None}


def _prepare_sqlite(connection: Any, _: object) -> None:
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")
