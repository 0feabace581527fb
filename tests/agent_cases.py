"""Agents that call the loopback endpoint, a model whose words a test writes, and an independent check of what of them
is trained on: from the engine's own records to the learner's loss."""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.core.errors import UserError
from echo2.core.types import RolloutGroup, SnapshotRef
from echo2.engines.engine import Completion, Outcome, SampleRequest
from echo2.engines.tokenizer import load_tokenizer
from echo2.learner.grpo.data import group_data
from echo2.sandbox.plugins import own_python
from echo2.tasks.loopback_model import LoopbackModel
from echo2.transport import messages
from echo2.transport.regroup import by_row, with_scores
from real_runs import REPOSITORY

#: As in the Qwen family: tools in the system's turn, calls and results in tags.
TEMPLATE = b"""\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or () %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
#: As in the smallest models: neither tools nor calls.
PLAIN_TEMPLATE = b"""\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def agents_python() -> str:
    """The Python that has the agents' frameworks. Skips the test if there is none."""
    os.chdir(REPOSITORY)  # where `make` puts it
    try:
        return own_python("agents")
    except UserError as error:
        pytest.skip(str(error))


Records = list[tuple[SampleRequest, Completion]]


def character_tokenizer(template: bytes = TEMPLATE) -> Any:
    """One token for each character of ASCII, and an end token."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocab = {name: at for at, name in enumerate(("<pad>", "<|im_end|>", "<|im_start|>", *characters))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<|im_end|>", "<|im_start|>"])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    files = {"tokenizer.json": core.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    return load_tokenizer(
        {**files, "chat_template.jinja": template, "config.json": b'{"max_position_embeddings": 100000}'}
    )


AGENTS_TOKENIZER = character_tokenizer()


class ScriptedEngine:
    """Says what `speak(prompt)` returns for the text of a prompt, and keeps every request with its answer (`heard`)."""

    installed = SnapshotRef("policy", 1, 1)

    def __init__(self, speak: Callable[[str], str], tokenizer: Any = AGENTS_TOKENIZER) -> None:
        self._speak, self._tokenizer, self._end = speak, tokenizer, tokenizer.eos_token_id
        self.heard: Records = []
        self.slots = self.free_slots = 1

    def refusal(self, request: SampleRequest) -> None:
        """It can say anything."""

    def submit(self, request: SampleRequest) -> asyncio.Future[Outcome]:
        """See `Engine.submit`."""
        text = self._speak(self._tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False))
        tokens = array("i", [*self._tokenizer.encode(text, add_special_tokens=False), self._end])
        ends = request.stop.length(tokens) if request.stop is not None else None
        tokens = tokens[: min(ends or len(tokens), request.params.max_tokens)]
        is_ended = ends is not None or tokens[-1] == self._end
        logprobs = array("f", [-(1 + len(self.heard)) / (1 + at) for at in range(len(tokens))])
        made = Completion(tokens, logprobs, ((0, 1),), "stop" if is_ended else "length")
        self.heard.append((request, made))
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(done.set_result, made)
        return done


def sampled(heard: Records) -> Counter[tuple[Any, ...]]:
    """Each token that an engine drew, with all that it had read before, and its logprob."""
    return Counter(
        ((*request.prompt_tokens, *made.tokens[:at]), token, made.logprobs[at])
        for request, made in heard
        for at, token in enumerate(made.tokens)
    )


def trained(group: RolloutGroup) -> Counter[tuple[Any, ...]]:
    """The same of each token that the learner has in its loss, from the bytes that the ledger holds."""
    scored = with_scores(group, by_row(group, [(float(at), {}) for at in range(group.num_rollouts)]))
    stored = messages.parse_group(messages.encode_group(scored).SerializeToString())
    return Counter(
        ((*datum.prompt_tokens, *datum.tokens[:at]), token, datum.behaviour_logprobs[at])
        for datum in group_data(stored, 2, "dr_grpo", "token", True).data
        for at, token in enumerate(datum.tokens)
        if datum.loss_mask[at]
    )


def texts(group: RolloutGroup) -> list[list[str]]:
    """The text of each row of each rollout, with the group's prompt in front."""
    return [
        [AGENTS_TOKENIZER.decode([*group.prompt_tokens, *row.tokens], skip_special_tokens=False) for row in rows]
        for rows in group.by_rollout
    ]


async def posted(
    model: LoopbackModel, path: str, body: Any, header: str = "Authorization: Bearer "
) -> tuple[int, dict[str, str], str]:
    """Send one request in plain HTTP, whose version 1.0 has no chunks; return the status, the headers and the body."""
    host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.0\r\nHost: x\r\n{header}{model.api_key}\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        told, _, content = (await reader.read()).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    status, *headers = told.split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in headers), content


def events(stream: str) -> list[tuple[str, Any]]:
    """Return (name, data) of each server-sent event."""
    found = []
    for event in stream.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
