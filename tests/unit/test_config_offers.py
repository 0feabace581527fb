"""The offers file: what is refused, in whose words."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.config.offers import Offer, load_offers, parse_offers
from echo2.core.errors import UserError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GOOD = 'name = "a"\nprice_usd_per_hour = 0.5\n'


def test_the_example_is_read() -> None:
    offers = {offer.name: offer for offer in load_offers(EXAMPLES / "offers.toml")}
    assert offers["rtx5090"].price_usd_per_hour == 0.35
    assert offers["a100"].price_usd_per_hour == 3.06
    spot = offers["rtx5090-spot"]
    assert spot.effective_rate == pytest.approx(0.31 * 0.98 * 4 * 3600 / (4 * 3600 + 600))
    assert spot.effective_usd_per_hour < spot.price_usd_per_hour


def test_a_rate_of_another_model_is_scaled_to_the_run_s() -> None:
    offer = Offer("a", 1.0, 0.31, parameters=8e9, max_tokens=8192)
    assert offer.scaled_to(4e9, 4096).rollouts_per_second == pytest.approx(4 * 0.31)
    assert offer.scaled_to(1e4, 8192) == offer.scaled_to(1e8, 8192)  # no smaller model is faster
    assert offer.scaled_to(None, 8192).parameters == 8e9  # still another model's
    measured = Offer("a", 1.0, 0.31)
    assert measured.scaled_to(4e9, 16) == measured


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no offers"),
        ("offers = []", "it has no offers"),
        ("offers = 3", r"under \[\[offers\]\]"),
        ("[[offer]]\n" + GOOD, r"under \[\[offers\]\], and nothing else"),
        ("[[offers]]\n" + GOOD + "rolouts_per_second = 1.0", r"offer 1 \('a'\): unknown key 'rolouts_per_second'"),
        ("[[offers]]\n" + GOOD + "rolouts_per_second = 1.0", r"Did you mean rollouts_per_second\?"),
        ("[[offers]]\nprice_usd_per_hour = 0.5", "offer 1: object missing required field `name`"),
        ('[[offers]]\nname = "a"', r"offer 1 \('a'\): object missing required field `price_usd_per_hour`"),
        ('[[offers]]\nname = "a"\nprice_usd_per_hour = -0.1', "price_usd_per_hour = -0.1: expected `float` >= 0.0"),
        ('[[offers]]\nname = "a"\nprice_usd_per_hour = nan', "price_usd_per_hour = nan: expected `float`"),
        ('[[offers]]\nname = "a"\nprice_usd_per_hour = "cheap"', "price_usd_per_hour = 'cheap': expected `float`"),
        (
            "[[offers]]\n" + GOOD + "rollouts_per_second = 0.0",
            "rollouts_per_second = 0.0: expected `float` > 0.0. Leave",
        ),
        ("[[offers]]\n" + GOOD + "rent = 'get \"it'", "rent is not a command line"),
        ("[[offers]]\n" + GOOD + "rent = 'get it'", "the machine would never be returned"),
        ("[[offers]]\n" + GOOD + "count = 0", "count = 0: expected `int` >= 1"),
        ("[[offers]]\n" + GOOD + "reliability = 1.5", "reliability = 1.5: expected `float` <= 1.0"),
        ("[[offers]]\n" + GOOD + "down_mbps = 0.0", "down_mbps = 0.0: expected `float` > 0.0"),
        ("[[offers]]\n" + GOOD + "replace_seconds = inf", "replace_seconds = inf: expected `float` <= 1000000000.0"),
        ("[[offers]]\n" + GOOD + "[[offers]]\n" + GOOD, "two offers are called 'a'"),
        ("[[offers]]\nname = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "offers.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_offers(path)


def test_a_missing_file_points_to_the_example(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"examples/offers\.toml"):
        load_offers(tmp_path / "none.toml")


def test_an_unknown_rate_says_how_to_measure_it() -> None:
    (offer,) = parse_offers({"offers": [{"name": "new", "price_usd_per_hour": 1}]}, "here")
    with pytest.raises(UserError, match=r"echo2 probe CONFIG --name new"):
        _ = offer.effective_rate
    assert Offer("a", 1.0, 2.0).effective_rate == 2.0
