"""The snapshots of the run's policy: which versions count, and which of them the origin still stores."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from echo2.core.types import SnapshotRef


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
