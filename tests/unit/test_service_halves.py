"""Half of a surrogate pair in a text: JSON can write it, no database and no answer can. The request is refused, and the
field named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from starlette.routing import Route

from echo2.core.errors import PeerError
from echo2_service.front import bodies
from echo2_service.front.app import UNSERVED
from echo2_service.front.request_guard import for_tenants
from front_service import Service

#: What these read is no JSON body.
UNREAD = {
    "/sign-in",
    "/sign-out",
    "client/config",
    "client/dynamic_config",
    "telemetry",
    "adapters",
    *(path for _, path in UNSERVED),
}


def text_fields() -> Iterator[tuple[type[msgspec.Struct], str]]:
    kinds = [one for one in vars(bodies).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    for kind in kinds:
        yield from ((kind, field) for field in kind.__struct_fields__)


@pytest.mark.parametrize("half", [b'"\\ud800"', b'["x", "\\uDFFF"]', b'{"a": "\xed\xa0\x80"}', b'{"\\udc00": 1}'])
def test_the_error_names_a_field_with_half_a_character(half: bytes) -> None:
    for kind, field in text_fields():
        with pytest.raises(PeerError, match=rf"{field}\S* has (a key with )?half of a surrogate pair"):
            bodies.parse(kind, b'{"seq_id": 1, "%s": %s}' % (field.encode(), half))


def test_the_search_for_the_field_takes_no_memory_for_others() -> None:
    """The words of every place were made: 200 kB took 5 s and 159 MiB, and 4 MB may come."""
    body = b'{"%s": [%s"\\ud800"]}' % (b"k" * 20_000, b"1," * 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(PeerError, match=r"k{64}\[10000\] has half of a surrogate pair"):
            bodies.parse(bodies.SamplerBody, body)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_half_a_character_is_refused_by_every_route_that_reads_it(tmp_path: Path) -> None:
    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite")) as service:
        refuses_everywhere(service)


def refuses_everywhere(service: Service) -> None:
    routes = [one for one in service.front.asgi.routes if isinstance(one, Route) and "POST" in (one.methods or ())]
    for route in routes:
        path = route.path.removeprefix("/api/v1/")
        for body in (b'{"model_id": "\\ud800", "seq_id": 1}', b'{"seq_id": 1, "x": {"\\ud800": "y"}}'):
            headers = {"x-api-key": service.key}
            answer = service.client.post(route.path, content=body, headers=headers)
            is_read = path not in UNREAD and "{" not in path
            assert answer.status_code == 400 or not is_read, (path, answer.text)
            assert "half of a surrogate pair" in answer.text or not is_read, (path, answer.text)


def test_an_error_that_quotes_half_a_character_can_be_sent() -> None:
    assert for_tenants("target_modules has 'x\ud800'").encode() == b"target_modules has 'x?'"
