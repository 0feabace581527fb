"""`echo2 probe`: what it measures, with an engine whose speed is known."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo2 import config as configuration
from echo2.config.offers import parse_offers
from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.fake_engine import FakeDecoder
from echo2.engines.registry import make_engine
from echo2.engines.tokenizer import load_tokenizer
from echo2.planning import probe
from echo2.planning.probe import Measured, RewardTime, as_offer
from echo2.reward.reward_processes import groups_at_once
from judge_standin import judge_standin
from rollout_cases import load, snapshot_of, tiny_module, tokenizer_files


class Clock:
    """Goes on when the engine says that it worked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def config() -> configuration.Config:
    return configuration.build(
        {
            "tasks": {"source": "digit_sorting"},
            "reward": {"functions": ["exact_match"]},
            "sampling": {"group_size": 4, "groups_per_batch": 3, "max_tokens": 10},
        },
        "test",
    )


class Paced(FakeDecoder):
    """Takes as long as an engine that makes 50 tokens a second, by this clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def step(self, added: Any, dropped: Any) -> Any:
        num_rows = len(self._rows) + len(added) - len(dropped)
        self._clock.advance(num_rows / 50.0)
        return super().step(added, dropped)


def test_the_rate_is_the_engine_s() -> None:
    clock = Clock()
    decoder = Paced(clock)
    files = {**tokenizer_files(), "config.json": b'{"vocab_size": 64, "max_position_embeddings": 512}'}
    decoder.load(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), {}, files))
    tokenizer = load_tokenizer({name: bytes(data) for name, data in files.items()})
    measured = probe.measure_engine(config(), DecodeLoop(decoder, 12), tokenizer, 40.0, clock)
    assert measured.tokens_per_second == pytest.approx(50.0, rel=0.02)
    assert measured.seconds >= 40.0
    assert measured.num_rollouts == measured.num_batches * 12
    assert measured.rollouts_per_second == pytest.approx(measured.num_rollouts / measured.seconds)
    mean_tokens = measured.tokens_per_second / measured.rollouts_per_second
    assert 4.0 < mean_tokens < 7.0  # lengths are spread evenly over 1..10
    assert 0.0 < measured.standard_error < 0.2 * measured.rollouts_per_second
    assert measured.groups_per_batch == 3
    assert measured.rewards is not None
    assert 0.0 < measured.rewards.seconds < 5.0
    assert measured.rewards.groups_at_once == groups_at_once(is_async=False)


def test_probe_announces_calls_of_a_judge_with_their_price(capsys: pytest.CaptureFixture[str]) -> None:
    clock, raw = Clock(), configuration.to_json(config())
    decoder = Paced(clock)
    files = {**tokenizer_files(), "config.json": b'{"vocab_size": 64, "max_position_embeddings": 512}'}
    decoder.load(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), {}, files))
    with judge_standin() as judge:
        table = {"model": "m", "base_url": judge.url, "rubric": "Good?", "usd_per_mtok": (1.0, 2.0)}
        reward = {"functions": ["judge"], "judge": {**table, "max_concurrency": 4}}
        judged = configuration.build({**json.loads(raw), "reward": reward}, "test")
        measured = probe.measure_engine(judged, DecodeLoop(decoder, 12), load_tokenizer(files), 40.0, clock)
    assert "the judge at http://127.0.0.1:" in (said := capsys.readouterr().err)
    assert "is asked 32 times, and waited for" in said  # 8 groups of 4
    assert measured.rewards is not None
    assert measured.rewards.groups_at_once == 1
    assert 1e-4 < measured.rewards.judge_usd <= 4 * 1.2e-4  # the same question is asked once
    assert "# not included: the judge costs $0.000" in as_offer("my card", 0.0, measured)


@pytest.mark.parametrize("is_same", [True, False])
def test_the_mismatch_is_what_other_weights_say_of_the_tokens(is_same: bool) -> None:
    module = tiny_module("qwen3")
    snapshot, engine = snapshot_of(module), make_engine("compact", "cpu", 12)
    load(engine, snapshot)
    if not is_same:
        for parameter in module.parameters():
            parameter.data *= 1.1

    def reader() -> Any:
        other = make_engine("compact", "cpu", 12)
        load(other, snapshot_of(module))
        return other

    tokenizer = load_tokenizer({name: bytes(data) for name, data in snapshot.files.items()})
    measured = probe.measure_engine(config(), engine, tokenizer, 0.1, time.perf_counter, reader)
    assert measured.mismatch is not None
    assert measured.mismatch < 1e-5 if is_same else measured.mismatch > 1e-3


def test_a_form_too_coarse_for_the_model_is_named_with_the_figure() -> None:
    measured = Measured(2.5, 0.1, 0.21, 900.0, 8, 5, 320, 128.0, mismatch=0.91)
    said = probe.of_rounding("llamacpp-q4_0", measured)
    assert "0.91 nats a token" in said
    assert "0.25 is allowed" in said
    assert "a head turns such a worker away" in said
    assert "turns" not in probe.of_rounding("llamacpp-q8_0", replace(measured, mismatch=0.076))
    assert probe.of_rounding("compact", replace(measured, mismatch=None)) == ""


def test_the_rate_of_rewards_is_a_comment_and_not_part_of_the_offers_rate() -> None:
    measured = Measured(2.5, 0.1, 0.21, 900.0, 8, 5, 320, 128.0, group_size=8, rewards=RewardTime(2.0, 1))
    text = as_offer("my card", 0.0, measured)
    assert "your reward functions take 2 s a group; a head like this machine scores 4 rollouts/s at most" in text
    assert "rollouts_per_second = 2.5\n" in text


def test_a_probe_prints_an_offer() -> None:
    text = as_offer("my card", 0.0, Measured(2.5, 0.1, 0.21, 900.0, 8, 5, 320, 128.0))
    assert "one standard error" in text
    (offer,) = parse_offers(tomllib.loads(text), "printed")
    assert (offer.name, offer.rollouts_per_second, offer.spread, offer.groups_per_batch) == ("my card", 2.5, 0.21, 8)


def test_an_invalid_time_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    options = argparse.Namespace(
        target=tmp_path / "none.toml",
        seconds=0.0,
        engine="",
        overrides={},
        name="a",
        price_usd_per_hour=0.0,
        json=False,
    )
    with pytest.raises(UserError, match=r"--seconds 0\.0 must be above 0"):
        probe.run(options)
    options.seconds = 1.0
    with pytest.raises(UserError, match="Cannot read the config file"):
        probe.run(options)
