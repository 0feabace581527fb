"""What goes wrong in the user's code is counted and shown with its first traceback, also after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo2.core.types import RUN_POLICY, GroupRef, SamplingFailure
from echo2.head.decide import commands as do
from echo2.head.decide import events as ev
from echo2.head.ledger.books import MESSAGE_CHARS, REFUSALS_PER_WORKER, Failures
from echo2.head.serve import report
from echo2.sandbox.plugins import TRACEBACK_CHARS
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import PROTOCOL_VERSION
from echo2.views.status import FAILURE_WORDS, failure_lines
from head_cases import OpenHead, delivery, rows, sample, settings, until
from rollout_cases import END

OWN = """
def mine(completions, **columns):
    return helper(columns)
def helper(columns):
    return columns.absent
"""


def test_a_reward_that_raises_is_counted_with_its_traceback_and_a_restart_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    reward = {"functions": [f"{tmp_path}/own.py:mine"]}
    raw = settings(rows(tmp_path / "rows.jsonl", "53=", "27="), reward=reward)

    async def scenario() -> None:
        async with OpenHead(tmp_path, raw) as open_head:
            async with open_head.attending() as leases:
                for count in (1, 2):
                    await until(lambda count=count: len(leases) >= count)
                    await open_head.deliver(delivery(leases[count - 1], [sample([5, 7, END])] * 4))
                    await until(
                        lambda count=count: (
                            [one["count"] for one in report.status(open_head.head)["failures"]] == [count]
                        )
                    )
            (found,) = report.summary(open_head.head)["failures"]
            open_head.head.books.save(open_head.head.distribution.origin)
        assert found["kind"] == "reward_failed"
        assert "in helper: AttributeError: 'dict' object has no attribute 'absent'" in found["message"]
        assert "in mine\n    return helper(columns)" in found["traceback"]
        assert "AttributeError: 'dict' object" in (tmp_path / "run" / "logs" / "reward.log").read_text()
        assert "reward_failed: The reward function mine raised" in caplog.text
        async with OpenHead(tmp_path, raw) as again:
            assert report.status(again.head)["failures"] == [found | {"num_before": 2}]

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_failed_leases_count_by_kind_and_harmless_ones_do_not_count() -> None:
    failures = Failures()
    group = GroupRef(RUN_POLICY, "train", 0)
    closed = do.CloseLease(
        cause=1,
        policy=RUN_POLICY,
        reason="it failed",
        lease_id=1,
        group=group,
        worker_id="w",
        outcome="failed",
        held_seconds=1.0,
    )
    reasons: tuple[SamplingFailure, ...] = (
        "environment_failed",
        "snapshot_gone",
        "engine_failed",
        "environment_failed",
    )
    for reason in reasons:
        failures.see(ev.LeaseFailed("w", 1, reason, f"{reason} here"), [closed])
    failures.see(ev.GroupScored(group), [])
    found = [(one["kind"], one["count"], one["message"]) for one in failures.to_plain()]
    assert found == [
        ("environment_failed", 2, "w: environment_failed here"),
        ("engine_failed", 1, "w: engine_failed here"),
    ]


def test_a_failure_after_a_restart_replaces_the_older_one() -> None:
    """Whoever mends a reward and resumes the run sees the next mistake, not the mended one."""
    first = Failures()
    for message in ("old", "older"):
        first.add("reward_failed", message, "old lines")
    again = Failures(first.to_plain())
    for count, message in ((3, "new"), (4, "newer")):
        again.add("reward_failed", message, "new lines")
        (found,) = again.to_plain()
        assert (found["count"], found["num_before"]) == (count, 2)
        assert (found["message"], found["traceback"]) == ("new", "new lines")


@pytest.mark.parametrize(
    ("num_before", "words"),
    [
        (10, "lost to your reward function before the head was started again; logs/reward.log has all. The first: it"),
        (9, "lost to your reward function; logs/reward.log has all. The first since the head was started again: it"),
    ],
)
def test_failures_before_a_restart_are_counted_apart(num_before: int, words: str) -> None:
    failure = {"kind": "reward_failed", "count": 10, "message": "it", "traceback": "", "num_before": num_before}
    (line,) = failure_lines({"failures": [failure]})
    assert words in line


@pytest.mark.parametrize("kind", [*FAILURE_WORDS, "of_another_release"])
def test_one_failure_is_written_in_the_singular(kind: str) -> None:
    one, two = (
        failure_lines({"failures": [{"kind": kind, "count": count, "message": "it", "traceback": ""}]})[0]
        for count in (1, 2)
    )
    assert (one.split()[0], two.split()[0]) == ("1", "2")
    assert not one.split()[1].endswith("s")
    assert " were " not in one + two
    assert two.split()[1] == f"{one.split()[1]}s"


def test_a_lease_that_its_worker_does_not_hold_counts_nothing_and_an_unknown_word_is_a_failed_engine(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw) as one, one.attending() as leases:
            await until(lambda: leases)
            held = leases[0].lease_id
            for peer, lease_id in (("w-1", 10**6), ("w-2", held)):
                said = wire.LeaseFailed(lease_id=lease_id, reason="engine_failed", detail="made up")
                await one.service.fail_lease(one.peer(peer), said)
            assert one.head.books.failures.to_plain() == []
            said = wire.LeaseFailed(lease_id=held, reason="busy", detail="cuda is gone\nline 1\nline 2")
            for _ in range(3):
                await one.service.fail_lease(one.peer("w-1"), said)
            (failure,) = one.head.books.failures.to_plain()
            assert (failure["kind"], failure["count"]) == ("engine_failed", 1)
            assert failure["message"] == f"{one.peer('w-1').peer_id}: cuda is gone"
            assert failure["traceback"] == "line 1\nline 2"

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_failure_messages_are_bounded_and_harmless() -> None:
    failures = Failures()
    failures.see(
        ev.GroupUnfit(
            GroupRef(RUN_POLICY, "train", 0), "reward_failed", "\x1b[2J" + "a" * 10_000, 1.0, "t\x07\n" * 10_000
        ),
        [],
    )
    (found,) = failures.to_plain()
    assert len(found["message"]) <= MESSAGE_CHARS
    assert len(found["traceback"]) <= TRACEBACK_CHARS
    assert "\x1b" not in found["message"]
    assert "\x07" not in found["traceback"]


def test_a_worker_that_refuses_a_snapshot_says_why_where_people_look(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, settings(rows(tmp_path / "rows.jsonl", "53="))) as one:
            hello = wire.WorkerHello(protocol=PROTOCOL_VERSION, slots=1)
            orders = one.service.attend(one.peer("w-1"), hello)
            listening = asyncio.ensure_future(anext(orders))
            await until(lambda: one.head.connections.workers)
            said = wire.WorkerReport(doing="waiting", refused="1.0: no room\x1b[2J for it")
            for _ in range(3):
                await one.service.report(one.peer("w-1"), said)
            found = report.status(one.head)
            for count in range(200):
                said = wire.WorkerReport(doing="waiting", refused=f"1.{count}: no room")
                await one.service.report(one.peer("w-1"), said)
            assert one.head.books.failures.to_plain()[0]["count"] == REFUSALS_PER_WORKER
            listening.cancel()
        (failure,) = found["failures"]
        assert (failure["kind"], failure["count"]) == ("snapshot_refused", 1)
        assert "refused snapshot 1.0: no room for it" in failure["message"]
        worker_id = one.peer("w-1").peer_id
        (reason,) = [wait["reason"] for wait in found["waits"] if wait["waiter"] == worker_id]
        assert reason == "it refused snapshot 1.0: no room for it; it tries again"

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
