"""Groups taken apart and put together: without the rollouts that failed, with others in their place, with scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo2.core.errors import PeerError
from echo2.core.types import SEVERAL, Lease, LostRollout, RolloutGroup, Score
from echo2.transport import wire_pb2 as wire
from echo2.transport.routes import packed, unpacked


def lost_of(message: wire.Delivery, lease: Lease) -> tuple[tuple[LostRollout, ...], tuple[int, ...]]:
    """Return the samples of a lease that gave no rollout, and the numbers of the others.

    Raises:
        PeerError: "malformed": they are not some of the leased ones in order, or all, or of an evaluation.
    """
    leased = range(lease.first_sample, lease.first_sample + lease.num_samples)
    lost = [one.sample for one in message.lost]
    is_possible = not lost or (len(lost) < lease.num_samples and lease.group.kind == "train")
    if not is_possible or lost != sorted(set(lost) & set(leased)):
        raise PeerError("malformed", f"of {leased} of a {lease.group.kind} group, {len(lost)} are said to be lost")
    gone = tuple(LostRollout(one.sample, "environment_failed", one.detail) for one in message.lost)
    return gone, tuple(sorted(set(leased) - set(lost)))


def without(group: RolloutGroup, lost: Sequence[LostRollout]) -> RolloutGroup:
    """Return the group without these rollouts, which its `lost` names from then on.

    Raises:
        PeerError: "malformed": its routes are not as many bytes for each token.
    """
    if not lost:
        return group
    gone, whole = {one.sample for one in lost}, unpacked(group)
    pairs = zip(whole.sample_numbers, whole.rollouts, strict=True)
    samples, rollouts = zip(*(pair for pair in pairs if pair[0] not in gone), strict=True)
    return packed(replace(whole, rollouts=rollouts, samples=samples, lost=(*group.lost, *lost)))


def joined(kept: RolloutGroup, new: RolloutGroup) -> RolloutGroup:
    """Return the new rollouts with those that the group had before. Without the latter, if they cannot be compared:
    versions of another lineage name other weights, and a harness may have made another prompt.

    Raises:
        PeerError: as `without`.
    """
    if (kept.lineage, kept.prompt_tokens) != (new.lineage, new.prompt_tokens):
        return new
    before, after = unpacked(kept), unpacked(new)
    whole = replace(
        after,
        rollouts=before.rollouts + after.rollouts,
        samples=(*before.sample_numbers, *after.sample_numbers),
        worker_id=new.worker_id if kept.worker_id == new.worker_id else SEVERAL,
        generate_seconds=kept.generate_seconds + new.generate_seconds,
    )
    return packed(whole)


def with_scores(group: RolloutGroup, texts: Sequence[str], scores: Sequence[Score]) -> RolloutGroup:
    """Return the group with texts and scores filled into its rollouts."""
    triples = zip(group.rollouts, texts, scores, strict=True)
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, text=text, reward=reward, reward_parts=parts) for rollout, text, (reward, parts) in triples
        ),
    )
