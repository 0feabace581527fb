"""Plays tasks of verifiers v1 tasksets, in the Python that has verifiers (`harness_process.py`, `verifiers_rows.py`).

A taskset's environment is served once in this process, and plays many rollouts at once. Its agents run in this process,
too, with a chat loop of our own: verifiers' harnesses start a script for each rollout and fetch its packages. (Its
contract allows a loop in this process as long as every call goes to the rollout's own endpoint. It finds a harness by
the name of its module, which `register` makes.) All agents call the policy; if there are several, `agent` names the one
that is trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any

from echo2.core.background import Shared
from echo2.core.errors import UserError
from echo2.tasks.loopback_model import CUT, UNTRAINED, LoopbackModel, OutOfRoomError

if TYPE_CHECKING:
    from echo2.tasks.loopback_model import Play

HARNESS_ID = "echo2_chat"
#: Column with the taskset, agent and data of a task.
COLUMN = "verifiers"
#: Prompt of a row whose task has no prompt text: the agent gets the environment's text instead.
NO_PROMPT = "-"
#: The environment variable with the Authorization of verifiers' client, which the endpoint does not look at.
NO_KEY = "ECHO2_NO_KEY"
#: The endpoint's header for a rollout's key.
KEY_HEADER = "X-Echo2-Rollout-Key"
#: The key of the rollout that the current asyncio task plays, and the agent that is trained (empty: any).
ROLLOUT_KEY: ContextVar[str] = ContextVar("ROLLOUT_KEY")
TRAINED: ContextVar[str] = ContextVar("TRAINED")


def register() -> None:
    """Let verifiers find the harness by its id. The first call imports verifiers, which takes seconds."""
    if HARNESS_ID in sys.modules:
        return
    from openai import AsyncOpenAI
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.harness import Harness

    class ChatConfig(HarnessConfig):  # type: ignore[misc]  # no types outside its own Python
        """The harness has no settings of its own."""

    class ChatHarness(Harness[ChatConfig]):  # type: ignore[misc]
        """Asks the model once a segment, with the whole conversation."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            """See `Harness.launch`."""
            if mcp_urls:
                raise NotImplementedError(f"the task brings tool servers ({', '.join(mcp_urls)}): not supported here")
            client = caller.with_options(base_url=endpoint, api_key=secret)
            key = ROLLOUT_KEY.get() + ("" if TRAINED.get() in ("", trace.agent.name) else UNTRAINED)
            return await _call_model(self.resolve_prompt(data), ctx.model, client, key)

    # One for all calls: a client of its own for each would read the machine's certificates anew.
    caller = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)
    module = ModuleType(HARNESS_ID, ChatHarness.__doc__)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[HARNESS_ID] = module


async def _call_model(prompts: tuple[Any, Any], model: str, client: Any, key: str) -> Any:
    """Make one chat call at the rollout's own endpoint."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    system, prompt = prompts
    prompt_messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
    )
    messages: list[Any] = [*([{"role": "system", "content": system}] if system else []), *prompt_messages]
    await client.chat.completions.create(model=model, messages=messages, extra_headers={KEY_HEADER: key})
    return ProgramResult(exit_code=0, stdout="", stderr="")


def make_play() -> Play:
    """Return a function that plays one rollout of a row from `rows`."""
    os.environ[NO_KEY] = "none"  # verifiers' client wants an Authorization, and has it from a variable only
    register()  # its imports take seconds, which should not count against a rollout's time limit
    stack = AsyncExitStack()
    stages = Shared[str, Any](lambda key: _stage(json.loads(key)[0], stack))

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> float:
        row = columns[COLUMN]
        TRAINED.set(row["agent"])
        env = await stages.get(json.dumps([row["taskset"], row["agent"]], sort_keys=True))
        episode = await _episode(env, row["data"], model)
        return _outcome(episode, row["agent"])

    return play


def rows(taskset: Mapping[str, Any], agent: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield the taskset's first `most` tasks as rows of a task source. `taskset`: its `id` and configuration."""
    env = load_env(taskset)
    for task, _ in zip(env.taskset.load(), range(most), strict=False):
        row = {"taskset": dict(taskset), "agent": agent, "data": task.data.model_dump(mode="json")}
        yield {"prompt": task.data.prompt_text or NO_PROMPT, COLUMN: row}


def load_env(taskset: Mapping[str, Any]) -> Any:
    """Load the taskset's environment, with every agent in this process.

    Raises:
        UserError: verifiers cannot load it.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import env_config_type, load_environment

    register()
    try:
        config_type = env_config_type(str(taskset["id"]))
        names = agent_config_fields(config_type.model_construct())
        seat = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}}
        return load_environment(config_type.model_validate({"taskset": dict(taskset), **dict.fromkeys(names, seat)}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"verifiers cannot load the taskset {dict(taskset)}: {error}") from error


async def _stage(taskset: Mapping[str, Any], stack: AsyncExitStack) -> Any:
    """Load and serve an environment. It runs as an asyncio task of its own, not in the task of one rollout."""
    env = load_env(taskset)
    await stack.enter_async_context(env.serving())
    return env


async def _episode(env: Any, data: dict[str, Any], model: LoopbackModel) -> Any:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.types import SamplingConfig

    # verifiers' training client tokenizes messages itself and reads sampled tokens back as text. echo2's endpoint keeps
    # the tokens that it sampled, so messages are sent to it unchanged. verifiers keeps a client, of 1 MB, for each
    # configuration that it ever saw: this one is the same for all rollouts, and ROLLOUT_KEY tells them apart.
    # No limit on connecting: the rollout has a time limit of its own, and a busy machine may connect slowly.
    client = EvalClientConfig(base_url=model.base_url, api_key_var=NO_KEY, timeout={"connect": None})
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
    (slot,) = env.slots(task)
    ROLLOUT_KEY.set(model.api_key)  # for this rollout's asyncio task, and those that it starts
    return await env.run_slot(slot, ModelContext(model=model.model, client=client, sampling=SamplingConfig()))


def _outcome(episode: Any, agent: str) -> float:
    """Return the trained agent's reward."""
    traces = [trace for trace in episode.traces if not agent or trace.agent.name == agent]
    if not traces and episode.errors:  # the episode failed before the agent said anything
        raise _failure(episode.errors[-1])
    if len(traces) != 1:
        names = ", ".join(str(trace.agent.name) for trace in episode.traces) or "none"
        raise UserError(
            f"The episode has {len(traces)} traces of the agent {agent!r} (there are: {names}). Set tasks.params.agent."
        )
    (trace,) = traces
    if errors := [*episode.errors, *trace.errors]:
        raise _failure(errors[-1])
    return float(trace.reward)


def _failure(error: Any) -> UserError:
    kind = OutOfRoomError if CUT in error.message else UserError
    return kind(f"verifiers: {error.type}: {error.message}"[:2000])
