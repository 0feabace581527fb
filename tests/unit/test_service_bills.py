"""What tenants pay, and what they may still spend."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from echo2_service import tinker_pb2 as pb
from echo2_service.front import requests_api
from echo2_service.front.database import models, sessions
from echo2_service.front.overview import tenants
from echo2_service.settings import Quotas
from front_service import PROTO, Service, protobuf


def test_usage_is_billed_at_its_price_and_ends_at_a_quota(tmp_path: Path) -> None:
    quotas = Quotas(usd_per_million_tokens={"forward_backward": 2e5}, quota_usd={"ada": 1.0})
    service = Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", quotas)
    try:
        model = service.model(service.session())
        service.result(service.train(model, 1, [1, 2, 3]))
        assert service.get("usage")["usd"] == pytest.approx(0.6)
        again = service.train(model, 1, [1, 2, 3])
        service.result(again)
        assert service.get("usage")["usd"] == pytest.approx(0.6)
        service.result(service.step(model, 2))
        service.result(service.train(model, 3, [1, 2]))
        bill = service.get("usage")
        assert (bill["quota_usd"], bill["usage"]["forward_backward"]["tokens"]) == (1.0, 5)
        spent = {"model_id": model, "seq_id": 4, "adam_params": {"learning_rate": 0.1}}
        assert "$1.0000 of $1" in service.post("optim_step", spent, status=402)["detail"]
        assert service.result(again)["metrics"]["loss:sum"] > 0  # what was done is still told
        eve = service.api_keys.add_key("eve")
        service.model(service.session(eve), key=eve)
        told = tenants(service.database, service.now)
        assert told["ada"]["usd"] == pytest.approx(1.0)
        assert (told["eve"]["models"], told["eve"]["open"], told["eve"]["usd"]) == (1, {}, 0.0)
    finally:
        service.end()
        service.database.close()


def test_an_estimate_has_the_costs_and_the_remaining_budget(tmp_path: Path) -> None:
    quotas = Quotas(usd_per_million_tokens={"forward_backward": 1.2, "sample": 0.6}, quota_usd={"ada": 25.0})
    service = Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", quotas)
    told = service.get("estimate?forward_backward=2000000&sample=500000")
    assert told["usd"] == pytest.approx(2.7)
    assert (told["usd_by_kind"]["sample"], told["usd_left"]) == (pytest.approx(0.3), 25.0)
    for wrong in ("save_weights=1", "sample=-1", "sample=1e6", "sample=" + "9" * 16):
        service.get(f"estimate?{wrong}", status=400)
    service.end()
    service.database.close()


def test_a_forward_in_protobuf_costs_what_a_forward_costs(tmp_path: Path) -> None:
    quotas = Quotas(usd_per_million_tokens={"forward_backward": 3e5, "forward": 1e5})
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", quotas)) as service:
        model = service.model(service.session())
        message = pb.ForwardBackwardRequest.FromString(protobuf(model, 1, [1, 2, 3]))
        message.forward_only = True
        body = message.SerializeToString()
        future = service.post("forward_backward", body, headers=PROTO)
        answered = pb.ForwardBackwardOutput.FromString(service.result(future, accept=requests_api.PROTOBUF))
        assert answered.metrics["loss:sum"] == pytest.approx(3 * math.log(16))
        assert service.post("forward_backward", body, headers=PROTO) == future
        bill = service.get("usage")
        assert bill["usage"]["forward"] == {"requests": 1, "tokens": 3, "usd": pytest.approx(0.3)}
        assert "forward_backward" not in bill["usage"]
        assert service.get("estimate?forward=3")["usd"] == pytest.approx(bill["usd"])
        assert service.backend.gradients[model].sum() == 0.0


def test_the_status_counts_models_of_live_sessions(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        over, live = service.session(), service.session()
        for number in range(3):
            service.model(over, number)
        service.model(live)
        service.in_front(service.front.dispatcher.end_session, over, "over")
        assert service.database.count(sessions, finished=None) == 1
        told = tenants(service.database, service.now)["ada"]
        assert (told["sessions"], told["models"]) == (1, 1)


def test_adapters_without_a_seed_differ_and_with_one_are_alike(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        body = {"session_id": service.session(), "base_model": "echo2/tiny"}
        for number, lora in enumerate([{}, {}, {"seed": 3}, {"seed": 3}, {"seed": 0}]):
            service.result(service.post("create_model", {**body, "model_seq_id": number, "lora_config": lora}))
        seeds = [row.spec["seed"] for row in service.database.select(models, "id")]
        assert seeds[2:] == [3, 3, 0]
        assert len({*seeds[:2], 0, 3}) == 4


def test_clients_retry_while_the_store_is_unreachable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:

        def execute(statement: str) -> None:
            with service.front.database.transaction() as connection:
                connection.exec_driver_sql(statement)

        full = "CREATE TRIGGER full BEFORE INSERT ON sessions BEGIN SELECT RAISE(ABORT, 'full'); END"
        service.in_front(execute, full.replace("RAISE(ABORT, 'full')", "* FROM nowhere"))
        for _ in range(3):
            assert "try again" in service.post("create_session", {}, status=503)["detail"]
        assert "a request waits for the database" in caplog.text
        assert "Traceback" not in caplog.text
        service.in_front(execute, "DROP TRIGGER full")
        service.session()
