"""The exactly-once ledger: what became of every train group, durable after ``kill -9`` at any instant.

Each method is one transaction: it happened wholly or not at all. The life of a group is the table `schema.TRANSITIONS`:

    issue -> open -> (deliver) delivered -> (score) ready -> (train) trained
                 \\_______________ retire, with a reason ________/        \\__ fall_back -> ready, for the same step

The ledger records, it decides nothing: who gets a lease, what is stale and what is retired is `control/`'s business.
Eval groups are not in it. Times are seconds of the head's clock. One thread uses a ledger.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

from echo2.buffer.records import GroupRecord, LeaseRecord, LedgerState
from echo2.buffer.schema import TRANSITIONS, open_for_writing, unusable
from echo2.errors import InvariantError, PeerError, UserError
from echo2.types import Portion

MAX_INTEGER = (1 << 63) - 1  # SQLite's
MAX_PAYLOAD_BYTES = 256 << 20  # above any message the transport takes; SQLite's own limit is 1 GB

#: What a `GroupRecord` holds.
_COLUMNS = "number, step, cursor, state, oldest_version, newest_version, num_tokens, worker_id, coalesce(reason, '')"


class Ledger:
    """Opens the ledger at `path`, or creates it.

    Every method raises `UserError` when the file cannot be used (disk full, locked by another process, no permission):
    the transaction is undone and nothing recorded is lost.

    Raises:
        UserError: the file cannot be used, is no ledger, or was written by another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = open_for_writing(path)

    def close(self) -> None:
        """Close the file. What was recorded is safe without it."""
        self._connection.close()

    def issue(self, number: int, step: int, cursor: int, now: float) -> None:
        """A new group, bound to training step `step`; numbers follow each other from 0.

        Raises:
            InvariantError: `number` is not the next one.
        """
        with self._transaction():
            following = self._next("number", "groups", first=0)
            if number != following:
                raise InvariantError(f"group {number} issued; the next number is {following}")
            self._execute(
                "INSERT INTO groups (number, step, cursor, state, issued_at) VALUES (?, ?, ?, 'open', ?)",
                (number, step, cursor, now),
            )
            # Lets the audit miss the newest group, too.
            self._put_meta("num_issued", number + 1)

    def grant(
        self,
        lease_id: int,
        number: int,
        worker_id: str,
        now: float,
        deadline: float,
        num_samples: int,
        first_sample: int = 0,
    ) -> None:
        """A lease on a group without a result, or on the attempts of it from `first_sample` on; in deterministic mode
        also on one that has a result and is sampled again for the sake of its batch's shape.

        Raises:
            InvariantError: the group is trained or retired, or the id was used before.
        """
        with self._transaction():
            if self._group(number).state in ("trained", "retired"):
                raise InvariantError(f"lease {lease_id} on a group that is over.\n{self._story(number)}")
            self._execute(
                "INSERT INTO leases (lease_id, number, worker_id, granted_at, deadline, first_sample, num_samples) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (lease_id, number, worker_id, now, deadline, first_sample, num_samples),
            )

    def close_lease(self, lease_id: int, outcome: str, now: float) -> None:
        """The end of a lease: accepted, expired, lost, failed, revoked, or why its delivery was refused.

        Raises:
            InvariantError: there is no such lease, or it is closed.
        """
        with self._transaction():
            closed = self._execute(
                "UPDATE leases SET outcome = ?, closed_at = ? WHERE lease_id = ? AND outcome IS NULL",
                (outcome, now, lease_id),
            )
            if closed.rowcount != 1:
                row = self._execute("SELECT number FROM leases WHERE lease_id = ?", (lease_id,)).fetchone()
                story = self._story(row["number"]) if row else "It was never granted."
                raise InvariantError(f"lease {lease_id} is not held, but closed as {outcome}.\n{story}")

    def refuse(
        self, lease_id: int, number: int, worker_id: str, reason: str, num_tokens: int, seconds: float, now: float
    ) -> None:
        """A delivery that was refused, with what it cost. Lease and group may be inventions of a stranger.

        Numbers that no ledger can hold are recorded as NULL.
        """
        with self._transaction():
            self._execute(
                "INSERT INTO refusals (lease_id, number, worker_id, reason, num_tokens, seconds, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (_storable(lease_id), _storable(number), worker_id, reason, num_tokens, seconds, now),
            )

    def keep_portion(self, portion: Portion, payload: bytes) -> None:
        """A valid result for some attempts of an open group.

        Raises:
            InvariantError: the group is not open, or has a result for these attempts.
            PeerError: "oversized".
        """
        _check_size(portion.number, payload)
        with self._transaction():
            if self._group(portion.number).state != "open":
                raise InvariantError(f"a portion of a group that is not open.\n{self._story(portion.number)}")
            self._execute("INSERT INTO portions VALUES (?, ?, ?, ?, ?, ?, ?)", (*astuple(portion), payload))

    def portions(self, number: int) -> list[tuple[Portion, bytes]]:
        """What is delivered of an open group, in order of attempts."""
        with self._mapped_errors():
            rows = self._execute("SELECT * FROM portions WHERE number = ? ORDER BY first_sample", (number,)).fetchall()
            return [(Portion(*tuple(row)[:-1]), bytes(row["data"])) for row in rows]

    def deliver(
        self,
        number: int,
        payload: bytes,
        worker_id: str,
        oldest_version: int,
        newest_version: int,
        num_tokens: int,
        seconds: float,
        now: float,
    ) -> None:
        """A valid result for an open group. `seconds` is what generating it took.

        Raises:
            InvariantError: the group is not open.
            PeerError: "oversized".
        """
        _check_size(number, payload)
        with self._transaction():
            self._move(number, "deliver")
            self._execute(
                "UPDATE groups SET worker_id = ?, oldest_version = ?, newest_version = ?, num_tokens = ?, seconds = ?, "
                "delivered_at = ? WHERE number = ?",
                (worker_id, oldest_version, newest_version, num_tokens, seconds, now, number),
            )
            self._execute("INSERT INTO payloads (number, data) VALUES (?, ?)", (number, payload))
            self._execute("DELETE FROM portions WHERE number = ?", (number,))

    def score(self, number: int, payload: bytes, now: float) -> None:
        """The scored form of a delivered group, in place of the unscored one.

        Raises:
            InvariantError: the group is not delivered, or scored already.
            PeerError: "oversized".
        """
        _check_size(number, payload)
        with self._transaction():
            self._move(number, "score")
            self._execute("UPDATE groups SET scored_at = ? WHERE number = ?", (now, number))
            self._execute("UPDATE payloads SET data = ? WHERE number = ?", (payload, number))

    def retire(self, number: int, reason: str, now: float) -> None:
        """A group that will never be trained on, and why.

        Raises:
            InvariantError: it was trained or retired before.
        """
        with self._transaction():
            self._move(number, "retire")
            self._execute("UPDATE groups SET retired_at = ?, reason = ? WHERE number = ?", (now, reason, number))
            self._execute("DELETE FROM portions WHERE number = ?", (number,))

    def train(self, step: int, lineage: int, numbers: Sequence[int], now: float) -> None:
        """Step `step` of `lineage` was trained on exactly these groups. The same report again changes nothing.

        Raises:
            InvariantError: a group is not ready or belongs to another step; the step was reported with other groups; no
                learner of this lineage is the newest to have joined.
        """
        with self._transaction():
            current = self._lineage()
            recorded = self._execute(
                "SELECT number FROM trainings WHERE lineage = ? AND step = ? ORDER BY number", (lineage, step)
            ).fetchall()
            if recorded and [row["number"] for row in recorded] == sorted(numbers):
                return
            if recorded or not numbers or lineage != current:
                raise InvariantError(
                    f"step {step} of lineage {lineage} trained on {sorted(numbers)}; recorded for it: "
                    f"{[row['number'] for row in recorded]}; lineage of the newest learner: {current}"
                )
            for number in numbers:
                if self._move(number, "train").step != step:
                    raise InvariantError(f"group {number} trained at step {step}.\n{self._story(number)}")
                self._execute(
                    "INSERT INTO trainings (number, step, lineage, at) VALUES (?, ?, ?, ?)",
                    (number, step, lineage, now),
                )

    def learner_joined(self, version: int, lineage: int, now: float) -> None:
        """A learner stands at `version`: groups trained at steps >= version are ready again, for the same step.

        Raises:
            InvariantError: an older lineage, or a fall-back without a new one.
            UserError: it fell back behind the checkpoints that the ledger was told of: the groups are gone.
        """
        with self._transaction():
            current = self._lineage()
            undone = self._execute(
                "SELECT groups.number, step, data IS NULL AS is_gone FROM groups LEFT JOIN payloads USING (number) "
                "WHERE state = 'trained' AND step >= ? ORDER BY groups.number",
                (version,),
            ).fetchall()
            if lineage < current or (lineage == current and undone):
                raise InvariantError(
                    f"a learner joined at version {version} in lineage {lineage}; the newest lineage is {current}, and "
                    f"{len(undone)} groups were trained from that version on"
                )
            kept_from = 1 + max((row["step"] for row in undone if row["is_gone"]), default=-1)
            if kept_from:
                raise UserError(
                    f"The learner starts at version {version}, but {self.path} keeps the groups of trained steps only "
                    f"from {kept_from} on. Resume from a checkpoint of version {kept_from} or later."
                )
            for row in undone:
                self._move(row["number"], "fall_back")
            self._execute("INSERT INTO joins (lineage, version, at) VALUES (?, ?, ?)", (lineage, version, now))

    def checkpoint(self, version: int, oldest_kept: int) -> None:
        """A checkpoint of `version` is safe and the oldest one still kept is `oldest_kept`: no learner will fall behind
        it, so the payloads of groups trained before it go, and those of retired groups."""
        with self._transaction():
            self._put_meta("checkpoint_version", version)
            self._execute(
                "DELETE FROM payloads WHERE number IN (SELECT number FROM groups "
                "WHERE state = 'retired' OR (state = 'trained' AND step < ?))",
                (oldest_kept,),
            )

    def payload(self, number: int) -> bytes:
        """The delivered bytes of a group (the scored ones, once scored).

        Raises:
            InvariantError: it was not delivered, or a checkpoint covers it.
        """
        with self._mapped_errors():
            row = self._execute("SELECT data FROM payloads WHERE number = ?", (number,)).fetchone()
            if row is None:
                raise InvariantError(f"group {number} has no payload.\n{self._story(number)}")
            return bytes(row["data"])

    def set_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key of the caller's."""
        with self._transaction():
            self._put_meta(f"caller.{key}", value)

    def get_meta(self, key: str, default: Any = None) -> Any:
        """The value last kept under `key`, else `default`."""
        with self._mapped_errors():
            row = self._execute("SELECT value FROM meta WHERE key = ?", (f"caller.{key}",)).fetchone()
            return default if row is None else json.loads(row["value"])

    def counts(self) -> dict[str, Any]:
        """Groups issued, trained and retired (by reason), refused deliveries by reason, and the tokens trained on."""
        with self._mapped_errors():
            states = dict(self._execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
            retired = "SELECT reason, count(*) FROM groups WHERE state = 'retired' GROUP BY reason"
            refused = "SELECT reason, count(*) FROM refusals GROUP BY reason"
            tokens = "SELECT coalesce(sum(num_tokens), 0) FROM groups WHERE state = 'trained'"
            return {
                "issued": sum(states.values()),
                "trained": states.get("trained", 0),
                "retired": dict(self._execute(retired).fetchall()),
                "refused": dict(self._execute(refused).fetchall()),
                "trained_tokens": int(self._execute(tokens).fetchone()[0]),
            }

    def recover(self) -> LedgerState:
        """Where the run stands, from what is on disk alone."""
        with self._transaction():
            groups = self._execute(
                f"SELECT {_COLUMNS} FROM groups "
                "WHERE state IN ('open', 'delivered', 'ready') "
                "OR (state = 'trained' AND number IN (SELECT number FROM payloads)) "
                "OR (state = 'retired' AND step >= min(?, (SELECT coalesce(min(step), 1 << 62) FROM groups "
                "WHERE state = 'trained' AND number IN (SELECT number FROM payloads)))) "
                "ORDER BY number",
                (self._version(self._lineage()),),
            ).fetchall()
            leases = self._execute(
                "SELECT lease_id, number, worker_id, granted_at, deadline, first_sample, num_samples FROM leases "
                "WHERE outcome IS NULL ORDER BY lease_id"
            ).fetchall()
            portions = self._execute(
                "SELECT number, first_sample, num_samples, worker_id, oldest_version, num_tokens FROM portions "
                "ORDER BY number, first_sample"
            ).fetchall()
            lineage = self._lineage()
            return LedgerState(
                version=self._version(lineage),
                lineage=lineage,
                next_number=self._next("number", "groups", first=0),
                cursor=self._next("cursor", "groups", first=0),
                next_lease_id=self._next("lease_id", "leases", first=1),
                groups=tuple(GroupRecord(*row) for row in groups),
                leases=tuple(LeaseRecord(*row) for row in leases),
                portions=tuple(Portion(*row) for row in portions),
            )

    # ---- inside a transaction ----------------------------------------------------------------------------------------

    def _move(self, number: int, event: str) -> GroupRecord:
        """Take one arrow of `TRANSITIONS`; the group as it was before."""
        group = self._group(number)
        state = TRANSITIONS[group.state].get(event)
        if state is None:
            raise InvariantError(f"{event} of a group that is {group.state}.\n{self._story(number)}")
        self._execute("UPDATE groups SET state = ? WHERE number = ?", (state, number))
        return group

    def _group(self, number: int) -> GroupRecord:
        row = self._execute(
            f"SELECT {_COLUMNS} FROM groups WHERE number = ?",
            (number,),
        ).fetchone()
        if row is None:
            raise InvariantError(f"group {number} was never issued")
        return GroupRecord(*row)

    def _story(self, number: int) -> str:
        lines = [f"Story of group {number}:"]
        for table in ("groups", "leases", "refusals", "trainings"):
            rows = self._execute(f"SELECT * FROM {table} WHERE number = ? ORDER BY rowid", (number,)).fetchall()
            lines += [f"  {table}: {dict(zip(row.keys(), row, strict=True))}" for row in rows]
        return "\n".join(lines)

    def _lineage(self) -> int:
        return int(self._execute("SELECT coalesce(max(lineage), 0) FROM joins").fetchone()[0])

    def _version(self, lineage: int) -> int:
        joined = self._execute("SELECT max(version) FROM joins WHERE lineage = ?", (lineage,)).fetchone()[0]
        step = self._execute("SELECT max(step) FROM trainings WHERE lineage = ?", (lineage,)).fetchone()[0]
        return max(joined or 0, 0 if step is None else step + 1)

    def _next(self, column: str, table: str, first: int) -> int:
        return int(self._execute(f"SELECT coalesce(max({column}) + 1, ?) FROM {table}", (first,)).fetchone()[0])

    def _put_meta(self, key: str, value: Any) -> None:
        self._execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, json.dumps(value)))

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, parameters)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make everything inside one transaction: it all happened, or none of it."""
        with self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self._in_transaction():  # inside `together`
            with self._mapped_errors():
                yield
            return
        with self._mapped_errors():
            self._execute("BEGIN IMMEDIATE")
            try:
                yield
                self._execute("COMMIT")
            except BaseException:
                # After a full disk SQLite may have rolled back by itself.
                if self._in_transaction():
                    self._execute("ROLLBACK")
                raise

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


def _storable(number: int) -> int | None:
    return number if 0 <= number <= MAX_INTEGER else None


def _check_size(number: int, payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PeerError("oversized", f"group {number}: {len(payload)} bytes; the limit is {MAX_PAYLOAD_BYTES}")
