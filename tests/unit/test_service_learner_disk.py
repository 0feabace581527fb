"""The service's learner on a disk that is full: no model is lost, none is taken for a new one, and tenants hear of no
path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disk_cases import no_file_beyond
from echo2.config.sections import LoraConfig
from echo2.core.errors import InvariantError, NoRoomError, UserError
from echo2_service import calling
from echo2_service.backend import CreateModelCall, ForwardBackwardCall, ModelSpec, OptimStepCall, TrainWork, UnloadCall
from echo2_service.learner import models as models_module
from service_cases import some_data
from test_service_learner import ADAM, Client


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path)
    for model in ("m", "same"):
        client.call(CreateModelCall(model, ModelSpec("tiny", rank=2)))
    yield client
    client.models.close()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_model_for_which_a_full_disk_leaves_no_memory_is_not_taken_for_a_new_one(
    client: Client, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    expected = client.train("same", range(1, 7))
    client.train("m", range(1, 4))
    client.call(UnloadCall("m"))
    monkeypatch.setattr(models_module, "MEMORY_BYTES", 1)
    call = CreateModelCall("new", ModelSpec("tiny", rank=2)) if is_new else OptimStepCall("m", 4, ADAM)
    for _ in range(2):
        with no_file_beyond(100), pytest.raises(NoRoomError, match="There is no memory for this model") as raised:
            client.call(call)
        assert "same" not in str(raised.value), "another tenant's model"
        assert [name in client.tenants for name in ("m", "new", "same")] == [False, False, True]
    assert client.train("m", range(4, 7)) == expected[3:]
    assert "same" not in client.tenants


def test_a_model_that_cannot_be_recorded_is_not_created_and_can_be_later(client: Client) -> None:
    call, adapters = CreateModelCall("new", ModelSpec("tiny", rank=2)), client.tenants._base._tuner.peft_config
    num_before = len(adapters)
    for _ in range(3):
        with no_file_beyond(40), pytest.raises(OSError, match="File too large"):
            client.call(call)
        assert "new" not in client.tenants
        with pytest.raises(UserError, match="There is no model 'new'"):
            client.call(OptimStepCall("new", 1, ADAM))
        assert len(adapters) == num_before
    client.call(call)
    with pytest.raises(UserError, match="new"):
        client.tenants.add("new", LoraConfig(rank=2), 0)
    assert len(adapters) == num_before + 1, "an adapter that nobody has is not kept"
    assert client.train("new", range(1, 7)) == client.train("same", range(1, 7))


@pytest.mark.parametrize(
    "error", [NoRoomError("Cannot write /srv/a b/tom:0"), OSError(28, "No space left", "/srv/a b")]
)
def test_a_full_disk_is_the_services_affair_and_tells_a_tenant_no_path(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    answer = calling.failed(3, error, "a step")
    assert answer.is_ours
    assert "/" not in answer.fault
    assert "full" in answer.fault or "No space left" in answer.fault
    assert "/srv/a b" in caplog.text, "its owner reads where"


def test_a_model_that_cannot_leave_memory_lets_another_leave(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.train("same", range(1, 4))
    client.call(ForwardBackwardCall("m", 1, some_data("1"), "cross_entropy", {}, True))
    monkeypatch.setattr(models_module, "MEMORY_BYTES", client.tenants.num_bytes("m") * 2)
    with no_file_beyond(100):  # `same`, which rests longer, has a step that no checkpoint holds
        client.call(CreateModelCall("new", ModelSpec("tiny", rank=2)))
    assert [name in client.tenants for name in ("m", "same", "new")] == [False, True, True]


def test_data_in_a_file_are_in_the_journal_when_the_file_may_go(client: Client, tmp_path: Path) -> None:
    file, losses = tmp_path / "data", []
    work = TrainWork("m", 1, some_data("1"), [0] * 4, "cross_entropy", {}, False)
    assert calling.write_work(file, work, "req_1").data == [] != work.data
    for model, call in (("same", {"data": work.data}), ("m", {"data": [], "file": str(file)})):
        answer = client.call(ForwardBackwardCall(model, 1, loss="cross_entropy", params={}, **call)).trained
        assert answer is not None
        losses.append(answer.metrics)
    file.unlink()
    client.restart()
    norms = [client.call(OptimStepCall(model, 2, ADAM)).metrics for model in ("same", "m")]
    assert losses[0] == losses[1]
    assert norms[0] == norms[1]
    with pytest.raises(InvariantError, match="gone or damaged"):
        client.call(ForwardBackwardCall("m", 3, [], "cross_entropy", {}, file=str(file)))
    assert client.loss("m", 3) == client.loss("same", 3), "a fault of the disk is no outcome"
