"""What a step costs, as clients log it, and prices and quotas that change while the service runs."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from echo2_service import limits
from echo2_service.front.curves import stride_of
from echo2_service.front.database import checkpoints, spending, steps
from echo2_service.settings import Quotas, Tariff
from front_service import PROTO, Service, protobuf

PRICES = {"forward_backward": 2e5, "sample": 1e5}


@pytest.fixture
def quotas() -> Quotas:
    return Quotas(PRICES)


def metrics(service: Service, future: Any) -> dict[str, float]:
    found: dict[str, float] = service.result(future)["metrics"]
    return found


def sampled(service: Service, session: str, number: int) -> None:
    """Sample two tokens from a prompt of one: .3 dollars."""
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "echo2/tiny"}
    sampler = service.post("create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [1]}]}
    params = {"max_tokens": 2, "stop": [99]}
    sample = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}
    service.result(service.post("asample", sample))


def test_a_step_returns_its_cost_and_the_sessions_total(anywhere: Service) -> None:
    session = anywhere.session()
    model = anywhere.model(session)
    sampled(anywhere, session, 1)
    trained, stepped = anywhere.train(model, 1, [1, 2, 3]), anywhere.step(model, 2)
    anywhere.result(trained)
    first = metrics(anywhere, stepped)
    assert (first["cost/step_usd"], first["cost/cum_usd"]) == (pytest.approx(0.9), pytest.approx(0.9))
    sampled(anywhere, session, 2)
    second = metrics(anywhere, anywhere.step(model, 3))
    assert (second["cost/step_usd"], second["cost/cum_usd"]) == (pytest.approx(0.3), pytest.approx(1.2))
    assert second["grad_norm"] == 0.0
    assert anywhere.get("usage")["usd"] == pytest.approx(second["cost/cum_usd"])


def test_a_session_is_not_charged_for_another_ones_samples(service: Service) -> None:
    model, other = service.model(service.session()), service.session()
    sampled(service, other, 1)
    assert metrics(service, service.step(model, 1))["cost/cum_usd"] == 0.0


def test_a_step_counts_what_was_trained_for_it_however_long_that_answer_takes(service: Service) -> None:
    """Training and its step are submitted at once, as the cookbook does; the larger answer takes a thread longer."""
    model = service.model(service.session())
    metrics(service, service.step(model, 1))
    service.in_front(service.backend.gate.clear)
    wide = protobuf(model, 2, [1] * 200_000)
    futures = [service.post("forward_backward", wide, headers=PROTO), service.step(model, 3)]
    service.until_called("optim_step")
    service.in_front(service.backend.gate.set)
    assert metrics(service, futures[1])["cost/step_usd"] == pytest.approx(40_000.0)
    row = service.database.select(steps, "-step")[0]
    assert (row.tokens, row.step, row.loss) == (200_000, 2, pytest.approx(2.772588722))


def test_a_step_without_prices_returns_no_dollars(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        assert set(metrics(service, service.step(service.model(service.session()), 1))) == {"grad_norm"}
        assert service.database.count(spending) == 0


def test_dollars_of_a_session_go_with_it_and_points_with_their_model(anywhere: Service) -> None:
    session = anywhere.session()
    model = anywhere.model(session)
    anywhere.result(anywhere.train(model, 1, [1]))
    metrics(anywhere, anywhere.step(model, 2))
    assert (anywhere.database.count(spending), anywhere.database.count(steps)) == (1, 1)
    anywhere.post(f"sessions/{session}/finish", status=204)
    anywhere.sweep()
    anywhere.now += 86401
    anywhere.sweep()
    assert (anywhere.database.count(spending), anywhere.database.count(steps)) == (0, 0)


def test_points_are_thinned_out_evenly_and_the_newest_stays(anywhere: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CURVE_POINTS_MAX", 8)
    model = anywhere.model(anywhere.session())
    for number in range(1, 33):
        metrics(anywhere, anywhere.step(model, number))
        kept = [row.step for row in anywhere.database.select(steps, "step")]
        assert len(kept) < 8
        assert kept[-1] == number
        assert all(step % stride_of(number) == 0 for step in kept[:-1])
    assert kept == [8, 16, 24, 32]


# ---- a file that changes ---------------------------------------------------------------------------------------------


#: What no bill and no date bears.
ENDLESS = [
    f"{name} = {{ {of} = {value} }}"
    for name, of in (("usd_per_million_tokens", "sample"), ("quota_usd", "ada"), ("checkpoint_days", "ada"))
    for value in ("inf", "nan", "1e308", "-1.0")
]


def write(file: Path, bills: str) -> None:
    """Replace the file, as editors do."""
    new = file.with_suffix(".new")
    new.write_text(f'[bases]\n"echo2/tiny" = ""\n[bills]\n{bills}\n')
    os.replace(new, file)


def take(service: Service) -> None:
    """The file is read at the second look at the same one."""
    service.sweep()
    service.sweep()


@pytest.fixture
def file(tmp_path: Path, service: Service) -> Path:
    """A service's file that this service reads."""
    found = tmp_path / "serve.toml"
    write(found, "usd_per_million_tokens = { forward_backward = 1e5 }")
    service.front.tariff._file = found
    return found


