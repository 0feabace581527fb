"""The fake engine: an engine like the others, the same in every process, that keeps time on somebody else's clock."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.errors import PeerError
from echo2.core.types import RUN_POLICY, SamplingParams, Snapshot, SnapshotRef
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.fake_engine import FakeDecoder

CONFIG = b'{"vocab_size": 31, "max_position_embeddings": 64, "eos_token_id": 1}'


def fake(version: int = 0) -> FakeDecoder:
    decoder = FakeDecoder()
    decoder.load(snapshot(version))
    return decoder


def snapshot(version: int = 0, config: bytes = CONFIG) -> Snapshot:
    return Snapshot(SnapshotRef(RUN_POLICY, 1, version), {}, {"config.json": config})


@given(st.integers(0, 2**63), st.integers(1, 30), st.integers(1, 6), st.integers(0, 9))
def test_every_completion_is_well_formed_and_repeatable(seed: int, max_tokens: int, samples: int, version: int) -> None:
    from echo2.engines.engine import SampleRequest
    from rollout_cases import requests, run

    prompt, others = requests(0)[0].prompt_tokens, requests(1)
    asked = [SampleRequest(prompt, seed, sample, SamplingParams(max_tokens=max_tokens)) for sample in range(samples)]
    completions = run(DecodeLoop(fake(version), 3), [*others, *asked])[len(others) :]
    assert completions == run(DecodeLoop(fake(version)), asked)
    for completion in completions:
        tokens = completion.tokens
        assert 1 <= len(tokens) == len(completion.logprobs) <= max_tokens
        assert all(0 <= token < 31 for token in tokens)
        assert 1 not in tokens[:-1]
        assert (tokens[-1] == 1) == (completion.finish == "stop") == (len(tokens) < max_tokens)
        assert all(logprob < 0 for logprob in completion.logprobs)
        assert completion.version_spans == ((0, version),)


def test_versions_and_tokens_change_from_the_swap_on() -> None:
    from rollout_cases import Hooked, requests, run

    decoder = fake(1)
    engine = DecodeLoop(Hooked(decoder, lambda step: step != 4 or decoder.load(snapshot(2))))
    long = [c for c in run(engine, requests(0, samples=8)) if len(c.tokens) > 3]
    assert long
    assert all(c.version_spans == ((0, 1), (3, 2)) for c in long)


@pytest.mark.parametrize("config", [b"", b"[]", b'{"vocab_size": 0}', b'{"eos_token_id": "x"}'])
def test_a_torn_snapshot_is_refused_and_the_old_one_stays(config: bytes) -> None:
    engine = fake(3)
    with pytest.raises(PeerError):
        engine.load(snapshot(4, config))
    assert engine.installed == SnapshotRef(RUN_POLICY, 1, 3)


def test_the_fake_engine_needs_no_torch() -> None:
    code = "import sys, echo2.rollouts.generate, echo2.engines.fake_engine; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
