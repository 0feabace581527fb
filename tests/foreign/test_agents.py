"""Agents of public frameworks, with tools, sub-agents, streams and compacted histories, in a Python of their own
(`make agents`; skipped without, saying why): they are played unchanged, and what was sampled is what is trained on."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path

import pytest
from trained_tokens import compare

from agent_cases import (
    AGENTS_TOKENIZER,
    PLAIN_TEMPLATE,
    ScriptedEngine,
    agents_python,
    character_tokenizer,
    sampled,
    texts,
    trained,
)
from echo2.core.types import RolloutGroup, SamplingParams, Task
from echo2.engines.engine import RequestFailure
from echo2.rollouts.generate import assignment_of, sample_group
from echo2.rollouts.harness import HarnessEnvironment
from echo2.sandbox.plugins import load_named
from echo2.tasks.harness_process import HarnessProcess
from echo2.tasks.loopback_model import LoopbackModel
from echo2.transport import messages
from harness_cases import LEASE, group_of, played

pytestmark = pytest.mark.timeout(240)

OPENAI_AGENTS = """
import asyncio, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

@function_tool
def add(a: int, b: int) -> int:
    return a + b

async def main():
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2]))
    helper = Agent(name="helper", instructions="Check it.", model=model)
    tools = [add, helper.as_tool("check", "Check a sum.")]
    agent = Agent(name="adder", instructions="Use the tools.", tools=tools, model=model)
    result = await Runner.run(agent, "1+2")
    more = result.to_input_list() + [{"role": "user", "content": "sure?"}]
    streamed = Runner.run_streamed(agent, more)
    async for _ in streamed.stream_events():
        pass
    print(result.final_output, "|", streamed.final_output)

asyncio.run(main())
"""
SMOLAGENTS = """
import sys
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

@tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: one
        b: the other
    '''
    return a + b

model = OpenAIServerModel(model_id="policy", api_base=sys.argv[1], api_key=sys.argv[2])
kinds = ToolCallingAgent, CodeAgent
print(*(kind(tools=[add], model=model, max_steps=4, verbosity_level=0).run("1+2") for kind in kinds), sep=" | ")
"""
ANTHROPIC = """
import sys
from anthropic import Anthropic

client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key=sys.argv[2])
tools = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]
talk, said = [{"role": "user", "content": "1+2"}], []
for turn in range(3):
    ask = dict(model="policy", max_tokens=500, system="Use the tools.", tools=tools, messages=talk)
    if turn == 1:
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    talk.append({"role": "assistant", "content": answer.content})
    used = [block for block in answer.content if block.type == "tool_use"]
    if used:
        total = str(used[0].input["a"] + used[0].input["b"])
        talk.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": used[0].id, "content": total}]})
    else:
        said.append(answer.content[0].text)
        talk = [{"role": "user", "content": "so far: " + said[-1]}]  # a summary in place of the history
print(*said, sep=" | ")
"""


def play(script: str, folder: Path, engine: ScriptedEngine) -> tuple[RolloutGroup, list[str]]:
    """Play a group with a program that knows nothing of echo2; return it with what the program printed."""
    program, path = agents_python(), folder / "agent.py"
    path.write_text(script)
    printed: list[str] = []

    async def agent(model: LoopbackModel, rng: random.Random) -> float:
        started = await asyncio.create_subprocess_exec(
            *(program, str(path), model.base_url, model.api_key),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
        )
        out, err = await started.communicate()
        assert started.returncode == 0, err.decode()[-4000:]
        printed.append(out.decode().strip())
        return 1.0

    group = group_of(played(engine, agent, AGENTS_TOKENIZER, 40_000, 64))
    assert trained(group) == sampled(engine.heard)
    assert group.num_rollouts == LEASE.num_samples
    return group, printed


def calls(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{arguments}}}}}\n</tool_call>'


def test_the_openai_agents_sdk(tmp_path: Path) -> None:
    def speak(prompt: str) -> str:
        if "Check it." in prompt:
            return "right"
        results = prompt.count("<|im_start|>tool")
        if "sure?" in prompt and results == 2:
            return calls("add", '"a": 1, "b": 2')
        return [calls("add", '"a": 1, "b": 2'), calls("check", '"input": "1+2=3"'), "it is 3", "sure"][results]

    group, printed = play(OPENAI_AGENTS, tmp_path, ScriptedEngine(speak))
    assert printed == ["it is 3 | sure"] * LEASE.num_samples
    for rows in texts(group):  # the adder's own, from its first call to the streamed ones, and the helper's
        assert [text.count("<|im_start|>assistant") for text in rows] == [5, 1]


def test_smolagents(tmp_path: Path) -> None:
    def speak(prompt: str) -> str:
        if "<code>" in prompt:
            return "Thought: easy.\n<code>\nfinal_answer(add(1, 2))\n</code> and so on"
        is_known = "Observation" in prompt.rpartition("New task:")[2]
        return calls("final_answer", '"answer": 3') if is_known else calls("add", '"a": 1, "b": 2')

    group, printed = play(SMOLAGENTS, tmp_path, ScriptedEngine(speak))
    assert printed == ["3 | 3"] * LEASE.num_samples
    for rows in texts(group):
        assert len(rows) == 3  # this agent rewrites its own calls in its history
        assert rows[-1].endswith("</code>")  # a stop string of CodeAgent's


def test_the_client_of_anthropic(tmp_path: Path) -> None:
    def speak(prompt: str) -> str:
        return "it is 3" if "<|im_start|>tool" in prompt or "so far" in prompt else calls("add", '"a": 1, "b": 2')

    group, printed = play(ANTHROPIC, tmp_path, ScriptedEngine(speak))
    assert printed == ["it is 3 | it is 3"] * LEASE.num_samples
    for rows in texts(group):
        assert [text.count("<|im_start|>assistant") for text in rows] == [2, 1]


def test_the_example_reads_what_its_warm_up_shows_and_is_right_if_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents_python()
    spec, log = "harness:examples/agents/people.py:Agent", tmp_path / "log.jsonl"
    people, calls = (load_named(f"examples/agents/people.py:{name}") for name in ("People", "calls"))
    row, tokenizer = people("train", 3)[5], character_tokenizer(PLAIN_TEMPLATE)
    shown = {
        tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True): answer
        for talk, answer in calls(row)
    }
    monkeypatch.setenv("AGENT_RECORDS", str(log))
    engine = ScriptedEngine(shown.__getitem__)
    leased = assignment_of(LEASE, Task(5, "", row), array("i", [1]), SamplingParams(max_tokens=4000), spec, 8)

    async def play() -> RolloutGroup | RequestFailure:
        environment = HarnessEnvironment(HarnessProcess(spec))
        await environment.start()
        try:
            return await sample_group(engine, tokenizer, leased, "w", {spec: environment})
        finally:
            await environment.close()

    group = group_of(asyncio.run(play()))
    assert {rollout.reward_parts["environment"] for rollout in group.rollouts} == {1.0}
    assert trained(group) == sampled(engine.heard)
    assert [len(rows) for rows in group.by_rollout] == [2] * LEASE.num_samples  # the last call has another history
    found = compare(log, {5: messages.encode_group(group).SerializeToString()})
    assert (found.complaints, found.calls, found.calls_not_trained) == ([], 3 * LEASE.num_samples, 0)
