"""`echo2 plan` without flags plans, and whatever it refuses, it names a command that plans."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from echo2 import config as configuration
from echo2.cli import main
from echo2.learner.core import fitting
from echo2.planning.first_plan import FirstPlan
from first_plans import MIXTURE, QWEN3_1_7B, write
from real_runs import REPOSITORY

SETTINGS = "[run]\nmax_steps = 20\n[sampling]\ngroup_size = 8\ngroups_per_batch = 4\nmax_tokens = 512\n"
SETTINGS += "[schedule]\nmax_staleness = 3\ngroups_per_step = 32\n[learner]\nranks = 4\n[workers]\ncount = 0\n"
OFFERS = '[[offers]]\nname = "card"\nprice_usd_per_hour = 0.35\ngpu = "RTX 5090"\ncount = 400\n'


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without an offers file, and without newer prices than those that came with echo2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path


def test_shipped_configurations_plan_without_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting._shape_of.cache_clear()
    # Half of the CPU time of a plan was the import of transformers, which brings torch.
    monkeypatch.setattr(fitting, "all_values", lambda values: pytest.fail("transformers is not needed"))
    for path in ("examples/gpu/qwen3_8b.toml", "src/echo2/demo/sort.toml"):
        assert main(["plan", str(REPOSITORY / path)]) == 0, path
        told = " ".join(capsys.readouterr().out.split())
        assert "the cheapest for a step of those that hold the model; another: --learner 2xH100" in told
        assert "others (--json)" in told, "of 26 kinds of machines, those that decide"


def test_the_learner_that_is_chosen_is_the_cheapest_for_a_step_and_may_be_named(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write(desk, QWEN3_1_7B, SETTINGS.replace("ranks = 4\n", ""), OFFERS), "--json"]
    assert main(words) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["inputs"]["learner"][0] == "4 x RTX-5090, $1.4 an hour of offer 'card'"  # fewer do not hold it
    floor = chosen["floor_usd_per_step"]
    for gpu, price in (("4xRTX-5090", 1.4), ("1xH100", 4.76), ("4xA100-80GB", 4.664), ("2xL40S", 2.8)):
        ranks = {"learner.ranks": gpu[0]}
        seconds, _ = FirstPlan(configuration.load(desk / "run.toml", ranks), gpu, None).train_seconds()
        assert price * seconds / 3600 > floor * (1.02 if gpu != "4xRTX-5090" else 1 - 1e-9), gpu


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """What a command is refused with, and the command that the refusal names."""
    assert main(words) == 2, words
    told = capsys.readouterr().err
    found = re.search(r"A plan that works.*?`(echo2 [^`]*)`", told)
    assert found is not None, told  # and those in which the learner waits do not count as such
    return told, shlex.split(found[1])[1:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--learner", "1xA100-80GB"], "--learner.ranks 1` ("),
        (["--learner", "GTX 9090"], "the data sheet of 'GTX 9090' is not known"),
        (["--learner", "0xH100"], "there must be one GPU at least"),
        (["--learner", "cpu"], "processors have no data sheet"),
        (["--answer-tokens", "-1"], "--answer-tokens -1.0 must be a positive number"),
        (["--budget", "-1", "--max-idle", "2"], "must"),
        (["--each", "0"], "--each 0 must be between 1"),
        (["--gpus", "T4", "--spot", "yes"], "No machine of the market is left"),
        (["--memory-gb", "500"], "--memory-gb 500"),
        (["--providers", "nobody"], "--providers nobody"),
        (["--offers", "nothing.toml"], "nothing.toml"),
        (["--from", "nothing"], "There is no directory nothing"),
        (["--model.path", "nobody/Something-7B"], "--model.path Qwen/Qwen3-8B"),
        (["--model.path", "nobody/Something-0B"], "--model.path Qwen/Qwen3-0.6B"),
        (["--here"], "--here forecasts the workers"),
        (["--here", "probe.json", "--offers", "nothing.toml"], "without --offers"),
        (["--sampling.group_size", "0"], "sampling.group_size"),
    ],
)
def test_a_refusal_names_a_command_that_plans(
    change: list[str], said: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, again = refused([*write(desk, QWEN3_1_7B, SETTINGS, "")[:2], *change], capsys)
    assert said in told
    assert main([*again, "--json"]) == 0, (again, capsys.readouterr().err)


def test_a_machine_with_several_cards_is_proposed_where_one_is_too_small(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*write(desk, MIXTURE, SETTINGS, "")[:2], "--learner", "4xH200", "--gpus", "RTX-4090"]
    told, again = refused(words, capsys)
    assert "has 24.0 GB" in told
    assert "4xRTX-4090" in again[again.index("--gpus") + 1]
    assert main([*again, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {name.partition("-")[0] for name in plan["machines"]} == {"4xrtx4090"}


@pytest.mark.parametrize("offers", ["nonsense", OFFERS.replace("RTX 5090", "RTX 9090"), OFFERS.partition("gpu")[0]])
def test_a_wrong_offers_file_is_left_out_by_a_command_that_plans(
    offers: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, again = refused(write(desk, QWEN3_1_7B, SETTINGS, offers), capsys)
    assert main([*again, "--json"]) == 0


def test_plan_without_a_configuration_names_the_demos(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan"], ["plan", "nothing.toml"], ["plan", "--from", str(desk)]):
        _, again = refused(words, capsys)
        assert again[-1].endswith("sort.toml")
        assert main([*again, "--json"]) == 0


def test_a_directory_of_a_run_that_trained_nothing_still_has_a_configuration(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(desk, QWEN3_1_7B, SETTINGS, "")
    run = desk / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"model": {"path": str(desk / "model")}, "workers": {"count": 0}}))
    (run / "metrics.jsonl").write_text("")
    capsys.readouterr()
    told, again = refused(["plan", "--from", str(run)], capsys)
    assert "no trained step" in told
    assert main([*again, "--json"]) == 0


def test_config_json_is_read_as_transformers_reads_it() -> None:
    from echo2.engines.model_values import all_values
    from echo2.learner.decide.model_shape import read_shape

    for path, values in fitting.known_models().items():
        assert fitting.model_shape(path) == read_shape(all_values(values)), path
