"""Agents of smolagents and of Anthropic's client learn, unmodified: over a few real steps their reward grows, and the
tokens that were trained are those of the raw HTTP answers. In a Python of their own (`make agents`)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import threading
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_learns import look
from trained_tokens import answers, compare
from transformers import AutoModelForCausalLM

from agent_cases import PLAIN_TEMPLATE, ScriptedEngine, agents_python
from echo2.core.types import RolloutGroup, SamplingParams, Task
from echo2.demo.small_models import UNTAUGHT, answer_loss, update
from echo2.engines.tokenizer import load_tokenizer
from echo2.rollouts.generate import assignment_of, sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.sandbox.plugins import load_named
from echo2.tasks.harness_process import HarnessProcess
from harness_cases import LEASE, group_of
from real_runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

#: Plays the tasks of its input, many at once. Both programs have a `play`, and read and write in the same way.
SERVING = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

writing = Lock()

def append(file, record):
    with writing:
        print(json.dumps(record), file=file, flush=True)

raw, answers = open(os.environ["AGENT_RECORDS"], "a"), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # a framework may print

def record(response):
    key = response.request.headers.get("x-api-key") or response.request.headers["authorization"]
    append(raw, {"key": key, "answer": json.loads(response.read())})

def answer(task):
    try:
        said = {"answer": play(task)}
    except Exception as error:
        said = {"answer": "", "why": f"{type(error).__name__}: {error}"}
    append(answers, {"number": task["number"], **said})

http = DefaultHttpxClient(event_hooks={"response": [record]})
with ThreadPoolExecutor(64) as pool:
    for line in sys.stdin:
        pool.submit(answer, json.loads(line))
"""
SMOLAGENTS = (
    """
from openai import DefaultHttpxClient
from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIServerModel, ToolCallingAgent, tool

def play(task):
    @tool
    def digits() -> str:
        '''What is to be sorted.'''
        return task["digits"]

    client = {"http_client": http}
    model = OpenAIServerModel("policy", api_base=task["base_url"], api_key=task["api_key"], client_kwargs=client)
    templates = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "Get the digits and sort them."}
    agent = ToolCallingAgent([digits], model, prompt_templates=templates, max_steps=2, verbosity_level=0)
    return str(agent.run("Sort."))
"""
    + SERVING
)
ANTHROPIC = (
    """
from anthropic import Anthropic, DefaultHttpxClient

TOOLS = [{"name": "digits", "description": "What is to be sorted.", "input_schema": {"type": "object"}}]

def play(task):
    client = Anthropic(base_url=task["base_url"].removesuffix("/v1"), api_key=task["api_key"], http_client=http)
    talk = [{"role": "user", "content": "Get the digits."}]
    for turn in range(2):
        answer = client.messages.create(
            model="policy", max_tokens=100, system="You sort.", tools=TOOLS, messages=talk
        )
        used = [block for block in answer.content if block.type == "tool_use"]
        if not used:
            return "".join(block.text for block in answer.content if block.type == "text")
        talk = [{"role": "user", "content": f"Sort {task['digits']}"}]  # a summary in place of the history
    return ""
"""
    + SERVING
)
#: The tasks, and the harness. It hands the program its digits, and knows what is right.
HARNESS = """
import asyncio, itertools, json, os
from echo2.tasks.digit_sorting import DigitSorting

class Digits(DigitSorting):
    def __init__(self, split="train", seed=0):
        super().__init__(split, 8, 10, seed)

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "digits": row["prompt"].rstrip("=")}

class Sorter:
    _starting, _program, _waiting, _numbers = asyncio.Lock(), None, {}, itertools.count()

    def __init__(self, columns, seed):
        self._row = columns

    async def run(self, policy):
        async with self._starting:
            if self._program is None:
                kind, piped = type(self), asyncio.subprocess.PIPE
                words = os.environ["SORTER"].split("\\n")
                kind._program = await asyncio.create_subprocess_exec(*words, stdin=piped, stdout=piped)
                kind._hearing = asyncio.ensure_future(self.hear())
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        task = {"number": number, "digits": self._row["digits"]}
        task |= {"base_url": policy.base_url, "api_key": policy.api_key}
        self._program.stdin.write(json.dumps(task).encode() + b"\\n")
        return float((await answer).strip() == self._row["answer"])

    @classmethod
    async def hear(cls):
        try:
            while line := await cls._program.stdout.readline():
                said = json.loads(line)
                cls._waiting.pop(said["number"]).set_result(said["answer"])
        finally:
            for answer in cls._waiting.values():
                answer.set_exception(RuntimeError("the program ended, or said something else"))
"""
CALL = '<tool_call>{"name": "digits", "arguments": {}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "%s"}}</tool_call>'
#: The program, and what is right to say when the digits are known.
AGENTS = {"smolagents": (SMOLAGENTS, FINAL), "anthropic": (ANTHROPIC, "%s")}
CONTEXT = 1024
WARM_UP_STEPS, ROWS, RATE, TARGET = 600, 24, 2e-3, 0.3
STEPS, GROUPS, ROLLOUTS = 16, 16, 8
SETTINGS = """
[run]
max_steps = {steps}
[model]
path = "{model}"
[tasks]
source = "{code}:Digits#train"
environment = "harness:{code}:Sorter"
[eval]
source = "{code}:Digits#heldout"
every = {steps}
limit = 256
[reward]
functions = ["environment"]
[sampling]
group_size = {rollouts}
max_turns = 4
max_tokens = 400
groups_per_batch = {groups}
[schedule]
groups_per_step = {groups}
lease_seconds = 600.0
[learner]
lr = 2e-4
checkpoint_every = 1000
[workers]
count = 1
"""


