"""The pages of the service and the data that they show: what is told, to whom, and that no other tenant sees it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from echo2_service import tiny_model
from echo2_service.backend import BaseInfo
from echo2_service.front.account import RUNS_TOLD
from echo2_service.front.app import ROOT
from echo2_service.front.database import keys
from echo2_service.front.overview import FAULTS_KEPT
from echo2_service.front.request_guard import PAGE_HEADER, SCOPES
from echo2_service.settings import Quotas
from front_server import serving
from front_service import Service

#: A tenant's name, which an owner chooses, and a label, which a tenant chooses.
HOSTILE = "<script>window.owned = 1</script>"
QUOTAS = Quotas(
    usd_per_million_tokens={"forward_backward": 2e5, "sample": 1e5}, quota_usd={"ada": 9.0}, quota_disk_gb={"ada": 1.0}
)
ASKED = ("account", "samples", "owner")


@pytest.fixture
def quotas() -> Quotas:
    return QUOTAS


def sign_in(service: Service, key: str) -> Any:
    """As a browser: it keeps the cookie, and its pages keep what stands behind the "#"."""
    service.client.cookies.clear()
    answer = service.client.post("/sign-in", data={"key": key}, follow_redirects=False)
    service.client.headers[PAGE_HEADER] = answer.headers.get("location", "").partition("#page=")[2]
    return answer


def landed(answer: Any) -> str:
    return str(answer.headers["location"]).partition("#")[0]


def asked_by_browser(service: Service, path: str) -> Any:
    return service.client.get(path, follow_redirects=False)


def some_work(service: Service, key: str = "", label: str = "") -> str:
    """A model with three steps, a checkpoint, a sample, and a request that waits. Returns the model's id."""
    session = service.session(key)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "echo2/tiny", "user_metadata": {"is": label}}
    model = str(service.result(service.post("create_model", body, key), key)["model_id"])
    for number in range(1, 7, 2):
        data = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": TARGETS}}
        work = {"data": [data], "loss_fn": "cross_entropy"}
        service.result(
            service.post(
                "forward_backward", {"model_id": model, "seq_id": number, "forward_backward_input": work}, key
            ),
            key,
        )
        step = {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.1}}
        service.now += 2.0
        service.result(service.post("optim_step", step, key), key)
    save = {"model_id": model, "seq_id": 7, "path": f"saved-{label}"}
    service.result(service.post("save_weights_for_sampler", save, key), key)
    path = f"tinker://{model}/sampler_weights/saved-{label}"
    made = service.post(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}, key
    )
    sample = {"sampling_session_id": made["sampling_session_id"], "prompt": {"chunks": [{"tokens": [1]}]}}
    service.result(service.post("asample", {**sample, "sampling_params": {"max_tokens": 3, "stop": [99]}}, key), key)
    service.post("optim_step", {"model_id": model, "seq_id": 10, "adam_params": {}}, key)
    return model


TARGETS = {"data": [3, 4], "dtype": "int64", "shape": [2]}


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_an_account_has_runs_curves_bill_keys_and_reasons_of_waits(anywhere: Service) -> None:
    model = some_work(anywhere, label="mine")
    anywhere.now += 5.0
    told = anywhere.get("account")
    assert (told["tenant"], told["num_runs"], told["num_open"]) == ("ada", 1, 1)
    (run,) = told["runs"]
    assert (run["id"], run["step"], run["is_live"], run["labels"]) == (model, 3, True, {"is": "mine"})
    assert run["usd"] == pytest.approx(1.2)
    (wait,) = told["waits"]
    assert (wait["who"], wait["kind"], wait["num"], told["time"] - wait["since"]) == (model, "optim_step", 1, 5.0)
    assert wait["why"] == "request 8 of this model has not come yet"
    assert told["bill"]["usd"] == anywhere.get("usage")["usd"] == pytest.approx(1.6)
    assert (told["bill"]["quota_usd"], told["bill"]["quota_disk_gb"]) == (9.0, 1.0)
    assert told["bill"]["disk_gb"] > 0
    assert told["notes"] == []
    (key,) = told["keys"]
    assert (key["id"], key["scopes"], key["revoked"]) == (told["key"], ["train", "sample"], None)
    assert "digest" not in key
    curve = anywhere.get(f"training_runs/{model}/steps")
    assert (curve["name"], curve["steps"], curve["seconds"], curve["stride"]) == (model, [1, 2, 3], [0, 2, 4], 1)
    assert curve["columns"]["loss"] == sorted(curve["columns"]["loss"], reverse=True)
    assert curve["columns"]["usd"] == pytest.approx([0.4, 0.8, 1.2])
    assert curve["columns"]["tokens"] == [2, 2, 2]


