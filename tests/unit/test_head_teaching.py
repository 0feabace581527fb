"""What the head tells the learner of a group's teacher, which the row names: at a real head, and before a start."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config, build
from echo2.core.errors import UserError
from echo2.core.types import Task
from echo2.head.serve import reading
from echo2.launch.preflight import check
from echo2.launch.start import absolute, changes, check_teachers
from echo2.tasks.streams import load_tasks
from echo2.tasks.teaching import task_for_teacher, teacher_of
from echo2.transport.messages import parse_group
from head_cases import OpenHead, delivery, sample, settings, until
from judge_standin import judge_standin
from model_cases import model_directory
from rollout_cases import END

RIGHT, WRONG = [5, 7, END], [7, 5, END]  # 35, 53
TEACHERS = {"sorts": "models/sorts", "own": "self"}


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60.0))


def rows(path: Path, *columns: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": "53=", **more}) + "\n" for more in columns))
    return str(path)


def head_of(path: Path, *columns: dict[str, Any], teacher: Any = TEACHERS, **more: Any) -> OpenHead:
    raw = settings(rows(path / "rows.jsonl", *columns), **more)
    return OpenHead(path, raw | {"distill": {"teacher": teacher}, "reward": {"functions": []}})


async def fed_by(head: OpenHead) -> Any:
    async with head.attending() as leases:
        await until(lambda: leases)
        said = [sample(RIGHT), sample(WRONG), sample(RIGHT), sample(WRONG[:2], finish="length")]
        assert (await head.deliver(delivery(leases[0], said)))[0][0]
        await until(lambda: head.fed)
        return head.fed[0]


def test_a_group_without_a_reward_names_its_teacher_and_what_that_reads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with head_of(tmp_path, {"teacher": "own", "teacher_prompt": "35 of 53="}) as head:
            group = await fed_by(head)
            wanted = head.head.tokenizer.result().tokenizer.encode("35 of 53=", add_special_tokens=True)
            assert group.teaching.teacher == "own"
            assert group.teaching.prompt_tokens.tolist() == wanted
            assert group.prompt_tokens.tolist() == [7, 5, 28]
            assert [one.reward for one in group.rollouts] == [0.0] * 4
            assert head.head.ledger.rollouts(group.group.number)  # as it is fed again after a restart

    run(scenario())


def test_a_single_teacher_has_no_name_and_reads_the_same_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with head_of(tmp_path, {"teacher": "a column of another meaning"}, teacher="models/sorts") as head:
            group = await fed_by(head)
            assert (group.teaching.teacher, len(group.teaching.prompt_tokens)) == ("", 0)

    run(scenario())


def test_the_learner_hears_what_an_endpoint_is_asked_while_a_judge_thinks(tmp_path: Path) -> None:
    """Of groups whose teacher is an endpoint, and of no others."""
    released = threading.Event()

    def think(question: str, n: int) -> str:
        assert released.wait(60.0)
        return ""

    named = {"far": "http://127.0.0.1:1/v1", "own": "self"}
    columns = {"teacher": "own", "teacher_prompt": "35 of 53="}, {"teacher": "far", "teacher_prompt": "35 of 53="}

    async def scenario(url: str) -> None:
        judge = {"model": "m", "base_url": url, "rubric": "Digits."}
        raw = settings(rows(tmp_path / "rows.jsonl", *columns), schedule={"groups_per_step": 2}) | {
            "distill": {"teacher": named}
        }
        raw |= {"reward": {"functions": ["judge"], "judge": judge, "timeout_seconds": 60.0}}
        async with OpenHead(tmp_path, raw) as head, head.attending() as leases:
            said = [sample(RIGHT), sample(WRONG), sample(RIGHT), sample(WRONG[:2], finish="length")]
            for number in range(2):
                await until(lambda number=number: len(leases) > number)
                assert (await head.deliver(delivery(leases[number], said)))[0][0]
            heard = parse_group((await anext(head.session)).unscored)
            assert not head.fed
            released.set()
            await until(lambda: len(head.fed) == 2)
            (fed,) = [group for group in head.fed if group.teaching.teacher == "far"]
            assert (heard.group, heard.step, heard.prompt_tokens) == (fed.group, fed.step, fed.prompt_tokens)
            assert heard.teaching == fed.teaching
            assert len(heard.teaching.prompt_tokens) > 0
            for told, row in zip(heard.rollouts, fed.rollouts, strict=True):
                assert (told.tokens, told.loss_mask) == (row.tokens, row.loss_mask)
            assert head.head.connections.learner is not None
            assert head.head.connections.learner.orders.empty()

    with judge_standin(think) as judge:
        run(scenario(judge.url))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"teacher": "adds"}, "its column 'teacher' is 'adds', and distill.teacher names sorts, own"),
        ({}, "its column 'teacher' is None"),
        ({"teacher": "own"}, "the row has no column 'teacher_prompt'"),
        ({"teacher": "sorts", "teacher_prompt": ""}, "'prompt' is empty"),
        ({"teacher": "sorts", "teacher_prompt": 5}, "'prompt' must be text or a list of chat messages"),
    ],
)
def test_an_unteachable_row_costs_its_group_and_is_named_before_the_start(
    tmp_path: Path, columns: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with head_of(tmp_path, columns, {"teacher": "sorts"}) as head, head.attending():
            failures = head.head.books.failures
            await until(lambda: failures.count("bad_task"))
            assert words in failures.to_plain()[0]["message"]

    run(scenario())
    raw = whole(tmp_path) | {"reward": {}, "distill": {"teacher": {"sorts": str(tmp_path / "model"), "own": "self"}}}
    check(build(raw | {"tasks": {"source": rows(tmp_path / "some.jsonl", columns, {"teacher": "sorts"})}}, "my.toml"))
    assert "1 of 2 rows" in (told := capsys.readouterr().err)
    assert words in told
    with pytest.raises(UserError, match="The same is true of all rows of") as caught:
        check(build(raw | {"tasks": {"source": rows(tmp_path / "all.jsonl", columns)}}, "my.toml"))
    assert words in str(caught.value)


def test_a_teachers_prompt_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TEACHER_TOKENS_MAX", 3)

    async def scenario() -> None:
        async with head_of(tmp_path, {"teacher": "sorts"}) as head:
            with pytest.raises(UserError, match="teacher_prompt has 4 tokens, not 1 to 3"):
                head.head.tokenizer.result().teacher_prompt(Task(0, "53=", {"teacher_prompt": "534="}))

    run(scenario())


def test_a_teachers_prompt_is_refused_beside_a_harness(tmp_path: Path) -> None:
    """Which makes the prompt of each row: the teacher would read its own prompt, and the rest of that one."""
    task, teachers = Task(3, "53=", {"teacher_prompt": "534="}), {"": "DIR"}
    assert teacher_of(task, teachers, "own.py:Game") == ""
    for environment in ("harness:own.py:Agent", "verifiers", "harbor"):
        assert teacher_of(replace(task, columns={}), teachers, environment) == ""
        with pytest.raises(UserError, match=r"Task 3 has a column 'teacher_prompt', and .* is a harness"):
            teacher_of(task, teachers, environment)


def test_a_template_makes_the_teachers_prompt_too(tmp_path: Path) -> None:
    source = rows(tmp_path / "rows.jsonl", {"question": "5 + 3", "answer": "8"})
    params = {"prompt": "{question} is", "teacher_prompt": "{question} is {answer}. Again:", "chat": True}
    row = load_tasks(source, params, 0)[0]
    assert row["teacher_prompt"] == [{"role": "user", "content": "5 + 3 is 8. Again:"}]
    shown = task_for_teacher(Task(0, "?", {"teacher_prompt": row["teacher_prompt"]}))
    assert shown is not None
    assert shown.prompt[0].content == "5 + 3 is 8. Again:"  # type: ignore[union-attr]


# ---- before a start --------------------------------------------------------------------------------------------------


def whole(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run that could start."""
    model = tmp_path / "model"
    return {
        "model": {"path": str(model if model.exists() else model_directory(model))},
        "tasks": {"source": rows(tmp_path / "train.jsonl", {"answer": "35"})},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"max_tokens": 8},
    }


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"advantage": "none"}}, "leaves nothing to learn"),
        (
            {"distill": {"teacher": "self", "divergence": {"top_k": 8}}, "sampling": {"top_p": 0.9}},
            "over the whole vocabulary",
        ),
        (
            {"distill": {"teacher": "self"}, "reward": {}, "schedule": {"dynamic_sampling": True}},
            "rewards are not trained on",
        ),
        (
            {"distill": {"teacher": "self"}, "reward": {}, "eval": {"source": "digit_sorting"}},
            "nothing scores the answers",
        ),
        ({"distill": {"teacher": "self", "weight": 0.0}}, "distill.weight = 0.0"),
        (
            {"distill": {"teacher": "self", "divergence": {"top_k": 1025}}},
            "distill.divergence.top_k = 1025: expected `int` <= 1024. Write {top_k = 64, beta = 1.0}.",
        ),
        ({"distill": {"divergence": {"top_k": 8, "beta": 1.5}}}, "distill.divergence.beta = 1.5: expected"),
        (
            {"distill": {"divergence": {"top_k": 8, "alpha": 1.0}}},
            "distill.divergence = {'top_k': 8, 'alpha': 1.0}: object",
        ),
        ({"distill": {"divergence": {"beta": 0.5}}}, "missing required field `top_k`"),
        ({"distill": {"divergence": {"top_k": 8.5}}}, "distill.divergence.top_k = 8.5: expected `int`"),
        ({"distill": {"teacher": "TMP/nowhere"}}, "distill.teacher = 'TMP/nowhere': there is no such directory"),
        ({"distill": {"teacher": "TMP"}}, "distill.teacher = 'TMP': that directory holds no model"),
        ({"distill": {"teacher": "self"}}, "the row has no column 'teacher_prompt'"),
        (
            {"distill": {"teacher": "self"}, "tasks": {"source": "TMP/train.jsonl", "environment": "harness:h.py:Own"}},
            "a harness makes the prompts itself",
        ),
    ],
)
def test_the_error_names_the_mistake_in_teaching(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    raw = whole(tmp_path)
    with pytest.raises(UserError) as caught:
        check(build(raw | json.loads(json.dumps(sections).replace("TMP", str(tmp_path))), "my.toml"))
    assert words.replace("TMP", str(tmp_path)) in str(caught.value)


def test_a_run_may_have_a_teacher_without_rewards_and_its_path_is_checked_by_the_learner(tmp_path: Path) -> None:
    raw = whole(tmp_path) | {"reward": {}}
    check(build(raw | {"distill": {"teacher": str(tmp_path / "model")}}, "my.toml"))
    check(build(raw | {"distill": {"teacher": "/on/the/learners/machine"}}, "my.toml"), has_learner=False)


def with_tokenizer(where: Path, model: Path, *tokens: str) -> Path:
    from tokenizers import Tokenizer, models

    shutil.copytree(model, where)
    core = Tokenizer(models.WordLevel({token: at for at, token in enumerate(tokens)}, unk_token=tokens[0]))
    (where / "tokenizer.json").write_text(core.to_str())
    (where / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return where


def test_a_teacher_with_another_tokenizer_is_refused_and_one_with_more_tokens_is_not(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "plain")
    policy = with_tokenizer(tmp_path / "policy", model, "a", "b", "c")

    def config(teacher: Path) -> Config:
        return build({"model": {"path": str(policy)}, "distill": {"teacher": str(teacher)}}, "my.toml")

    check_teachers(config(policy))
    check_teachers(config(with_tokenizer(tmp_path / "more", model, "a", "b", "c", "d")))
    with pytest.raises(UserError, match=r"of the policy's 3 tokens 2 are others there, for example number 1, 'b'"):
        check_teachers(config(with_tokenizer(tmp_path / "other", model, "a", "c", "b")))
    (broken := with_tokenizer(tmp_path / "broken", model, "a", "b", "c")).joinpath("tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="can't be compared"):
        check_teachers(config(broken))


def test_paths_become_absolute_and_a_resumed_run_keeps_its_teachers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big").mkdir()
    (tmp_path / "self").mkdir()
    several = {"one": "big", "two": "owner/name", "own": "self"}
    made = absolute(build({"distill": {"teacher": several}}, "my.toml"))
    assert made.distill.teachers == {"one": str(tmp_path / "big"), "two": "owner/name", "own": "self"}
    single = absolute(build({"distill": {"teacher": "./big"}}, "my.toml"))
    assert single.distill.teachers == {"": str(tmp_path / "big")}
    with pytest.raises(UserError, match="scored groups name their teachers"):
        changes(single, made)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampling": {"temperature": 0.7}}, "with sampling.temperature = 0.7"),
        ({"sampling": {"top_p": 0.9}}, "a server gives logprobs at temperature 1 over all tokens"),
        ({"sampling": {"min_p": 0.1}}, "or let the learner hold the teacher"),
        (
            {"distill": {"teacher": {"a": "self", "b": "http://host/"}}},
            "'http://host/': expected the address",
        ),
        ({"distill": {"teacher": "http://key@host/v1"}}, "expected the address"),
        ({"distill": {"teacher": "http://host:0/v1"}}, "expected the address"),
        ({"distill": {"teacher": "http://host/v1?x=1"}}, "expected the address"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(sections: dict[str, Any], words: str) -> None:
    raw = {"model": {"path": "m"}, "distill": {"teacher": "http://10.0.0.9:8000/v1#large"}}
    build(raw, "my.toml")
    with pytest.raises(UserError) as caught:
        build(raw | sections, "my.toml")
    assert words in str(caught.value)


def test_a_resumed_run_may_have_its_teacher_at_another_address() -> None:
    def config(teacher: Any) -> Any:
        return absolute(build({"distill": {"teacher": teacher}}, "my.toml"))

    (line,) = changes(config("http://a:1/v1"), config("http://b:1/v1"))
    assert "http://b:1/v1" in line
    with pytest.raises(UserError, match="scored groups name their teachers"):
        changes(config("http://a:1/v1"), config("a/model"))
    with pytest.raises(UserError, match="scored groups name their teachers"):
        changes(config({"x": "http://a:1/v1"}), config({"y": "http://a:1/v1"}))
