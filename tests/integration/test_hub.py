"""Hub ids, opt-in: set ECHO2_HUB_MODEL (for example Qwen/Qwen3-0.6B) where the hub can be reached."""

from __future__ import annotations

import os

import pytest

HUB_MODEL = os.environ.get("ECHO2_HUB_MODEL", "")

pytestmark = pytest.mark.timeout(900)


@pytest.mark.skipif(not HUB_MODEL, reason="ECHO2_HUB_MODEL names no hub id")
def test_a_hub_id_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    from echo2.learner.core.model import load_policy

    policy = load_policy(HUB_MODEL, "bfloat16", "cpu")
    assert policy.vocab_size > 0
    assert "config.json" in policy.files
