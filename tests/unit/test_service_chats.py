"""Samples in OpenAI's form: the answers, what they cost, and whose models they may be of."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from echo2.core.errors import UserError
from echo2_service.backend import PromptCall
from echo2_service.front import chat_api, chat_tokens
from echo2_service.front.database import requests, samplers, sessions
from echo2_service.settings import Quotas
from front_service import Service

CHARACTERS = "0123456789abcde"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
BASE = "echo2/tiny"
SAID = [{"role": "user", "content": "12"}, {"role": "user", "content": [{"type": "text", "text": "ab"}]}]
CHAT = {"model": BASE, "messages": SAID, "max_tokens": 6, "seed": 7}


def with_tokenizer(service: Service) -> Service:
    """Give the base model a tokenizer: one token a character, as many as the back end knows."""
    write_tokenizer(service.folder)
    return service


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    core = Tokenizer(models.WordLevel({"<end>": 0} | {c: at for at, c in enumerate(CHARACTERS, 1)}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<end>"])
    (folder / "tokenizer.json").write_text(core.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("chats")
    quotas = Quotas(usd_per_million_tokens={"sample": 1e6})
    with closing(Service(folder, f"sqlite:///{folder}/service.sqlite", quotas)) as made:
        yield with_tokenizer(made)


@pytest.fixture
def chats(shared: Service, request: pytest.FixtureRequest) -> Service:
    """The service of all tests, for a tenant of each test: its tokenizers are loaded once."""
    shared.key = shared.api_keys.add_key(request.node.name)
    return shared


def call(service: Service, path: str, body: Any = None, key: str = "", status: int = 200) -> Any:
    headers = {"authorization": f"Bearer {key or service.key}"}
    url = f"/oai/api/v1/{path}"
    answer = (
        service.client.get(url, headers=headers)
        if body is None
        else service.client.post(url, headers=headers, json=body)
    )
    assert answer.status_code == status, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


def tenant(service: Service) -> str:
    return str(service.get("account")["tenant"])


def num(service: Service, table: Any, **where: Any) -> int:
    return service.database.count(table, tenant=tenant(service), **where)


def test_a_chat_is_answered_and_charged_as_a_sample(chats: Service) -> None:
    told = call(chats, "chat/completions", {**CHAT, "n": 2, "logprobs": True})
    assert (told["model"], told["object"]) == (BASE, "chat.completion")
    assert told["prompt_token_ids"] == [2, 3, 11, 12]
    for choice in told["choices"]:
        ids, text = choice["token_ids"], choice["message"]["content"]
        assert text == "".join(CHARACTERS[token - 1] for token in ids if token)
        assert choice["finish_reason"] == ("stop" if ids[-1] == 0 else "length")
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == ids
    written = sum(len(choice["token_ids"]) for choice in told["choices"])
    assert told["usage"] == {"prompt_tokens": 4, "completion_tokens": written, "total_tokens": 4 + written}
    assert chats.get("account")["bill"]["usd"] == pytest.approx(4 + written)
    again = call(chats, "chat/completions", CHAT)
    assert again["choices"][0]["message"] == told["choices"][0]["message"]
    assert again["choices"][0]["logprobs"] is None
    assert num(chats, sessions) == num(chats, samplers) == 1


def test_a_streamed_chat_has_the_same_answer(chats: Service) -> None:
    whole = call(chats, "chat/completions", CHAT)["choices"][0]
    events = call(chats, "chat/completions", {**CHAT, "stream": True}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["model"] for chunk in chunks} == {BASE}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_completion_reads_text_or_tokens(chats: Service) -> None:
    asked = {"model": BASE, "seed": 3, "max_tokens": 8}
    texts = [call(chats, "completions", {**asked, "prompt": prompt})["choices"][0]["text"] for prompt in ("12", [2, 3])]
    assert texts[0] == texts[1]
    stop = texts[0][3]
    stopped = call(chats, "completions", {**asked, "prompt": "12", "stop": stop})["choices"][0]
    assert stopped["text"] == texts[0].partition(stop)[0]


def test_an_answer_ends_with_the_model_where_a_stop_is_given(chats: Service) -> None:
    body = {**CHAT, "n": 64, "max_tokens": 60, "stop": ["zz"]}
    ends = [choice["token_ids"][-1] for choice in call(chats, "chat/completions", body)["choices"]]
    assert 0 in ends


def test_a_checkpoint_is_sampled_as_it_is_now(chats: Service) -> None:
    model, number = chats.model(chats.session()), 1
    for target in (3, 9):
        for _ in range(8):
            chats.result(chats.train(model, number, [target]))
            chats.result(chats.step(model, number + 1, lr=20.0))
            number += 2
        saved = chats.post("save_weights_for_sampler", {"model_id": model, "seq_id": number, "path": "mine"})
        path = chats.result(saved)["path"]
        number += 1
        told = call(chats, "chat/completions", {**CHAT, "model": path})
        assert told["choices"][0]["token_ids"] == [target] * 6
        if target == 3:  # the name is free for another
            chats.post("checkpoints/delete", {"paths": [path]})
    assert [card["id"] for card in call(chats, "models")["data"]] == [BASE, path]
    stranger = chats.api_keys.add_key("eve")
    refused = call(chats, "chat/completions", {**CHAT, "model": path}, stranger, 400)
    assert "There is no checkpoint" in refused["error"]["message"]
    assert [card["id"] for card in call(chats, "models", key=stranger)["data"]] == [BASE]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("chat/completions", {"model": "gpt"}, "There is no base model 'gpt'"),
        ("chat/completions", {"model": 7}, "model"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "12" * 200}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "1" * 200}]}, "The prompt has 200 tokens"),
        ("chat/completions", {"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ("chat/completions", {"logit_bias": {"1": 5}}, "logit_bias is not supported"),
        ("chat/completions", {"top_p": 0}, "top_p"),
        ("completions", {"prompt": ""}, "The prompt has 0 tokens"),
        ("completions", {"prompt": "1", "echo": True}, "echo is not supported"),
        ("completions", {"prompt": [-1]}, "prompt"),
    ],
)
def test_a_refusal_has_openais_form(chats: Service, path: str, change: Any, words: str) -> None:
    error = call(chats, path, {**CHAT, **change}, status=400)["error"]
    assert words in error["message"]
    assert num(chats, requests) == 0


def test_the_error_says_that_a_base_model_has_no_tokenizer(service: Service) -> None:
    error = call(service, "chat/completions", CHAT, status=400)["error"]
    assert "no tokenizer" in error["message"]
    assert str(service.folder) not in error["message"]


def test_a_key_needs_the_scope(chats: Service) -> None:
    assert "scope" in call(chats, "models", key=chats.api_keys.add_key(tenant(chats), ["train"]), status=403)["detail"]


def test_a_new_session_follows_an_ended_one(chats: Service) -> None:
    call(chats, "chat/completions", CHAT)
    (session,) = chats.database.select(sessions, tenant=tenant(chats))
    chats.post(f"sessions/{session.id}/finish", status=204)
    call(chats, "chat/completions", CHAT)
    assert num(chats, sessions, finished=None) == 1


def test_a_client_that_hangs_up_pays_nothing(chats: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_api, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("starlette.requests.Request.is_disconnected", _gone)
    chats.in_front(chats.backend.gate.clear)
    assert "hung up" in call(chats, "chat/completions", CHAT, status=400)["error"]["message"]
    (row,) = chats.database.select(requests, tenant=tenant(chats))
    assert row.state == "failed"
    chats.until_called("cancelled")
    chats.in_front(chats.backend.gate.set)
    assert chats.get("account")["bill"]["usd"] == 0


async def _gone(_: Any) -> bool:
    return True


def test_a_tenants_chats_wait_for_each_other_and_not_others_for_all(chats: Service) -> None:
    order: list[str] = []

    async def ask(tenant: str) -> None:
        await chats.front.chats.prompt(tenant, PromptCall(str(chats.folder), text="12" * 1000))
        order.append(tenant)

    async def both() -> None:
        await asyncio.gather(*(ask("many") for _ in range(5)), ask("few"))

    chats.in_front(both)
    assert order.index("few") <= 1


def test_a_service_reports_its_end(service: Service) -> None:
    with_tokenizer(service)
    service.in_front(service.backend.gate.clear)
    service.in_front(service.front.requests.stop)
    assert call(service, "chat/completions", CHAT, status=503)["error"]["code"] == "ending"


def test_an_endless_chat_template_delays_no_other_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tenants' chats are written by one process, one after the other."""
    monkeypatch.setattr(chat_tokens, "PROMPT_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}" * 4
    endless = f"{loops}{{% endfor %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}"
    calls = []
    for name, template in (("endless", endless), ("fair", TEMPLATE)):
        write_tokenizer(tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
        calls.append(PromptCall(str(tmp_path / name), json.dumps([{"role": "user", "content": "12"}]).encode()))
    with pytest.raises(UserError, match=r"did not end within 0.2 s of the processor"):
        chat_tokens._carry_out(calls[0], 1)
    assert chat_tokens._carry_out(calls[1], 2).prompt == array("i", [2, 3])
