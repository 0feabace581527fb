"""The pages of the service in a real browser: signing in, what both say, and hostile names that stay words."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser_page import PHONE, Page
from echo2_service.front.request_guard import SCOPES
from echo2_service.settings import Quotas
from front_server import Client, FrontServer, serving

HOSTILE = "<img src=x onerror='window.owned = 1'>"
QUOTAS = Quotas(usd_per_million_tokens={"forward_backward": 2e5, "sample": 1e5}, quota_usd={HOSTILE: 9.0})
NUM_STEPS = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    with serving(tmp_path_factory.mktemp("service"), QUOTAS) as made:
        work(made.client(HOSTILE))
        logging.getLogger("echo2.test").error("it went wrong: %s", HOSTILE)
        yield made


def work(client: Client) -> None:
    """Two models, one of which makes steps; a sample; and a request that waits for another one."""
    session = client.session()
    model = client.model(session, user_metadata={"is": HOSTILE})
    targets = {"data": [3, 4], "dtype": "int64", "shape": [2]}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": targets}}
    for number in range(1, 2 * NUM_STEPS, 2):
        train = {"data": [datum], "loss_fn": "cross_entropy"}
        body = {"model_id": model, "seq_id": number, "forward_backward_input": train}
        client.result(client.ok("forward_backward", body))
        step = {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.1}}
        client.result(client.ok("optim_step", step))
    client.ok("optim_step", {"model_id": model, "seq_id": 99, "adam_params": {}})
    client.model(session, 1)
    sample = {"sampling_session_id": client.sampler(session), "prompt": {"chunks": [{"tokens": [1]}]}}
    client.result(client.ok("asample", {**sample, "sampling_params": {"max_tokens": 3, "stop": [99]}}))


def signed_in(driver: Any, server: FrontServer, key: str, path: str = "/") -> Page:
    """Type a key into the form, as a person does, and go to a page."""
    page = Page(driver, f"http://127.0.0.1:{server.port}{path}")
    driver.get(f"http://127.0.0.1:{server.port}/")
    driver.delete_all_cookies()
    driver.get(f"http://127.0.0.1:{server.port}/")
    driver.find_element("id", "key").send_keys(key)
    driver.find_element("css selector", "form button").click()
    page.until("document.querySelector('#facts') && location.hash === ''")  # it keeps its half
    assert key not in driver.current_url
    driver.get_log("browser")  # of it, that the first page was refused
    driver.get(page.address)
    page.until("document.querySelector('#link').textContent === 'live'")
    return page


def test_a_tenants_page_says_what_it_has_and_why_it_waits(driver: Any, server: FrontServer) -> None:
    page = signed_in(driver, server, server.api_keys.add_key(HOSTILE))
    page.until("document.querySelectorAll('#charts canvas').length === 4")
    page.until("document.querySelector('#samples').textContent.includes('tokens ')")
    assert page.text("#state") == f"{HOSTILE}: 1 request is open"
    assert "$2.4000 of $9.0000" in page.text("#facts")
    assert f"request {2 * NUM_STEPS + 1} of this model has not come yet" in page.text("#waits")
    assert page.ask("document.querySelectorAll('#models tbody tr').length") == 2
    assert f"is: {HOSTILE}" in page.text("#models")
    assert "forward_backward" in page.text("#causes")
    assert "this page's" in page.text("#keys")
    assert page.text("#shown").endswith(":train:0")
    assert page.ask("document.getElementById('to-owner').hidden")
    page.ask("document.querySelectorAll('#models button')[0].click()")
    page.ask("document.querySelectorAll('#models button')[1].click()")
    page.until("document.querySelectorAll('#models button')[1].getAttribute('aria-pressed') === 'true'")
    assert_harmless(page)


def test_the_owners_page_says_what_the_service_does(driver: Any, server: FrontServer) -> None:
    page = signed_in(driver, server, server.api_keys.add_key("owner", SCOPES), "/owner")
    page.until("document.querySelectorAll('#tenants tbody tr').length")
    assert HOSTILE in page.text("#tenants")
    assert "1 optim_step" in page.text("#tenants")
    assert "dollars billed$2.4000" in page.text("#facts")
    assert "No machine has joined" in page.text("#fleet")
    assert f"it went wrong: {HOSTILE}" in page.text("#faults")
    assert_harmless(page)


def assert_harmless(page: Page) -> None:
    assert page.ask("window.owned === undefined")
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert page.complaints() == []


@pytest.mark.parametrize("path", ["/", "/owner"])
def test_the_pages_fit_a_phone_in_the_dark_and_are_accessible(
    driver: Any, server: FrontServer, path: str, tmp_path: Path
) -> None:
    page = signed_in(driver, server, server.api_keys.add_key(HOSTILE, SCOPES), path)
    page.dress(PHONE, "dark")
    driver.get(page.address)
    page.until("document.querySelector('#link').textContent === 'live'")
    assert page.ask("document.documentElement.scrollWidth") <= PHONE[0]
    page.picture(f"service-{path[1:] or 'tenant'}", tmp_path)
    for violation in page.violations():
        assert violation["impact"] not in ("serious", "critical"), violation


def test_the_page_asks_for_a_key_after_signing_out(driver: Any, server: FrontServer) -> None:
    page = signed_in(driver, server, server.api_keys.add_key(HOSTILE))
    driver.find_element("css selector", "header form button").click()
    page.until("document.querySelector('#key')")
    driver.find_element("id", "key").send_keys("tml-wrong")
    driver.find_element("css selector", "form button").click()
    page.until("document.querySelector('#why').textContent.includes('not known')")
