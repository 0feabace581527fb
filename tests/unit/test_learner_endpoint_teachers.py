"""Teachers behind endpoints, over real HTTP: the same gradients as of a teacher that the learner holds, what is asked
when, and what every fault costs."""

from __future__ import annotations

import random
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from echo2.config import Config
from echo2.config.rundir import CRASH_RECORD
from echo2.core.errors import UserError
from echo2.core.types import Backoff, RolloutGroup, Teaching
from echo2.learner.core.model import Policy, load_policy
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.saving import CrashRecord
from echo2.learner.link.teacher_endpoint import TeacherEndpoint
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire
from learner_cases import (
    TEXTS,
    VOCAB,
    config_of,
    gradients,
    in_float64,
    model_directory,
    random_group,
    tiny_module,
    write_tokenizer,
)
from teacher_standin import teacher_standin
from test_learner_loop import OPTIONS, ScriptedHead, run, step_groups, weights

PLAIN: dict[str, Any] = {"loss": "tis", "loss_params": {"cap": 1e6}, "advantage": "none"}
#: Long enough that a busy machine answers, short where a request hangs for as long as a test wants.
QUICK: dict[str, Any] = {"backoff": Backoff(0.001, 0.01), "seconds": 20.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tokenizer_files_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(model_directory(tmp_path_factory.mktemp("teacher") / "model", seed=7)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.learner.grpo.teachers.TeacherEndpoint", partial(TeacherEndpoint, **QUICK))


@pytest.fixture
def client_of(files: dict[str, bytes]) -> Iterator[Callable[..., GrpoClient]]:
    """Clients, closed at the end."""
    made: list[GrpoClient] = []

    def client(settings: Config | None = None, **options: Any) -> GrpoClient:
        policy = Policy(in_float64(tiny_module()), files, torch.device("cpu"))
        made.append(GrpoClient(policy, config_of(settings, **options)))
        return made[-1]

    yield client
    for one in made:
        if one.teachers is not None:
            one.teachers.close()


def tokenizer_files_in(directory: Path) -> dict[str, bytes]:
    """The policy's files."""
    where = write_tokenizer(directory)
    return {path.name: path.read_bytes() for path in where.iterdir()} | {"config.json": b"{}"}


def likely(top_k: int) -> dict[str, int]:
    """The setting `distill.divergence`; 0: the teacher's part is in the advantages."""
    return {"top_k": top_k} if top_k else {}


def standin_of(teacher: str, **options: Any) -> Any:
    return teacher_standin(load_policy(teacher, "float32", "cpu").module, TEXTS, **options)


def some_groups(seed: int = 5, name: str = "", prompt: tuple[int, ...] = ()) -> list[RolloutGroup]:
    made = [random_group(random.Random(seed + at), at) for at in range(3)]
    return [replace(one, teaching=Teaching(name, array("i", prompt))) for one in made]


def num_questions(groups: list[RolloutGroup]) -> int:
    """How often a teacher is asked about them."""
    rows = [
        (one.prompt_tokens.tobytes(), row.tokens.tobytes(), row.loss_mask) for one in groups for row in one.rollouts
    ]
    return len({row for row in rows if 1 in row[2]})


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.norm() > 1.0
    assert (found - expected).norm() < 1e-4 * expected.norm()


def gradient_of(client: GrpoClient, groups: list[RolloutGroup]) -> torch.Tensor:
    client.forward_backward(groups)
    return gradients(client)


# ---- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 4, VOCAB + 3])
@pytest.mark.parametrize("prompt", [(), (9, 1, 4)])
def test_the_gradient_is_that_of_a_teacher_that_the_learner_holds(
    teacher: str, client_of: Callable[..., GrpoClient], top_k: int, prompt: tuple[int, ...]
) -> None:
    groups = some_groups(prompt=prompt)
    with standin_of(teacher) as standin:
        asked = gradient_of(client_of(teacher=standin.url, divergence=likely(top_k), **PLAIN), groups)
        body = standin.bodies[-1]
    same(asked, gradient_of(client_of(teacher=teacher, divergence=likely(top_k), **PLAIN), groups))
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("the-teacher", 1, min(top_k, VOCAB))


def test_a_local_teacher_an_endpoint_and_the_policy_itself_side_by_side(
    teacher: str, tmp_path: Path, client_of: Callable[..., GrpoClient]
) -> None:
    other = str(write_tokenizer(model_directory(tmp_path / "other", seed=11)))
    groups = [
        replace(one, teaching=Teaching(name, array("i", prompt)))
        for one, name, prompt in zip(some_groups(), ("maths", "code", "own"), ([], [4, 5, 6], [9, 1]), strict=True)
    ]
    with standin_of(other) as standin:
        client = client_of(teacher={"maths": teacher, "code": standin.url, "own": "self"}, **PLAIN)
        asked = gradient_of(client, groups)
        stats = client.optim_step()
    same(asked, gradient_of(client_of(teacher={"maths": teacher, "code": other, "own": "self"}, **PLAIN), groups))
    assert sum(one.tokens for one in stats.taught.values()) == stats.num_tokens
    assert all(one.seconds > 0.0 for one in stats.taught.values())


def test_tokens_that_only_the_teacher_has_are_a_part_of_the_rest(
    tmp_path: Path, client_of: Callable[..., GrpoClient]
) -> None:
    tiny_module(seed=3, vocab=VOCAB + 4).save_pretrained(tmp_path / "large")
    module = load_policy(str(tmp_path / "large"), "float32", "cpu").module
    with teacher_standin(module, [*TEXTS, "w", "x", "y", "z"]) as standin:
        client = client_of(teacher=standin.url, divergence=likely(6), **PLAIN)
        assert client.teachers is not None
        (group, *_) = some_groups()
        (first, *_) = client.teachers.taught([group], [client.take_data(group)])
    rows = torch.frombuffer(bytearray(first.top_logprobs), dtype=torch.float32).view(-1, 6)
    assert len(rows) == first.loss_mask.count(1)
    assert max(first.top_tokens) < VOCAB
    assert rows.isinf().any(), "one of the six was not the policy's"


def test_rows_are_asked_about_when_their_group_arrives_and_once_in_a_step(
    teacher: str, client_of: Callable[..., GrpoClient]
) -> None:
    with standin_of(teacher) as standin:
        client = client_of(teacher=standin.url, **PLAIN)
        groups = some_groups()
        for group in groups:
            client.prepare(group)
        assert client.teachers is not None
        assert client.teachers.waits_for(groups, 60.0) == ""
        num_rows = num_questions(groups)
        num_asked = standin.num_asked["/v1/completions"]
        standin.fault = lambda path, n: "400"  # nothing more is asked
        client.forward_backward(groups)
        client.optim_step()
        assert standin.num_asked["/v1/completions"] == num_asked
        assert num_asked == num_rows + 1, "and one to greet"
        standin.fault = lambda path, n: ""
        client.forward_backward([replace(one, step=1) for one in groups])
        assert standin.num_asked["/v1/completions"] == num_asked + num_rows, "a step later it is asked again"


def test_a_row_that_the_teacher_cannot_read_is_left_out(teacher: str, client_of: Callable[..., GrpoClient]) -> None:
    with standin_of(teacher, max_model_len=12) as standin:
        client = client_of(teacher={"maths": standin.url}, **PLAIN)
        assert client.teachers is not None
        assert client.teachers.waits_for((), 60.0) == ""
        (group, *_) = some_groups(name="maths")
        assert client.why_unfit(group) == ""
        longer = replace(group, prompt_tokens=array("i", [1] * 12))
        assert "the teacher maths has 11 positions" in client.why_unfit(longer)
        assert "is none of maths" in client.why_unfit(replace(group, teaching=Teaching("code")))
        num_asked = standin.num_asked["/v1/completions"]
        client.prepare(longer)  # it is left out, so nobody hears of that
        with pytest.raises(UserError, match=r"it reads 11 tokens, and a row has 12 \+ \d"):
            client.teachers.waits_for([longer], 60.0)
        assert standin.num_asked["/v1/completions"] == num_asked


# ---- what it may get wrong -------------------------------------------------------------------------------------------

FAULTS = ["429", "429 1", "500", "503 1", "404", "401", "cut", "hang", "no json", "oversized", "short", "NaN"]
FAULTS += [
    "infinite",
    "above 0",
    "too likely",
    "another token",
    "too many",
    "a negative id",
    "other ids",
    "no logprobs",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_teacher_costs_one_request(
    teacher: str, client_of: Callable[..., GrpoClient], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hang":
        short = partial(TeacherEndpoint, **QUICK | {"seconds": 2.0})
        monkeypatch.setattr("echo2.learner.grpo.teachers.TeacherEndpoint", short)
    groups = some_groups()
    spoils = lambda path, n: fault if path == "/v1/completions" and n == 3 else ""  # noqa: E731
    with standin_of(teacher, fault=spoils) as standin:
        asked = gradient_of(client_of(teacher=standin.url, divergence=likely(3), **PLAIN), groups)
        assert standin.num_asked["/v1/completions"] > 3
    same(asked, gradient_of(client_of(teacher=teacher, divergence=likely(3), **PLAIN), groups))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("400", "it answers 400"),
        ("500", "it answers 500"),
        ("no json", "its answer cannot be read"),
        ("oversized", "its answer has more than"),
        ("short", "positions of"),
        ("NaN", "its answer cannot be read"),
        ("infinite", "its answer cannot be read"),
        ("above 0", "a logprob is 0.5"),
        ("too likely", "probabilities that make"),
        ("another token", "or not the one that is there"),
        ("too many", "tokens, or not the one"),
        ("a negative id", "a token is -1"),
        ("other ids", "it read other tokens than it was sent"),
        ("no logprobs", "no prompt_logprobs"),
    ],
)
def test_a_fault_that_lasts_stops_the_run_with_its_reason(
    teacher: str, client_of: Callable[..., GrpoClient], fault: str, words: str
) -> None:
    spoils = lambda path, n: fault if path == "/v1/completions" and n > 2 else ""  # noqa: E731
    with standin_of(teacher, fault=spoils) as standin:
        client = client_of(teacher=standin.url, divergence=likely(3), **PLAIN)
        before = weights(client)
        with pytest.raises(UserError, match=r"/v1/completions failed 6 times: .*continue with --resume") as caught:
            client.forward_backward(some_groups())
    assert words in str(caught.value)
    assert weights(client) == before


# ---- a run -----------------------------------------------------------------------------------------------------------


RUN: dict[str, Any] = {"settings": OPTIONS, "max_steps": 3, **PLAIN}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class WatchedHead(ScriptedHead):
    """`on_wait` is called once, when the learner's activity says that it waits for a teacher that is down."""

    def __init__(self, on_wait: Callable[[ScriptedHead], object] = lambda head: None, **options: Any) -> None:
        super().__init__(**options)
        self.on_wait, self.activities = on_wait, list[str]()

    def _LearnerReport(self, request: Any) -> Any:
        self.activities.append(request.doing)
        if "waits for the teacher" in request.doing:
            on_wait, self.on_wait = self.on_wait, lambda head: None
            on_wait(self)
        return super()._LearnerReport(request)


@pytest.fixture
def expected(teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path) -> dict[str, bytes]:
    """The weights of a run whose learner holds the teacher."""
    client = client_of(teacher=teacher, **RUN)
    run(ScriptedHead(max_steps=3), client, tmp_path / "held")
    return weights(client)


def close_to(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    for name, data in expected.items():
        both = [torch.frombuffer(bytearray(one), dtype=torch.float64) for one in (found[name], data)]
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-5)


def test_a_teacher_that_is_down_is_waited_for_with_its_reason(
    teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    port, is_over = free_port(), threading.Event()

    def serve() -> None:
        with standin_of(teacher, port=port):
            is_over.wait()

    server = threading.Thread(target=serve)
    head = WatchedHead(lambda head: server.start(), max_steps=3)
    client = client_of(teacher=f"http://127.0.0.1:{port}/v1", **RUN)
    try:
        assert run(head, client, tmp_path / "asked") == "all steps are trained"
    finally:
        is_over.set()
        server.join()
    close_to(weights(client), expected)
    (activity, *_) = [one for one in head.activities if "waits for the teacher" in one]
    assert activity.startswith(f"step 0: training waits for the teacher at http://127.0.0.1:{port}, which is asked")
    for row in head.metrics.values():
        assert row["time/teacher"] > 0.0
        assert row["distill/reverse_kl/mean"] != 0.0
        parts = ("wait_for_batch", "train", "publish_wait", "checkpoint", "teacher_wait")
        assert sum(row[f"time/{part}"] for part in parts) <= row["time/step"] + 1e-3


def test_a_group_is_asked_about_before_the_next_has_come(
    teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path
) -> None:
    """All groups of a step fit into one micro-batch, so the trainer does nothing before the last has come."""
    asked, seen = threading.Event(), list[bool]()

    def hear(path: str, n: int) -> str:
        if path == "/v1/completions" and n > 1:  # behind the greeting
            asked.set()
        return ""

    def second(head: ScriptedHead, now: str, count: int) -> None:
        if now == "before:FedGroups" and count == 2:
            seen.append(asked.wait(60.0))

    with standin_of(teacher, fault=hear) as standin:
        client = client_of(teacher=standin.url, **RUN | {"max_steps": 1, "tokens_per_microbatch": 10_000})
        run(ScriptedHead(max_steps=1, fault=second), client, tmp_path)
    assert seen == [True]


def test_what_the_head_foretells_is_asked_about_before_its_step_and_once(
    teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Groups of step 2 are foretold when step 0 is under way: the teacher has been asked about them before the learner
    has trained that, and is asked nothing more when they come."""
    greeting, asked, known = 1, threading.Event(), threading.Event()
    num_rows = {step: num_questions(step_groups(step)) for step in range(3)}
    wanted = greeting + num_rows[0] + num_rows[2]

    def hear(path: str, n: int) -> str:
        if path == "/v1/completions" and n == wanted:
            asked.set()
        return ""

    def foretell(head: ScriptedHead, now: str, count: int) -> None:
        if now == "before:FedGroups" and count == 1:
            for group in step_groups(2):
                head.orders.put_nowait(wire.LearnerWelcome(unscored=messages.encode_unscored(group, Teaching())))
        if now == "before:ReportStep" and count == 1:
            assert asked.wait(60.0)
            known.set()

    with standin_of(teacher, fault=hear) as standin:
        client = client_of(teacher=standin.url, **RUN)
        run(ScriptedHead(max_steps=3, fault=foretell), client, tmp_path / "foretold")
        assert standin.num_asked["/v1/completions"] == greeting + sum(num_rows.values())
    assert known.is_set()
    close_to(weights(client), expected)


def test_rows_are_not_asked_about_ahead_without_end(teacher: str, client_of: Callable[..., GrpoClient]) -> None:
    """A stranger may deliver one group after the other that is retired."""
    with standin_of(teacher) as standin:
        client = client_of(teacher=standin.url, groups_per_step=2, group_size=3, **PLAIN)
        assert client.teachers is not None
        schedule, rows = client.config.schedule, client.config.sampling.group_size
        most = (schedule.max_staleness + 2) * schedule.groups_per_step * rows
        groups = [replace(one, step=step) for step in range(most) for one in some_groups(seed=9 * step)]
        for group in groups:
            client.prepare(group)
        asked = client.teachers._endpoint_teachers
        assert asked is not None
        assert most <= asked.num_rows < most + max(len(one.rollouts) for one in groups)
        assert client.teachers.waits_for(groups[-1:], 60.0) == ""  # but what is trained on always is
        client.teachers.end_step(most)
        assert asked.num_rows == 0


def test_a_stop_ends_the_wait_for_a_teacher_and_blames_no_group(
    client_of: Callable[..., GrpoClient], tmp_path: Path
) -> None:
    client = client_of(teacher="http://127.0.0.1:1/v1", **RUN)

    def stop(head: ScriptedHead) -> None:
        assert head.session is not None
        head.session.stop("told to stop")

    assert run(WatchedHead(stop, max_steps=3), client, tmp_path) == "told to stop"
    assert client.version == 0
    assert CrashRecord(tmp_path / CRASH_RECORD).summary == ""


def test_a_run_through_faults_is_the_run_without(
    teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    faults = iter(("500", "429", "NaN", "cut", "short", "other ids") * 2)

    def fault(path: str, n: int) -> str:
        return next(faults, "") if path == "/v1/completions" and n > 1 and n % 3 == 0 else ""

    with standin_of(teacher, fault=fault) as standin:
        client = client_of(teacher=standin.url, **RUN)
        assert run(ScriptedHead(max_steps=3), client, tmp_path / "asked") == "all steps are trained"
    assert next(faults, "") == ""
    close_to(weights(client), expected)


def test_another_tokenizer_ends_a_run_at_once(
    teacher: str, client_of: Callable[..., GrpoClient], tmp_path: Path
) -> None:
    with standin_of(teacher) as standin:
        standin.texts = TEXTS[::-1]
        client = client_of(teacher=standin.url, **RUN)
        with pytest.raises(UserError, match="it has another tokenizer"):
            run(ScriptedHead(max_steps=3), client, tmp_path)
