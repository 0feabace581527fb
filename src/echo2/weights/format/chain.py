"""Joins successive payloads into one, without reading or decoding weights.

Each record of a segment is applied to the result of the record before it, so a chain of deltas equals one payload with
all their records in order. A raw record makes the records before it unnecessary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from echo2.core.errors import PeerError, UserError
from echo2.weights.format.manifest import MAX_DELTAS, RAW, FileEntry, Manifest, Record, Segment


def compose(steps: Sequence[Manifest]) -> Manifest:
    """Join successive payloads, each over the one before it, into one. A single payload is returned as it is.

    Raises:
        PeerError: "base", they do not fit together, or are too many or too large for one payload.
    """
    if len(steps) == 1:
        return steps[0]
    for first, second in pairwise(steps):
        if second.base != first.ref:
            raise PeerError("base", f"payload {second.payload} is not over {first.ref}")
        if (first.tensors, first.extents) != (second.tensors, second.extents):
            raise PeerError("base", f"{second.payload} has other tensors than {first.payload}, or cuts them otherwise")
        if first.base_model != second.base_model:
            raise PeerError("base", f"{second.payload} is an adapter of another base model than {first.payload}")
    segments = zip(*(step.segments for step in steps), strict=True)
    try:
        return replace(
            steps[-1],
            base=steps[0].base,
            files=tuple(_sent_file(entry, steps) for entry in steps[-1].files),
            segments=tuple(_joined(parts) for parts in segments),
        )
    except UserError as error:
        raise PeerError("base", f"{steps[-1].payload} after {len(steps) - 1} others: {error}") from error


def is_anchor_due(steps: Sequence[Manifest]) -> bool:
    """Whether the next payload without a base should be raw throughout. `steps` lead from nothing to the newest
    snapshot. A raw payload is due once they reach the number of deltas that one payload may have, or once their deltas
    are as large as the content."""
    try:
        whole = compose(steps)
    except PeerError:  # they do not fit into one payload
        return True
    num_deltas = max((sum(one.codec != RAW for one in segment.records) for segment in whole.segments), default=0)
    is_large = num_deltas > 0 and whole.total_bytes >= 2 * whole.content_bytes
    return is_large or max(num_deltas, len(steps) - 1) >= MAX_DELTAS


def _sent_file(entry: FileEntry, steps: Sequence[Manifest]) -> FileEntry:
    """Return the entry of the newest step that sends this file, or the first step's if the file is from its base."""
    for step in reversed(steps):
        found = next((one for one in step.files if one.name == entry.name and one.digest == entry.digest), None)
        if found is None:
            break
        if found.record is not None or step is steps[0]:
            return found
    raise PeerError("base", f"{steps[0].payload} does not lead to the file {entry.name!r}")


def _joined(parts: Sequence[Segment]) -> Segment:
    """Join the records of one segment over all payloads. Records before a raw record are dropped."""
    records: list[Record] = []
    for part in parts:
        starts_anew = bool(part.records) and part.records[0].codec == RAW
        records = [*(() if starts_anew else records), *part.records]
    return replace(parts[-1], records=tuple(records))
