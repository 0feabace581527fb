"""No answer to a tenant names a path of the service's machine, whatever goes wrong, and wherever."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from echo2.core.errors import InvariantError, PeerError, UserError
from echo2_service.front.request_guard import ERROR_CHARS_MAX, for_tenants
from echo2_service.settings import Quotas
from front_server import Client, FrontServer, serving
from one_row_backend import OneRowBackend

OPERATIONS = ("create_model", "forward_backward", "optim_step", "save_state", "load_state", "publish", "sample")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("'/tmp/my models/x' is bad", "... is bad"),
        ("/home/a/b: bad, see ~/x/y, or /a.", "...: bad, see ..., or ..."),
        ("[Errno 2] No such file: PosixPath('/a/b')", "[Errno 2] No such file: PosixPath(...)"),
        ("/srv/models/tom:train:0/step_5 is full: wait", "... is full: wait"),
        ("sqlite:////a/b.sqlite and file:///etc/x", "... and ..."),
        ("log=/var/log/x", "log=..."),
        ("no checkpoint 'tinker://M/weights/NAME', echo2/tiny", "no checkpoint 'tinker://M/weights/NAME', echo2/tiny"),
        ("alpha / r, and/or GET /api/v1/usage", "alpha / r, and/or GET /api/v1/usage"),
        ("GET .../checkpoints/NAME/archive", "GET .../checkpoints/NAME/archive"),
        ("x" * 10**6, "x" * ERROR_CHARS_MAX),  # each letter may begin a URL; the event loop stood still for hours
        ("y" * (ERROR_CHARS_MAX - 10) + " '/tmp/my models/x'", "y" * (ERROR_CHARS_MAX - 10) + " ..."),
    ],
)
def test_paths_are_taken_out_and_what_a_tenant_may_know_stays(text: str, told: str) -> None:
    assert for_tenants(text) == told


def errors(path: Path) -> Iterator[Exception]:
    yield UserError(f"{path}/checkpoints/req_1 has no complete checkpoint.")
    yield PeerError("bad_adapter", f"{path}/x of base holds '{path}/a b'")
    yield InvariantError(f"The learner process does not start: see {path}/learner.log.")
    yield OSError(errno.ENOSPC, "No space left on device", f"{path}/models")
    yield RuntimeError(f"{path}: boom")


class Failing(OneRowBackend):
    """Every operation fails with `error`, if there is one."""

    error: Exception | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS and (error := object.__getattribute__(self, "error")):

            async def fail(*_: Any, **__: Any) -> None:
                raise error

            return fail
        return object.__getattribute__(self, name)


def fail_with(server: FrontServer, error: Exception | None) -> None:
    server.backend.__class__ = Failing
    server.backend.error = error  # type: ignore[attr-defined]


def operations(client: Client, session: str, model: str, sampler: str, path: str, first: int) -> Iterator[Any]:
    """The outcome of one request of each kind."""
    created = {"session_id": session, "model_seq_id": first, "base_model": "echo2/tiny"}
    yield client.ok("create_model", created)
    named: dict[str, Any] = {"model_id": model}
    train = {"forward_backward_input": {"data": [], "loss_fn": "x"}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("forward_backward", train),
        ("optim_step", {"adam_params": {}}),
        ("save_weights", {"path": f"n{first}"}),
        ("save_weights_for_sampler", {"path": f"n{first}"}),
        ("load_weights", {"path": path}),
    ]
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}}
    train["forward_backward_input"]["data"] = [
        {**datum, "loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64", "shape": [1]}}}
    ]
    for number, (verb, body) in enumerate(bodies, first):
        yield client.ok(verb, {**named, "seq_id": number, **body})
    yield client.ok("asample", {"sampling_session_id": sampler, "prompt": datum["model_input"]})


def test_no_failing_operation_reveals_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "the service's"
    folder.mkdir()
    with serving(folder) as server:
        client = server.client("ada")
        session = client.session()
        model, sampler = client.model(session), client.sampler(session)
        path = client.result(client.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
        first, found = 2, []
        for error in errors(tmp_path):
            fail_with(server, error)
            outcomes = [client.result(future) for future in operations(client, session, model, sampler, path, first)]
            assert all(outcome["error"] for outcome in outcomes)
            found += outcomes
            first += 5
        fail_with(server, None)
        assert not names_a_path(found, tmp_path)
        assert "has no complete checkpoint" in json.dumps(found)


def names_a_path(answers: Any, tmp_path: Path) -> list[str]:
    text = json.dumps(answers)
    return re.findall(rf".{{0,60}}(?:{re.escape(str(tmp_path))}|site-packages).{{0,60}}", text)


BODIES: list[bytes] = [b"", b"{}", b"[", b"\xff\xfe", b"x" * 5_000_000]
NAMES = ("x", "..%2f..%2f..%2fetc%2fpasswd", "%00", "weights/../../service.sqlite", "/etc/passwd")


def test_no_endpoint_reveals_a_path(tmp_path: Path) -> None:
    """Every endpoint with every wrong body and name, and every right kind of body with wrong values."""
    with serving(tmp_path, Quotas(quota_disk_gb={"poor": 0.0})) as server:
        client, found = server.client("ada"), []
        session = client.session()
        model, sampler = client.model(session), client.sampler(session)
        path = client.result(client.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
        for file in (server.folder / "checkpoints").rglob("row.npy"):
            file.unlink()  # as a damaged disk
        wrong: dict[str, Any] = {"session_id": session, "model_id": model, "sampling_session_id": sampler}
        wrong |= {"path": path, "source_path": path, "model_path": path, "tinker_path": path, "model_seq_id": 7}
        wrong |= {"sampling_session_seq_id": 7, "prompt": {"chunks": [{"tokens": [1]}]}, "adam_params": {}}
        wrong |= {"base_model": "/etc/passwd", "request_id": "/etc/passwd", "name": "/etc/passwd"}
        bodies = [*BODIES, json.dumps(wrong).encode(), json.dumps({**wrong, "base_model": "echo2/tiny"}).encode()]
        urls = [(method, url) for route in server.front.asgi.routes for method, url in methods(route, model)]
        assert len(urls) > 100
        for key in (client, server.client("poor")):
            for method, url in urls:
                for body in bodies if method == "POST" else [b""]:
                    try:
                        found.append((method, url, *key.ask(method, url, body)))
                    except (ConnectionError, UnicodeDecodeError):
                        continue
        told = [(status, str(answer)) for _, url, status, answer in found]
        assert not names_a_path(told, tmp_path)
        assert {status for status, _ in told} >= {200, 400, 404, 413}
        bad = [one for one in found if one[2] == 500]
        assert not bad, bad[:5]


def methods(route: Any, model: str) -> Iterator[tuple[str, str]]:
    assert isinstance(route, Route)
    for method in sorted((route.methods or set()) - {"HEAD"}):
        for name in (*NAMES, "weights/a") if "{" in route.path else NAMES[:1]:
            url = re.sub(r"\{model\}", model, route.path.removeprefix("/api/v1/"))
            yield method, re.sub(r"\{[^}]*\}", name, url)
        if "{model}" in route.path:
            yield method, re.sub(r"\{[^}]*\}", NAMES[1], route.path.removeprefix("/api/v1/"))
