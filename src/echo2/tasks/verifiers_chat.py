"""The chat loop that plays verifiers' agents, in the process that serves them.

verifiers' contract allows a harness to run its loop in this process, as long as every call goes to the rollout's own
endpoint. verifiers finds a harness by the name of its module: `register` makes that module.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any

HARNESS_ID = "echo2_chat"
#: Key in `trace.info` of the tokens of the trace's conversation.
TOKENS = "echo2_tokens"
#: The endpoint's header for a rollout's key.
KEY_HEADER = "X-Echo2-Rollout-Key"
#: The key of the rollout that the current asyncio task plays.
ROLLOUT_KEY: ContextVar[str] = ContextVar("ROLLOUT_KEY")


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
        """Asks the model once a segment, with all that was said."""

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
            return await _asked(self.resolve_prompt(data), ctx.model, trace, client)

    # One for all calls: a client of its own for each would read the machine's certificates anew.
    caller = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None)
    module = ModuleType(HARNESS_ID, ChatHarness.__doc__)
    module.__dict__.update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    sys.modules[HARNESS_ID] = module


async def _asked(prompts: tuple[Any, Any], model: str, trace: Any, client: Any) -> Any:
    """Make one chat call at the rollout's own endpoint, and keep its tokens in the trace."""
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    system, prompt = prompts
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
    messages: list[Any] = [*([{"role": "system", "content": system}] if system else []), *asked]
    key = {KEY_HEADER: ROLLOUT_KEY.get()}
    answer = (await client.chat.completions.create(model=model, messages=messages, extra_headers=key)).model_dump()
    trace.info[TOKENS] = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    return ProgramResult(exit_code=0, stdout="", stderr="")
