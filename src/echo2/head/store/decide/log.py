"""The log of a run's ledger in a store: what a head sends, what may leave the head meanwhile, and who may write.

The log is a sequence of entries at positions 1, 2, 3 ...; an entry has the records of some transactions, in order. Only
the head that creates the object of a position writes there, and it goes on at the next position only. A head begins
with an entry without records. So a head that another has followed cannot write any more, however late it wakes up: it
finds that entry where its own should be. Therefore these entries stay when the log is shortened.

A head that lives also gives signs of life, for standbys. They decide only when a standby begins; who may write is up to
the log.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

#: Bytes of records in one entry, if it has several.
ENTRY_BYTES = 4 << 20
#: The ledger is copied when the log since the last copy has grown to its size, and to so many bytes.
COPY_BYTES_MIN = 16 << 20

#: Interval of a head's signs of life, and of a standby's looks at them.
ALIVE_SECONDS = 5.0
LOOK_SECONDS = 2.0
#: A standby takes over after so long without a new sign. A head that is restarted on its machine is back before.
SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of the log: records `first`, `first + 1` ... of the ledger. `head`: the directory of the head that
    wrote it; `epoch`: its turn. `copy`: a copy of the ledger before these records, which is not in earlier entries;
    empty: it follows from these."""

    head: str
    epoch: int
    first: int
    records: tuple[bytes, ...] = ()
    copy: str = ""

    @property
    def last(self) -> int:
        """Number of the ledger's last record after this entry."""
        return self.first + len(self.records) - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Who a head's directory is (`own`), and whose entry was the last when its ledger was fetched from the store."""

    own: str
    after: tuple[str, int] | None = None

    def refuses(self, last: Entry | None) -> str:
        """Why this directory may not take the log over, whose last entry is `last`; empty: it may."""
        if last is None or last.head == self.own or (last.head, last.epoch) == self.after:
            return ""
        return f"another head has it: its directory is {last.head}, this is its turn {last.epoch}"


class LogWriter:
    """A head's end of the log. `position`: where it writes next; `first`: its next record; `beginnings`: see `Mark`.

    `stored`: the last record that is surely in the store. `fenced`: another head's entry, after which this one writes
    nothing.
    """

    def __init__(self, head: str, epoch: int, position: int, first: int, beginnings: tuple[int, ...]) -> None:
        self.head, self.epoch, self.position, self.beginnings = head, epoch, position, beginnings
        self.stored = first - 1
        self.fenced: Entry | None = None
        self.bytes_since_copy = 0
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._sent: Entry | None = None

    @property
    def added(self) -> int:
        """The last record that was taken."""
        return self.stored + len(self._waiting)

    def add(self, number: int, record: bytes, now: float) -> None:
        """Take the record of a transaction that the ledger has committed."""
        assert number == self.added + 1
        self._waiting.append((now, record))

    def to_send(self) -> Entry | None:
        """Return what to create at `position`; the same again until `answered` says that it is there. None: nothing."""
        if self.fenced is not None or not self._waiting:
            return None
        if self._sent is None:
            records: list[bytes] = []
            size = 0
            for _, record in self._waiting:
                size += len(record)
                if records and size > ENTRY_BYTES:
                    break
                records.append(record)
            self._sent = Entry(self.head, self.epoch, self.stored + 1, tuple(records))
        return self._sent

    def answered(self, entry: Entry) -> None:
        """Take what is at `position` now: the entry that was sent, by this or another head; or a different one."""
        if entry != self._sent:
            self.fenced = entry
        else:
            for record in entry.records:
                self._waiting.popleft()
                self.bytes_since_copy += len(record)
            self.stored, self._sent, self.position = entry.last, None, self.position + 1

    def may_leave(self, number: int, now: float, lag_seconds: float) -> bool:
        """Whether a message may leave the head that follows from the ledger up to record `number`. `lag_seconds`: it
        may be so far ahead of the store; 0: it waits for it."""
        if self.fenced is not None:
            return False
        return self.stored >= number or self.behind_seconds(now) < lag_seconds

    def behind_seconds(self, now: float) -> float:
        """Age of the oldest record that is not in the store."""
        return now - self._waiting[0][0] if self._waiting else 0.0

    def is_copy_due(self, copy_bytes: int) -> bool:
        """Whether to copy the ledger, so that a reader need not begin before. `copy_bytes`: size of the last copy."""
        return self.bytes_since_copy >= max(COPY_BYTES_MIN, copy_bytes)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a reader may begin: with a copy that has records up to `number`, all of them in the log, and the entries
    from `position` on, which exists. Marks are numbered and never replaced, and a later one never lies before an
    earlier one, so that entries before the newest mark can be deleted, but for those at `beginnings`: with these a head
    began."""

    copy: str
    number: int
    position: int
    beginnings: tuple[int, ...]

    def is_after(self, other: Mark | None) -> bool:
        """Whether this mark may follow the other."""
        return other is None or (self.position, self.number) > (other.position, other.number)


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """A sign of life of a head: its directory, its turn, and a number that no other sign of it has. `over`: why the run
    has ended, after which no other head is wanted; empty: it goes on."""

    head: str
    epoch: int
    number: int
    over: str = ""


class SignWatch:
    """How long a head has been silent, by a standby's own clock. Only time between two looks counts, and little of a
    long one: a standby that slept, or did not reach the store, has not seen anybody be silent."""

    def __init__(self) -> None:
        self.silent_seconds = 0.0
        self._last_sign: bytes | None = None
        self._looked_at = -math.inf
        self._begun: tuple[str, int] | None = None

    def look(self, sign_bytes: bytes | None, now: float) -> None:
        """Take what there is of a sign now."""
        passed = min(now - self._looked_at, 2.0 * LOOK_SECONDS)
        self.silent_seconds = self.silent_seconds + passed if sign_bytes == self._last_sign else 0.0
        self._last_sign, self._looked_at = sign_bytes, now

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds >= SILENT_SECONDS

    def may_follow(self, last: tuple[str, int] | None, signed: tuple[str, int] | None) -> bool:
        """Whether a standby may follow the head whose entry is the log's last one. `signed`: who gave the newest sign.
        A head that has just begun, such as another standby, has given none yet, and is waited for as long again."""
        if self.is_silent and last not in (signed, self._begun):
            self._begun, self.silent_seconds = last, 0.0
        return self.is_silent
