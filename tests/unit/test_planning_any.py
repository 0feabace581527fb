"""`echo2 plan` for configurations at random: it ends soon, in a plan or in a refusal whose remedy plans."""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo2.cli import main
from echo2.head.fleet.decide import forecast
from echo2.planning.gpus import GPUS
from first_plans import MIXTURE, QWEN3_8B, write

#: Forecasts of one command at most. A refusal has two searches for the plan (34), tries of more at once (18), and five
#: kinds of remedy alone and five together (14 each); a plan has fewer, with its range and its table of staleness.
FORECASTS_MAX = 224
#: Times that one forecast asks a simulated machine for its next batch: twice `WORK`, and what rounding adds.
EVENTS_EACH = 3 * forecast.WORK


@dataclass
class Work:
    """What a plan has cost so far; its time goes by that."""

    events: int = 0
    forecasts: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted, free, start = Work(), forecast._Walk._free, forecast._Walk.__init__

    def counting(walk: forecast._Walk, *rest: object) -> None:
        counted.events += 1
        free(walk, *rest)  # type: ignore[arg-type]

    def starting(walk: forecast._Walk, *rest: object) -> None:
        counted.forecasts += 1
        start(walk, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(forecast._Walk, "_free", counting)
    monkeypatch.setattr(forecast._Walk, "__init__", starting)
    return counted


#: What may be wrong with a command.
WRONG = (
    *(["--learner", "3xH100"], ["--learner", "GTX 9090"], ["--answer-tokens", "0"], ["--max-idle", "7"]),
    *(["--each", "0"], ["--from", "nowhere"], ["--offers", "nowhere.toml"], ["--model.path", "nobody/Nothing-7B"]),
    *(["--gpus", "T4"], ["--here"], ["--learner.ranks", "7"], ["--sampling.group_size", "0"]),
)


def bare(seed: int, folder: Path) -> list[str]:
    """The words of a plan without a learner, half of them without offers and a third of them wrong."""
    draw, words = random.Random(seed), drawn(seed, folder)
    for flag, share in (("--learner", 1.0), ("--offers", 0.5)):
        if draw.random() < share:
            del words[(at := words.index(flag)) : at + 2]
    return words + (draw.choice(WRONG) if draw.random() < 0.3 else [])


def drawn(seed: int, folder: Path) -> list[str]:
    """The words of a plan: sizes, GPUs, lengths and offers at random."""
    draw = random.Random(seed)
    heads = draw.choice((4, 16, 32))
    values = {
        **draw.choice((QWEN3_8B, MIXTURE)),
        "hidden_size": heads * draw.choice((64, 128)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, 4)),
        "num_hidden_layers": draw.choice((2, 30, 60)),
        "intermediate_size": draw.choice((512, 20_000)),
        "max_position_embeddings": draw.choice((2048, 131_072)),
    }
    ranks = draw.choice((1, 2, 4, 8))
    settings = (
        f"[run]\nmax_steps = {draw.choice((1, 8, 300, 2000))}\n[sampling]\ngroup_size = {draw.choice((2, 8, 16))}\n"
        f"groups_per_batch = {draw.choice((1, 8))}\nmax_tokens = {draw.choice((16, 1024, 8000, 32000))}\n"
        f"[schedule]\ngroups_per_step = {draw.choice((1, 8, 128, 512))}\nmax_staleness = {draw.choice((0, 1, 3, 8))}\n"
        f"[learner]\nranks = {ranks}\nprice_usd_per_hour = {draw.choice((0.0, 9.0))}\n"
        f"[lora]\nrank = {draw.choice((0, 16))}\n[workers]\ncount = 0\n"
    )
    offers = "".join(
        f'[[offers]]\nname = "card{number}"\nprice_usd_per_hour = {draw.choice((0.0, 0.3, 1.1, 4.0))}\n'
        f'down_mbps = {draw.choice((100, 2000))}\ngpu = "{draw.choice(sorted(GPUS))}"\n'
        f"count = {draw.choice((1, 2, 32, 500, 10_000))}\n"
        for number in range(draw.choice((1, 2, 5)))
    )
    words = [*write(folder, values, settings, offers), "--learner", f"{ranks}x{draw.choice(sorted(GPUS))}"]
    words += ["--budget", str(draw.choice((1, 50, 1000)))] if draw.random() < 0.3 else []
    return words + (["--json"] if draw.random() < 0.7 else [])


