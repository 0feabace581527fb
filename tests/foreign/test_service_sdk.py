"""Real SDKs drive a real `echo2 serve`. Each has an environment of its own, which `make test-foreign` makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
from echo2_service.commands.serve import open_database
from echo2_service.front.request_guard import ApiKeys
from served import SDKS, Served

NUM_STEPS = 24
#: Steps of the client after which the service is killed.
KILL_AFTER = (3, 9, 15)

#: The newest of each kind; the others are for `make test-all`.
NEWEST = ("tinker-038", "logits")


@pytest.fixture
def sdk(request: pytest.FixtureRequest) -> str:
    """Asked for before anything is started: an SDK whose Python is missing costs nothing."""
    name: str = request.param
    if not (installed := house.REPOSITORY / f".venv-{name}" / ".installed").exists():
        pytest.skip(f"{installed.parent} is not there or not whole; `make test-foreign FOREIGN={name}` makes it")
    return name


@pytest.fixture
def served(sdk: str, tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    try:
        yield made
    finally:
        made.machine.terminate()
        made.process.terminate()
        made.machine.communicate(timeout=30)
        made.process.communicate(timeout=30)
    assert (made.machine.returncode, made.process.returncode) == (0, 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "sdk", [pytest.param(sdk, marks=() if sdk in NEWEST else pytest.mark.slow) for sdk in SDKS], indirect=True
)
def test_clients_of_the_sdk_get_what_they_rely_on(served: Served, sdk: str) -> None:
    database = open_database(served.folder)
    other = ApiKeys(database, time.time).add_key("other")
    database.close()
    text, _ = served.client(sdk, "conformance.py", other).communicate()
    lines = [line for line in text.splitlines() if line.startswith("ok ")]
    assert "FAIL" not in text, text
    assert len(lines) == 18, text
    assert served.num_sampled() > 0, "the machine that joined sampled nothing"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("sdk", NEWEST, indirect=True)
def test_a_client_does_not_notice_that_the_service_was_killed(served: Served, sdk: str) -> None:
    undisturbed, _ = served.client(sdk, "training.py", str(NUM_STEPS)).communicate()
    lines = []
    with served.client(sdk, "training.py", str(NUM_STEPS)) as client:
        assert client.stdout is not None
        for line in client.stdout:
            lines.append(line)
            if len(lines) in KILL_AFTER:
                served.kill()
                served.machine.kill()
                served.machine.communicate()
                served.start()
                served.start_machine()
    assert client.returncode == 0
    assert len(lines) == NUM_STEPS
    assert lines == undisturbed.splitlines(keepends=True)
