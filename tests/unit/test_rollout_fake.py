"""The fake engine: an engine like the others, the same in every process, that keeps time on somebody else's clock."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.errors import PeerError
from echo2.rollout.fake_engine import FakeEngine
from echo2.types import SamplingParams, Snapshot, SnapshotRef

CONFIG = b'{"vocab_size": 31, "max_position_embeddings": 64, "eos_token_id": 1}'


def fake(version: int = 0) -> FakeEngine:
    engine = FakeEngine()
    engine.load_snapshot(snapshot(version))
    return engine


def snapshot(version: int = 0, config: bytes = CONFIG) -> Snapshot:
    return Snapshot(SnapshotRef(1, version), {}, {"config.json": config})


@settings(max_examples=50)
@given(st.integers(0, 2**63), st.integers(1, 30), st.integers(1, 6), st.integers(0, 9))
def test_every_completion_is_well_formed_and_repeatable(seed: int, max_tokens: int, samples: int, version: int) -> None:
    from echo2.rollout.engine import SampleRequest
    from rollout_cases import request, run

    prompt = request(0).prompt_tokens
    asked = SampleRequest(prompt, samples, seed, SamplingParams(max_tokens=max_tokens))
    completions = run(fake(version), [request(1), asked])[1]
    assert completions == run(fake(version), [asked])[0]
    for completion in completions:
        tokens = completion.tokens
        assert 1 <= len(tokens) == len(completion.logprobs) <= max_tokens
        assert all(0 <= token < 31 for token in tokens)
        assert 1 not in tokens[:-1]
        assert (tokens[-1] == 1) == (completion.finish == "stop") == (len(tokens) < max_tokens)
        assert all(logprob < 0 for logprob in completion.logprobs)
        assert completion.version_spans == ((0, version),)


def test_versions_follow_a_swap_and_change_the_tokens_from_there() -> None:
    from rollout_cases import request

    engine, outcomes, polls = fake(1), [], iter(range(1000))

    def poll() -> bool:
        if next(polls) == 3:
            engine.load_snapshot(snapshot(2))
        return False

    engine.generate([request(0, samples=8)], lambda _, outcome: outcomes.append(outcome), poll)
    long = [c for c in outcomes[0] if len(c.tokens) > 3]
    assert long
    assert all(c.version_spans == ((0, 1), (3, 2)) for c in long)


def test_it_tells_the_clock_how_long_it_would_have_taken() -> None:
    from rollout_cases import request, run

    elapsed: list[float] = []
    engine = FakeEngine(tokens_per_second=50.0, advance=elapsed.append)
    engine.load_snapshot(snapshot())
    completions = run(engine, [request(0, samples=4)])[0]
    assert sum(elapsed) == pytest.approx(sum(len(c.tokens) for c in completions) / 50.0)


@pytest.mark.parametrize("config", [b"", b"[]", b'{"vocab_size": 0}', b'{"eos_token_id": "x"}'])
def test_a_torn_snapshot_is_refused_and_the_old_one_stays(config: bytes) -> None:
    engine = fake(3)
    with pytest.raises(PeerError):
        engine.load_snapshot(snapshot(4, config))
    assert engine.installed == SnapshotRef(1, 3)


def test_it_needs_no_torch() -> None:
    code = "import sys, echo2.rollout.generate, echo2.rollout.fake_engine; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
