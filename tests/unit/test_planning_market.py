"""Prices of the market: those that are here, those of a catalogue, and the commands that rent a plan's machines."""

from __future__ import annotations

import csv
import zipfile
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.cli import main
from echo2.core.errors import UserError
from echo2.planning import market
from echo2.planning.market import MachineFilter, from_catalogue, known_prices, market_offers
from echo2.planning.renting import rent_command, rent_commands
from first_plans import QWEN3_8B, write

#: As gpuhunt gives them: name, memory, price, number, spot, region.
ITEMS = [
    SimpleNamespace(
        provider=provider, location=region, price=price, gpu_count=count, gpu_name=name, gpu_memory=memory, spot=spot
    )
    for provider, region, name, memory, price, count, spot in (
        ("vastai", "Norway", "RTX4090", 24.0, 0.4, 1, False),
        ("vastai", "Texas, US", "RTX4090", 24.0, 0.3, 1, False),
        ("runpod", "EU-RO-1", "A100", 80.0, 1.2, 1, True),
        ("aws", "us-east-1", "A100", 40.0, 2.0, 1, False),
        ("aws", "us-east-1", "H200", 141.0, 40.0, 8, False),  # eight in a machine
        ("gcp", "us-east1", "V100", 16.0, 2.5, 1, False),  # the data sheet is of the one with 32 GB
        ("runpod", "EU-RO-1", "A6000", 48.0, 0.5, 1, False),
        ("runpod", "EU-RO-1", "Gaudi2", 96.0, 0.5, 1, False),
        ("aws", "us-east-1", None, None, 0.1, 0, False),
    )
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "echo2" / "market.csv"


def test_a_catalogue_becomes_prices_of_gpus_that_are_known() -> None:
    prices = from_catalogue(ITEMS, date(2026, 11, 20))
    assert [one.gpu for one in prices] == ["RTX-4090", "RTX-4090", "A100-80GB", "A100-40GB", "RTX-A6000"]
    offers = {one.name: one for one in market_offers(prices, MachineFilter(count=7))}
    assert offers["rtx4090-vastai"].price_usd_per_hour == 0.3
    assert offers["rtx4090-vastai"].count == 7
    assert offers["a10080gb-runpod-spot"].mean_life_hours > 0
    assert [one.name for one in market_offers(prices, MachineFilter(spot="yes"))] == ["a10080gb-runpod-spot"]
    norway = market_offers(prices, MachineFilter(region="norway"))
    assert [(one.price_usd_per_hour, one.rent, one.release) for one in norway] == [(0.4, "", "")]
    assert [one.gpu for one in market_offers(prices, MachineFilter(gpus=("a100",)))] == ["A100-80GB"]
    assert {one.gpu for one in market_offers(prices, MachineFilter(memory_gb=45))} == {"A100-80GB", "RTX-A6000"}
    assert [one.name for one in market_offers(prices, MachineFilter(providers=("AWS", "vast")))] == ["a10040gb-aws"]
    for wanted in (
        MachineFilter(region="Mars"),
        MachineFilter(gpus=("B200",)),
        MachineFilter(count=0),
        MachineFilter(gpus=("GTX 1",)),
        MachineFilter(memory_gb=200),
    ):
        with pytest.raises(UserError, match=r"--region Mars|--gpus|--each 0|--memory-gb 200. It has"):
            market_offers(prices, wanted)


def test_the_newest_prices_that_are_here_are_used(own_cache: Path) -> None:
    shipped, told = known_prices()
    assert len(shipped) > 20
    assert told.startswith("prices of 2026-03-10 to 2026-06-30, with echo2")
    market._write(own_cache, from_catalogue(ITEMS, date(2026, 11, 20)))
    assert known_prices()[1] == f"prices of 2026-11-20, {own_cache}"
    for text in ("", "date,gpu\n1,2\n", "\0", own_cache.read_text().replace("0.4", "nan")):
        own_cache.write_text(text)
        prices, told = known_prices()
        assert prices == shipped
        assert told.startswith(f"prices of 2026-03-10 to 2026-06-30, with echo2; {own_cache} ")
        assert told.endswith("; delete it")


def test_a_plan_without_offers_file_uses_the_market_and_rents_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "[run]\nmax_steps = 5\n[sampling]\ngroup_size = 8\ngroups_per_batch = 1\nmax_tokens = 1024\n"
    settings += "[schedule]\nmax_staleness = 3\n[workers]\ncount = 0\n"
    words = [
        *write(tmp_path, QWEN3_8B, settings, "")[:2],
        "--learner",
        "B200",
        "--train-seconds",
        "2000",
        "--gpus",
        "RTX-5090",
    ]
    monkeypatch.chdir(tmp_path)
    Path("offers.toml").unlink()
    assert main([*words, "--json"]) == 0
    assert "prices of 2026-03-10" in capsys.readouterr().out
    assert main([*words, "--rent"]) == 0
    out = capsys.readouterr().out
    assert "sky launch -d -y -c rtx5090-runpod-spot-$n --infra runpod --gpus RTX5090:1 --use-spot" in out
    assert "sky down -y rtx5090-runpod-spot-$n" in out


@pytest.mark.parametrize(
    ("provider", "region", "gpu", "names"),
    [
        ("runpod", "any", "RTX-4090", ("runpod", "RTX4090")),
        ("runpod", "EU-RO-1", "H200", ("runpod/*/EU-RO-1", "H200-SXM")),
        ("runpod", "CA", "H100", ("runpod/CA", "H100-SXM")),
        ("runpod", "any", "H100-PCIe", ("runpod", "H100")),
        ("aws", "us-east-1", "A100-40GB", ("aws/us-east-1", "A100")),
        ("gcp", "us-east1-b", "A100-80GB", ("gcp/us-east1/us-east1-b", "A100-80GB")),
        ("lambdalabs", "us-west-3", "RTX-A6000", ("lambda/us-west-3", "A6000")),
        ("vastai", "any", "A100-80GB", None),  # there "A100" has 40 or 80 GB
        ("vastai", "no-norway", "RTX-4090", None),  # and places have other names
        ("aws", "any", "H100-PCIe", None),
        ("cloudrift", "any", "RTX-4090", None),
    ],
)
def test_skypilot_gets_its_own_names_and_no_command_where_it_has_none(
    provider: str, region: str, gpu: str, names: tuple[str, str] | None
) -> None:
    command = rent_command(provider, region, gpu, 2, False, 1.5)
    assert command.split(" --env ")[0] == (
        f"sky launch -d -y -c {{name}} --infra {names[0]} --gpus {names[1]}:2 --no-use-spot" if names else ""
    )


def test_rent_commands_are_those_of_the_offers() -> None:
    offers = market_offers(from_catalogue(ITEMS, date(2026, 11, 20)), MachineFilter())
    told = rent_commands(offers, {"rtx4090-vastai": 3})
    assert "for n in $(seq 3); do sky launch" in told
    assert "a100" not in told


def test_gpuhunt_s_own_catalogue_is_read(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpuhunt")
    from gpuhunt._internal.storage import CATALOG_V2_FIELDS

    folder = tmp_path / "catalogue" / "runpod"
    (folder / "1").mkdir(parents=True)
    (folder / "version").write_text("1")
    row = {"instance_name": "x", "location": "EU", "price": 0.6, "cpu": 8, "memory": 32, "gpu_count": 1}
    row |= {"gpu_name": "RTX4090", "gpu_memory": 24, "spot": "False", "gpu_vendor": "nvidia", "cpu_arch": "x86"}
    with (tmp_path / "runpod.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CATALOG_V2_FIELDS)
        writer.writeheader()
        writer.writerow({**row, "provider_data": "{}"})
    with zipfile.ZipFile(folder / "1" / "catalog.zip", "w") as packed:
        packed.write(tmp_path / "runpod.csv", "runpod.csv")
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", (tmp_path / "catalogue").as_uri())
    for name in ("vastai", "lium", "seeweb", "jarvislabs", "vultr", "hotaisle", "digitalocean", "daytona", "crusoe"):
        monkeypatch.setitem(__import__("sys").modules, f"gpuhunt.providers.{name}", None)
    assert market.refresh() == ""
    assert [(one.gpu, one.usd_per_hour) for one in known_prices()[0]] == [("RTX-4090", 0.6)]
    assert own_cache.is_file()


def test_a_cache_that_cannot_be_written_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Set XDG_CACHE_HOME"):
        market._write(tmp_path / "file" / "echo2" / "market.csv", [])