def test_the_account_shows_that_new_requests_are_refused(service: Service) -> None:
    service.in_front(service.front.bills.charge, "ada", "s", "sample", 90)
    (note,) = service.get("account")["notes"]
    assert note.startswith("ada has spent $9.0000 of $9")


def test_samples_are_shown_with_their_text(anywhere: Service, tmp_path: Path) -> None:
    tiny_model.make(tmp_path / "tiny")
    anywhere.backend.bases = {"echo2/tiny": BaseInfo("echo2/tiny", str(tmp_path / "tiny"), 128)}
    some_work(anywhere, label="mine")
    (told,) = anywhere.get("samples")["samples"]
    (sequence,) = told["sequences"]
    assert (told["num_sequences"], sequence["num_tokens"], sequence["finish"]) == (1, 3, "length")
    assert told["path"].endswith("/saved-mine")
    assert len(sequence["text"]) >= 1
    assert sequence["logprob"] < 0
    anywhere.backend.bases = {"echo2/tiny": BaseInfo("echo2/tiny", str(tmp_path / "none"), 128)}
    assert anywhere.get("samples")["samples"][0]["sequences"][0]["text"] == ""


def test_an_account_is_bounded_however_much_a_tenant_has(service: Service) -> None:
    session = service.session()
    for number in range(RUNS_TOLD + 3):
        model = service.model(session, number)
        service.step(model, 2)
    told = service.get("account")
    assert (len(told["runs"]), told["num_runs"]) == (RUNS_TOLD, RUNS_TOLD + 3)
    assert (len(told["waits"]), told["num_open"]) == (20, RUNS_TOLD + 3)


def test_the_owner_sees_tenants_money_fleet_and_faults(anywhere: Service) -> None:
    some_work(anywhere)
    eve = anywhere.api_keys.add_key(HOSTILE)
    anywhere.session(eve)
    logging.getLogger("echo2.anything").error("it went wrong", exc_info=ValueError("because\x1b[2J"))
    told = anywhere.get("owner", anywhere.api_keys.add_key("owner", SCOPES))
    ada, other = told["tenants"]
    assert (ada["tenant"], ada["open"], ada["models"], ada["quota_usd"]) == ("ada", {"optim_step": 1}, 1, 9.0)
    assert (other["tenant"], other["quota_usd"], other["usd"]) == (HOSTILE, None, 0.0)
    assert told["usd"] == pytest.approx(1.6)
    assert (told["machines"], told["waiting_samples"], told["num_tenants"], told["num_open"]) == ({}, 0, 2, 1)
    newest = told["faults"][0]
    assert (newest["level"], newest["text"]) == ("error", "it went wrong: ValueError: because")


def test_a_frequent_fault_is_one_line_and_bad_requests_of_strangers_have_none(service: Service) -> None:
    logging.getLogger("echo2.anything").warning("an adapter is lost")
    for _ in range(100):
        logging.getLogger("echo2.anything").warning("the disk is full")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    told = service.get("owner", service.api_keys.add_key("owner", SCOPES))["faults"]
    found = [(fault["text"], fault["num"]) for fault in told]
    assert found == [("the disk is full", 100), ("an adapter is lost", 1)]
    for number in range(FAULTS_KEPT):
        logging.getLogger("echo2.anything").warning("number %d", number)
    told = service.get("owner", service.api_keys.add_key("owner", SCOPES))["faults"]
    assert (len(told), told[0]["text"]) == (FAULTS_KEPT, f"number {FAULTS_KEPT - 1}")


# ---- who may see it --------------------------------------------------------------------------------------------------


def test_no_page_and_no_data_without_a_key(service: Service) -> None:
    some_work(service, label="mine")
    for path in ("/", "/owner"):
        page = asked_by_browser(service, path)
        assert page.status_code == 401
        assert 'name="key"' in page.text
        assert "ada" not in page.text
        assert "<script" not in page.text
    for name in ASKED:
        assert service.client.get(ROOT + name).status_code == 401


@pytest.mark.parametrize("way", ["?key={}", "?token={}", "?api_key={}", "?x-api-key={}", "{}", "?{}"])
def test_a_key_in_an_address_opens_nothing(service: Service, way: str) -> None:
    for path in ("/", "/owner", *(ROOT + name for name in ASKED)):
        assert asked_by_browser(service, path + way.format(service.key)).status_code in (401, 404)


