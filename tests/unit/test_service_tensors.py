"""What clients send as input: small bytes that would become large, numbers that are no tokens, and images."""

from __future__ import annotations

import pytest

from echo2.core.errors import UserError
from echo2_service import limits
from echo2_service import tinker_pb2 as pb
from echo2_service.front.bodies import TensorBody
from echo2_service.front.data import _json_tensor
from front_service import PROTO, Service


def test_a_small_sparse_tensor_does_not_become_a_large_one(service: Service) -> None:
    model = service.model(service.session())
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([1, 1 << 40])
    tensor.sparse_csr.crow_indices = bytes(16)
    answer = service.result(service.post("forward_backward", message.SerializeToString(), headers=PROTO))
    assert "sparse" in answer["error"]


def test_a_negative_size_does_not_hide_a_large_tensor(service: Service) -> None:
    message = pb.ForwardBackwardRequest(model_id=service.model(service.session()), seq_id=1, loss_fn="cross_entropy")
    for shape in ([1, 1 << 22], [1, 1 << 22], [-(1 << 30), 1 << 30]):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4)
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = pb.DTYPE_INT64
        tensor.shape.extend(shape)
        tensor.sparse_csr.crow_indices = bytes(16)
    answer = service.result(service.post("forward_backward", message.SerializeToString(), headers=PROTO))
    assert "The sparse tensors of a request stand for" in answer["error"]


@pytest.mark.parametrize("encoding", ["dense", "sparse_csr"])
def test_a_shape_of_many_sizes_is_not_multiplied(service: Service, encoding: str) -> None:
    """Their product has a hundred thousand digits. With a million sizes, it would take all tenants' processor for
    hours."""
    message = pb.ForwardBackwardRequest(model_id=service.model(service.session()), seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4)
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([limits.TENSOR_NUMBERS_MAX] * 20_000)
    if encoding == "dense":
        tensor.dense = bytes(8)
    else:
        tensor.sparse_csr.values = bytes(8)
    answer = service.result(service.post("forward_backward", message.SerializeToString(), headers=PROTO))
    assert "20000 sizes" in answer["error"] or "two sizes are taken" in answer["error"]


@pytest.mark.parametrize("path", ["create_session", "asample", "forward_backward"])
def test_json_of_many_small_parts_is_refused_unread(service: Service, path: str) -> None:
    empty = b",".join([b"{}"] * limits.PARTS_MAX)
    bodies = {
        "create_session": b'{"user_metadata":{"a":[%b]}}',
        "asample": b'{"prompt":{"chunks":[%b]}}',
        "forward_backward": b'{"forward_backward_input":{"data":[%b]}}',
    }
    answer = service.post(path, bodies[path] % empty, status=413)
    assert f"objects and lists; {limits.PARTS_MAX} are taken" in answer["detail"]


@pytest.mark.parametrize(
    "body",
    [b"\x1a\0" * (limits.PARTS_MAX + 1), b"\x1a\x80\x80\x40" + b"\x0a\0" * (1 << 19)],
    ids=["data", "parts of a prompt"],
)
def test_protobuf_of_many_small_parts_is_refused_unread(service: Service, body: bytes) -> None:
    """A body of the largest size would take 800 MB and the processor for seconds, sent as three kilobytes."""
    assert "too many parts" in service.post("forward_backward", body, headers=PROTO, status=413)["detail"]


@pytest.mark.parametrize("number", [1e300, 1.7, float(1 << 60)])
def test_a_fraction_is_not_a_token(number: float) -> None:
    with pytest.raises(UserError, match="not a whole one"):
        _json_tensor(TensorBody(data=[number], dtype="int64"))


IMAGE = {"type": "image", "data": "iVBORw0KGgo=", "format": "png", "expected_tokens": 4}


def test_an_image_is_refused_by_the_type_of_its_part(service: Service) -> None:
    """A sample at once; training as the failure of its future, so that the requests behind it do not wait for it."""
    session = service.session()
    model = service.model(session)
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "echo2/tiny"}
    asked = {"sampling_session_id": service.post("create_sampling_session", sampler)["sampling_session_id"]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}, IMAGE]}
    words = "a part of type 'image'"
    assert words in service.post("asample", {**asked, "prompt": prompt}, status=400)["detail"]
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image = b"\x0a\x04\x89PNG"
    futures = [service.post("forward_backward", message.SerializeToString(), headers=PROTO)]
    target = {"data": [1, 1], "dtype": "int64", "shape": [2]}
    given = {"data": [{"model_input": prompt, "loss_fn_inputs": {"target_tokens": target}}], "loss_fn": "cross_entropy"}
    body = {"model_id": model, "seq_id": 2, "forward_backward_input": given}
    futures.append(service.post("forward_backward", body))
    for future in futures:
        answer = service.result(future)
        assert answer["category"] == "user"
        assert answer["error"].startswith(f"datum 0: The input has {words}")
    assert "metrics" in service.result(service.train(model, 3, [1]))
