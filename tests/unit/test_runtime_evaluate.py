"""`echo2 eval` scores as a run does: rewards may be asynchronous, and one that fails costs its own task only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from echo2 import config as configuration
from echo2.planning.local_sampler import LocalSampler
from echo2.rollout.decode_loop import DecodeLoop
from echo2.rollout.fake_engine import FakeDecoder
from echo2.rollout.tokenizer import load_tokenizer
from echo2.runtime.launch import evaluate
from echo2.types import RUN_POLICY, Snapshot, SnapshotRef
from model_cases import model_directory
from rollout_cases import tokenizer_files

OWN = """
import asyncio
under_way, most = 0, 0
def plain(completions, answer, **columns):
    asyncio.run(asyncio.sleep(0))  # what is not asynchronous may run a loop of its own
    return [float(answer[0]) for _ in completions]
async def judged(completions, answer, **columns):
    global under_way, most
    under_way += 1
    most = max(most, under_way)
    await asyncio.sleep(0.2)
    under_way -= 1
    return [float(answer[0]) + 1000.0 * most for _ in completions]
"""


def fake_engine(*_: Any) -> tuple[DecodeLoop, Any]:
    """What `load_engine` gives, without weights."""
    decoder = FakeDecoder()
    files = {**tokenizer_files(), "config.json": b'{"vocab_size": 64, "max_position_embeddings": 512}'}
    decoder.load(Snapshot(SnapshotRef(RUN_POLICY, 1, 0), {}, files))
    return DecodeLoop(decoder, 64), load_tokenizer({name: bytes(data) for name, data in files.items()})


@pytest.mark.parametrize("function", ["plain", "judged"])
def test_every_task_is_scored_and_those_that_fail_are_counted(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    number = evaluate.BATCH_TASKS + 3
    rows = [{"prompt": "a", "answer": "no number" if i == 50 else str(i)} for i in range(number)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "my.toml"
    path.write_text(
        f'[model]\npath = "{model_directory(tmp_path / "model")}"\n[eval]\nsource = "{tmp_path}/rows.jsonl"\n'
        f'[reward]\nfunctions = ["{tmp_path}/own.py:{function}"]\n[sampling]\nmax_tokens = 4\n'
    )
    monkeypatch.setattr(evaluate, "load_engine", fake_engine)
    found = evaluate.evaluate(path, None, "", {})
    assert (found["eval/num_tasks"], found["eval/num_failed"]) == (number - 1, 1)
    assert "ValueError" in capsys.readouterr().err
    mean = (sum(range(number)) - 50) / (number - 1)  # without the one that failed
    if function == "plain":
        assert found["eval/accuracy"] == pytest.approx(mean)
    else:
        assert found["eval/accuracy"] > mean + 10_000.0  # many were scored together


def test_training_tasks_are_sampled_as_groups() -> None:
    raw: dict[str, Any] = {"tasks": {"source": "digit_sorting"}, "sampling": {"group_size": 3, "max_tokens": 4}}
    sampler = LocalSampler(configuration.build(raw, "test"), "train", *fake_engine())
    groups = asyncio.run(sampler.sample(range(4, 6)))
    assert sorted(group.cursor for group in groups) == [4, 5]
    assert all(len(group.rollouts) == 3 and group.generate_seconds > 0 for group in groups)