def remedy(told: str, offers: Path) -> list[str]:
    """The words of the command that a refusal names; the counts that it names are put into the offers file."""
    found = re.search(r"(A plan that works|the nearest one).*?`(echo2 [^`]*)` \(.*?, the learner waits ([\d.]+)%", told)
    assert found is not None, told
    waits = float(found.group(3))  # rounded: at the limit itself either is right
    assert waits == 50.0 or (waits < 50.0) == (found.group(1) == "A plan that works"), told
    text = offers.read_text()
    for count, name in re.findall(r"count = (\d+) for '(\w+)'", told[: found.end()]):
        text = re.sub(rf'(name = "{name}"[^[]*count = )\d+', rf"\g<1>{count}", text)
    offers.write_text(text)
    return [*shlex.split(found.group(2))[1:], "--json"]


def check(
    seeds: range,
    folder: Path,
    work: Work,
    capsys: pytest.CaptureFixture[str],
    draw: Callable[[int, Path], list[str]] = drawn,
) -> dict[str, int]:
    """Plan each; return how many have a plan, a remedy that plans, and neither, for no machine can hold the model."""
    ends = {"plan": 0, "remedy": 0, "neither": 0}
    for seed in seeds:
        words, work.events, work.forecasts = draw(seed, folder / str(seed)), 0, 0
        status, told = main(words), capsys.readouterr().err
        assert work.forecasts <= FORECASTS_MAX, seed
        assert work.events <= work.forecasts * EVENTS_EACH, seed
        assert status in (0, 2), (seed, told)
        if status == 0:
            ends["plan"] += 1
        elif "`echo2 " in told:
            ends["remedy"] += 1
            again = remedy(json.loads(told)["error"] if "--json" in words else told, folder / str(seed) / "offers.toml")
            assert main(again) == 0, (seed, told, capsys.readouterr().err)
            capsys.readouterr()
        else:
            ends["neither"] += 1
            assert re.search(r"No (machine on offer|GPU that is known) holds .* of its size would fit", told), (
                seed,
                told,
            )
    return ends


def test_any_configuration_ends_in_a_plan_or_in_a_refusal_whose_remedy_plans(
    tmp_path: Path, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = check(range(5), tmp_path, work, capsys)
    assert ends["plan"]
    assert ends["remedy"]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without an offers file, and without newer prices than those that came with echo2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_any_configuration_without_learner_or_offers_ends_so_too(
    desk: Path, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = check(range(3000, 3008), desk, work, capsys, bare)
    assert ends["plan"]
    assert ends["remedy"]
    for seed in (4009, 4023, 4044):  # a remedy without the learner for which it was found; ranks without rollouts
        assert check(range(seed, seed + 1), desk, work, capsys, bare)["remedy"]


def test_a_plan_with_a_mostly_idle_learner_is_not_called_workable(
    tmp_path: Path, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(range(1136, 1137), tmp_path, work, capsys)["remedy"] == 1
    main(drawn(1136, tmp_path))
    assert "the learner waits most of the time; the nearest one: `echo2 plan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_configurations(tmp_path: Path, work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    ends = check(range(1000, 2000), tmp_path, work, capsys)
    assert ends["neither"] < 20, ends


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_hundred_configurations_without_learner_or_offers(
    desk: Path, work: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = check(range(4000, 4500), desk, work, capsys, bare)
    assert ends["neither"] < 10, ends
