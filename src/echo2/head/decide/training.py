"""Where the run stands: the learner's steps, what it waits for, and the policy's snapshots; and whether it goes on."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from echo2.core.types import SnapshotRef, Wait


@dataclass(slots=True)
class Training:
    """The learner's position. `version`: number of trained steps; `lineage`: grows each time the learner falls back.
    `wanted_step`: the step whose groups the learner waits for, since `wanted_since`; `has_all`: it has got them all.
    `took_over_at`: when the learner last fell back, or this head replaced an earlier one; -inf if neither happened.
    """

    version: int = 0
    lineage: int = 1
    checkpoint_version: int = -1
    oldest_kept: int = 0
    wanted_step: int | None = None
    wanted_since: float | None = None
    has_all: bool = False
    learner_joined: bool = False
    took_over_at: float = -math.inf

    def join(self) -> None:
        """The learner connected with the current version."""
        self.learner_joined, self.wanted_step = True, None

    def lose(self, now: float) -> None:
        """The learner is gone; from now on the head waits for it."""
        self.learner_joined, self.wanted_step, self.wanted_since = False, None, now

    def fall_back(self, version: int, now: float) -> None:
        """The learner is back at its checkpoint of `version`: the later steps are trained again."""
        self.version, self.lineage, self.took_over_at = version, self.lineage + 1, now
        self.checkpoint_version = min(self.checkpoint_version, version)

    def want(self, step: int, now: float) -> None:
        """The learner asks for the groups of this step."""
        self.wanted_step, self.wanted_since, self.has_all = step, now, False

    def end_step(self) -> None:
        """The learner has all groups of its step."""
        self.has_all, self.wanted_since = True, None

    def train(self) -> None:
        """The learner finished its step."""
        self.version, self.wanted_step = self.version + 1, None

    def save(self, version: int, oldest_kept: int) -> None:
        """A checkpoint is durable. Reports may come twice and out of order; only the newest counts."""
        self.checkpoint_version = max(self.checkpoint_version, version)
        self.oldest_kept = max(self.oldest_kept, oldest_kept)

    def replaces_weights(self, now: float) -> None:
        """A version is published again: workers may still have the earlier weights of that name."""
        self.took_over_at = now

    @property
    def open_step(self) -> int | None:
        """The step whose groups the learner lacks; None if it waits for none."""
        return None if self.has_all else self.wanted_step


@dataclass(slots=True)
class RunHealth:
    """Whether the run goes on. `over`: why it ended; `paused`: what keeps it from leasing and feeding groups; both None
    while it goes on. `num_failed`: groups that failed in a row; `num_failed_at_strangers`: those that only strangers
    failed, and `last_failure` why the last of them was given up.
    """

    over: str | None = None
    paused: Wait | None = None
    num_failed: int = 0
    num_failed_at_strangers: int = 0
    last_failure: str = ""

    def end(self, reason: str) -> bool:
        """End the run. Return False if it had ended before: the first reason counts."""
        is_first = self.over is None
        self.over = reason if is_first else self.over
        return is_first

    def pause(self, wait: Wait | None) -> None:
        """Pause the run because of this wait, or let it go on (None)."""
        self.paused = wait

    def succeed(self) -> None:
        """A group was scored, which ends every row of failures."""
        self.num_failed = self.num_failed_at_strangers = 0

    def fail(self) -> int:
        """The head or machines of the owner failed a group. Return how many in a row."""
        self.num_failed += 1
        return self.num_failed

    def fail_at_strangers(self, why: str) -> None:
        """Only strangers failed a group."""
        self.num_failed_at_strangers, self.last_failure = self.num_failed_at_strangers + 1, why


class Snapshots:
    """`published`: the versions of the surviving history that a worker may have installed; `retained`: those that the
    origin still stores; `published_at`: when the newest was published, in seconds. Verbs return what the origin may
    delete.
    """

    def __init__(self) -> None:
        self._published: dict[int, SnapshotRef] = {}
        self._retained: dict[int, SnapshotRef] = {}
        self.published_at = 0.0

    @property
    def published(self) -> Mapping[int, SnapshotRef]:
        """The valid snapshots by version."""
        return self._published

    @property
    def retained(self) -> Mapping[int, SnapshotRef]:
        """Those of them that the origin stores."""
        return self._retained

    def restore(self, refs: Iterable[SnapshotRef], version: int) -> list[SnapshotRef]:
        """Add what an earlier head left. What does not belong to the history up to `version` is returned."""
        refs = list(refs)
        self._published.update({ref.version: ref for ref in sorted(refs) if ref.version <= version})
        self._retained.update(self._published)
        return [ref for ref in refs if not self.has(ref)]

    def publish(self, ref: SnapshotRef, now: float) -> bool:
        """Add a snapshot. Return whether its version was published before, with other weights."""
        is_again = self._published.get(ref.version, ref) != ref
        self._published[ref.version] = self._retained[ref.version] = ref
        self.published_at = now
        return is_again

    def fall_back(self, version: int) -> list[SnapshotRef]:
        """Drop all later versions: their steps are trained again."""
        for later in [v for v in self._published if v > version]:
            del self._published[later]
        return [self._retained.pop(v) for v in sorted(self._retained) if v > version]

    def drop_old(self, needed: Container[int], num_kept: int, oldest: int, oldest_installed: int) -> list[SnapshotRef]:
        """Drop what the origin need not store any longer: versions below `oldest`, but not the `needed` ones and the
        newest few. No worker has a version below `oldest_installed`.
        """
        olds = [v for v in sorted(self._retained)[:-num_kept] if v < oldest and v not in needed]
        dropped = [self._retained.pop(version) for version in olds]
        for version in [v for v in self._published if v < oldest_installed and v not in self._retained]:
            del self._published[version]
        return dropped

    def has(self, ref: SnapshotRef | None) -> bool:
        """Whether this snapshot is valid: it belongs to the surviving history and is recent enough."""
        return ref is not None and self._published.get(ref.version) == ref

    def newest(self) -> SnapshotRef | None:
        """Return the newest published snapshot, or None."""
        return self._published[max(self._published)] if self._published else None

    def newest_retained(self) -> SnapshotRef | None:
        """Return the newest snapshot that the origin stores, or None."""
        return self._retained[max(self._retained)] if self._retained else None
