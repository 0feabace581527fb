"""The order of a model's requests."""

from __future__ import annotations

import random

import pytest

from echo2_service.decide.order import GAP_SECONDS, ModelOrder, Released
from seeds import seeds


@pytest.mark.parametrize("seed", seeds(12, 50))
def test_requests_go_in_their_order_whichever_way_they_come(seed: int) -> None:
    numbers = list(range(1, 40))
    random.Random(seed).shuffle(numbers)
    order = ModelOrder()
    released = [one.request for number in numbers for one in order.arrive(str(number), number, 0.0)]
    assert released == [str(number) for number in range(1, 40)], f"seed {seed}"
    assert order.num_held == 0


def test_a_client_that_restarts_its_numbers_is_served_in_order_of_arrival() -> None:
    order = ModelOrder()
    assert order.arrive("load", 1, 0.0) == [Released("load")]
    assert order.arrive("forward", 1, 0.0) == [Released("forward")]
    assert order.arrive("optim", 2, 0.0) == [Released("optim")]
    assert order.arrive("unnumbered", None, 0.0) == [Released("unnumbered")]


def test_the_error_names_the_missing_request_that_others_waited_for() -> None:
    order = ModelOrder()
    assert order.arrive("b", 2, 0.0) == []
    assert order.arrive("d", 4, 100.0) == []
    assert order.waits_for("b") == 1
    assert order.expire(GAP_SECONDS - 1) == []
    assert order.expire(GAP_SECONDS) == [Released("b", 1)]
    assert order.waits_for("d") == 3
    assert order.arrive("c", 3, GAP_SECONDS) == [Released("c"), Released("d")]


def test_requests_after_an_expired_one_go_on() -> None:
    order = ModelOrder()
    order.arrive("b", 2, 0.0)
    order.arrive("c", 3, 200.0)
    assert order.expire(GAP_SECONDS) == [Released("b", 1), Released("c")]
