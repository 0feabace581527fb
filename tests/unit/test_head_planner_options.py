"""What the planner is told of the configuration and the offers file."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.config import build
from echo2.core.errors import UserError
from echo2.head.decide.state import RentableOffer
from echo2.head.fleet.machines import read_offers
from echo2.head.serve.head import planner_options

OFFERS = """
[[offers]]
name = "spot"
price_usd_per_hour = 0.2
rollouts_per_second = 0.5
reliability = 0.8
count = 3
rent = "get {name}"
release = "drop {name}"

[[offers]]
name = "desk"
price_usd_per_hour = 0.0
"""


def test_without_activation_no_worker_is_chosen_and_no_machine_rented() -> None:
    options = planner_options(build({}, "my.toml"), 0)
    assert not options.activation
    assert options.offers == ()


def test_offers_that_can_be_rented_reach_the_planner_with_the_rate_that_arrives(tmp_path: Path) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(OFFERS)
    config = build({"fleet": {"offers": str(path)}}, "my.toml")
    offers = read_offers(config)
    assert sorted(offers) == ["desk", "spot"]
    options = planner_options(config, 0, offers)
    assert options.activation
    assert options.offers == (RentableOffer("spot", 0.5 * 0.8, 0.2, 3),)  # a desk of unknown rate can't be rented


def test_a_machine_that_can_be_rented_must_have_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(OFFERS.replace("rollouts_per_second = 0.5", ""))
    config = build({"fleet": {"offers": str(path)}}, "my.toml")
    with pytest.raises(UserError, match="'spot' has no rollouts_per_second"):
        read_offers(config)


def test_a_missing_offers_file_is_a_user_error(tmp_path: Path) -> None:
    config = build({"fleet": {"offers": str(tmp_path / "none.toml")}}, "my.toml")
    with pytest.raises(UserError, match="Cannot read the offers file"):
        read_offers(config)
