"""A failed environment or reward costs one rollout: its group trains with the others, or gets more, or is lost."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, GroupRef, Lease, LostRollout, SnapshotRef
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.decide.groups import TOP_UPS_MAX
from echo2.head.ledger.audit import audit
from echo2.head.ledger.ledger import Ledger, Left
from echo2.head.serve.report import status, step_row
from echo2.transport import wire_pb2 as wire
from echo2.transport.identity import PeerIdentity
from echo2.transport.messages import decode_delivery
from echo2.transport.tickets import Ticket
from head_cases import OpenHead, delivery, rows, sample, settings, until
from planner_cases import OPTIONS, Desk, of, running

QUICK = replace(OPTIONS, groups_per_step=1)


def lost(*samples: int) -> tuple[LostRollout, ...]:
    return tuple(LostRollout(one, "environment_failed", "it broke") for one in samples)


def short(desk: Desk, lease_id: int, *samples: int) -> list[do.Command]:
    """A result without these samples."""
    held = desk.planner.leases.get(lease_id)
    assert held is not None
    record = desk.planner.groups.get(held[1].group.number)
    assert record is not None
    kept = record.num_kept if held[1].first_sample else 0
    count = kept + held[1].num_samples - len(samples)
    return desk.deliver(lease_id, scored=False, lost=lost(*samples), num_rollouts=count)


# ---- decisions -----------------------------------------------------------------------------------------------------


def test_a_group_trains_with_the_rollouts_that_are_left() -> None:
    desk = running(QUICK)
    commands = short(desk, 1, 1, 2)
    assert len(of(do.ScoreGroup, commands)) == 1
    assert [len(command.lost) for command in of(do.AcceptDelivery, commands)] == [2]
    (kept,) = of(do.KeepScores, desk.tell(ev.GroupScored(of(do.ScoreGroup, commands)[0].group)))
    assert kept.group.number == 0


def test_a_group_with_too_few_rollouts_gets_a_lease_for_the_missing_ones() -> None:
    desk = running(QUICK)
    commands = short(desk, 1, 0, 1, 3)
    assert not of(do.ScoreGroup, commands)
    (topped_up,) = of(do.TopUpGroup, commands)
    assert (topped_up.number, topped_up.num_kept, topped_up.num_top_ups) == (0, 1, 1)
    (lease,) = [lease for grant in of(do.GrantLeases, commands) for lease in grant.leases if not lease.group.number]
    assert (lease.num_samples, lease.first_sample) == (3, 4)
    commands = short(desk, lease.lease_id, 4)
    assert [command.group.number for command in of(do.ScoreGroup, commands)] == [0]


def test_a_lease_for_what_a_group_lacks_that_fails_whole_does_not_cost_what_the_group_keeps() -> None:
    """Its worker reports the lease as failed: there is no rollout to deliver."""
    desk = running(QUICK)
    short(desk, 1, 0, 1, 3)
    for num_top_ups in range(2, TOP_UPS_MAX + 2):
        (lease,) = [lease for _, lease in desk.planner.leases.open_leases() if not lease.group.number]
        commands = desk.tell(ev.LeaseFailed("a", lease.lease_id, "environment_failed", "it broke"))
        found = [(one.num_kept, one.num_top_ups) for one in of(do.TopUpGroup, commands)]
        desk.now += 5.0  # its worker has rested
        desk.tell(ev.WorkerReported("a", SnapshotRef(RUN_POLICY, 1, 0)))
        if num_top_ups > TOP_UPS_MAX:
            assert [one.why for one in of(do.RetireGroup, commands)] == ["environment_failed"]
            break
        assert found == [(1, num_top_ups)]
        (again,) = [lease for _, lease in desk.planner.leases.open_leases() if not lease.group.number]
        assert (again.num_samples, again.first_sample) == (3, 4 * num_top_ups), "other samples than those that failed"


def test_a_group_is_lost_after_so_many_top_ups_and_its_step_gets_another() -> None:
    desk, retired = running(QUICK), list[do.RetireGroup]()
    for _ in range(TOP_UPS_MAX + 1):
        (lease,) = [lease for _, lease in desk.planner.leases.open_leases() if not lease.group.number]
        numbers = range(lease.first_sample, lease.first_sample + lease.num_samples)
        retired = of(do.RetireGroup, short(desk, lease.lease_id, *numbers[: 3 if not lease.first_sample else None]))
    assert [(one.number, one.why) for one in retired] == [(0, "environment_failed")]
    assert any(record.step == 0 and record.state == "leased" for record in desk.planner.groups)


def test_failed_rewards_are_not_zeros_and_too_many_cause_a_top_up() -> None:
    desk = running(QUICK)
    (asked,) = of(do.ScoreGroup, desk.deliver(1, scored=False))
    failed = (LostRollout(2, "reward_failed", "503"),)
    scored = ev.GroupScored(asked.group, lost=failed * 3, num_rollouts=1)
    (topped_up,) = of(do.TopUpGroup, desk.tell(scored))
    assert (topped_up.num_kept, topped_up.lost) == (1, failed * 3)
    assert not of(do.KeepScores, desk.tell(scored)), "the group waits for rollouts"


def test_failures_of_rewards_in_a_row_stop_the_run_also_if_a_rollout_is_left() -> None:
    desk, ended = running(QUICK), list[do.StopRun]()
    for _ in range((TOP_UPS_MAX + 1) * OPTIONS.max_failures):
        assert not ended
        lease_id = next(one for one in desk.open() if not desk.leases[one][1].step)
        (asked,) = of(do.ScoreGroup, desk.deliver(lease_id, scored=False))
        failed = tuple(LostRollout(one, "reward_failed", "503") for one in range(3))
        ended = of(do.StopRun, desk.tell(ev.GroupScored(asked.group, lost=failed, num_rollouts=1)))
    assert ended


def test_a_stranger_draws_all_samples_of_a_group_that_lacks_some() -> None:
    desk = running(QUICK)
    assert of(do.TopUpGroup, short(desk, 1, 0, 1, 3))
    desk.tell(ev.WorkerLeft("a", "it said good-bye"))
    desk.tell(ev.WorkerJoined("s", 8, 0.1, None, ticket="t"))
    desk.tell(ev.WorkerReported("s", desk.planner.snapshots.newest_retained()))
    (lease,) = [lease for _, lease in desk.planner.leases.open_leases() if lease.step == 0]
    assert (lease.group.number, lease.num_samples, lease.first_sample) == (0, 4, 0)


# ---- the record ----------------------------------------------------------------------------------------------------


def test_a_restarted_head_knows_what_a_group_keeps_and_lacks(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.learner_joined(0, 1, 0.0)
    ledger.issue(0, 0, 0, 1.0)
    ledger.grant(1, 0, "a", 1.0, 60.0, 4)
    ledger.deliver(0, b"four", "a", 0, 0, 40, 1.0, 2.0, lost(1, 2))
    ledger.close_lease(1, "accepted", 2.0)
    ledger.top_up(0, 1, 1, Left(b"one", 10, [LostRollout(3, "reward_failed")]))
    ledger.grant(2, 0, "a", 3.0, 63.0, 3)
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    (group,), (lease,) = again.recover().groups, again.recover().leases
    assert (group.state, group.num_kept, group.num_top_ups, lease.num_samples) == ("open", 1, 1, 3)
    assert again.rollouts(0) == b"one"
    assert again.counts()["lost"] == {"environment_failed": 2, "reward_failed": 1}
    assert again.sizes() == {}, "a top-up says nothing about the size of groups"
    desk = Desk(QUICK, replace(again.recover(), published=()))
    held = desk.planner.leases.get(2)
    assert held is not None
    assert (held[1].first_sample, held[1].num_samples) == (4, 3)
    again.close_lease(2, "failed", 4.0)
    again.top_up(0, 1, 2)  # nothing came of this lease
    assert (again.recover().groups[0].num_top_ups, again.rollouts(0)) == (2, b"one")
    again.grant(3, 0, "a", 4.0, 64.0, 3)
    again.deliver(0, b"all", "a", 0, 0, 41, 1.0, 4.0)
    again.close_lease(3, "accepted", 4.0)
    again.score(0, b"+scores", False, 5.0)
    again.train(0, 1, [0], 6.0)
    assert again.kept("top_up") == {}
    again.close()
    found = audit(tmp_path / "ledger.sqlite")
    assert (found.issued, found.trained, found.lost) == (1, 1, 0)


# ---- the head ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [[1, 1], [2, 1], [4], [0, 1, 2, 3]])
def test_lost_rollouts_that_were_not_leased_or_all_of_them_are_malformed(numbers: list[int]) -> None:
    lease = Lease(1, GroupRef(RUN_POLICY, "train", 0), 0, 0, 4, 0, None, 9.0, 9.0, 1)
    gone = [wire.Lost(sample=one) for one in numbers]
    sent = wire.Delivery(
        lease_id=1, group={"policy": RUN_POLICY, "kind": "train", "rollouts": [sample([5])] * 2}, lost=gone
    )
    with pytest.raises(PeerError, match="lost"):
        decode_delivery(sent, lease, array("i", [5]), "w")


def test_rows_of_a_rollout_are_refused_where_no_harness_plays(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            several = delivery(leases[0], [sample([5, 7, 1])] * 5, rows=[2, 1, 1, 1])
            ((is_accepted, reason),) = await open_head.deliver(several)
            assert not is_accepted
            assert "a rollout of several rows" in reason

    asyncio.run(scenario())


def test_the_head_joins_what_several_leases_gave(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            gone = [wire.Lost(sample=one, detail="it broke") for one in (0, 2, 3)]
            assert (await open_head.deliver(delivery(leases[0], [sample([5, 7, 1])], lost=gone)))[0][0]
            await until(lambda: any(lease.first_sample for lease in leases))
            (more,) = [lease for lease in leases if lease.first_sample]
            assert (more.num_samples, more.first_sample, more.number) == (3, 4, leases[0].number)
            rest = [sample([6, 7, 1]), sample([5, 6, 1])]
            reply = await open_head.deliver(delivery(more, rest, lost=[wire.Lost(sample=5, detail="again")]))
            assert reply[0][0], reply
            await until(lambda: open_head.fed)
            (group,) = open_head.fed
            assert group.samples == (1, 4, 6)
            assert [one.tokens[0] for one in group.rollouts] == [5, 6, 5]
            assert all(one.reward is not None for one in group.rollouts)
            row = step_row(open_head.head, 1, {})
            assert (row["rollouts/lost"], row["rollouts/lost/environment_failed"]) == (4, 4)
            (failure,) = status(open_head.head)["failures"]
            assert (failure["kind"], failure["count"]) == ("environment_failed", 4)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


OWN = """
def compute_score(solution_str, ground_truth):
    if solution_str.startswith("3"): raise AssertionError("no verdict")
    return 1.0
