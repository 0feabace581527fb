"""The service's front as its clients see it: the real application, over HTTP, with a back end of one row of logits."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import house
from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.front import requests_api
from echo2_service.front.app import UNSERVED
from echo2_service.front.cleaning import SILENCE_SECONDS
from echo2_service.front.database import requests, sessions
from echo2_service.front.overview import tenants
from front_service import PROTO, Service
from one_row_backend import VOCABULARY, OneRowBackend, log_softmax
from postgres_server import PostgresServer

#: Of tests that ask nothing of the database.
ON_SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture
def service(tmp_path: Path, url: str) -> Iterator[Service]:
    with closing(Service(tmp_path, url)) as made:
        yield made


def test_a_model_is_trained_saved_and_sampled_from(service: Service) -> None:
    session = service.session()
    model = service.model(session)
    futures = [service.train(model, 1, [1, 2, 3]), service.step(model, 2)]
    first = service.result(futures[0])
    assert first["metrics"]["loss:sum"] == pytest.approx(3 * math.log(16))
    assert first["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    assert service.result(futures[1])["metrics"]["grad_norm"] > 0
    assert service.result(service.train(model, 3, [1, 2, 3]))["metrics"]["loss:sum"] < 3 * math.log(16)
    future = service.post("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0})
    sampler = service.result(future)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
    body |= {"sampling_params": {"max_tokens": 5, "stop": []}, "prompt_logprobs": True}
    sampled = service.post("asample", body)
    assert len(set(sampled["sample_sequence_ids"])) == 2
    output = service.result(sampled)
    assert [len(sequence["tokens"]) for sequence in output["sequences"]] == [5, 5]
    assert output["prompt_logprobs"][0] is None
    assert len(output["prompt_logprobs"]) == 2
    assert pb.SampleResponse.FromString(service.result(sampled, accept=requests_api.PROTOBUF)).sequences[0].tokens
    assert service.get("usage")["usage"]["sample"] == {"requests": 1, "tokens": 2 + 10, "usd": 0.0}


@ON_SQLITE
def test_extra_outputs_of_a_sample_have_the_layout_of_the_request(service: Service) -> None:
    model = service.model(service.session())
    service.train(model, 1, [3, 3, 5])
    service.step(model, 2, lr=1.0)
    saved = service.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0})
    sampler = service.result(saved)["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [1, 3, 5, 7]}]}
    body: dict[str, Any] = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    wanted = {"topk_sample_logprobs": 2, "topk_prompt_logprobs": 2, "prompt_logprobs": True}
    wanted |= {"prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 2}
    dense = {"data": [3, -1, -1, 5, 5, 3], "dtype": "int64", "shape": [3, 2]}
    sparse = {"data": [5, -1], "dtype": "int64", "shape": [3, 100_000]}
    sparse |= {"sparse_crow_indices": [0, 0, 1, 2], "sparse_col_indices": [99_999, 4]}
    found = []
    for number, targets in enumerate((dense, sparse)):
        asked = service.post("asample", {**body, **wanted, "seq_id": number, "target_prompt_logprobs": targets})
        found.append(pb.SampleResponse.FromString(service.result(asked, accept=requests_api.PROTOBUF)))
    logp = log_softmax(service.backend.rows[model])
    likely = np.frombuffer(found[0].sequences[0].topk_sampled_logprobs.token_ids, "<i4")
    assert likely.tolist() == [3, 5] * (len(found[0].sequences[0].tokens) // 4)
    assert np.frombuffer(found[0].prompt_logprobs, "<f4")[2:] == pytest.approx(logp[[5, 7]])
    assert np.isnan(np.frombuffer(found[0].prompt_logprobs, "<f4")[:2]).all()
    tops = found[0].topk_prompt_logprobs
    assert np.frombuffer(tops.token_ids, "<i4").tolist() == [0, 0, 0, 0, 3, 5, 3, 5]
    assert np.frombuffer(tops.logprobs, "<f4")[:4].tolist() == [-99999.0] * 4
    values = np.frombuffer(found[0].target_prompt_logprobs.dense, "<f4")
    assert values == pytest.approx([logp[3], 0, 0, logp[5], logp[5], logp[3]])
    csr = found[1].target_prompt_logprobs.sparse_csr
    assert np.frombuffer(csr.values, "<f4") == pytest.approx([logp[5], 0])
    assert np.frombuffer(csr.col_indices, "<i8").tolist() == [99_999, 4]
    assert list(found[0].prompt_alt_tokens.tokens.shape) == [3, 2]
    assert len(found[0].prompt_alt_tokens.tokens.dense) == 3 * 2 * 8


#: What is wanted beside a sample, and the words of its refusal.
UNSCORABLE: list[tuple[dict[str, Any], str]] = [
    ({"target_prompt_logprobs": {"data": [1.0], "dtype": "float32", "shape": [1, 1]}}, "int64"),
    ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, r"\[1, K\]"),
    ({"target_prompt_logprobs": {"data": [1, 2, 3], "dtype": "int64", "shape": [1, 2]}}, "has 3 numbers"),
    ({"target_prompt_logprobs": {"data": [1e300], "dtype": "int64", "shape": [1, 1]}}, "neither a token"),
    ({"target_prompt_logprobs": {"data": [-2], "dtype": "int64", "shape": [1, 1]}}, "neither a token"),
    (
        {
            "target_prompt_logprobs": {
                "data": [1],
                "dtype": "int64",
                "shape": [1, 1],
                "sparse_crow_indices": [0, 1],
                "sparse_col_indices": [7],
            }
        },
        "do not fit",
    ),
    ({"topk_sample_logprobs": 64, "num_samples": 1024}, "are asked for"),
    ({"topk_sample_logprobs": 65}, "<= 64"),
]


@ON_SQLITE
def test_unscorable_requests_are_refused(service: Service) -> None:
    session = {"session_id": service.session(), "sampling_session_seq_id": 0, "base_model": "echo2/tiny"}
    sampler = service.post("create_sampling_session", session)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
    for number, (wanted, words) in enumerate(UNSCORABLE):
        body |= {"seq_id": number}
        assert re.search(words, service.post("asample", body | wanted, status=400)["detail"])


def test_chunks_that_come_last_first_are_carried_out_in_order(service: Service) -> None:
    model = service.model(service.session())
    futures = [service.train(model, number, [number]) for number in (3, 2, 1)]
    futures.append(service.step(model, 4))
    for future in futures:
        service.result(future)
    operations = [call for call in service.backend.calls if call[0] != "create_model"]
    assert [call[2] for call in operations] == [1, 2, 3, 4]
    assert [call[0] for call in operations] == ["forward_backward"] * 3 + ["optim_step"]


def test_a_request_that_comes_again_is_the_same_request(service: Service) -> None:
    session = service.session()
    model = service.model(session)
    assert service.model(session) == model
    ids = {service.train(model, 1, [1])["request_id"] for _ in range(3)}
    assert len(ids) == 1
    service.result({"request_id": ids.pop()})
    assert len(service.backend.calls) == 2


def test_a_client_that_restarts_its_numbers_gets_no_old_answers(service: Service) -> None:
    """The Logits facade loads under number 1, and then trains under number 1."""
    session = service.session()
    model = service.model(session)
    path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    other = service.model(session, 1)
    loaded = service.post("load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": True})
    trained = service.train(other, 1, [1])
    assert loaded["request_id"] != trained["request_id"]
    assert "loss:sum" in service.result(trained)["metrics"]


def test_a_clients_mistake_fails_its_future_and_no_later_one(service: Service) -> None:
    model = service.model(service.session())
    wrong = [service.train(model, 1, [99]), service.train(model, 2, [1], loss="no_loss")]
    wrong.append(service.train(model, 3, [1], weight=math.nan))
    for future, word in zip(wrong, ("vocabulary", "loss", "finite"), strict=True):
        answer = service.result(future)
        assert answer["category"] == "user"
        assert word in answer["error"]
    assert service.result(service.train(model, 4, [1]))["metrics"]["loss:sum"] == pytest.approx(math.log(16))


def test_a_state_makes_a_new_model_in_another_session(service: Service) -> None:
    model = service.model(service.session())
    service.train(model, 1, [1])
    service.step(model, 2, lr=1.0)
    path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 3, "path": "mid"}))["path"]
    assert path == f"tinker://{model}/weights/mid"
    session = service.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path.replace("tinker", "logits"), "optimizer": True}
    other = service.result(service.post("load_weights", body))["model_id"]
    assert other == f"{session}:train:0"
    assert np.array_equal(service.backend.rows[other], service.backend.rows[model])
    assert service.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    again = service.post("save_weights", {"model_id": model, "seq_id": 4, "path": "mid"})
    assert "already" in service.result(again)["error"]


def test_a_copy_outlives_its_original(service: Service) -> None:
    model = service.model(service.session())
    path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    other = service.api_keys.add_key("eve")
    body = {"source_path": path, "destination_project_id": "any", "ttl_seconds": 3600}
    assert "no checkpoint" in service.post("copy_weights", body, key=other, status=400)["detail"]
    service.post(f"training_runs/{model}/checkpoints/weights/a/publish", status=204)
    copies = [
        service.post("copy_weights", body, key=other, headers={"x-idempotency-key": key})["tinker_path"]
        for key in ("one", "one", "two")
    ]
    assert copies[0] == copies[1] != copies[2]
    service.client.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a", headers={"x-api-key": service.key})
    service.sweep()
    loading = {"session_id": service.session(other), "model_seq_id": 0, "path": copies[0], "optimizer": True}
    assert "model_id" in service.result(service.post("load_weights", loading, key=other), key=other)
    assert service.get("checkpoints")["checkpoints"] == []
    service.now += 3601
    service.sweep()
    assert service.get("checkpoints", key=other)["checkpoints"] == []


def test_checkpoints_are_listed_under_both_sets_of_names_and_deleted(service: Service) -> None:
    model = service.model(service.session())
    service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "ttl_seconds": 60}))
    service.result(service.post("save_weights_for_sampler", {"model_id": model, "seq_id": 2, "path": "b"}))
    run = f"training_runs/{model}"
    found = {one["name"]: one for one in service.get(f"{run}/checkpoints")["checkpoints"]}
    assert found["a"]["tinker_path"].replace("tinker", "logits") == found["a"]["logits_path"]
    assert (found["b"]["checkpoint_type"], found["b"]["checkpoint_id"]) == ("sampler", "sampler_weights/b")
    assert service.get(run)["last_checkpoint"]["name"] == "a"
    redirect = service.client.get(
        f"/api/v1/{run}/checkpoints/sampler_weights/b/archive",
        headers={"x-api-key": service.key},
        follow_redirects=False,
    )
    assert redirect.status_code == 302
    with tarfile.open(fileobj=BytesIO(service.client.get(redirect.headers["location"]).content)) as file:
        assert file.getnames() == ["row.npy"]
    assert service.client.delete(f"/api/v1/{run}/checkpoints/b", headers={"x-api-key": service.key}).status_code == 204
    service.now += 61.0
    service.sweep()
    assert service.get("checkpoints")["checkpoints"] == []
    assert list((service.folder / "checkpoints").rglob("req_*")) == []


def test_a_poll_is_held_and_then_says_why_it_waits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    model = service.model(service.session())
    monkeypatch.setattr(requests_api, "POLL_SECONDS", 0.01)  # not before: the model may take longer
    future = service.train(model, 2, [1])
    answer = service.post("retrieve_future", {"request_id": future["request_id"]}, status=408)
    assert answer["type"] == "try_again"
    assert "request 1 of this model has not come yet" in answer["queue_state_reason"]


def test_a_tenant_sees_nothing_of_another(service: Service) -> None:
    session = service.session()
    model = service.model(session)
    path = service.result(service.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    sampler = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
    service.post("create_sampling_session", sampler)
    future = service.train(model, 2, [1])
    eve = service.api_keys.add_key("eve")
    hers = service.session(eve)
    service.post("retrieve_future", {"request_id": future["request_id"]}, eve, 404)
    service.post("get_info", {"model_id": model}, eve, 404)
    service.post("optim_step", {"model_id": model, "adam_params": {}, "seq_id": 3}, eve, 404)
    service.post("create_sampling_session", {**sampler, "session_id": hers}, eve, 400)
    service.post("create_sampling_session", sampler, eve, 404)
    service.post(f"sessions/{session}/finish", {}, eve, 404)
    service.post(f"training_runs/{model}/checkpoints/weights/a/publish", {}, eve, 404)
    service.get(f"samplers/{session}:sample:5", eve, 404)
    service.get(f"training_runs/{model}", eve, 404)
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/a"
    assert service.client.delete(url, headers={"x-api-key": eve}).status_code == 404
    assert service.get("checkpoints", eve)["checkpoints"] == []
    body = {"session_id": hers, "model_seq_id": 0, "path": path, "optimizer": False}
    service.post("load_weights", body, eve, 400)
    service.post(f"training_runs/{model}/checkpoints/weights/a/publish", status=204)
    assert "model_id" in service.result(service.post("load_weights", body, eve), eve)


def test_keys_have_scopes_an_end_and_a_rate(service: Service) -> None:
    service.post("create_session", key="tml-guessed", status=401)
    sampling = service.api_keys.add_key("ada", scopes=["sample"], days=1.0)
    service.post("create_model", {}, sampling, 403)
    service.now += 86401.0
    service.post("create_session", key=sampling, status=401)
    slow = service.api_keys.add_key("ada", per_minute=2)
    assert [service.client.post("/api/v1/telemetry", headers={"x-api-key": slow}).status_code for _ in range(3)] == [
        200,
        200,
        429,
    ]
    service.now += 30.0
    service.post("telemetry", key=slow)


def test_an_acknowledged_request_survives_the_process(service: Service) -> None:
    model = service.model(service.session())
    service.backend.gate.clear()
    futures = [service.train(model, 1, [1]), service.step(model, 2), service.train(model, 4, [1])]
    service.end()
    backend = OneRowBackend(service.folder)
    backend.rows, backend.gradients = {model: np.zeros(VOCABULARY)}, {model: np.zeros(VOCABULARY)}
    service.begin(backend)
    futures.append(service.step(model, 3))
    for future in futures:
        assert "metrics" in service.result(future)
    assert [call[::2] for call in service.backend.calls] == [
        ("forward_backward", 1),
        ("optim_step", 2),
        ("optim_step", 3),
        ("forward_backward", 4),
    ]


def test_a_silent_session_ends_and_what_it_held_fails(service: Service) -> None:
    session = service.session()
    model = service.model(session)
    future = service.train(model, 5, [1])
    service.now += SILENCE_SECONDS + 1
    service.sweep()
    assert "never came" in service.result(future)["error"] or "heard" in service.result(future)["error"]
    service.post("session_heartbeat", {"session_id": session}, status=410)
    assert service.database.count(sessions, finished=None) == 0
    service.now += 86401.0
    service.sweep()
    assert service.database.count(requests) == 0


HOSTILE = [
    ("forward_backward", b"\xff" * 100, PROTO, 400),
    ("forward_backward", b"{", {}, 400),
    ("create_model", b"[" * 100_000, {}, 400),
    ("create_model", b'{"session_id": "x", "model_seq_id": 1e99, "base_model": "echo2/tiny"}', {}, 400),
    ("create_model", b'{"session_id": "../..", "model_seq_id": 1, "base_model": "/etc/passwd"}', {}, 400),
    ("save_weights", b'{"model_id": "x", "path": "../../etc"}', {}, 400),
    ("save_weights", b'{"model_id": "x", "path": ".."}', {}, 400),
    ("load_weights", b'{"model_id": "x", "path": "tinker://a/b/../../etc"}', {}, 404),
    ("asample", b'{"sampling_session_id": "x", "prompt": {"chunks": [{"tokens": [99999999999]}]}}', {}, 400),
    ("asample", b'{"sampling_session_id": "x", "prompt": {"chunks": []}}', {}, 404),
    ("optim_step", b'{"model_id": "x", "adam_params": {"learning_rate": NaN}}', {}, 400),
    ("retrieve_future", b"\xff\xfe", {}, 400),
    ("create_session", b" " * (limits.SMALL_BODY_BYTES_MAX + 1), {}, 413),
    ("forward_backward", zstandard.compress(bytes(1 << 30)), {"content-encoding": "zstd"}, 413),
    ("forward_backward", b"not zstd", {"content-encoding": "zstd"}, 400),
]


@ON_SQLITE
def test_hostile_bodies_are_refused(service: Service) -> None:
    for path, body, headers, code in HOSTILE:
        service.post(path, body, status=code, headers=headers)


@ON_SQLITE
@pytest.mark.parametrize("headers", [{}, {"content-encoding": "zstd"}], ids=["plain", "packed"])
def test_the_total_of_all_bodies_is_bounded_packed_and_unpacked(
    service: Service, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    monkeypatch.setattr(limits, "ALL_BYTES_MAX", limits.RESERVED_BYTES + 1000)
    monkeypatch.setattr(limits, "FEW_BYTES", 0)
    body = b" " * 2000
    service.post("create_session", zstandard.compress(body) if headers else body, status=429, headers=headers)
    service.session()


def test_the_generated_module_is_fresh(tmp_path: Path) -> None:
    folder = house.SOURCE / "echo2_service"
    outputs = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{house.SOURCE}", *outputs, str(folder / "tinker.proto")]
    subprocess.run(command, check=True)
    for name in ("tinker_pb2.py", "tinker_pb2.pyi"):
        made = tmp_path / "echo2_service" / name
        assert (folder / name).read_text() == made.read_text(), "run `make proto`"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_database_that_is_gone_for_a_while_costs_no_request(
    service: Service, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    model = service.model(service.session())
    service.backend.gate.clear()
    futures = [service.train(model, 1, [1, 2])]
    service.until_called("forward_backward")
    postgres.stop()
    service.in_front(service.backend.gate.set)
    service.until(lambda: "the database can't be reached" in caplog.text)
    postgres.start()
    futures.append(service.step(model, 2))
    assert service.result(futures[0])["metrics"]["loss:sum"] == pytest.approx(2 * math.log(16))
    assert service.result(futures[1])["metrics"]["grad_norm"] > 0


def test_numbers_beyond_32_bits_and_unstorable_text_are_client_errors(service: Service) -> None:
    model = service.model(service.session())
    for _ in range(2):
        service.in_front(service.front.bills.charge, "ada", "s", "sample", 3_000_000_000)
    assert service.get("usage")["usage"]["sample"]["tokens"] == 6_000_000_000
    body = {"model_id": model, "seq_id": 1, "path": "a\x00b"}
    assert service.result(service.post("save_weights", body))["category"] == "user"


@ON_SQLITE
def test_an_unsupported_request_is_refused_with_an_alternative(service: Service) -> None:
    for method, path in UNSERVED:
        url = "/api/v1/" + path.replace("{checkpoint:path}", "weights/a").format(model="m", session="s")
        answer = service.client.request(method, url, headers={"x-api-key": service.key})
        assert answer.status_code == 400, url
        assert "is not served here: " in answer.json()["detail"]
        assert service.client.request(method, url).status_code == 401


def test_a_cancelled_sample_loses_its_turn_and_costs_nothing(service: Service) -> None:
    sampler = {"session_id": service.session(), "sampling_session_seq_id": 0, "base_model": "echo2/tiny"}
    body = {"sampling_session_id": service.post("create_sampling_session", sampler)["sampling_session_id"], "seq_id": 0}
    service.backend.gate.clear()
    future = service.post("asample", {**body, "prompt": {"chunks": [{"tokens": [1]}]}})
    request = {"request_id": future["request_id"]}
    service.post("cancel_future", request, service.api_keys.add_key("eve"), status=204)
    assert service.database.count(requests, state="queued") == 1
    service.post("cancel_future", request, status=204)
    assert "cancelled" in service.result(future)["error"]
    assert [call[0] for call in service.backend.calls[-2:]] == ["sample", "cancelled"], "it stops at the back end, too"
    service.in_front(service.backend.gate.set)
    model = service.model(sampler["session_id"])
    trained = service.train(model, 1, [1])
    service.post("cancel_future", {"request_id": trained["request_id"]}, status=204)
    assert "metrics" in service.result(trained)
    assert "sample" not in service.get("usage")["usage"]


def test_open_requests_and_how_long_they_wait_are_in_the_status(service: Service) -> None:
    model = service.model(service.session())
    service.backend.gate.clear()
    service.train(model, 1, [1])
    service.train(model, 3, [1])
    service.now += 5.0
    (told,) = tenants(service.database, service.now).values()
    assert (told["open"], told["oldest_wait_seconds"]) == ({"forward_backward": 2}, 5.0)


def test_clients_may_number_up_to_63_bits(service: Service) -> None:
    """Pickled sampling clients do; one number more is refused."""
    session = service.session()
    for number in (10**18, 2**63 - 1):
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "echo2/tiny"}
        sampler = service.post("create_sampling_session", body)["sampling_session_id"]
        sample = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [1]}]}}
        assert service.result(service.post("asample", sample))["sequences"]
        model = service.model(session, number)
        held = service.step(model, number)
        assert held["request_id"] == service.step(model, number)["request_id"]
        assert "metrics" in service.result(service.step(model, 1))
        service.now += 331.0
        service.sweep()
        assert "Request 2 of this model never came" in service.result(held)["error"]
        assert "metrics" in service.result(service.step(model, number, lr=0.2))
        wrong = {**body, "sampling_session_seq_id": 2**63}
        service.post("create_sampling_session", wrong, status=400)
