"""Configuration: what is refused and in which words, flags over file, and the round trip through config.json."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2 import config as configuration
from echo2.config import Config, all_fields, build, load, to_json
from echo2.config.values import LOSS_PARAMS
from echo2.core.errors import UserError

NAMES = {f"{section}.{name}" for section, name, *_ in all_fields()}


def refusal(raw: dict[str, object]) -> str:
    with pytest.raises(UserError) as caught:
        build(raw, "my.toml")
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_setting_is_described() -> None:
    rows = list(all_fields())
    assert all(description.endswith(".") for *_, description in rows)
    assert len(NAMES) == len(rows)


def test_an_empty_configuration_has_the_defaults() -> None:
    assert build({}, "my.toml") == Config()


@pytest.mark.parametrize(
    ("raw", "near"),
    [
        ({"learner": {"lrr": 1}}, "learner.lr"),
        ({"schedule": {"max_stalness": 1}}, "schedule.max_staleness"),
        ({"lerner": {}}, "learner"),
        ({"lr": 1e-5}, "learner.lr"),  # a key without its section
        ({"run": {"group_size": 8}}, "sampling.group_size"),  # a key in the wrong section
    ],
)
def test_the_error_about_an_unknown_key_suggests_the_nearest_one(raw: dict[str, object], near: str) -> None:
    message = refusal(raw)
    assert message.startswith("my.toml: unknown ")
    assert message.endswith(f"Did you mean {near}?")


def test_the_error_says_where_to_write_a_key_of_a_table_setting() -> None:
    assert "reward.judge is one setting: write [reward.judge]" in refusal({"reward": {"judge.base_url": "http://x"}})


def test_an_unknown_key_like_nothing_known_says_where_to_look() -> None:
    assert refusal({"zzz": 1}).endswith("`echo2 run --help` lists them all.")


@given(
    section=st.text(string.ascii_lowercase + "_", min_size=1, max_size=12),
    name=st.text(string.ascii_lowercase + "_", min_size=1, max_size=12),
)
def test_no_unknown_key_passes(section: str, name: str) -> None:
    if f"{section}.{name}" not in NAMES:
        assert "unknown" in refusal({section: {name: 1}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"run": {"max_steps": 0}}, "my.toml: run.max_steps = 0: expected `int` >= 1."),
        ({"run": {"max_steps": "10"}}, "my.toml: run.max_steps = '10': expected `int`, got `str`."),
        ({"run": {"deterministic": 1}}, "my.toml: run.deterministic = 1: expected `bool`, got `int`."),
        ({"lora": {"rank": -1}}, "my.toml: lora.rank = -1: expected `int` >= 0."),
        ({"sampling": {"top_p": 1.5}}, "my.toml: sampling.top_p = 1.5: expected `float` <= 1.0."),
        ({"sampling": {"group_size": 1}}, "my.toml: sampling.group_size = 1: expected `int` >= 2."),
        (
            {"learner": {"loss": "grpo"}},
            "my.toml: learner.loss = 'grpo': expected one of "
            + ", ".join(LOSS_PARAMS)
            + " ('grpo' is one of learner.advantage).",
        ),
        (
            {"learner": {"loss": "ppo", "loss_params": {"clip_hi": 0.2}}},
            "my.toml: learner.loss_params.clip_hi: the loss 'ppo' takes clip_low, clip_high. Did you mean clip_high?",
        ),
        (
            {"learner": {"loss": "none", "loss_params": {"cap": 2}}},
            "my.toml: learner.loss_params.cap: the loss 'none' takes none.",
        ),
        (
            {"learner": {"loss": "tis", "loss_params": {"cap": -1.0}}},
            "my.toml: learner.loss_params.cap = -1.0: expected a number >= 0.",
        ),
        ({"reward": {"functions": [1]}}, "my.toml: reward.functions[0] = [1]: expected `str`, got `int`."),
        ({"learner": {"lr": float("nan")}}, "my.toml: learner.lr = nan: expected `float` >= 0.0."),
        ({"learner": {"lr": float("inf")}}, "my.toml: learner.lr = inf is not a finite number."),
        ({"run": 3}, "my.toml: 'run' is a section, but holds 3. Write [run] and its keys below."),
    ],
)
def test_the_error_about_a_wrong_value_has_its_path_and_the_allowed_values(
    raw: dict[str, object], message: str
) -> None:
    assert refusal(raw) == message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"schedule": {"max_staleness": 1, "publish_every": 3}}, ["max_staleness = 1", "publish_every = 3", ">= 2"]),
        ({"run": {"deterministic": True}, "schedule": {"dynamic_sampling": True}}, ["run.deterministic", "dynamic"]),
        ({"schedule": {"groups_per_step": 6}, "learner": {"updates_per_step": 4}}, ["does not divide", "= 6"]),
        ({"run": {"deterministic": True}, "schedule": {"order": "frontier"}}, ["run.deterministic", '"frontier"']),
        (
            {"run": {"deterministic": True}, "workers": {"engine": "llamacpp-q8_0"}},
            ["run.deterministic", "llamacpp-q8_0"],
        ),
        ({"workers": {"forms": ["q8_0", "q4_0"]}}, ["workers.forms has 'q4_0'", "from others: q8_0"]),
        ({"learner": {"loss": "icepop", "loss_params": {"low": 6.0}}}, ["low = 6.0 is above high = 5.0"]),
        ({"head": {"listen": "127.0.0.1:65536"}}, ["head.listen = '127.0.0.1:65536'", "HOST:PORT"]),
        ({"head": {"listen": "7341"}}, ["head.listen = '7341'", "HOST:PORT"]),
        ({"head": {"advertise": "a.example b.example"}}, ["head.advertise", "'a.example b.example'", "HOST:PORT"]),
        ({"head": {"advertise": "a.example:70000"}}, ["'a.example:70000' is not HOST or HOST:PORT"]),
        ({"head": {"advertise": "a.example,"}}, ["'' is not HOST", "Separate several by commas"]),
        ({"head": {"advertise": ",".join("abcdefghi")}}, ["names 9 addresses", "at most 8"]),
        ({"lora": {"targets": ["q_proj"]}}, ["lora.rank = 0 trains the whole model", "leave out the rest"]),
        ({"lora": {"rank": 4, "targets": []}}, ["lora.targets is empty", "all-linear"]),
        ({"run": {"log_to": ["tensorboard", "wandb"]}}, ["run.log_to has 'wandb'", "wandb:<project>"]),
        ({"run": {"log_to": ["wandb+rollouts:"]}}, ["run.log_to has 'wandb+rollouts:'", "wandb+rollouts:<project>"]),
        ({"sampling": {"stop": ["a"]}, "tasks": {"source": "logs:a"}}, ["sampling.stop = ['a']", "'logs:a'", "Leave"]),
        ({"sampling": {"stop": ["a"]}, "tasks": {"environment": "b:C"}}, ["'b:C'", "a `stop` of its own"]),
    ],
)
def test_settings_that_are_impossible_together_are_refused(raw: dict[str, object], words: list[str]) -> None:
    message = refusal(raw)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("staleness", range(4))
def test_the_widest_possible_publishing_interval_is_staleness_plus_one(staleness: int) -> None:
    build({"schedule": {"max_staleness": staleness, "publish_every": staleness + 1}}, "my.toml")
    refusal({"schedule": {"max_staleness": staleness, "publish_every": staleness + 2}})


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "my.toml", "[learner]\nlr = 1e-3\nwarmup_steps = 7\n")
    flags = {
        "learner.lr": "1e-5",
        "run.seed": "3",
        "run.deterministic": "true",
        "learner.loss": "ppo",
        "run.log_to": '["wandb+rollouts:mine", "tensorboard"]',
        "learner.loss_params": "{clip_high = 1}",
        "tasks.params": '{split = "train"}',
        "reward.functions": '["exact_match"]',
        "tasks.source": "rows.jsonl",
    }
    config = load(path, flags)
    assert (config.learner.lr, config.learner.warmup_steps) == (1e-5, 7)
    assert (config.run.seed, config.run.deterministic, config.learner.loss) == (3, True, "ppo")
    assert (config.tasks.params, config.tasks.source) == ({"split": "train"}, "rows.jsonl")
    assert config.reward.functions == ["exact_match"]
    assert config.run.log_to == ["wandb+rollouts:mine", "tensorboard"]
    assert config.learner.loss_params == {"clip_high": 1.0}


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("run.max_steps", "1.5", "`int`"),
        ("run.max_steps", "0", "`int` >= 1"),
        ("learner.lr", "fast", "`float`"),
        ("run.deterministic", "maybe", "`bool`"),
        ("schedule.publish_every", "often", "`int`"),
        ("learner.loss", "grpo", "one of dppo, ppo"),
        ("reward.functions", "exact_match", "written as in TOML"),
        ("learner.loss_params", "{cap = true}", "`float`, got `bool`"),
    ],
)
def test_a_flag_with_a_wrong_value_is_refused(tmp_path: Path, flag: str, value: str, wanted: str) -> None:
    with pytest.raises(UserError, match=f"--{flag} {value}: expected .*{wanted}"):
        load(write(tmp_path / "my.toml", ""), {flag: value})


def test_the_error_names_contradictory_flags(tmp_path: Path) -> None:
    path = write(tmp_path / "my.toml", "[schedule]\nmax_staleness = 1\n")
    with pytest.raises(UserError, match=r"my\.toml --schedule\.publish_every 3: schedule\.max_staleness = 1 with"):
        load(path, {"schedule.publish_every": "3"})


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.toml", b"[run\n", "is not valid TOML"),
        ("a.toml", b"[model]\npath = '\xff'\n", "is not valid TOML"),
        ("a.json", b"{", "is not valid JSON"),
        ("a.json", b"[1]", "must hold an object"),
        ("a.toml", b"run = 3\n", "'run' is a section"),  # with a flag for that section: see the call
    ],
)
def test_a_file_without_a_valid_configuration_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=message):
        load(path, {"run.seed": "1"})


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read the config file .*nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml")


@given(
    lr=st.floats(0, 1),
    functions=st.lists(st.text(max_size=8), max_size=3),
    params=st.dictionaries(st.text(max_size=4), st.integers(-(2**53), 2**53) | st.text(max_size=4), max_size=3),
    staleness=st.integers(0, 9),
)
def test_the_resolved_configuration_survives_config_json(
    lr: float, functions: list[str], params: dict[str, int | str], staleness: int
) -> None:
    config = build(
        {
            "learner": {"lr": lr},
            "reward": {"functions": functions},
            "tasks": {"params": params},
            "schedule": {"max_staleness": staleness},
        },
        "my.toml",
    )
    assert build(json.loads(to_json(config)), "config.json") == config


def test_config_json_is_read_like_the_file_it_came_from(tmp_path: Path) -> None:
    config = load(write(tmp_path / "my.toml", '[model]\npath = "m"\n'))
    assert load(write(tmp_path / "config.json", to_json(config))) == config
    assert configuration.parse_flag("run.seed", "5") == 5
    assert configuration.parse_flag("eval.source", '{easy = "a.jsonl", hard = "b"}') == {"easy": "a.jsonl", "hard": "b"}
    assert configuration.parse_flag("tasks.source", '["0.7 * a", "0.3 * b"]') == ["0.7 * a", "0.3 * b"]
    assert configuration.parse_flag("tasks.source", "a.jsonl") == "a.jsonl"
    for name, text in (("eval.source", '{easy = "a.jsonl"'), ("tasks.source", '["a"')):
        with pytest.raises(UserError, match=rf"--{name} .*: expected a (dict|list), written as in TOML"):
            configuration.parse_flag(name, text)


def test_sampling_parameters_follow_from_the_settings() -> None:
    config = build({"sampling": {"temperature": 0.5, "top_k": 3, "max_tokens": 9}}, "x")
    train, held_out = config.sampling_params, config.eval_params
    assert (train.temperature, train.top_k, train.max_tokens) == (0.5, 3, 9)
    assert (held_out.temperature, held_out.top_k, held_out.top_p, held_out.max_tokens) == (1.0, 0, 1.0, 9)


@pytest.mark.parametrize(
    ("staleness", "deterministic", "swap"), [(0, False, "between"), (1, False, "during"), (1, True, "between")]
)
def test_weights_change_during_a_generation_where_that_may_be(staleness: int, deterministic: bool, swap: str) -> None:
    raw = {"run": {"deterministic": deterministic}, "schedule": {"max_staleness": staleness}}
    config = build(raw, "x")
    assert config.swap_of(is_own=True, draws=True) == config.swap_of(is_own=False, draws=False) == swap
    assert config.swap_of(is_own=False, draws=True) == ("apart" if swap == "during" else swap)


def test_the_listening_address_of_the_head() -> None:
    assert Config().head.address == ("127.0.0.1", 0)
    assert build({"head": {"listen": "[::]:7341"}}, "x").head.address == ("::", 7341)


def test_tickets_name_reachable_addresses() -> None:
    assert Config().head.advertised(7) == "127.0.0.1:7"
    for listed, written in (
        ("a.example", "a.example:7"),
        ("a.example, b.example:8", "a.example:7,b.example:8"),
        ("2001:db8::5, [2001:db8::6]:9,[fe80::1%eth0]", "[2001:db8::5]:7,[2001:db8::6]:9,[fe80::1%eth0]:7"),
    ):
        assert build({"head": {"advertise": listed}}, "x").head.advertised(7) == written
