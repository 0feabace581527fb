"""A refused request uses up its number: what a client sends behind it goes on at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zstandard

from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.front.bodies import Numbered, numbered
from front_service import PROTO, Service, protobuf

PACKED = {"content-encoding": "zstd"}


def text(**values: Any) -> bytes:
    return json.dumps(values).encode()


def huge(model: str, number: int) -> bytes:
    message = pb.ForwardBackwardRequest.FromString(protobuf(model, number, [1]))
    return message.SerializeToString() + bytes(3000)


#: By what is wrong: endpoint, body of a model and number, headers, and words of the error.
REFUSED: dict[str, tuple[str, Any, dict[str, str], str]] = {
    "a name with a space": ("save_weights", lambda m, n: text(model_id=m, seq_id=n, path="step 1"), {}, "path"),
    "a time of 0": ("save_weights", lambda m, n: text(model_id=m, seq_id=n, ttl_seconds=0), {}, "ttl_seconds"),
    "NaN": ("optim_step", lambda m, n: text(model_id=m, seq_id=n, adam_params={"learning_rate": float("nan")}), {}, ""),
    "null": ("optim_step", lambda m, n: text(model_id=m, seq_id=n, adam_params={"learning_rate": None}), {}, "float"),
    "a path of nobody": ("load_weights", lambda m, n: text(model_id=m, seq_id=n, path=7), {}, "path"),
    "not served": ("save_weights_external", lambda m, n: text(model_id=m, seq_id=n, path="a"), {}, "not served here"),
    "a token of 2^31": (
        "forward_backward",
        lambda m, n: text(
            model_id=m,
            seq_id=n,
            forward_backward_input={
                "loss_fn": "cross_entropy",
                "data": [{"model_input": {"chunks": [{"tokens": [2**31]}]}, "loss_fn_inputs": {}}],
            },
        ),
        {},
        "",
    ),
    "no input": ("forward", lambda m, n: text(model_id=m, seq_id=n), {}, "forward_input"),
    "torn JSON": ("forward_backward", lambda m, n: text(model_id=m, seq_id=n, a=[1])[:-2], {}, ""),
    "torn protobuf": ("forward_backward", lambda m, n: protobuf(m, n, [1, 2])[:-3], PROTO, "ForwardBackwardRequest"),
    "too large": ("forward_backward", huge, PROTO, "are taken"),
    "too large, packed": ("forward_backward", lambda m, n: zstandard.compress(huge(m, n)), PROTO | PACKED, "unpacks"),
    "too large JSON": ("optim_step", lambda m, n: text(model_id=m, seq_id=n, a="x" * 5_000_000), {}, "are taken"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_request_fails_alone(service: Service, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_MAX", 2000)
    path, body, headers, words = REFUSED[why]
    model = service.model(service.session())
    future = service.post(path, body(model, 2), headers=headers)
    before = service.train(model, 1, [1])
    behind = [service.train(model, 3, [1]), service.step(model, 4)]
    refused = service.result(future)
    assert (refused["category"], words in refused["error"]) == ("user", True), refused
    assert ["metrics" in service.result(one) for one in (before, *behind)] == [True] * 3
    assert [call[2] for call in service.backend.calls[1:]] == [1, 2, 3], "the back end's numbers have no gap"
    assert service.post(path, body(model, 2), headers=headers)["request_id"] == future["request_id"]


def test_a_quota_of_disk_uses_up_the_number_and_one_of_dollars_is_asked_again(service: Service) -> None:
    """402 makes the SDKs send the same request again."""
    eve = service.api_keys.add_key("eve")
    model = service.model(service.session())
    assert service.post("save_weights", text(model_id=model, seq_id=1, path="a b"), key=eve, status=400)
    assert "metrics" in service.result(service.train(model, 1, [1])), "of another tenant's model nothing is refused"


@pytest.mark.parametrize(
    ("body", "is_protobuf", "found"),
    [
        (b"", False, None),
        (b"", True, None),
        (b"[]", False, None),
        (b'{"model_id": 3, "seq_id": 1}', False, None),
        (b'{"model_id": "m", "seq_id": true}', False, None),
        (b'{"model_id": "m", "seq_id": 0}', False, None),
        (b'{"model_id": "m", "seq_id": 99999999999999999999}', False, None),
        (b'{"seq_id": 12, "model_id": "m", "x": ', False, Numbered("m", 12)),
        (b"[" * 100_000, False, None),
        (b"\xff" * 100, False, None),
        (b"\xff" * 100, True, None),
        (b"\x0a\x01m\x10", True, None),
        (b"\x0a\x01m\x10\xac\x02", True, Numbered("m", 300)),
        (b"\x0a\x01m\x10" + b"\xff" * 20, True, None),
        (b"\x0a\x7fm", True, None),
    ],
)
def test_an_unreadable_request_has_no_number(body: bytes, is_protobuf: bool, found: Numbered | None) -> None:
    assert numbered(body, is_protobuf, False) == found
    packed = zstandard.compress(body)
    assert numbered(packed, is_protobuf, True) == found
    assert numbered(packed[:-1], is_protobuf, True) in (found, None)


def test_a_long_request_is_not_parsed_for_its_number() -> None:
    """Its number stands at one of its ends."""
    named, data = b'"model_id": "m", "seq_id": 12', b'"x": [' + b"0," * 200_000 + b"0]"
    for body in (b"{%b, %b}" % (named, data), b"{%b, %b}" % (data, named), b"{%b, %b" % (named, data)):
        assert numbered(body, False, False) == Numbered("m", 12)
    assert numbered(b"{%b, %b, %b}" % (data, named, data), False, False) is None
