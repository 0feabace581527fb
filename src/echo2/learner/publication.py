"""What the learner sends of each version: what changed since the last published one, or the whole content.

The last published content stays in memory (on the CPU, in the snapshot's dtype) as the base of the next delta. Whether
workers have it does not matter: the encoder waits for nobody.
"""

from __future__ import annotations

from echo2.types import Snapshot
from echo2.weights.chain import is_anchor_due
from echo2.weights.encoder import Encoder
from echo2.weights.manifest import Manifest


class DeltaBase:
    """What was published last, over which the next delta is encoded. The encoders work in another thread."""

    def __init__(self) -> None:
        self._base: Snapshot | None = None
        self._steps: list[Manifest] = []  # what leads to the base from nothing

    def delta(self, target: Snapshot) -> Encoder | None:
        """What changed since the last published content; None at the start of a lineage."""
        base = self._base
        return None if base is None or base.ref.lineage != target.ref.lineage else Encoder(target, base)

    def published(self, target: Snapshot, manifest: Manifest) -> bool:
        """The head has this payload. Returns whether the whole content is due as well: a newcomer would have to take as
        many deltas as a payload may have, or deltas as large as the content."""
        self._steps = [manifest] if manifest.base is None else [*self._steps, manifest]
        self._base = target
        return is_anchor_due(self._steps)
