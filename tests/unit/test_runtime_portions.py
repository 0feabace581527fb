"""Attempts of one group from several workers, put together at the head."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from echo2.buffer import Ledger
from echo2.control import commands as do
from echo2.errors import InvariantError, PeerError, UserError
from echo2.runtime import portions
from echo2.runtime.recovery import recovered
from echo2.transport import messages
from echo2.transport.limits import MESSAGE_BYTES_MAX
from echo2.types import GroupRef, Portion, Rollout, RolloutGroup


def made_by(worker_id: str, lengths: tuple[int, ...], version: int = 0) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            tokens=array("i", range(length)),
            logprobs=array("f", [-1.0] * length),
            loss_mask=b"\x01" * length,
            version_spans=((0, version),),
            finish="stop",
            text=str(length),
        )
        for length in lengths
    )
    return RolloutGroup(GroupRef("train", 0), 0, 1, 0, array("i", (1, 2)), rollouts, worker_id, float(sum(lengths)))


def accept(first_sample: int, completes: bool) -> do.AcceptDelivery:
    where = {"worker_id": "w", "lease_id": 1, "group": GroupRef("train", 0)}
    return do.AcceptDelivery(cause=1, reason="", first_sample=first_sample, completes=completes, **where)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.learner_joined(version=0, lineage=1, now=0.0)
    ledger.issue(0, step=0, cursor=0, now=0.0)
    return ledger


def take(ledger: Ledger, group: RolloutGroup, first: int, completes: bool) -> tuple[RolloutGroup, bytes] | None:
    return portions.take(ledger, accept(first, completes), group, messages.encode_group(group).SerializeToString(), 6)


def test_a_group_of_several_workers_has_its_attempts_in_order(ledger: Ledger) -> None:
    assert take(ledger, made_by("b", (5, 6), version=3), 2, completes=False) is None
    assert take(ledger, made_by("c", (7, 8), version=2), 4, completes=False) is None
    whole = take(ledger, made_by("a", (3, 4), version=3), 0, completes=True)
    assert whole is not None
    group, payload = whole
    assert [rollout.text for rollout in group.rollouts] == ["3", "4", "5", "6", "7", "8"]
    assert (group.worker_id, group.generate_seconds, group.oldest_version) == ("a+b+c", 15.0, 2)
    assert group.workers == ("a", "a", "b", "b", "c", "c")
    assert portions._decode(payload) == group


def test_a_group_of_one_worker_is_stored_as_it_came(ledger: Ledger) -> None:
    group = made_by("a", (3,))
    payload = messages.encode_group(group).SerializeToString()
    assert portions.take(ledger, accept(0, True), group, payload, 1) == (group, payload)


def test_portions_that_may_come_can_be_joined() -> None:
    third = (MESSAGE_BYTES_MAX - portions.NAMES_BYTES) // 3
    portions.check_size(third, 2, 6)
    with pytest.raises(PeerError, match="2 of 6 attempts"):
        portions.check_size(third + 1, 2, 6)
    assert 3 * third + portions.NAMES_BYTES <= MESSAGE_BYTES_MAX


def test_a_run_is_not_resumed_with_groups_of_another_size(ledger: Ledger) -> None:
    ledger.grant(1, 0, "a", now=1.0, deadline=9.0, num_samples=4, first_sample=0)
    state = ledger.recover()
    assert recovered(state, 4, lambda group: False)["leases"][0].num_samples == 4
    for size in (2, 6):
        with pytest.raises(UserError, match=f"group_size = {size}"):
            recovered(state, size, lambda group: False)


def test_the_ledger_keeps_portions_until_the_group_is_delivered_or_retired(ledger: Ledger) -> None:
    ledger.issue(1, step=0, cursor=1, now=0.0)
    ledger.grant(1, 0, "a", now=1.0, deadline=9.0, num_samples=2, first_sample=2)
    kept = Portion(0, 2, 2, "a", 3, 11)
    ledger.keep_portion(kept, b"some")
    ledger.keep_portion(Portion(1, 0, 2, "a", 3, 11), b"others")
    with pytest.raises(InvariantError):
        ledger.keep_portion(kept, b"again")
    state = ledger.recover()
    assert state.portions[0] == kept
    assert (state.leases[0].first_sample, state.leases[0].num_samples) == (2, 2)
    assert ledger.portions(0) == [(kept, b"some")]
    ledger.deliver(0, b"all", "a", 3, 3, 22, 1.0, now=2.0)
    ledger.retire(1, "gave_up", now=2.0)
    assert ledger.recover().portions == ()
    with pytest.raises(InvariantError):
        ledger.keep_portion(kept, b"late")
