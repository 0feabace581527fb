"""The exactly-once ledger: the state and outcome of every training group, durable after `kill -9` at any instant.

Each method is one atomic transaction. The life of a group is the table `schema.TRANSITIONS`:

    issue -> open -> (deliver) delivered -> (score) ready -> (train) trained
                 |\\                  \\__ top_up -> open, keeping some rollouts
                 \\_______________ retire, with a reason ________/        \\__ fall_back -> ready, for the same step

The ledger records and decides nothing: the planner decides which worker gets a lease, which groups are stale and which
are retired. Eval groups are not recorded. Times are seconds of the head's clock. Use a ledger from one thread only.

Every row names the run's policy.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from echo2.core.errors import InvariantError, UserError, counted
from echo2.core.types import RUN_POLICY, LostRollout
from echo2.head.decide.events import HeadStarted
from echo2.head.ledger import schema
from echo2.head.ledger.schema import TRANSITIONS, open_for_writing, storable, unusable

#: Bytes of delivered groups that are kept in memory until they are trained on; the oldest go first.
RECENT_BYTES_MAX = 32 << 20

#: event -> (first part, last part) of the SQL statement that makes this transition of `TRANSITIONS`.
_ARROWS = {
    event: (
        f"UPDATE groups SET state = '{arrows[event]}'",
        "WHERE policy = ? AND number = ? AND state IN ({})".format(
            ", ".join(f"'{state}'" for state, each in TRANSITIONS.items() if event in each)
        ),
    )
    for arrows in TRANSITIONS.values()
    for event in arrows
}


class Left(NamedTuple):
    """The rest of a delivered group whose rewards failed for some rollouts, which are `lost`."""

    rollouts: bytes
    num_tokens: int
    lost: Sequence[LostRollout]


class Ledger:
    """The ledger in the file `path`, which is created if it does not exist.

    Every method raises `UserError` when the file cannot be used (disk full, locked by another process, no permission);
    the transaction is rolled back and earlier records are kept.

    Raises:
        UserError: the file cannot be used, is not a ledger, or was written by another version.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.policy = path, RUN_POLICY
        self._connection = open_for_writing(path)
        self._known_counts: dict[str, Any] | None = None  # `_counts`, read on first use
        self._counts_changed = False
        self._recent: dict[int, tuple[bytes, ...]] = {}  # number -> what `parts` returns of it
        self._recent_bytes = 0

    def close(self) -> None:
        """Close the file. Records are durable without this call."""
        self._connection.close()

    def issue(self, number: int, step: int, cursor: int, now: float) -> None:
        """Record a new group, bound to training step `step`. Numbers are consecutive from 0.

        Raises:
            InvariantError: `number` is not the next one.
        """
        with self.together():
            following = self._counts["issued"]
            if number != following:
                raise InvariantError(f"group {number} issued; the next number is {following}")
            self._execute(
                "INSERT INTO groups (policy, number, step, cursor, state, issued_at) VALUES (?, ?, ?, ?, 'open', ?)",
                (self.policy, number, step, cursor, now),
            )
            self._count("issued")

    def use_lease_ids(self, last: int) -> None:
        """Mark lease ids up to `last` as used, by leases that the ledger does not record (evaluations)."""
        with self.together():
            self._put_meta("last_lease_id", last)

    def grant(
        self,
        lease_id: int,
        number: int,
        worker_id: str,
        now: float,
        deadline: float,
        num_samples: int,
    ) -> None:
        """Record a lease on a group that has no result yet. In deterministic mode, a group with a result is leased too,
        to keep the shape of its batch.

        Raises:
            InvariantError: the group is trained or retired, or the id was used before.
        """
        with self.together():
            granted = self._execute(
                "INSERT INTO leases (lease_id, policy, number, worker_id, granted_at, deadline, num_samples) "
                "SELECT ?, policy, number, ?, ?, ?, ? FROM groups "
                "WHERE policy = ? AND number = ? AND state NOT IN ('trained', 'retired')",
                (lease_id, worker_id, now, deadline, num_samples, self.policy, number),
            )
            if granted.rowcount != 1:
                self._value(number, "state")  # raises if the group was never issued
                raise InvariantError(f"lease {lease_id} on a group that is over.\n{self._story(number)}")

    def close_lease(self, lease_id: int, outcome: str, now: float) -> None:
        """Record the end of a lease. `outcome`: accepted, expired, lost, failed, revoked, or the reason of a refusal.

        Raises:
            InvariantError: there is no such lease, or it is closed.
        """
        with self.together():
            closed = self._execute(
                "UPDATE leases SET outcome = ?, closed_at = ? WHERE lease_id = ? AND policy = ? AND outcome IS NULL",
                (outcome, now, lease_id, self.policy),
            )
            if closed.rowcount != 1:
                query = "SELECT number FROM leases WHERE lease_id = ? AND policy = ?"
                row = self._execute(query, (lease_id, self.policy)).fetchone()
                story = self._story(row["number"]) if row else "It was never granted."
                raise InvariantError(f"lease {lease_id} is not held, but closed as {outcome}.\n{story}")

    def refuse(
        self, lease_id: int, number: int, worker_id: str, reason: str, num_tokens: int, seconds: float, now: float
    ) -> None:
        """Record a refused delivery and its cost. A stranger may have invented the lease id and the group number.

        Numbers outside SQLite's range are recorded as NULL.
        """
        with self.together():
            self._execute(
                "INSERT INTO refusals (lease_id, policy, number, worker_id, reason, num_tokens, seconds, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (storable(lease_id), self.policy, storable(number), worker_id, reason, num_tokens, seconds, now),
            )
            self._count("refused", reason)

    def deliver(
        self,
        number: int,
        rollouts: bytes,
        worker_id: str,
        oldest_version: int,
        newest_version: int,
        num_tokens: int,
        seconds: float,
        now: float,
        lost: Sequence[LostRollout] = (),
    ) -> None:
        """Record a valid result for an open group. `seconds`: time spent generating it; `lost`: rollouts that it lacks.

        Raises:
            InvariantError: the group is not open.
        """
        with self.together():
            self._move(
                number,
                "deliver",
                "worker_id = ?, oldest_version = ?, newest_version = ?, num_tokens = ?, seconds = ?, delivered_at = ?",
                (worker_id, oldest_version, newest_version, num_tokens, seconds, now),
            )
            self._put_rollouts(number, rollouts, lost)

    def _put_rollouts(self, number: int, rollouts: bytes, lost: Sequence[LostRollout]) -> None:
        what = (self.policy, number, rollouts)
        self._execute("INSERT OR REPLACE INTO rollouts (policy, number, data) VALUES (?, ?, ?)", what)
        self._forget(number)
        self._remember(number, rollouts)
        for one in lost:
            self._count("lost", one.cause)

    def _trim(self, number: int, left: Left | None) -> None:
        if left is not None:
            self._put_rollouts(number, left.rollouts, left.lost)
            parameters = (left.num_tokens, self.policy, number)
            self._execute("UPDATE groups SET num_tokens = ? WHERE policy = ? AND number = ?", parameters)

    def top_up(self, number: int, num_kept: int, num_top_ups: int, left: Left | None = None) -> None:
        """Record that a group has too few rollouts and is open again, for the `num_top_ups`-th time: one that was
        delivered, or that is open since an earlier time whose lease failed.

        Raises:
            InvariantError: the group is neither.
        """
        with self.together():
            self._move(number, "top_up")
            self._trim(number, left)
            self._put_meta(f"{self.policy}.top_up.{number}", (num_kept, num_top_ups))

    def score(self, number: int, scores: bytes, is_flat: bool, now: float, left: Left | None = None) -> None:
        """Record the rewards of a delivered group. `is_flat`: the rewards are all equal.

        Raises:
            InvariantError: the group is not delivered, or already scored.
        """
        with self.together():
            self._move(number, "score", "scored_at = ?, is_flat = ?", (now, is_flat))
            self._trim(number, left)
            what = (self.policy, number, scores)
            self._execute("INSERT INTO scores (policy, number, data) VALUES (?, ?, ?)", what)
            if delivered := self._forget(number):
                self._remember(number, *delivered, scores)

    def retire(self, number: int, reason: str, now: float) -> None:
        """Record that a group will never be trained on, and the reason.

        Raises:
            InvariantError: the group was trained or retired before.
        """
        with self.together():
            self._move(number, "retire", "retired_at = ?, reason = ?", (now, reason))
            self._count("retired", reason)
            self._forget(number)
            self.forget("top_up", number)

    def train(self, step: int, lineage: int, numbers: Sequence[int], now: float) -> None:
        """Record that `step` of `lineage` was trained on exactly these groups. Idempotent.

        Raises:
            InvariantError: a group is not ready or belongs to another step; the step was reported with other groups; no
                learner of this lineage is the newest to have joined.
        """
        with self.together():
            current = schema.read_lineage(self._execute, self.policy)
            recorded = self._execute(
                "SELECT number FROM trainings WHERE policy = ? AND lineage = ? AND step = ? ORDER BY number",
                (self.policy, lineage, step),
            ).fetchall()
            if recorded and [row["number"] for row in recorded] == sorted(numbers):
                return
            if recorded or not numbers or lineage != current:
                raise InvariantError(
                    f"step {step} of lineage {lineage} trained on {sorted(numbers)}; recorded for it: "
                    f"{[row['number'] for row in recorded]}; lineage of the newest learner: {current}"
                )
            # One statement for the whole step: one per group and table would take half of the time of a step.
            these, parameters = "(SELECT value FROM json_each(?))", (self.policy, json.dumps(list(numbers)))
            ready = f"WHERE policy = ? AND number IN {these} AND state = 'ready' AND step = ?"
            moved = self._execute(f"{_ARROWS['train'][0]} {ready}", (*parameters, step))
            if moved.rowcount != len(numbers):
                wrong = [number for number in numbers if self._value(number, "state") != "trained"] or list(numbers)
                raise InvariantError(
                    f"step {step} trained on {sorted(numbers)}; {moved.rowcount} of them were ready for it.\n"
                    f"{self._story(wrong[0])}"
                )
            self._execute(
                "INSERT INTO trainings (policy, number, step, lineage, at) "
                f"SELECT policy, number, ?, ?, ? FROM groups WHERE policy = ? AND number IN {these}",
                (step, lineage, now, *parameters),
            )
            tokens = f"SELECT sum(num_tokens) FROM groups WHERE policy = ? AND number IN {these}"
            for number in numbers:
                self._forget(number)
            top_ups = "SELECT ? || value FROM json_each(?)"
            self._execute(f"DELETE FROM meta WHERE key IN ({top_ups})", (f"{self.policy}.top_up.", parameters[1]))
            self._count("trained", by=len(numbers))
            self._count("trained_tokens", by=int(self._execute(tokens, parameters).fetchone()[0]))

    def learner_joined(self, version: int, lineage: int, now: float) -> None:
        """Record that a learner joined at `version`. Groups trained at steps >= version are ready again, for the same
        step.

        Raises:
            InvariantError: the lineage is older than the newest, or not newer after a fall-back.
            UserError: the learner fell back behind the recorded checkpoints: the rollouts of the groups are gone.
        """
        with self.together():
            current = schema.read_lineage(self._execute, self.policy)
            undone = self._execute(
                "SELECT groups.number, step, data IS NULL AS is_gone "
                "FROM groups LEFT JOIN rollouts USING (policy, number) "
                "WHERE policy = ? AND state = 'trained' AND step >= ? ORDER BY groups.number",
                (self.policy, version),
            ).fetchall()
            if lineage < current or (lineage == current and undone):
                raise InvariantError(
                    f"a learner joined at version {version} in lineage {lineage}; the newest lineage is {current}, and "
                    f"{counted(len(undone), 'group')} trained from that version on"
                )
            kept_from = 1 + max((row["step"] for row in undone if row["is_gone"]), default=-1)
            if kept_from:
                raise UserError(
                    f"The learner starts at version {version}, but {self.path} keeps the groups of trained steps only "
                    f"from {kept_from} on. Resume from a checkpoint of version {kept_from} or later."
                )
            for row in undone:
                self._move(row["number"], "fall_back")
                self._count("trained", by=-1)
                self._count("trained_tokens", by=-self._value(row["number"], "num_tokens"))
            joined = (self.policy, lineage, version, now)
            self._execute("INSERT INTO joins (policy, lineage, version, at) VALUES (?, ?, ?, ?)", joined)

    def checkpoint(self, version: int, oldest_kept: int) -> None:
        """Record a saved checkpoint of `version`. No learner falls back behind `oldest_kept`, the oldest checkpoint
        kept, so the rollouts and scores of groups trained before it and of retired groups are deleted."""
        with self.together():
            self._put_meta(f"{self.policy}.checkpoint", (version, oldest_kept))
            for table in ("rollouts", "scores"):  # CROSS JOIN: scan their rows, not every group ever issued
                covered = (
                    f"SELECT number FROM {table} CROSS JOIN groups USING (policy, number) WHERE policy = ? "
                    "AND (state = 'retired' OR (state = 'trained' AND step < ?))"
                )
                self._execute(
                    f"DELETE FROM {table} WHERE policy = ? AND number IN ({covered})",
                    (self.policy, self.policy, oldest_kept),
                )

    def keep(self, kind: str, name: str | int, value: Mapping[str, Any] | str) -> None:
        """Store a record about a stranger, in place of an earlier one, by kind and name: "trust" and "rest" by ticket,
        "check" by group, "expulsion" by worker.
        """
        with self.together():
            self._put_meta(f"{self.policy}.{kind}.{name}", value)

    def forget(self, kind: str, name: str | int) -> None:
        with self.together():
            self._execute("DELETE FROM meta WHERE key = ?", (f"{self.policy}.{kind}.{name}",))

    def rollouts(self, number: int) -> bytes:
        """Return the delivered bytes of a group, followed by the bytes of its scores if it is scored. Raises as
        `parts`."""
        return b"".join(self.parts(number))

    def parts(self, number: int) -> tuple[bytes, ...]:
        """Return the delivered bytes of a group and, if it is scored, those of its scores.

        Raises:
            InvariantError: the group was not delivered, or a checkpoint covers it.
        """
        if (recent := self._recent.get(number)) is not None:
            return recent
        with self._mapped_errors():
            row = self._execute(
                "SELECT rollouts.data, scores.data FROM rollouts "
                "LEFT JOIN scores USING (policy, number) WHERE policy = ? AND number = ?",
                (self.policy, number),
            ).fetchone()
            if row is None:
                raise InvariantError(f"group {number} has no rollouts.\n{self._story(number)}")
            return tuple(part for part in row if part is not None)

    def _remember(self, number: int, *parts: bytes) -> None:
        self._recent[number] = parts
        self._recent_bytes += sum(map(len, parts))
        while self._recent_bytes > RECENT_BYTES_MAX:
            self._forget(next(iter(self._recent)))

    def _forget(self, number: int) -> tuple[bytes, ...]:
        parts = self._recent.pop(number, ())
        self._recent_bytes -= sum(map(len, parts))
        return parts

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON value under a key of the caller's."""
        with self.together():
            self._put_meta(f"caller.{key}", value)

    def get_meta(self, key: str, default: Any = None) -> Any:
        return self._meta(f"caller.{key}", default)

    @property
    def last_granted_at(self) -> float:
        return float(self._execute("SELECT coalesce(max(granted_at), 0) FROM leases", ()).fetchone()[0])

    def counts(self) -> dict[str, Any]:
        """Return counts: groups issued, trained and retired (by reason), rollouts lost (by cause), deliveries refused
        (by reason), and tokens trained on."""
        return {name: dict(count) if isinstance(count, dict) else count for name, count in self._counts.items()}

    def recover(self) -> HeadStarted:
        """Return what the ledger knows of the run, from disk alone: the groups that a learner may need, or need again
        after a fall-back (trained ones until a checkpoint covers them, retired ones of steps that may still be
        trained), and the leases that are still held. Lineage 0: there was no learner yet.
        """
        with self.together():
            lineage = schema.read_lineage(self._execute, self.policy)
            return HeadStarted(
                version=(version := schema.read_version(self._execute, self.policy, lineage)),
                lineage=lineage,
                next_number=self._counts["issued"],
                next_lease_id=schema.read_next_lease_id(self._execute, int(self._meta("last_lease_id", 0))),
                groups=schema.read_groups(self._execute, self.policy, version, self.kept("top_up")),
                leases=schema.read_leases(self._execute, self.policy),
                checkpoint_version=(checkpoint := self._meta(f"{self.policy}.checkpoint", (-1, 0)))[0],
                oldest_kept=checkpoint[1],
            )

    def sizes(self) -> dict[int, int]:
        """Return the number of rollouts of each group that is leased as a whole."""
        query = "SELECT number, num_samples FROM leases WHERE policy = ? AND outcome IS NULL"
        with self.together():
            leased_sizes = {row["number"]: row["num_samples"] for row in self._execute(query, (self.policy,))}
        return {number: size for number, size in leased_sizes.items() if str(number) not in self.kept("top_up")}

    def kept(self, kind: str) -> dict[str, Any]:
        prefix, query = f"{self.policy}.{kind}.", "SELECT key, value FROM meta WHERE substr(key, 1, ?) = ? ORDER BY key"
        with self._mapped_errors():
            rows = self._execute(query, (len(prefix), prefix))
            return {row["key"].removeprefix(prefix): json.loads(row["value"]) for row in rows}

    # ---- inside a transaction ----------------------------------------------------------------------------------------

    def _move(self, number: int, event: str, columns: str = "", values: Sequence[Any] = ()) -> None:
        """Make one transition of `TRANSITIONS`, and set these columns."""
        begin, end = _ARROWS[event]
        moved = self._execute(f"{begin}{', ' if columns else ''}{columns} {end}", (*values, self.policy, number))
        if moved.rowcount != 1:
            raise InvariantError(f"{event} of a group that is {self._value(number, 'state')}.\n{self._story(number)}")

    def _value(self, number: int, column: str) -> Any:
        query = f"SELECT {column} FROM groups WHERE policy = ? AND number = ?"
        row = self._execute(query, (self.policy, number)).fetchone()
        if row is None:
            raise InvariantError(f"group {number} of {self.policy} was never issued")
        return row[0]

    def _count(self, what: str, reason: str = "", by: int = 1) -> None:
        """Add to a count of `counts`. The new count is stored when the transaction ends."""
        counted, key = (self._counts[what], reason) if reason else (self._counts, what)
        counted[key] = counted.get(key, 0) + by
        self._counts_changed = True

    @property
    def _counts(self) -> dict[str, Any]:
        """The counts in memory, including those of the open transaction."""
        if self._known_counts is None:
            nothing: dict[str, Any] = {"issued": 0, "trained": 0, "trained_tokens": 0}
            nothing |= {"retired": {}, "refused": {}, "lost": {}}  # also in ledgers that did not count them
            self._known_counts = nothing | self._meta(f"{self.policy}.counts", {})
        return self._known_counts

    def _story(self, number: int) -> str:
        return schema.story(self._execute, self.policy, number)

    def _meta(self, key: str, default: Any) -> Any:
        with self._mapped_errors():
            row = self._execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return default if row is None else json.loads(row["value"])

    def _put_meta(self, key: str, value: Any) -> None:
        self._execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, json.dumps(value)))

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, parameters)

    def together(self) -> AbstractContextManager[None]:
        """Run everything inside as one atomic transaction; inside another one, take part in it."""
        return nullcontext() if self._in_transaction() else self._begun()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        with self._mapped_errors():
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
                if self._counts_changed:
                    self._put_meta(f"{self.policy}.counts", self._counts)
                self._execute("COMMIT")
            except BaseException:
                # After a full disk, SQLite may already have rolled back.
                if self._in_transaction():
                    self._connection.execute("ROLLBACK")
                self._recent.clear()  # what was rolled back was never delivered
                self._recent_bytes = 0
                self._known_counts = None  # stale after a rollback; read again on next use
                raise
            finally:
                self._counts_changed = False

    def _in_transaction(self) -> bool:
        return self._connection.in_transaction

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError) as error:
            raise InvariantError(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise unusable(self.path, error) from error
