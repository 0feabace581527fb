"""What `echo2 serve status` says in a terminal."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

from rich.console import Console

from echo2_service.commands.status import show
from echo2_service.front.overview import tenants
from front_service import Service

MACHINE = {"host": "<b>", "device": "cpu", "doing": "samples", "under_way": 3, "sampled": 1234, "price_usd_per_hour": 0}


def test_the_terminal_shows_tenants_and_machines_and_obeys_none_of_their_names(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        service.session(service.api_keys.add_key("<script>eve\x1b[2J"))
        service.model(service.session())
        found = {"tenants": tenants(service.database, service.now), "machines": {"w-1": MACHINE}, "waiting_samples": 0}
    console = Console(file=io.StringIO(), width=200)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    for cell in ("ada", "<script>eve", "w-1", "1,234"):
        assert cell in text