"""


def test_a_reward_that_fails_for_one_rollout_costs_this_rollout(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "own.py").write_text(OWN)
        source = rows(tmp_path / "rows.jsonl", "53=", ground_truth="35")
        raw = settings(source, reward={"functions": [f"{tmp_path}/own.py:compute_score"]})
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            rollouts = [sample([5, 7, 1]), sample([6, 7, 1]), sample([5, 8, 1]), sample([7, 7, 1])]
            assert (await open_head.deliver(delivery(leases[0], rollouts)))[0][0]
            await until(lambda: open_head.fed)
            (group,) = open_head.fed
            assert {one.reward for one in group.rollouts} == {1.0}
            assert 0 < len(group.rollouts) < 4
            assert len(group.samples) == len(group.rollouts)
            num_lost = open_head.head.ledger.counts()["lost"]["reward_failed"]
            assert num_lost + len(group.rollouts) == 4
            (failure,) = status(open_head.head)["failures"]
            assert "no verdict" in failure["message"]

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def made_stranger(open_head: OpenHead, tmp_path: Path) -> str:
    """Make the worker of the head's one that joins with a stranger's ticket. Return the ticket's number."""
    identity = open_head.head.identity
    ticket = Ticket.parse(identity.make_ticket("worker", "127.0.0.1:1", 1, 1.0, is_own=False))
    csr = PeerIdentity(tmp_path / "stranger").request()
    peer = open_head.peer("w-1")
    open_head._peers["w-1"] = replace(peer, peer_id=identity.enrol(ticket.ticket_id, "worker", csr)[0])
    return ticket.ticket_id


