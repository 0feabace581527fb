"""What a service stores for the machines of its fleet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from echo2.config.sections import LoraConfig
from echo2.core.disk import num_bytes
from echo2.learner.core.adapters import load_base
from echo2.transport.identity import RunIdentity
from echo2_service import limits
from echo2_service.fleet.payloads import Payloads
from echo2_service.learner.tenants import Tenants
from learner_cases import model_directory


@pytest.mark.parametrize("restarts", [False, True])
def test_adapters_for_the_fleet_are_bounded_by_number_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    base = str(model_directory(tmp_path / "base"))
    tenants = Tenants(load_base(base, "cpu"))
    for number in range(6):
        tenants.add(f"{number}", LoraConfig(rank=16), number)
        tenants.publish(f"{number}", tmp_path / "published" / f"{number}")
    size = num_bytes(tmp_path / "published" / "0")
    identity = RunIdentity.create_or_load(tmp_path / "identity")

    async def run() -> list[int]:
        payloads, found = made(), []
        for number in range(6):
            if restarts:
                await payloads.distribution.close()
                payloads = made()
            await payloads.store("tiny", tmp_path / "published" / f"{number}")
            found.append(len(payloads._adapters))
        await payloads.distribution.close()
        return found

    def made() -> Payloads:
        def fail(error: BaseException) -> None:
            raise AssertionError from error

        return Payloads(tmp_path / "chunks", {"tiny": base}, identity, lambda name, order: None, fail)

    monkeypatch.setattr(limits, "FLEET_ADAPTER_BYTES_MAX", int(2.5 * size))
    assert asyncio.run(run()) == [1, 2, 2, 2, 2, 2]
    assert num_bytes(tmp_path / "chunks") < num_bytes(tmp_path / "base") + 4 * size
    monkeypatch.setattr(limits, "FLEET_ADAPTER_BYTES_MAX", 100 * size)
    monkeypatch.setattr(limits, "FLEET_ADAPTERS_MAX", 3)
    assert asyncio.run(run())[-1] == 3
