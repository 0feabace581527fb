"""`echo2 eval` scores as a run does: rewards may be asynchronous, and one that fails costs its own task only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from echo2 import config as configuration
from echo2.cli import main
from echo2.core.errors import UserError
from echo2.core.types import RUN_POLICY, Snapshot, SnapshotRef
from echo2.engines.decode_loop import DecodeLoop
from echo2.engines.fake_engine import FakeDecoder
from echo2.engines.tokenizer import load_tokenizer
from echo2.models import evaluate
from echo2.worker.alone import LocalSampler
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


def configured(folder: Path, sets: dict[str, list[dict[str, str]]]) -> Path:
    """A configuration with these rows as its held-out sets."""
    (folder / "own.py").write_text(OWN)
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = ", ".join(f'{name} = "{folder}/{name}.jsonl"' for name in sets)
    path = folder / "my.toml"
    path.write_text(
        f'[model]\npath = "{model_directory(folder / "model")}"\n[eval]\nsource = {{{named}}}\nsamples = 2\n'
        f'[reward]\nfunctions = ["{folder}/own.py:plain"]\n[sampling]\nmax_tokens = 4\n'
    )
    return path


def test_greedy_rollouts_of_a_task_are_equal_and_sampled_ones_are_not(tmp_path: Path) -> None:
    path = configured(tmp_path, {"only": [{"prompt": "ab", "answer": "1"}, {"prompt": "ba", "answer": "1"}]})
    different = {}
    for flags in ([], ["--greedy"]):
        to = tmp_path / f"{len(flags)}.jsonl"
        assert main(["eval", str(path), "--to", str(to), "--eval.samples", "8", *flags]) == 0
        written = [json.loads(line) for line in to.read_text().splitlines()]
        different[len(flags)] = [len({rollout["text"] for rollout in record["rollouts"]}) for record in written]
    assert different[1] == [1, 1]
    assert min(different[0]) > 1


@pytest.mark.parametrize("setting", sorted(evaluate.NOT_OF_EVALUATIONS))
def test_a_setting_without_effect_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = configured(tmp_path, {"only": [{"prompt": "ab", "answer": "1"}]})
    assert main(["eval", str(path), f"--{setting}", "1"]) == 2
    assert f"--{setting} 1 has no effect" in capsys.readouterr().err


def test_each_held_out_set_is_reported_with_its_best_and_worst_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"easy": [("ab", "1"), ("ba", "1"), ("bb", "0")], "hard": [("aa", "0"), ("[bold]b", "0")]}
    path = configured(tmp_path, {name: [{"prompt": p, "answer": a} for p, a in rows] for name, rows in sets.items()})
    monkeypatch.setattr(evaluate, "load_engine", fake_engine)
    to = tmp_path / "all.jsonl"
    assert main(["eval", str(path), "--to", str(to)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("held-out reward 0.4000 on 5 tasks")
    assert lines[1] == "pass@2 0.4000"
    assert lines[3] == "easy: reward 0.6667 on 3 tasks"
    assert lines[4].startswith("  reward 1  ")
    assert lines[5].startswith("  reward 0  bb → ")
    assert lines[6] == "hard: reward 0.0000 on 2 tasks"
    assert lines[7].startswith("  reward 0  ")  # all are equal: one is shown
    assert len(lines) == 8
    written = [json.loads(line) for line in to.read_text().splitlines()]
    assert sorted(record["prompt"] for record in written) == sorted(p for rows in sets.values() for p, _ in rows)
    assert all(len(record["rollouts"]) == 2 and "text" in record["rollouts"][0] for record in written)
    assert main(["eval", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/accuracy/easy"] == pytest.approx(found["sets"]["easy"]["reward"])
    assert [one["reward"] for one in found["sets"]["easy"]["samples"]] == [1.0, 0.0]


def test_training_tasks_are_not_called_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path, {"only": [{"prompt": "ab", "answer": "1"}]})
    there = path.read_text().replace(f'[eval]\nsource = {{only = "{tmp_path}/only.jsonl"}}\nsamples = 2', "[tasks]")
    path.write_text(there.replace("[tasks]", f'[tasks]\nsource = "{tmp_path}/only.jsonl"'))
    monkeypatch.setattr(evaluate, "load_engine", fake_engine)
    assert main(["eval", str(path)]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("reward 1.0000 on 1 training tasks (")
    assert first.endswith("there are no held-out ones. Name some by --eval.source FILE")


def test_an_evaluation_writes_over_no_file_and_leaves_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path, {"one": [{"prompt": "ab", "answer": "no number"}]})
    monkeypatch.setattr(evaluate, "load_engine", fake_engine)
    (tmp_path / "kept.jsonl").write_text("mine")
    assert main(["eval", str(path), "--to", str(tmp_path / "kept.jsonl")]) == 2
    assert "kept.jsonl exists: choose another --to" in capsys.readouterr().err
    assert (tmp_path / "kept.jsonl").read_text() == "mine"
    assert main(["eval", str(path), "--to", str(tmp_path / "none" / "all.jsonl")]) == 2
    assert "Cannot write" in capsys.readouterr().err
    assert main(["eval", str(path), "--to", str(tmp_path / "all.jsonl")]) == 2  # its only task fails
    assert not (tmp_path / "all.jsonl").exists()


def test_a_full_disk_ends_an_evaluation_in_one_line(
    tmp_path: Path, full_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = configured(tmp_path, {"one": [{"prompt": "ab", "answer": "1"}]})
    monkeypatch.setattr(evaluate, "load_engine", fake_engine)
    assert main(["eval", str(path), "--to", str(full_disk / "all.jsonl")]) == 3
    assert f"error: Cannot write {full_disk / 'all.jsonl'}: No space left on device." in capsys.readouterr().err


def test_a_sampler_that_ends_leaves_no_engine_at_work() -> None:
    """Where a harness's time is over, its thread may be within torch, and the interpreter would abort at its end."""
    raw: dict[str, Any] = {"tasks": {"source": "digit_sorting"}, "sampling": {"group_size": 3, "max_tokens": 4}}
    sampler = LocalSampler(configuration.build(raw, "test"), "train", *fake_engine())
    asyncio.run(sampler.aclose())
    with pytest.raises(UserError, match="engine is closed"):
        asyncio.run(sampler.sample(range(4, 6)))


def test_training_tasks_are_sampled_as_groups() -> None:
    raw: dict[str, Any] = {"tasks": {"source": "digit_sorting"}, "sampling": {"group_size": 3, "max_tokens": 4}}
    sampler = LocalSampler(configuration.build(raw, "test"), "train", *fake_engine())
    groups = asyncio.run(sampler.sample(range(4, 6)))
    assert sorted(group.cursor for group in groups) == [4, 5]
    assert all(len(group.rollouts) == 3 and group.generate_seconds > 0 for group in groups)