def shown(spec: str, tasks: Any, tokenizer: Any, final: str) -> list[tuple[str, str]]:
    """What an agent's model reads and should say, as the agent asks it; with digits in place of those of a task. The
    answer comes last."""
    task = tasks[0]
    digits = task["digits"]
    engine = ScriptedEngine(lambda read: final % task["answer"] if digits in read else CALL, tokenizer)
    lease = assignment_of(LEASE, Task(5, "", task), array("i", [1]), SamplingParams(max_tokens=4000), spec, 8)

    async def play() -> RolloutGroup:
        environment = HarnessEnvironment(HarnessProcess(spec))
        await environment.start()
        try:
            return group_of(await sample_group(engine, tokenizer, lease, "w", {spec: environment}))
        finally:
            await environment.close()

    assert {one.reward_parts["environment"] for one in asyncio.run(play()).rollouts} == {1.0}
    texts = {
        tuple(tokenizer.decode(list(part), skip_special_tokens=False) for part in (asked.prompt_tokens, said.tokens))
        for asked, said in engine.heard
    }
    turns = [(read.replace(digits, "{digits}"), said.replace(task["answer"], "{answer}")) for read, said in texts]
    return sorted(turns, key=lambda turn: "{answer}" in turn[1])


def write_model(sort_model: Path, out: Path) -> Any:
    """The demo's small model, which sorts badly, with a token for each printable character and a chat template."""
    shutil.copytree(sort_model, out)
    table = json.loads((out / "tokenizer.json").read_text())
    vocabulary = table["model"]["vocab"]
    turns = "<|im_start|>", "<|im_end|>"
    for character in (*turns, "\n", *map(chr, range(32, 127))):
        vocabulary.setdefault(character, len(vocabulary))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    table["added_tokens"] += [{"id": vocabulary[name], "content": name, **plain, "special": True} for name in turns]
    (out / "tokenizer.json").write_text(json.dumps(table))
    told = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**told, "eos_token": turns[1]}))
    (out / "chat_template.jinja").write_bytes(PLAIN_TEMPLATE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(out)
    model.resize_token_embeddings(len(vocabulary), mean_resizing=False)
    model.config.max_position_embeddings = CONTEXT
    model.config.eos_token_id = model.generation_config.eos_token_id = vocabulary[turns[1]]
    model.save_pretrained(out)
    return model


def warm_up(model: Any, tasks: Any, tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    """Teach the model what to say at each of its turns, until `TARGET` of its rollouts would be right."""
    rng, chances = random.Random(0), [deque[float](maxlen=200) for _ in turns]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(WARM_UP_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30)
        rows, labels, places = [], [], []
        for at in range(ROWS):
            task = tasks[step * ROWS + at]
            digits, answer = task["digits"], task["answer"]
            places.append(rng.randrange(len(turns)))
            read, said = (
                tokenizer.encode(one.replace("{digits}", digits).replace("{answer}", answer), add_special_tokens=False)
                for one in turns[places[-1]]
            )
            rows.append(read + said)
            labels.append([UNTAUGHT] * len(read) + said)
        loss_BT = answer_loss(model, rows, labels, reduction="none")
        for place, chance in zip(places, loss_BT.detach().sum(-1).neg().exp().tolist(), strict=True):
            chances[place].append(chance)
        if math.prod(map(statistics.mean, chances)) > TARGET:
            return
        update(model, optimizer, loss_BT.sum() / sum(len(one) - one.count(UNTAUGHT) for one in labels))
    raise AssertionError(f"after {WARM_UP_STEPS} steps: {list(map(statistics.mean, chances))} of its turns are right")


@pytest.mark.parametrize("name", AGENTS)
def test_an_unmodified_agent_learns(
    name: str, sort_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, final = AGENTS[name]
    log, out = tmp_path / "raw.jsonl", tmp_path / "run"
    monkeypatch.setenv("SORTER", f"{agents_python()}\n{tmp_path / 'agent.py'}")
    monkeypatch.setenv("AGENT_RECORDS", str(tmp_path / "shown.jsonl"))
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "sorter.py").write_text(HARNESS)
    code = str(tmp_path / "sorter.py")
    tasks = load_named(f"{code}:Digits")(seed=1)
    model = write_model(sort_model, tmp_path / "model")
    tokenizer = load_tokenizer({path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()})
    turns = shown(f"harness:{code}:Sorter", tasks, tokenizer, final)
    assert len(turns) == 2
    torch.set_num_threads(1)
    warm_up(model, tasks, tokenizer, turns)
    model.save_pretrained(tmp_path / "model")

    settings = SETTINGS.format(model=tmp_path / "model", code=code, steps=STEPS, groups=GROUPS, rollouts=ROLLOUTS)
    (tmp_path / "run.toml").write_text(settings)
    command = [sys.executable, "-m", "echo2", "run", str(tmp_path / "run.toml"), "--out", str(out), "--json"]
    command += ["--head.listen", "127.0.0.1:0"]
    groups: dict[int, bytes] = {}
    with (tmp_path / "run.log").open("wb") as said:
        environment = {**os.environ, "AGENT_RECORDS": str(log)}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=said, stderr=said)
        ended = threading.Thread(target=process.wait)
        ended.start()
        while ended.is_alive():
            look(out / "ledger.sqlite", groups)  # it forgets what a checkpoint covers
            ended.join(0.1)
    assert process.returncode == 0, (tmp_path / "run.log").read_text()[-3000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    rewards = [round(row["reward/mean"], 3) for row in rows if "reward/mean" in row]
    with sqlite3.connect(out / "ledger.sqlite") as tables:
        steps = dict(tables.execute("SELECT number, step FROM trainings"))
    assert {number for number, step in steps.items() if step < STEPS - 1} <= set(groups)  # the last ones go at once
    found = compare(log, {number: data for number, data in groups.items() if number in steps})
    print(f"{name}: held-out {held_out}, rewards {rewards}, {found}")
    assert found.complaints == []
    assert found.tokens_trained == found.tokens_sampled > 0
    assert found.rows > found.rollouts  # the last call has another history
    assert sum(one.total() for one in answers(log).values()) == found.calls + found.calls_not_trained
    assert held_out[-1] > held_out[0] + 0.1, (held_out, rewards)