def test_prices_and_quotas_change_without_a_restart(service: Service, file: Path) -> None:
    model = service.model(service.session())
    service.result(service.train(model, 1, [1, 2]))
    assert service.get("usage")["usd"] == pytest.approx(0.4)
    take(service)
    service.result(service.train(model, 2, [1, 2]))
    assert service.get("usage")["usd"] == pytest.approx(0.6)
    write(file, 'quota_usd = { ada = 0.5, "*" = 0.0 }')
    take(service)
    assert "of $0.5" in service.post("forward_backward", protobuf(model, 3, [1]), headers=PROTO, status=402)["detail"]
    assert service.get("usage")["usd_per_million_tokens"] == {}
    eve = service.api_keys.add_key("eve")
    body = {"session_id": service.session(eve), "model_seq_id": 0, "base_model": "echo2/tiny"}
    assert "eve has spent" in service.post("create_model", body, eve, status=402)["detail"]
    write(file, "")
    take(service)
    service.result(service.train(model, 3, [1]))


@pytest.mark.parametrize(
    "wrong", ["quota_usd = 3", "quotas = {}", "usd_per_million_tokens = { step = 1.0 }", "=", None, *ENDLESS]
)
def test_a_file_with_a_mistake_changes_nothing(
    service: Service, file: Path, wrong: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    take(service)
    before = service.get("usage")["usd_per_million_tokens"]
    if wrong is None:
        file.unlink()
    else:
        write(file, wrong)
    for _ in range(3):
        service.sweep()
    assert service.get("usage")["usd_per_million_tokens"] == before == {"forward_backward": 1e5}
    told = [record for record in caplog.records if "stay as they were" in record.getMessage()]
    assert len(told) == 1  # not at each cleanup


def test_a_quota_for_all_others_bounds_their_disk(service: Service, file: Path) -> None:
    write(file, 'quota_disk_gb = { ada = 1.0, "*" = 1e-6 }')
    take(service)
    eve = service.api_keys.add_key("eve")
    body = {"session_id": service.session(eve), "model_seq_id": 0, "base_model": "echo2/tiny"}
    assert "are allowed" in service.post("create_model", body, eve, status=400)["detail"]
    service.model(service.session())


def test_checkpoints_are_kept_as_long_as_the_operator_keeps_them(service: Service, file: Path) -> None:
    write(file, 'checkpoint_days = { "*" = 2.0, eve = 9.0 }')
    take(service)
    model = service.model(service.session())
    for number, ttl in ((1, None), (2, 60), (3, 10**6)):
        save = {"model_id": model, "seq_id": number, "path": f"n{number}", "ttl_seconds": ttl}
        service.result(service.post("save_weights", save))
    service.post("copy_weights", {"source_path": f"tinker://{model}/weights/n1"})
    left = [row.expires - service.now for row in service.database.select(checkpoints, "id")]
    assert sorted(left) == [60, 172800, 172800, 172800]
    url = f"/api/v1/training_runs/{model}/checkpoints/weights/n2/ttl"
    service.client.put(url, headers={"x-api-key": service.key}, json={"ttl_seconds": None})
    service.now += 172801
    take(service)
    assert service.database.count(checkpoints) == 0
    assert service.get("usage")["checkpoint_days"] == 2.0


def test_without_a_file_the_tariff_stays() -> None:
    tariff = Tariff(Quotas(PRICES))
    tariff.reread()
    assert tariff.quotas.usd_per_million_tokens == PRICES


@pytest.mark.parametrize("half", ["", "[bi"])
def test_a_file_of_which_only_half_is_written_is_not_read(service: Service, file: Path, half: str) -> None:
    """Without the rest there are no prices and no quotas."""
    take(service)
    whole = file.read_text()
    file.write_text(whole.partition("[bills]")[0] + half)
    service.sweep()
    assert service.get("usage")["usd_per_million_tokens"] == {"forward_backward": 1e5}
    file.write_text(whole.replace("1e5", "2e5"))
    take(service)
    assert service.get("usage")["usd_per_million_tokens"] == {"forward_backward": 2e5}


def test_a_file_that_changed_before_the_first_look_is_read(tmp_path: Path) -> None:
    write(file := tmp_path / "serve.toml", "quota_usd = { ada = 1.0 }")
    tariff = Tariff(Quotas(), file)
    for _ in range(2):
        tariff.reread()
    assert tariff.quotas.quota_usd == {"ada": 1.0}
