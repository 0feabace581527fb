"""The settings of `echo2 serve`: one TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from echo2.core.addresses import host_and_port
from echo2.core.documents import read_tables
from echo2.core.errors import UserError

#: Kinds of requests that may have a price.
PRICED = ("forward_backward", "forward", "sample")


class Quotas(Struct, forbid_unknown_fields=True, frozen=True):
    """`usd_per_million_tokens`: by kind of request (`forward_backward`, `forward`, or `sample`, for the prompt and the
    samples); other kinds are free. `quota_usd`, `quota_disk_gb`: limits by tenant of all spending, and of the sizes of
    checkpoints and samplers; tenants not listed have none.
    """

    usd_per_million_tokens: dict[str, Annotated[float, Meta(ge=0)]] = {}
    quota_usd: dict[str, Annotated[float, Meta(ge=0)]] = {}
    quota_disk_gb: dict[str, Annotated[float, Meta(ge=0)]] = {}

    def __post_init__(self) -> None:
        if wrong := sorted(self.usd_per_million_tokens.keys() - set(PRICED)):
            raise ValueError(f"{wrong[0]!r} has no price: only {', '.join(PRICED)} have")


class FleetSettings(Struct, forbid_unknown_fields=True, frozen=True):
    """`listen`: HOST:PORT where machines of the owner join to sample; empty: no machine can join. `advertise`: the host
    in their ticket; empty: the host of `listen`.
    """

    listen: str = ""
    advertise: str = ""

    def __post_init__(self) -> None:
        if self.listen:
            _ = self.address  # refuses a bad address when the file is read

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`.

        Raises:
            UserError: `listen` is not HOST:PORT.
        """
        host, port = host_and_port(self.listen, "fleet.listen", "0.0.0.0:8643")
        if not port:
            raise UserError(f"fleet.listen = {self.listen!r}: name a port, where machines find the service again.")
        return host, port


class ServiceSettings(Struct, forbid_unknown_fields=True):
    """What is served, and where. `bases`: a directory or hub id by the name that clients use; an empty one makes a tiny
    model. `database`: a URL for SQLAlchemy; empty: SQLite in the service's directory.
    """

    bases: Annotated[dict[str, str], Meta(min_length=1)]
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8642
    database: str = ""
    device: str = "auto"
    bills: Quotas = Quotas()
    fleet: FleetSettings = FleetSettings()


def load(path: Path) -> ServiceSettings:
    """Read the settings from a file.

    Raises:
        UserError: the file is missing, or a key or value is wrong.
    """
    try:
        return msgspec.convert(read_tables(path, "the service's file"), ServiceSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(ServiceSettings.__struct_fields__)
        raise UserError(f"{path}: {error}. Keys: {known}.") from error
