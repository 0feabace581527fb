"""Nothing of a worker's is believed that can be known: what it is sent, and what comes of each lie, at a real head."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.child import child_environment
from echo2.core.errors import PeerError, UserError
from echo2.core.types import LOGGED_ROLLOUTS, RUN_POLICY, GroupRef, Lease, Message, SamplingParams, Task
from echo2.head.serve import learner_calls, reading, results
from echo2.head.serve.reading import RunTokenizer
from echo2.rollouts.generate import assignment_of
from echo2.transport import limits, messages
from echo2.transport import wire_pb2 as wire
from head_cases import HUGE_SECONDS, LEARNER, OpenHead, delivery, rows, sample, settings, until
from invariants import check
from rollout_cases import END, VOCAB, tokenizer_files

PROMPT = [7, 5, 28]  # 53=
RIGHT, WRONG = [5, 7, END], [7, 5, END]  # 35, 53


def one_task(path: Path) -> OpenHead:
    return OpenHead(path, settings(rows(path / "rows.jsonl", "53=")))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


# ---- the honest way --------------------------------------------------------------------------------------------------


def test_the_head_makes_prompt_text_and_rewards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            one_task(tmp_path) as open_head,
            open_head.attending() as leases,
        ):
            await until(lambda: leases)
            assert array("i", leases[0].prompt_tokens).tolist() == PROMPT
            said = [sample(RIGHT), sample(WRONG), sample(RIGHT), sample(WRONG[:2], finish="length")]
            assert (await open_head.deliver(delivery(leases[0], said)))[0][0]
            await until(lambda: open_head.fed)
            (group,) = open_head.fed
            (line,) = (open_head.head.rundir.rollouts / "step_1.jsonl").read_text().splitlines()
        assert group.prompt_tokens.tolist() == PROMPT
        assert [rollout["text"] for rollout in json.loads(line)["rollouts"]] == ["35", "53", "35", "53"]
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 1.0, 0.0]
        assert [dict(rollout.reward_parts) for rollout in group.rollouts][:2] == [
            {"exact_match": 1.0},
            {"exact_match": 0.0},
        ]
        assert (group.step, group.cursor, group.worker_id, group.logged) == (0, 0, open_head.peer("w-1").peer_id, False)

    run(scenario())


def test_a_restarted_head_reads_the_tokenizer_of_its_stored_snapshot(tmp_path: Path) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="))
        async with OpenHead(tmp_path, raw):
            pass
        async with OpenHead(tmp_path, raw) as again:
            assert again.head.tokenizer.done()
            async with again.attending() as leases:
                await until(lambda: leases)
                assert array("i", leases[0].prompt_tokens).tolist() == PROMPT

    run(scenario())


# ---- a worker learns no answer ---------------------------------------------------------------------------------------

WORDS = st.text("abcdefghij", min_size=6, max_size=12)
LEASE = Lease(1, GroupRef(RUN_POLICY, "train", 0), 0, 0, 2, 0, None, 9.0, 9.0, 0)


@given(st.dictionaries(WORDS, WORDS | st.lists(WORDS, max_size=3), min_size=1), st.booleans())
def test_a_lease_holds_none_of_a_tasks_columns(columns: dict[str, Any], is_chat: bool) -> None:
    prompt: Any = (Message("user", "?"),) if is_chat else "?"
    assignment = assignment_of(LEASE, Task(0, prompt, columns), array("i", [1]), SamplingParams())
    text = messages.encode_assignment(assignment).SerializeToString()
    for secret in (
        *columns,
        *(word for value in columns.values() for word in ([value] if isinstance(value, str) else value)),
    ):
        assert secret.encode() not in text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4), WORDS)
def test_a_lease_on_a_logged_task_holds_no_reward(rewards: list[float], answer: str) -> None:
    rollouts = [{"completion": "x", "reward": reward} for reward in rewards]
    task = Task(0, "?", {LOGGED_ROLLOUTS: {"rollouts": rollouts}, "answer": answer})
    sent = json.loads(
        messages.encode_assignment(assignment_of(LEASE, task, array("i", [1]), SamplingParams())).columns_json
    )
    assert sent == {LOGGED_ROLLOUTS: {"rollouts": [{"completion": "x"}] * len(rewards)}}


def test_only_an_environment_gets_the_columns(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = rows(tmp_path / "rows.jsonl", "53=")
        async with OpenHead(tmp_path, settings(source)) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            data = leases[0].SerializeToString()
            assert b"xyzzy" not in data
            assert b"answer" not in data

    run(scenario())


# ---- lies ------------------------------------------------------------------------------------------------------------


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


Lie = Callable[[wire.Lease], wire.Delivery]


def told(*samples: wire.Rollout, **fields: Any) -> Lie:
    return lambda lease: delivery(lease, samples, **fields)


HONEST = [sample(RIGHT) for _ in range(4)]
LIES: dict[str, tuple[str, Lie]] = {
    "a group that was not leased": ("malformed", told(*HONEST, number=99)),
    "an evaluation's": ("malformed", told(*HONEST, kind="eval")),
    "fewer rollouts": ("malformed", told(*HONEST[:3])),
    "more rollouts": ("malformed", told(*HONEST, sample(RIGHT))),
    "none": ("malformed", told()),
    "longer than leased": ("oversized", told(*HONEST[:3], sample([5] * 13))),
    "a token that the model has not": ("malformed", told(*HONEST[:3], sample([VOCAB]))),
    "a version that is not published yet": ("malformed", told(*HONEST[:3], sample(RIGHT, version=7))),
    "a lineage that never was": ("malformed", told(*HONEST, lineage=2)),
    "a support, where nothing narrows": (
        "malformed",
        told(*HONEST[:3], sample([5], support_tokens=ints(5), support_offsets=ints(0, 1))),
    ),
    "words of an environment, where there is none": (
        "malformed",
        told(*HONEST[:3], sample([5, 6, 7], loss_mask=b"\1\0\1", logprobs=array("f", [-1, 0, -1]).tobytes())),
    ),
    "a negative duration": ("malformed", told(*HONEST, generate_seconds=-1.0)),
}


@pytest.mark.parametrize(("word", "lie"), LIES.values(), ids=LIES)
def test_an_impossible_result_is_refused_and_the_group_lives_on(tmp_path: Path, word: str, lie: Lie) -> None:
    async def scenario() -> None:
        async with (
            one_task(tmp_path) as open_head,
            open_head.attending() as leases,
        ):
            await until(lambda: leases)
            ((accepted, reason),) = await open_head.deliver(lie(leases[0]))
            assert not accepted
            assert reason.startswith(word), reason
            record = open_head.head.planner.groups.get(0)
            assert record is not None
            assert record.state in ("pending", "leased")

    run(scenario())


def test_a_group_that_no_message_to_the_learner_could_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with one_task(tmp_path) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            monkeypatch.setattr(results, "GROUP_BYTES_MAX", 40)
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], HONEST))
            assert not accepted
            assert reason.startswith("oversized: a group of"), reason

    assert results.GROUP_BYTES_MAX + results.FEED_BYTES < limits.MESSAGE_BYTES_MAX
    run(scenario())


@given(st.lists(st.integers(1, 12), max_size=20))
def test_groups_go_together_in_order_as_far_as_a_message_holds_them(sizes: list[int]) -> None:
    groups = [wire.RolloutGroup(kind=chr(65 + place) * size).SerializeToString() for place, size in enumerate(sizes)]

    async def sent() -> list[list[bytes]]:
        feed: asyncio.Queue[tuple[bytes, ...] | wire.StepDone | None] = asyncio.Queue()
        for group in groups:
            feed.put_nowait((group[:3], group[3:]))
        feed.put_nowait(wire.StepDone(cursor=len(groups)))
        held: list[tuple[bytes, ...]] = []
        messages_sent: list[list[bytes]] = []
        is_last = False
        while not is_last:
            fed = await learner_calls._together(feed, held)
            assert fed is not None
            data, is_last = fed
            message = wire.FedGroups.FromString(data)
            assert message.HasField("done") == is_last
            messages_sent.append([one.SerializeToString() for one in message.groups])
        return messages_sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_calls, "FEED_BYTES", 10)
        fed = asyncio.run(sent())
    assert [group for message in fed for group in message] == groups
    assert all(len(message) == 1 or sum(map(len, message)) <= 10 for message in fed)
    assert all(sum(map(len, one)) + len(other[0]) > 10 for one, other in itertools.pairwise(fed) if other)


def test_only_leased_groups_of_the_caller_are_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            one_task(tmp_path) as open_head,
            open_head.attending() as leases,
        ):
            await until(lambda: leases)
            thief = delivery(leases[0], HONEST)
            ((accepted, reason),) = await open_head.deliver(thief, name="w-2")
            assert (accepted, reason) == (
                False,
                f"malformed: lease {leases[0].lease_id} is held by {open_head.peer('w-1').peer_id}",
            )
            junk = delivery(leases[0], [wire.Rollout(tokens=b"x")], lease_id=10**6)
            assert await open_head.deliver(junk) == [(False, "late: lease 1000000 is over")]
            assert (await open_head.deliver(delivery(leases[0], HONEST)))[0][0]

    run(scenario())


def test_a_duration_counts_at_most_from_the_grant(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            one_task(tmp_path) as open_head,
            open_head.attending(price_usd_per_hour=1.0) as leases,
        ):
            await until(lambda: leases)
            assert (await open_head.deliver(delivery(leases[0], HONEST, generate_seconds=HUGE_SECONDS)))[0][0]
            await until(lambda: open_head.fed)
            assert 0 < open_head.fed[0].generate_seconds < 60

    run(scenario())


@pytest.mark.parametrize(
    ("narrowing", "width", "is_possible"),
    [
        ({"top_k": 3}, 3, True),
        ({"top_k": 3}, 4, False),
        ({"top_p": 0.9}, VOCAB, True),
        ({"top_p": 0.9}, VOCAB + 1, False),
        ({"top_k": 1 << 20}, VOCAB + 1, False),
    ],
)
def test_a_support_is_as_wide_as_sampling_leaves_it(
    tmp_path: Path, narrowing: dict[str, Any], width: int, is_possible: bool
) -> None:
    async def scenario() -> None:
        raw = settings(rows(tmp_path / "rows.jsonl", "53="), sampling=narrowing)
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            wide = sample([5], support_tokens=ints(*[5] * width), support_offsets=ints(0, width))
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], [*HONEST[:3], wide]))
            assert accepted == is_possible, reason

    run(scenario())


# ---- a log -----------------------------------------------------------------------------------------------------------


def logged_settings(tmp_path: Path) -> dict[str, Any]:
    column = {"rollouts": [{"completion": text, "reward": i / 4} for i, text in enumerate(("35", "53", "3", "5"))]}
    source = rows(tmp_path / "rows.jsonl", "53=", **{LOGGED_ROLLOUTS: column})
    return settings(source, reward={"functions": ["logged"]})


LOGGED = [[5, 7, END], [7, 5, END], [5, END], [7, END]]


def test_a_log_contains_what_the_head_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, logged_settings(tmp_path)) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            forged = array("f", [-9.0] * 3).tobytes()
            said = [sample(LOGGED[0], logprobs=forged), *(sample(tokens) for tokens in LOGGED[1:])]
            assert (await open_head.deliver(delivery(leases[0], said)))[0][0]
            await until(lambda: open_head.fed)
            (group,) = open_head.fed
            assert group.logged
            assert array("f", group.rollouts[0].logprobs).tolist() == [0.0] * 3  # not counted, so no estimate
            assert [rollout.reward for rollout in group.rollouts] == [0.0, 0.25, 0.5, 0.75]

    run(scenario())


@pytest.mark.parametrize("forged", [[5, 5, END], [5, 7], [5, 7, END, END]])
def test_a_forged_log_is_refused(tmp_path: Path, forged: list[int]) -> None:
    async def scenario() -> None:
        async with OpenHead(tmp_path, logged_settings(tmp_path)) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            said = [sample(forged), *(sample(tokens) for tokens in LOGGED[1:])]
            ((accepted, reason),) = await open_head.deliver(delivery(leases[0], said))
            assert (accepted, reason) == (False, "malformed: rollout 0 is not what the log says")

    run(scenario())


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_cannot_be_made_costs_its_group_and_says_why(tmp_path: Path) -> None:
    """Task 0 is a chat, and the model has no chat template: in training, and held out."""

    async def scenario() -> None:
        source = rows(tmp_path / "rows.jsonl", [{"role": "user", "content": "53"}], "53=")
        raw = settings(source, eval={"source": source, "limit": 2})
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:
            planner = open_head.head.planner
            await until(lambda: {lease.kind for lease in leases} == {"train", "eval"})
            await until(lambda: planner.groups.get(0).why and planner.evaluation.rounds[0].failed)  # both are told
            assert {(lease.kind, lease.number) for lease in leases} >= {("eval", 1), ("train", 1)}
            assert not {lease.number for lease in leases if lease.kind == "train"} & {0, 2}
            record = planner.groups.get(0)
            assert record is not None
            assert (record.state, record.why) == ("retired", "bad_task")
            assert planner.evaluation.rounds[0].failed == {"bad_task": 1}
            events = (tmp_path / "run" / "events.jsonl").read_text()
            assert "Task 0 has chat messages, but the model's tokenizer has no chat template" in events
            (held_out,) = [lease for lease in leases if lease.kind == "eval"]
            assert (await open_head.deliver(delivery(held_out, [sample(RIGHT)])))[0][0]
            await until(lambda: not planner.evaluation.rounds)
            check(planner)

    run(scenario())


def test_prompts_are_made_once_and_no_more_are_kept_than_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        reader = RunTokenizer(tokenizer_files())
        monkeypatch.setattr(reading, "KEPT_PROMPT_TOKENS", 7)
        monkeypatch.setattr(reading, "PROMPT_TOKENS", 0)
        first = reader.prompt("train", Task(0, "53="))
        assert reader.prompt("train", Task(0, "another text under the same cursor")) is first
        assert reader.prompt("eval", Task(0, "5")).tolist() == [7]
        reader.prompt("train", Task(1, "1234"))  # the oldest goes
        assert reader.prompt("train", Task(0, "5")).tolist() == [7]
        with pytest.raises(UserError, match="Task 3: its prompt has no tokens"):
            reader.prompt("train", Task(3, ""))

    run(scenario())


def test_a_model_without_a_tokenizer_is_a_user_error() -> None:
    with pytest.raises(UserError, match="tokenizer can't be used"):
        RunTokenizer({"config.json": b"{}"})


WITHOUT_TORCH = """
import asyncio, pathlib, sys
from echo2.core.devices import forbid_torch
forbid_torch()
from echo2.head.serve.reading import RunTokenizer
from echo2.core.types import GroupRef, Message, Rollout, RolloutGroup, Task
from array import array
reader = RunTokenizer({path.name: path.read_bytes() for path in pathlib.Path(sys.argv[1]).iterdir()})
assert reader.prompt("train", Task(0, "53=")).tolist() == [7, 5, 28]
assert reader.prompt("train", Task(1, (Message("user", "53"),))).tolist() == [7, 5, 28]
rollout = Rollout(array("i", [5, 7, 1]), array("f"), b"", (), "stop")
group = RolloutGroup(GroupRef("policy", "train", 0), 0, 1, 0, array("i"), (rollout,))
(read,) = reader.read(group, Task(0, "53=")).rollouts
assert read.text == "35"
assert sys.modules["torch"] is None
"""


def test_the_head_reads_routes_without_torch_and_prints_nothing(tmp_path: Path) -> None:
    for name, data in (tokenizer_files() | {"chat_template.jinja": b"{{ messages[0].content }}="}).items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, env=child_environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@given(
    st.dictionaries(
        st.sampled_from(["tokenizer.json", "tokenizer_config.json", "config.json", "vocab.txt"]), st.binary(max_size=60)
    )
)
def test_files_without_a_tokenizer_raise_one_kind_of_error(files: dict[str, bytes]) -> None:
    try:
        RunTokenizer(files)
    except UserError:
        pass


def test_a_checkpoint_of_a_version_that_no_ledger_can_hold_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_task(tmp_path) as head:
            for version, oldest in ((2**63, 0), (0, 2**64 - 1)):
                with pytest.raises(PeerError, match="out of range"):
                    await head.service.learner.report_checkpoint(
                        LEARNER, wire.CheckpointReport(version=version, oldest_kept=oldest, epoch=head.epoch)
                    )

    run(scenario())


def test_the_best_checkpoint_and_those_under_evaluation_are_spared(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = rows(tmp_path / "rows.jsonl", "53=")
        raw = settings(source, eval={"source": source, "limit": 1})
        async with OpenHead(tmp_path, raw) as open_head, open_head.attending() as leases:

            async def spared(*versions: int) -> list[int]:
                report = wire.CheckpointReport(version=0, oldest_kept=0, epoch=open_head.epoch, versions=versions)
                return list((await open_head.service.learner.report_checkpoint(LEARNER, report)).spared)

            rounds = open_head.head.planner.evaluation.rounds
            await until(lambda: any(lease.kind == "eval" for lease in leases))
            assert await spared(1, 0) == [0]
            open_head.head.books.metrics.amend(4, {"eval/accuracy": 0.5})
            assert await spared(8, 4, 0) == [4, 0]
            (held_out,) = [lease for lease in leases if lease.kind == "eval"]
            assert (await open_head.deliver(delivery(held_out, [sample(RIGHT)])))[0][0]
            await until(lambda: not rounds)
            assert await spared(8, 4, 0) == [0]  # all right, which is more than half
            assert await spared(8, 4) == [4]
            assert await spared(8) == []

    run(scenario())


# ---- what the head itself makes --------------------------------------------------------------------------------------


def test_prompts_none_of_which_can_be_made_end_the_run_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        source = rows(tmp_path / "rows.jsonl", [{"role": "user", "content": "53"}])
        async with OpenHead(tmp_path, settings(source)) as open_head, open_head.attending():
            await until(lambda: open_head.head.ending.stopping)  # it ends once the learner has saved
            assert "8 groups failed in a row (bad_task)" in open_head.head.ending.stopping
            assert "no chat template" in open_head.head.ending.stopping

    run(scenario())


def test_a_text_that_no_learner_reads_costs_its_group_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.head.serve.results.TEXT_CHARS_MAX", 2)

    async def scenario() -> None:
        async with one_task(tmp_path) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            await open_head.deliver(delivery(leases[0], [*HONEST[:3], sample([5, 5, 5, END])]))
            await until(lambda: [lease for lease in leases if lease.step == 0][1:])  # another group for this step
            assert open_head.head.planner.groups.get(0).why == "oversized"  # type: ignore[union-attr]
            await open_head.deliver(delivery([lease for lease in leases if lease.step == 0][1], HONEST))
            await until(lambda: open_head.fed)
            assert open_head.head.ending.outcome is None

    run(scenario())


def test_a_head_without_a_tokenizer_asks_for_the_result_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_task(tmp_path) as open_head, open_head.attending() as leases:
            await until(lambda: leases)
            nothing = asyncio.get_running_loop().create_future()
            tokenizer, open_head.head.tokenizer = open_head.head.tokenizer, nothing
            with pytest.raises(PeerError, match="busy"):
                await open_head.deliver(delivery(leases[0], HONEST))
            open_head.head.tokenizer = tokenizer
            assert (await open_head.deliver(delivery(leases[0], HONEST)))[0][0]

    run(scenario())
