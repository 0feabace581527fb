"""An agent that answers questions about people, written with the OpenAI agents SDK. It knows nothing of echo2.

    python agent.py SOCKET

says so once it listens at this Unix socket for tasks, each a line of JSON: `question`, `people` (what its tool knows),
and `base_url` and `api_key` of a server of the model. It answers each by a line: {"answer": ...}, or {"failed": ...} if
that server is to blame. With AGENT_RECORDS=FILE, it appends what the server says to that file, beside the key.

The agent keeps its history short, by a filter that the SDK calls before it calls the model: once its tool has answered
twice, what the tool said stands behind the question, and all other turns are dropped.
"""

import asyncio
import json
import os
import sys
from typing import Any

INSTRUCTIONS = (
    "You answer questions about people. To find a person, write "
    '<tool_call>{"name": "find", "arguments": {"name": "Anna"}}</tool_call> and nothing else. '
    "When you know the answer, write the answer alone."
)
TURNS = 5


def compacted(question: str, found: list[str]) -> str:
    """What the model reads in place of its history."""
    return "\n".join([question, *found])


def shortened(data: Any) -> Any:
    """The filter of the SDK: the model's next input, from the question and all turns."""
    (question, *turns), whole = data.model_data.input, data.model_data
    found = [turn["output"] for turn in turns if turn.get("type") == "function_call_output"]
    if len(found) < 2:
        return whole
    return type(whole)([{"role": "user", "content": compacted(question["content"], found)}], whole.instructions)


class Finder:
    """Answers tasks, many at once, over one pool of connections."""

    def __init__(self) -> None:
        from openai import DefaultAsyncHttpxClient  # here: INSTRUCTIONS can be read where the SDK is not installed

        hooks = {"response": [record]} if "AGENT_RECORDS" in os.environ else {}
        self._http = DefaultAsyncHttpxClient(event_hooks=hooks, timeout=600.0)

    async def answer(self, task: dict[str, Any]) -> str:
        """What the agent says in the end; nothing if it says no answer within its turns."""
        from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
        from openai import AsyncOpenAI, BadRequestError

        @function_tool
        def find(name: str) -> str:
            """What is known of a person."""
            return str(task["people"].get(name, f"There is no {name}."))

        client = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], http_client=self._http)
        model = OpenAIChatCompletionsModel("policy", client)
        agent = Agent(name="finder", instructions=INSTRUCTIONS, tools=[find], model=model)
        config = RunConfig(call_model_input_filter=shortened, tracing_disabled=True)
        try:
            result = await Runner.run(agent, task["question"], max_turns=TURNS, run_config=config)
        except (AgentsException, BadRequestError):  # too many turns, a tool that is not there, no room left
            return ""
        return str(result.final_output)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        try:
            said = {"answer": await self.answer(json.loads(await reader.readline()))}
        except Exception as error:
            said = {"failed": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(said).encode() + b"\n")
        writer.close()


async def record(response: Any) -> None:
    """Hear of a response before the SDK does."""
    said = json.loads(await response.aread())
    append(os.environ["AGENT_RECORDS"], {"key": response.request.headers["authorization"], "answer": said})


def append(path: str, record: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


async def main() -> None:
    server = await asyncio.start_unix_server(Finder().serve, sys.argv[1])
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
