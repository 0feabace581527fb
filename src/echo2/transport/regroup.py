"""Groups taken apart and put together: without the rollouts that failed, with others in their place, with scores, with
one prompt, or each rollout's rows as one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from echo2.core.errors import PeerError
from echo2.core.types import SEVERAL, Lease, LostRollout, Rollout, RolloutGroup, Score
from echo2.transport import limits
from echo2.transport import wire_pb2 as wire
from echo2.transport.routes import packed, unpacked


def samples_of(message: wire.Delivery, lease: Lease) -> tuple[tuple[LostRollout, ...], tuple[int, ...]]:
    """Return the samples of a lease that gave no rollout, and for each row the number of its sample.

    Raises:
        PeerError: "malformed": the lost are not some of the leased ones in order, or all, or of an evaluation; or the
            rows are not those of the others. "oversized": those of a rollout have too many tokens.
    """
    leased = range(lease.first_sample, lease.first_sample + lease.num_samples)
    lost = [one.sample for one in message.lost]
    is_possible = not lost or (len(lost) < lease.num_samples and lease.group.kind == "train")
    if not is_possible or lost != sorted(set(lost) & set(leased)):
        raise PeerError(
            "malformed", f"{len(lost)} of {leased} rollouts of a {lease.group.kind} group are reported lost"
        )
    gone = tuple(LostRollout(one.sample, "environment_failed", one.detail) for one in message.lost)
    samples, num_rows = sorted(set(leased) - set(lost)), len(message.group.rollouts)
    rows = message.rows or [1] * num_rows
    if len(rows) != len(samples):
        counts = f"{len(rows)}{f', and {len(lost)} lost' if lost else ''}"
        raise PeerError("malformed", f"leased {lease.num_samples} rollouts, got {counts}")
    if sum(rows) != num_rows or min(rows) < 1 or max(rows) > limits.ROWS_MAX:
        problem = f"rollouts of {list(rows[:10])} rows; {num_rows} rows are there, {limits.ROWS_MAX} may be"
        raise PeerError("malformed", problem)
    lengths = iter([len(row.loss_mask) for row in message.group.rollouts])
    if (longest := max(sum(islice(lengths, count)) for count in rows)) > limits.TOKENS_MAX:
        raise PeerError("oversized", f"the rows of a rollout have {longest} tokens; the limit is {limits.TOKENS_MAX}")
    return gone, tuple(sample for sample, count in zip(samples, rows, strict=True) for _ in range(count))


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


def joined(earlier: RolloutGroup, new: RolloutGroup) -> RolloutGroup:
    """Return the new rollouts with those that the group had before. Without the latter, if they cannot be compared:
    versions of another lineage name other weights, and a harness may have made a prompt that begins otherwise.

    Raises:
        PeerError: as `without`.
    """
    before, after = unpacked(earlier), unpacked(new)
    pairs = [(part.prompt_tokens, row) for part in (before, after) for row in part.rollouts]
    prompt, rollouts = with_one_prompt(pairs)
    if earlier.lineage != new.lineage or not prompt:
        return new
    whole = replace(
        after,
        prompt_tokens=prompt,
        rollouts=tuple(rollouts),
        samples=(*before.sample_numbers, *after.sample_numbers),
        worker_id=new.worker_id if earlier.worker_id == new.worker_id else SEVERAL,
        generate_seconds=earlier.generate_seconds + new.generate_seconds,
    )
    return packed(whole)


def with_scores(group: RolloutGroup, scores: Sequence[Score]) -> RolloutGroup:
    """Return the group with scores filled into its rows."""
    pairs = zip(group.rollouts, scores, strict=True)
    rollouts = tuple(replace(row, reward=reward, reward_parts=parts) for row, (reward, parts) in pairs)
    return replace(group, rollouts=rollouts)


def by_row(group: RolloutGroup, scores: Sequence[Score]) -> list[Score]:
    """Return for each row the score of its rollout."""
    return [score for score, rows in zip(scores, group.by_rollout, strict=True) for _ in rows]


def as_one_row(group: RolloutGroup) -> tuple[Rollout, ...]:
    """Return each rollout as one sequence, with its rows one behind the other: for rewards, counts and people. Nobody
    sampled such a sequence, and it is never trained on."""
    return tuple(rows[0] if len(rows) == 1 else _as_one(rows) for rows in group.by_rollout)


def _as_one(rows: Sequence[Rollout]) -> Rollout:
    tokens, logprobs, spans = array("i"), array("f"), list[tuple[int, int]]()
    for row in rows:
        spans += [(len(tokens) + start, version) for start, version in row.version_spans]
        tokens += row.tokens
        logprobs += row.logprobs
    return Rollout(
        tokens,
        logprobs,
        b"".join(row.loss_mask for row in rows),
        tuple(spans),
        "length" if any(row.finish == "length" for row in rows) else "stop",
        "\n\n".join(row.text for row in rows),
        rows[0].reward,
        rows[0].reward_parts,
    )


def with_one_prompt(pairs: Sequence[tuple[array[int], Rollout]]) -> tuple[array[int], list[Rollout]]:
    """Return what all of these prompts begin with, and the rollouts with the rest of their prompts in front, which is
    masked out of the loss."""
    first, *others = (prompt for prompt, _ in pairs)
    length = len(first)
    for prompt in others:
        length = min(length, len(prompt))
        if prompt[:length] != first[:length]:
            length = next(i for i in range(length) if prompt[i] != first[i])
    return first[:length], [_behind(prompt[length:], rollout) for prompt, rollout in pairs]


def _behind(rest: array[int], rollout: Rollout) -> Rollout:
    if not rest:
        return rollout
    (_, version), *spans = rollout.version_spans
    offsets = rollout.support_offsets
    return replace(
        rollout,
        tokens=rest + rollout.tokens,
        logprobs=array("f", bytes(4 * len(rest))) + rollout.logprobs,
        loss_mask=bytes(len(rest)) + rollout.loss_mask,
        version_spans=((0, version), *((len(rest) + start, later) for start, later in spans)),
        support_offsets=None if offsets is None else array("i", [0] * len(rest)) + offsets,
    )