def test_a_key_is_sent_once_and_then_stays_in_a_cookie_that_scripts_cannot_read(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = sign_in(service, f" {service.key}\n")
    assert (answer.status_code, landed(answer)) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Max-Age" not in cookie
    assert "Secure" not in cookie
    page = asked_by_browser(service, "/")
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "form-action 'self'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-store"
    account = asked_by_browser(service, f"{ROOT}account")
    assert account.json() == service.get("account")
    assert account.headers["cross-origin-resource-policy"] == "same-origin"
    assert service.client.post("/sign-out", follow_redirects=False).status_code == 303
    assert asked_by_browser(service, f"{ROOT}account").status_code == 401
    assert service.key not in caplog.text


def test_a_program_on_another_port_of_the_host_neither_learns_a_key_nor_sets_one(service: Service) -> None:
    """Browsers send it the service's cookies, and keep those that it sets for the service."""
    mallory = service.api_keys.add_key("mallory")
    halves = []
    for key in (service.key, mallory, service.key):
        sign_in(service, key)
        ((name, cookie),) = service.client.cookies.items()
        halves.append((cookie, service.client.headers[PAGE_HEADER]))
        assert asked_by_browser(service, f"{ROOT}account").json()["tenant"] == ("mallory" if key == mallory else "ada")
        assert key not in {bytes.fromhex(half).decode(errors="replace") for half in halves[-1]}
    assert halves[0][0] != halves[2][0]
    for cookie, page in (
        (halves[1][0], halves[0][1]),  # mallory's cookie in ada's browser
        (mallory, halves[0][1]),
        (mallory.encode().hex(), halves[0][1]),
        (halves[0][0], ""),  # ada's cookie, wherever else it is read
        (halves[0][0], halves[2][1]),
        ("", ""),
        ("é", "\x00"),
        ("00", "zz"),
    ):
        headers = {"cookie": f"{name}={cookie}".encode(), PAGE_HEADER.encode(): page.encode()}
        service.client.cookies.clear()
        assert service.client.get(f"{ROOT}account", headers=headers).status_code == 401, (cookie, page)


def test_a_cookie_goes_only_over_encrypted_lines_if_the_page_came_over_one(service: Service) -> None:
    answer = service.client.post("https://testserver/sign-in", data={"key": service.key}, follow_redirects=False)
    assert "Secure" in answer.headers["set-cookie"]


def test_the_servers_own_log_has_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(tmp_path, QUOTAS) as server:
        client = server.client("ada")
        connection_headers = {"content-type": "application/x-www-form-urlencoded"}
        for path in ("/sign-in", "account"):
            client.ask("POST" if "sign" in path else "GET", path, f"key={client.key}".encode(), connection_headers)
        assert client.key not in caplog.text


@pytest.mark.parametrize("host", ["a:99999", "a:b", "[::1", "a/b?c#d", "é"])
def test_a_hostile_host_header_is_no_failure(service: Service, host: str) -> None:
    for path in ("/", "/sign-in", "/api/v1/account"):
        answer = service.client.get(path, headers={"host": host.encode(), "cookie": "echo2_key_80=ab"})
        assert answer.status_code in (200, 401)
        assert host not in answer.text


@pytest.mark.parametrize("wrong", ["", "tml-wrong", "é", "\x00", HOSTILE, "a" * 3000])
def test_a_wrong_key_is_refused(service: Service, wrong: str) -> None:
    answer = sign_in(service, wrong)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "<script" not in answer.text


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({"sec-fetch-site": "cross-site", "origin": "null"}, False),
        ({"sec-fetch-site": "same-site", "origin": "http://testserver"}, False),  # another port of this machine
        ({"sec-fetch-site": "same-origin", "origin": "https://behind-a-proxy"}, True),
        ({"origin": "http://elsewhere"}, False),
        ({"origin": "http://testserver:1"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://testserver"}, True),
        ({}, True),
    ],
)
def test_no_page_of_another_site_signs_anybody_in_or_out(
    service: Service, headers: dict[str, str], is_let_in: bool
) -> None:
    """It could have somebody work in an account that others read."""
    service.client.cookies.clear()
    for path, data in (("/sign-in", {"key": service.key}), ("/sign-out", {})):
        answer = service.client.post(path, data=data, headers=headers, follow_redirects=False)
        assert answer.status_code == (303 if is_let_in else 403)
        assert ("set-cookie" in answer.headers) == is_let_in
        assert is_let_in or "another site" in answer.text
    assert asked_by_browser(service, "/").headers["referrer-policy"] == "same-origin"  # else the origin is "null"


def test_a_password_for_a_proxy_does_not_stand_before_the_cookie(service: Service) -> None:
    sign_in(service, service.key)
    headers = {"authorization": "Basic YWRhOnNlY3JldA=="}
    for path in ("/", f"{ROOT}account"):
        assert service.client.get(path, headers=headers).status_code == 200
    assert service.client.get(f"{ROOT}usage", headers=headers).status_code == 401


def test_a_key_that_ends_or_is_revoked_ends_the_page(service: Service) -> None:
    key = service.api_keys.add_key("ada", days=1.0)
    assert sign_in(service, key).status_code == 303
    service.now += 86401
    data = asked_by_browser(service, f"{ROOT}account")
    assert data.status_code == 401
    assert "is expired" in data.text
    assert sign_in(service, service.key).status_code == 303
    service.api_keys.revoke(service.database.select(keys, "created")[0].id)
    assert "is revoked" in asked_by_browser(service, f"{ROOT}account").text
    assert asked_by_browser(service, f"{ROOT}account").status_code == 401


def test_the_owners_page_needs_the_owners_scope(service: Service) -> None:
    sign_in(service, service.key)
    data = asked_by_browser(service, f"{ROOT}owner")
    assert data.status_code == 403
    assert "lacks the scope" in data.text
    answer = sign_in(service, service.api_keys.add_key("owner", ["owner"]))
    assert landed(answer) == "/owner"
    for path in ("/owner", f"{ROOT}owner", "/"):
        assert asked_by_browser(service, path).status_code == 200
    service.post("create_model", {}, service.api_keys.add_key("owner", ["owner"]), status=403)


def test_a_page_opens_nothing_that_changes_anything(service: Service) -> None:
    """A form on another site sends a browser's cookie, too: everything but what pages read asks for a header."""
    assert sign_in(service, service.key).status_code == 303
    read = {ROOT + name for name in (*ASKED, "training_runs/{model}/steps")}
    for route in service.front.asgi.routes:
        assert isinstance(route, Route)
        if not route.path.startswith(ROOT) or route.path in read or "healthz" in route.path or "archives" in route.path:
            continue
        for method in (route.methods or set()) - {"HEAD"}:
            found = service.client.request(method, re.sub(r"\{.*?\}", "x", route.path))
            assert found.status_code == 401, (method, route.path)


def test_a_tenant_sees_nothing_of_another_wherever_it_looks(service: Service) -> None:
    """Every address that is read, asked by ada for her own things and for eve's, tells nothing of eve's."""
    eve = service.api_keys.add_key("eve")
    theirs, mine = some_work(service, eve, "of-eve"), some_work(service, label="of-ada")
    secret = [theirs.partition(":")[0], "of-eve", '"eve"']
    sign_in(service, service.key)
    seen = 0
    for route in service.front.asgi.routes:
        assert isinstance(route, Route)
        if "GET" not in (route.methods or set()):
            continue
        for model in (mine, theirs):
            session = model.partition(":")[0]
            values = {"model": model, "session": session, "sampler": f"{session}:sample:0", "token": "x"}
            path = route.path.replace(
                "{checkpoint:path}", f"sampler_weights/saved-of-{'ada' if model == mine else 'eve'}"
            )
            for name, value in values.items():
                path = path.replace(f"{{{name}}}", value)
            assert "{" not in path
            for headers in ({}, {"x-api-key": service.key}):
                answer = service.client.get(path, headers=headers, follow_redirects=False)
                text = answer.text.replace(path, "") + json.dumps(dict(answer.headers))
                if answer.status_code != 404:
                    assert not [word for word in secret if word in text], (path, text)
                    seen += mine.partition(":")[0] in text
    assert seen >= 8  # ada sees her own
    assert service.client.get(f"{ROOT}training_runs/{theirs}/steps").status_code == 404


def test_every_visitor_gets_the_same_page(service: Service) -> None:
    """So no name of anybody's can become a part of one."""
    pages = set()
    for tenant in ("ada", HOSTILE):
        some_work(service, key := service.api_keys.add_key(tenant), tenant[1:4])
        sign_in(service, key)
        pages.add(asked_by_browser(service, "/").text)
    assert len(pages) == 1


def test_a_page_loads_only_files_that_this_server_has(service: Service) -> None:
    sign_in(service, service.api_keys.add_key("owner", SCOPES))
    for path in ("/", "/owner"):
        for name in re.findall(r'(?:src|href)="([^"#]+)"', asked_by_browser(service, path).text):
            assert "//" not in name
            if not name.startswith("/"):
                found = asked_by_browser(service, f"/{name}")
                assert found.status_code == 200
                for part in re.findall(r'from "\./([\w.]+)"', found.text):
                    assert asked_by_browser(service, f"/{part}").status_code == 200
