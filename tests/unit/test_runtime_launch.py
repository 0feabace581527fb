"""`launch.check`: every mistake that can be found before a process starts, in one sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.config import build
from echo2.errors import UserError
from echo2.runtime.launch import check, open_run, resolve
from echo2.runtime.rundir import create


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """Settings that pass: a directory that looks like a model, rows and a reward."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return {
        "model": {"path": str(model)},
        "tasks": {"source": str(rows)},
        "reward": {"functions": ["exact_match"]},
    }


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        check(build(raw, "my.toml"))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_good_settings_pass(raw: dict[str, Any]) -> None:
    check(build(raw, "my.toml"))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("reward", {"functions": ["environment"]}, ['has "environment"', "tasks.environment is empty"]),
        (
            "tasks",
            {"source": "TMP/rows.jsonl", "environment": "sokobam"},
            ["no environment 'sokobam'", "Did you mean sokoban"],
        ),
        ("tasks", {"source": "TMP/rows.jsonl", "environment": "nowhere.py:Game"}, ["There is no file nowhere.py"]),
        ("model", {"path": ""}, ["model.path is empty", "name a Hugging Face model"]),
        ("model", {"path": "TMP"}, ["model.path = 'TMP'", "no config.json"]),
        ("model", {"path": "TMP/nowhere"}, ["model.path = 'TMP/nowhere'", "no such directory"]),
        ("model", {"path": "no/such/model"}, ["model.path = 'no/such/model'", "no hub id (owner/name)"]),
        ("tasks", {"source": ""}, ["tasks.source is empty"]),
        ("tasks", {"source": "TMP/none.jsonl"}, ["TMP/none.jsonl"]),
        ("tasks", {"source": "digit_sortin"}, ["'digit_sortin'", "Did you mean digit_sorting?"]),
        ("eval", {"source": "TMP/none.parquet"}, ["TMP/none.parquet"]),
        ("reward", {"functions": []}, ["reward.functions is empty", '["exact_match"]']),
        ("reward", {"functions": ["exact_mach"]}, ["'exact_mach'", "Did you mean exact_match?"]),
        ("reward", {"functions": ["TMP/none.py:f"]}, ["TMP/none.py"]),
    ],
)
def test_a_mistake_is_named_with_its_value_and_the_way_out(
    raw: dict[str, Any], tmp_path: Path, section: str, values: dict[str, Any], words: list[str]
) -> None:
    fill: dict[str, Any] = json.loads(json.dumps(values).replace("TMP", str(tmp_path)))
    message = refusal(raw | {section: fill})
    for word in words:
        assert word.replace("TMP", str(tmp_path)) in message


def test_a_bad_row_is_named_with_file_and_line(raw: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3}\n')
    assert f"{rows}:2" in refusal(raw)
    rows.write_text('{"prompt": "a"}\n{"prompt"\n')
    assert f"{rows}:2" in refusal(raw)


def test_an_empty_file_of_tasks_is_refused(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    assert "empty" in refusal(raw)


def test_a_reward_whose_module_raises_is_named_with_the_line(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bad_reward.py"
    path.write_text("import math\nraise RuntimeError('not today')\n")
    message = refusal(raw | {"reward": {"functions": [f"{path}:score"]}})
    assert f"{path}:2" in message
    assert "not today" in message


def test_a_hub_model_while_the_hub_is_switched_off_is_refused(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    message = refusal(raw | {"model": {"path": "an-owner/a-model"}})
    assert message.startswith("model.path = 'an-owner/a-model': ")
    assert "HF_HUB_OFFLINE" in message


def test_the_run_directory_is_the_flags_then_the_files_then_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sort.toml"
    path.write_text("")
    assert resolve(path, {}, None)[1] == Path("outputs/sort")
    path.write_text('[run]\nout = "there"\n')
    assert resolve(path, {}, None)[1] == Path("there")
    config, where = resolve(path, {}, Path("here"))
    assert (config.run.out, where) == ("here", Path("here"))


def test_a_head_alone_takes_a_run_directory_or_a_configuration(raw: dict[str, Any], tmp_path: Path) -> None:
    config = build(raw, "my.toml")
    made = create(tmp_path / "run", config, resume=False)
    assert open_run(made.path, None, False, {}) == made
    again = open_run(made.config, tmp_path / "other", False, {"run.seed": "7"})
    assert again.read_config().run.seed == 7
    with pytest.raises(UserError, match="is not a run directory"):
        open_run(tmp_path, None, False, {})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"fleet": {"budget_usd": 5.0}}, ["fleet.budget_usd = 5 would never be spent", "learner.price_usd_per_hour"]),
        (
            {"fleet": {"activation": True, "offers": "TMP/offers.toml"}},
            ["none of its offers has a `rent` command", "leave fleet.offers out"],
        ),
    ],
)
def test_money_that_could_not_be_spent_and_machines_that_could_not_be_had_are_refused(
    raw: dict[str, Any], tmp_path: Path, sections: dict[str, Any], words: list[str]
) -> None:
    offer = '[[offers]]\nname = "a"\nprice_usd_per_hour = 1.0\nrollouts_per_second = 1.0\n'
    (tmp_path / "offers.toml").write_text(offer)
    for values in sections.values():
        values |= {key: v.replace("TMP", str(tmp_path)) for key, v in values.items() if isinstance(v, str)}
    message = refusal({**raw, **sections})
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "priced",
    [
        {"learner": {"price_usd_per_hour": 3.0}},
        {"workers": {"price_usd_per_hour": 0.3}},
        {"workers": {"count": 0}},  # those who join bring their prices
    ],
)
def test_a_budget_is_fine_where_something_may_cost(raw: dict[str, Any], priced: dict[str, Any]) -> None:
    check(build({**raw, "fleet": {"budget_usd": 5.0}, **priced}, "my.toml"))


def test_auto_is_a_number_before_anything_is_checked_or_written(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({**raw, "schedule": {"publish_every": "auto", "max_staleness": 4}}))
    rundir = open_run(path, tmp_path / "run", False, {})
    assert rundir.read_config().schedule.publish_every == 1
    assert 'schedule.publish_every = "auto" is 1: nothing is measured yet' in capsys.readouterr().err
    row = {"step": 1, "time/train": 10.0, "broadcast/t_bcast": 4.0}
    (tmp_path / "past").mkdir()
    (tmp_path / "past" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    config, _ = resolve(path, {}, tmp_path / "other", like=tmp_path / "past")
    assert config.schedule.publish_every == 3
    config, _ = resolve(path, {"schedule.publish_every": "2"}, tmp_path / "other", like=tmp_path / "past")
    assert config.schedule.publish_every == 2