def test_a_stranger_that_reports_failed_rollouts_fails_its_lease(tmp_path: Path) -> None:
    """Else it would choose what is trained on: short answers, or those that it likes."""

    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), workers={"require_checks": False})
        async with OpenHead(tmp_path, raw) as open_head:
            ticket_id = made_stranger(open_head, tmp_path)
            async with open_head.attending() as leases:
                await until(lambda: leases)
                gone = [wire.Lost(sample=3, detail="too long for me")]
                answers = await open_head.deliver(delivery(leases[0], [sample([5, 7, 1])] * 3, lost=gone))
                assert not answers[0][0]
                assert "1 rollout failed, it says. The first: too long for me" in answers[0][1]
                assert open_head.head.planner.credits.of(ticket_id).num_rests == 1
                assert open_head.head.ledger.counts()["lost"] == {}

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_strangers_text_on_which_a_reward_fails_costs_its_whole_group(tmp_path: Path) -> None:
    """Else it would put such a text in the place of each answer that it does not like, and no check would read it."""

    async def scenario() -> None:
        (tmp_path / "own.py").write_text(OWN)
        source = rows(tmp_path / "rows.jsonl", "53=", ground_truth="35")
        reward, workers = {"functions": [f"{tmp_path}/own.py:compute_score"]}, {"require_checks": False}
        async with OpenHead(tmp_path, settings(source, reward=reward, workers=workers)) as open_head:
            made_stranger(open_head, tmp_path)
            async with open_head.attending() as leases:
                await until(lambda: leases)
                rollouts = [sample([5, 7, 1]), sample([6, 7, 1]), sample([5, 8, 1]), sample([7, 7, 1])]
                assert (await open_head.deliver(delivery(leases[0], rollouts)))[0][0]
                counts = open_head.head.ledger.counts
                await until(lambda: open_head.fed or counts()["retired"])
                assert (counts()["retired"], counts()["lost"]) == ({"reward_failed": 1}, {})

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
