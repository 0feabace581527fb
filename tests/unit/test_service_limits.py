"""Every limit of the service, exceeded as a client would, beside another tenant that must still be served."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from echo2_service import limits
from echo2_service.front import http_server
from echo2_service.front.database import checkpoints, steps
from echo2_service.settings import Quotas
from front_server import Client, FrontServer, archived, come, everything, location, raw, serving

Attack = Callable[[FrontServer, Client], None]
QUOTAS = Quotas(usd_per_million_tokens={"sample": 1e6}, quota_usd={"spender": 1.0}, quota_disk_gb={"hoarder": 40e-6})


def refused(found: tuple[int, Any], status: int, words: str) -> None:
    assert found[0] == status, found
    assert re.search(words, json.dumps(found[1])), found


def datum(tokens: int = 1, **more: Any) -> dict[str, Any]:
    targets = {"data": [1] * tokens, "dtype": "int64", "shape": [tokens]}
    return {"model_input": {"chunks": [{"tokens": [1] * tokens}]}, "loss_fn_inputs": {"target_tokens": targets, **more}}


def training(model: str, data: list[Any], number: int = 1) -> dict[str, Any]:
    return {"model_id": model, "seq_id": number, "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}


def train_refused(client: Client, data: list[Any], words: str) -> None:
    model = client.model(client.session())
    answer = client.result(client.ok("forward_backward", training(model, data)))
    assert re.search(words, answer["error"]), answer


def sample(client: Client, session: str = "", **more: Any) -> tuple[int, Any]:
    sampler = client.sampler(session or client.session())
    return client.post("asample", {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}, **more})


def until(server: FrontServer, holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0.001)

    server.in_front(wait)


# ---- connections and bodies ------------------------------------------------------------------------------------------


def header(server: FrontServer, client: Client) -> None:
    answer = everything(raw(client, "telemetry", b"X-Long: " + b"a" * (limits.HEADER_BYTES_MAX + 100_000)))
    assert answer.startswith(b"HTTP/1.1 400") or not answer


def silent_head(server: FrontServer, client: Client) -> None:
    assert everything(raw(client, "telemetry")) == b""


def address(server: FrontServer, client: Client) -> None:
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", client.port), source_address=("127.0.0.2", 0)))
            for _ in range(7)
        ]
        assert everything(opened[-1]) == b""
        assert Client(server.port, server.api_keys.add_key("other")).is_served()


def training_body(server: FrontServer, client: Client) -> None:
    refused(client.post("forward_backward", b"x" * 2001), 413, "2001 bytes; 2000 are taken")


def adapter_body(server: FrontServer, client: Client) -> None:
    refused(client.post("adapters?base_model=echo2/tiny&name=a", b"x" * 2001), 413, "2001 bytes; 2000 are taken")


def small_body(server: FrontServer, client: Client) -> None:
    refused(client.post("create_session", b" " * (limits.SMALL_BODY_BYTES_MAX + 1)), 413, "are taken")


def chat_body(server: FrontServer, client: Client) -> None:
    refused(client.post("/oai/api/v1/chat/completions", b" " * (limits.CHAT_BYTES_MAX + 1)), 413, "are taken")


def stalled_body(server: FrontServer, client: Client) -> None:
    opened = raw(client, "forward_backward", b"Content-Length: 100000\r\n\r\n" + b"x" * 5000)
    assert come(opened, b"too slowly").startswith(b"HTTP/1.1 400")
    opened.close()
    unread_answer(server, client)


def unread_answer(server: FrontServer, client: Client) -> None:
    """The client asks for an answer of megabytes, and does not read it."""
    model = client.model(client.session())
    future = client.ok("forward_backward", training(model, [datum(1_000_000)]))
    client.result(future)
    body = json.dumps({"request_id": future["request_id"]}).encode()
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.connect(("127.0.0.1", client.port))
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nX-API-Key: {client.key}\r\n"
    opened.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    connections = server.server.server_state.connections
    until(server, lambda: any(one.flow.write_paused for one in connections if one.flow))
    until(server, lambda: not connections)
    opened.close()


def bodies_of_a_tenant(server: FrontServer, client: Client) -> None:
    refused(client.post("forward_backward", b"x" * 2001), 429, "2001 bytes of your requests are under way")


def bodies_in_all(server: FrontServer, client: Client) -> None:
    """Two uploads that begin and do not end, of one tenant."""
    uploads = "adapters?base_model=echo2/tiny&name=a"
    first = raw(client, uploads, b"Content-Length: 5500\r\n\r\n" + b"x" * 5000)
    until(server, lambda: server.front.guard.traffic.num_bytes == 5000)
    refused(client.post(uploads, b"x" * 5500), 429, "too much is under way")
    other = Client(server.port, server.api_keys.add_key("other"))
    assert other.is_served()
    model = other.model(other.session())
    assert "metrics" in other.result(other.ok("forward_backward", training(model, [datum(100)])))
    first.close()
    until(server, lambda: server.front.guard.traffic.num_bytes == 0)


def requests_at_once(server: FrontServer, client: Client) -> None:
    session = client.session()
    model = client.model(session)
    server.in_front(server.backend.gate.clear)
    future = client.ok("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    body = json.dumps({"request_id": future["request_id"]}).encode()
    polls = [raw(client, "retrieve_future", b"Content-Length: %d\r\n\r\n" % len(body) + body) for _ in range(2)]
    until(server, lambda: server.front.guard.traffic._requests[client_tenant(client)] == 2)
    refused(client.post("session_heartbeat", {"session_id": session}), 429, "requests are under way")
    server.in_front(server.backend.gate.set)
    for poll in polls:
        come(poll, b"grad_norm")
        poll.close()


def client_tenant(client: Client) -> str:
    return "mallory"


def form_with_a_key(server: FrontServer, client: Client) -> None:
    found = client.post("/sign-in", b"key=" + b"x" * limits.SIGN_IN_BYTES_MAX)
    assert found[0] == 413
    assert b"are taken" in found[1]


def calls_of_a_key(server: FrontServer, client: Client) -> None:
    slow = Client(server.port, server.api_keys.add_key("mallory", per_minute=2))
    assert [slow.post("telemetry")[0] for _ in range(3)] == [200, 200, 429]


# ---- what is stored --------------------------------------------------------------------------------------------------


def many_sessions(server: FrontServer, client: Client) -> None:
    for _ in range(2):
        client.session()
    refused(client.post("create_session"), 400, "you have 2 sessions, and no more are taken")


def many_models(server: FrontServer, client: Client) -> None:
    session = client.session()
    for number in range(2):
        client.model(session, number)
    body = {"session_id": session, "model_seq_id": 2, "base_model": "echo2/tiny"}
    refused(client.post("create_model", body), 400, "you have 2 models, and no more are taken")


def many_samplers(server: FrontServer, client: Client) -> None:
    session = client.session()
    for number in range(2):
        client.sampler(session, number)
    body = {"session_id": session, "sampling_session_seq_id": 2, "base_model": "echo2/tiny"}
    refused(client.post("create_sampling_session", body), 400, "you have 2 samplers, and no more are taken")


def many_checkpoints(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    found = [
        client.result(client.ok("save_weights", {"model_id": model, "seq_id": number, "path": f"n{number}"}))
        for number in (1, 2, 3)
    ]
    assert "you have 2 checkpoints" in found[2]["error"]
    refused(client.post("copy_weights", {"source_path": found[0]["path"]}), 400, "you have 2 checkpoints")


def labels(server: FrontServer, client: Client) -> None:
    """Of sessions, models and checkpoints; with as many as may be, a listing is still bounded."""
    most = {"a": "x" * (limits.LABELS_BYTES_MAX - 8)}
    more = {"a": "x" * (limits.LABELS_BYTES_MAX - 7)}
    session = client.ok("create_session", {"user_metadata": most})["session_id"]
    model = client.model(session, user_metadata=most)
    saved = {"model_id": model, "seq_id": 1, "path": "a", "user_metadata": most}
    assert "path" in client.result(client.ok("save_weights", saved))
    for path, body in (
        ("create_session", {}),
        ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": "echo2/tiny"}),
        ("load_weights", {"session_id": session, "model_seq_id": 9, "path": "x"}),
    ):
        refused(client.post(path, {**body, "user_metadata": more}), 400, "bytes as JSON")


def open_requests(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    for number in (2, 3):
        client.ok("optim_step", {"model_id": model, "seq_id": number, "adam_params": {}})
    found = client.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}})
    refused(found, 429, "2 requests are open")


def open_bytes(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    client.ok("forward_backward", training(model, [datum(50)], 2))
    refused(client.post("forward_backward", training(model, [datum(50)], 3)), 429, "bytes of requests are open")


def held_requests(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    client.ok("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    found = client.post("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
    refused(found, 429, "1 requests of this model wait for an earlier one")


def stored_answers(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    futures = [client.ok("forward_backward", training(model, [datum(100)], number)) for number in (1, 2, 3)]
    for future in futures:
        client.result(future)
    server.now += 601
    server.in_front(server.front.sweep)
    refused(client.post("retrieve_future", {"request_id": futures[0]["request_id"]}), 404, "no request")


def refusals(server: FrontServer, client: Client) -> None:
    disk(server, client)
    hoarder = server.client("hoarder")
    (model,) = [
        row["training_run_id"] for row in hoarder.ask("GET", "training_runs?limit=1&offset=0")[1]["training_runs"]
    ]
    found = hoarder.post("forward_backward", training(model, [datum(2000)], 99))
    refused(found, 429, "too many requests were refused")


def curve_points(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    for number in range(1, 10):
        client.result(client.ok("optim_step", {"model_id": model, "seq_id": number, "adam_params": {}}))
    assert server.database.count(steps) < 4


def archives(server: FrontServer, client: Client) -> None:
    path = archived(client)
    urls = [location(client, path) for _ in range(2)]
    assert client.ask("GET", urls[0])[0] == 404
    status, text = client.ask("GET", urls[1])
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(text)) as file:
        assert file.getnames() == ["row.npy"]
    assert not list(server.folder.rglob("*.tar"))


def downloads(server: FrontServer, client: Client) -> None:
    path = archived(client)
    (row,) = server.database.select(checkpoints)
    with (Path(row.directory) / "large").open("wb") as file:
        file.truncate(64 << 20)  # more than buffers hold
    url = location(client, path)
    opened = socket.create_connection(("127.0.0.1", client.port), timeout=120)
    opened.sendall(f"GET /api/v1/{url} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    come(opened, b"200 OK")
    refused(client.ask("GET", url), 429, "archives are being sent")
    opened.close()
    until(server, lambda: not server.front.accounts._num_downloads)
    assert client.ask("GET", url)[0] == 200


def page(server: FrontServer, client: Client) -> None:
    session = client.session()
    for number in range(3):
        client.model(session, number)
    assert len(client.ask("GET", "training_runs?limit=1000")[1]["training_runs"]) == 2
    assert len(client.ask("GET", f"sessions/{session}")[1]["training_run_ids"]) <= 20


def dollars(server: FrontServer, client: Client) -> None:
    spender = server.client("spender")
    status, future = sample(spender, sampling_params={"max_tokens": 2})
    assert status == 200
    spender.result(future)
    refused(sample(spender), 402, "has spent")


def disk(server: FrontServer, client: Client) -> None:
    """Whatever a tenant does, no more lies on the disk than its quota."""
    hoarder = server.client("hoarder")
    session = hoarder.session()
    model = hoarder.model(session)
    answer: dict[str, Any] = {}
    for number in range(1, 20):
        save = {"model_id": model, "seq_id": number, "path": f"n{number}"}
        if "error" in (answer := hoarder.result(hoarder.ok("save_weights", save))):
            break
    assert "are allowed" in answer["error"]
    for number in range(20):
        hoarder.post("create_session", {"user_metadata": {"a": "x" * 4000}})
        hoarder.post("create_model", {"session_id": session, "model_seq_id": number, "base_model": "echo2/tiny"})
        hoarder.post("forward_backward", training(model, [datum(2000)], 20 + number))
    assert hoarder.ask("GET", "usage")[1]["disk_gb"] <= 40e-6 + (limits.REFUSED_BYTES_MAX + 4096) / 1e9
    refused(hoarder.post("adapters?base_model=echo2/tiny&name=a", b"x"), 400, "are allowed")


# ---- what a request asks for -----------------------------------------------------------------------------------------


def tensor(server: FrontServer, client: Client) -> None:
    many = {"data": [1.0], "shape": [1, 101], "sparse_crow_indices": [0, 1], "sparse_col_indices": [100]}
    train_refused(client, [datum(weights=many)], "their product bounded")


def numbers(server: FrontServer, client: Client) -> None:
    train_refused(client, [datum(60), datum(60)], "first 2 data have 120 numbers; a request has 100")
    wide = {"data": [1.0], "shape": [1, 101], "sparse_crow_indices": [0, 1], "sparse_col_indices": [100]}
    train_refused(client, [datum(weights=wide)], "stand for 101 numbers; 100 are taken")


def data(server: FrontServer, client: Client) -> None:
    train_refused(client, [datum()] * (limits.DATA_MAX + 1), f"from 1 to {limits.DATA_MAX} are taken")


def samples(server: FrontServer, client: Client) -> None:
    refused(sample(client, num_samples=limits.SAMPLES_MAX + 1), 400, "num_samples")


def sampled_tokens(server: FrontServer, client: Client) -> None:
    found = sample(client, num_samples=2, sampling_params={"max_tokens": 51})
    refused(found, 400, "2 samples of 51 tokens are asked for; a call gives 100 tokens")


def scores(server: FrontServer, client: Client) -> None:
    found = sample(client, topk_sample_logprobs=5, sampling_params={"max_tokens": 21})
    refused(found, 400, "logprobs are asked for; a call gives 100")


def stops(server: FrontServer, client: Client) -> None:
    for stop in ([1] * (limits.STOPS_MAX + 1), "x" * (limits.STOP_CHARS_MAX + 1), "", ["a", ""]):
        refused(sample(client, sampling_params={"stop": stop}), 400, "stop has .* are taken")


def rank(server: FrontServer, client: Client) -> None:
    body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "echo2/tiny"}
    refused(client.post("create_model", {**body, "lora_config": {"rank": limits.RANK_MAX + 1}}), 400, "rank")


def entries(server: FrontServer, client: Client) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(limits.ENTRIES_MAX + 1):
            archive.addfile(tarfile.TarInfo(str(number)))
    refused(client.post("adapters?base_model=echo2/tiny&name=a", file.getvalue()), 400, "more than 64 entries")


def uploads(server: FrontServer, client: Client) -> None:
    refused(client.post("adapters?base_model=echo2/tiny&name=a", b"x"), 429, "uploads are being checked")


# ---- what is done at once --------------------------------------------------------------------------------------------


def samples_at_once(server: FrontServer, client: Client) -> None:
    server.in_front(server.backend.gate.clear)
    session = client.session()
    futures = [sample(client, session, seq_id=number)[1] for number in range(6)]
    until(server, lambda: len(server.backend.calls) == 3)
    other = server.client("other")
    futures_of_other = [sample(other)[1]]
    until(server, lambda: len(server.backend.calls) == 4)
    server.in_front(server.backend.gate.set)
    assert all("sequences" in client.result(future) for future in futures)
    assert "sequences" in other.result(futures_of_other[0])


def operations(server: FrontServer, client: Client) -> None:
    model = client.model(client.session())
    client.result(client.ok("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}))
    server.in_front(server.backend.gate.clear)
    steps = [client.ok("optim_step", {"model_id": model, "seq_id": at, "adam_params": {}}) for at in range(2, 7)]
    other = server.client("other")
    theirs = other.ok("optim_step", {"model_id": other.model(other.session()), "seq_id": 1, "adam_params": {}})
    until(server, lambda: len(server.backend.calls) >= 5)
    assert [call[2] for call in server.backend.calls if call[:2] == ("optim_step", model)] == [1, 2]
    server.in_front(server.backend.gate.set)
    assert all("metrics" in client.result(step) for step in steps)
    assert "metrics" in other.result(theirs)


def data_in_memory(server: FrontServer, client: Client) -> None:
    """What does not wait in memory is read again, and gives the same."""
    model = client.model(client.session())
    server.in_front(server.backend.gate.clear)
    futures = [client.ok("forward_backward", training(model, [datum(40)], number)) for number in range(1, 30)]
    assert server.front.dispatcher._parsed_bodies._num_bytes <= limits.DATA_BYTES_MAX
    server.in_front(server.backend.gate.set)
    assert len({client.result(future)["metrics"]["loss:sum"] for future in futures}) == 1
    assert server.front.dispatcher._parsed_bodies._num_bytes == 0


#: By the names of a limit's values (with a dot: settings): an attack, and smaller values where the real ones would take
#: long.
ATTACKS: dict[str, tuple[Attack, dict[str, float]]] = {
    "HEADER_BYTES_MAX": (header, {}),
    "HEAD_SECONDS": (silent_head, {"HEAD_SECONDS": 4.0}),
    "ADDRESS_CONNECTIONS_SHARE": (address, {}),
    "BODY_BYTES_MAX": (training_body, {"BODY_BYTES_MAX": 2000}),
    "ADAPTER_BYTES_MAX": (adapter_body, {"ADAPTER_BYTES_MAX": 2000}),
    "SMALL_BODY_BYTES_MAX": (small_body, {}),
    "CHAT_BYTES_MAX": (chat_body, {}),
    "PROGRESS_BYTES PROGRESS_SECONDS": (stalled_body, {"PROGRESS_SECONDS": 2.0}),
    "TENANT_BYTES_MAX": (bodies_of_a_tenant, {"TENANT_BYTES_MAX": 2000}),
    "ALL_BYTES_MAX RESERVED_BYTES FEW_BYTES": (
        bodies_in_all,
        {"ALL_BYTES_MAX": 10_000, "RESERVED_BYTES": 4000, "FEW_BYTES": 3000},
    ),
    "AT_ONCE_MAX": (requests_at_once, {"AT_ONCE_MAX": 2}),
    "keys.per_minute": (calls_of_a_key, {}),
    "SESSIONS_MAX": (many_sessions, {"SESSIONS_MAX": 2}),
    "MODELS_MAX": (many_models, {"MODELS_MAX": 2}),
    "SAMPLERS_MAX": (many_samplers, {"SAMPLERS_MAX": 2}),
    "CHECKPOINTS_MAX": (many_checkpoints, {"CHECKPOINTS_MAX": 2}),
    "LABELS_BYTES_MAX": (labels, {}),
    "OPEN_MAX": (open_requests, {"OPEN_MAX": 2}),
    "OPEN_BYTES_MAX": (open_bytes, {"OPEN_BYTES_MAX": 600}),
    "HELD_MAX": (held_requests, {"HELD_MAX": 1}),
    "ANSWERS_BYTES_MAX": (stored_answers, {"ANSWERS_BYTES_MAX": 3000}),
    "REFUSED_BYTES_MAX": (refusals, {"REFUSED_BYTES_MAX": 4096}),
    "SIGN_IN_BYTES_MAX": (form_with_a_key, {}),
    "CURVE_POINTS_MAX": (curve_points, {"CURVE_POINTS_MAX": 4}),
    "ARCHIVES_MAX": (archives, {"ARCHIVES_MAX": 1}),
    "DOWNLOADS_MAX": (downloads, {"DOWNLOADS_MAX": 1}),
    "PAGE_MAX": (page, {"PAGE_MAX": 2}),
    "bills.quota_usd": (dollars, {}),
    "bills.quota_disk_gb": (disk, {}),
    "TENSOR_NUMBERS_MAX": (tensor, {"TENSOR_NUMBERS_MAX": 100}),
    "NUMBERS_MAX": (numbers, {"NUMBERS_MAX": 100}),
    "DATA_MAX": (data, {}),
    "SAMPLES_MAX": (samples, {}),
    "SAMPLED_TOKENS_MAX": (sampled_tokens, {"SAMPLED_TOKENS_MAX": 100}),
    "SCORES_MAX": (scores, {"SCORES_MAX": 100}),
    "STOPS_MAX STOP_CHARS_MAX": (stops, {}),
    "RANK_MAX": (rank, {}),
    "ENTRIES_MAX": (entries, {}),
    "UPLOADS_MAX": (uploads, {"UPLOADS_MAX": 0}),
    "SAMPLES_AT_ONCE SAMPLES_FOR_OTHERS": (samples_at_once, {"SAMPLES_AT_ONCE": 4, "SAMPLES_FOR_OTHERS": 1}),
    "DATA_BYTES_MAX": (data_in_memory, {"DATA_BYTES_MAX": 2000}),
    "OPERATIONS_MAX": (operations, {"OPERATIONS_MAX": 1}),
}
#: Limits of other processes than the front's. Attacks: test_service_learner.py, _placing.py, _sampler.py, _fleet.py.
OF_OTHERS = "ADAPTER_MEMORY_BYTES JOURNAL_BYTES_MAX placing.OTHERS_SHARE FLEET_ADAPTERS_MAX FLEET_ADAPTER_BYTES_MAX"
#: Limits of what is within a body, and of what is kept. Attacks: test_service_tensors.py, test_service_disk.py.
ELSEWHERE = "PARTS_MAX DIMENSIONS_MAX ENDED_MAX"


@pytest.mark.parametrize("limit", ATTACKS)
def test_a_limit_stops_the_caller_that_exceeds_it_and_no_other(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, smaller = ATTACKS[limit]
    for name, value in smaller.items():
        assert name in limit.split()
        monkeypatch.setattr(limits, name, value)
    if attack is address:
        monkeypatch.setattr(http_server, "connections_max", lambda: 8)
    with serving(tmp_path, QUOTAS) as server:
        attack(server, server.client("mallory"))
        assert server.client("other").is_served()


def test_every_limit_is_exceeded() -> None:
    exceeded = " ".join([*ATTACKS, OF_OTHERS, ELSEWHERE]).split()
    assert {name for name in vars(limits) if name.isupper()} == {name for name in exceeded if "." not in name}
