"""What clients send as tensors: small bytes that would become large, and numbers that are no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from echo2.errors import UserError
from echo2.service import tinker_pb2 as pb
from echo2.service.bodies import TensorBody
from echo2.service.data import _json_tensor
from front_service import PROTO, Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as made:
        yield made


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


@pytest.mark.parametrize("number", [1e300, 1.7, float(1 << 60)])
def test_a_number_that_is_not_whole_is_no_token(number: float) -> None:
    with pytest.raises(UserError, match="not a whole one"):
        _json_tensor(TensorBody(data=[number], dtype="int64"))
