"""What the learner offers of each version: what changed since the last published one, or the whole content.

The last published content stays in memory (on the CPU, in the snapshot's dtype) as the base of the next delta. Whether
workers have it does not matter: the encoder waits for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2.types import Snapshot
from echo2.weights import Manifest, encode, encode_delta


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """`anchor_every`: publications between those whose whole content is sent as well."""

    deltas: bool = True
    anchor_every: int = 25


@dataclass(frozen=True, slots=True)
class Offer:
    """One payload of a version, whole or a delta, cut into chunks."""

    manifest: Manifest
    chunks: Mapping[bytes, bytes | memoryview]

    @property
    def is_delta(self) -> bool:
        return self.manifest.payload.base is not None


class Publisher:
    """Knows what was published last. `delta` and `whole` do the work, in a thread that is not the training's."""

    def __init__(self, options: PublishOptions) -> None:
        self._options = options
        self._base: Snapshot | None = None
        self._since_whole = 0

    def delta(self, target: Snapshot) -> Offer | None:
        """What changed since the last published content; None at the start of a lineage, and where that is not
        smaller than the whole."""
        base = self._base
        if not self._options.deltas or base is None or base.ref.lineage != target.ref.lineage:
            return None
        encoded = encode_delta(base, target)
        return None if encoded is None else Offer(*encoded)

    @staticmethod
    def whole(target: Snapshot) -> Offer:
        return Offer(*encode(target.ref, target.tensors, target.files))

    def published(self, target: Snapshot, as_delta: bool) -> bool:
        """The head has it. Returns whether its whole content is due as well."""
        self._base = target
        self._since_whole = self._since_whole + 1 if as_delta else 0
        return self._since_whole >= self._options.anchor_every

    def sent_whole(self) -> None:
        self._since_whole = 0
