"""The settings of `echo2 serve`: one TOML file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from echo2.core.addresses import host_and_port
from echo2.core.documents import read_tables
from echo2.core.errors import UserError

log = logging.getLogger(__name__)

#: Kinds of requests that may have a price.
PRICED = ("forward_backward", "forward", "sample")


#: Stands for every tenant that is not named.
OTHERS = "*"
#: Bounded, since a bill of an infinite price stays infinite, and dates end with the year 9999.
ByTenant: TypeAlias = dict[str, Annotated[float, Meta(ge=0, le=1e9)]]
DaysByTenant: TypeAlias = dict[str, Annotated[float, Meta(ge=0, le=36500)]]


class Quotas(Struct, forbid_unknown_fields=True, frozen=True):
    """`usd_per_million_tokens`: by kind of request (`forward_backward`, `forward`, or `sample`, for the prompt and the
    samples); other kinds are free. By tenant, where "*" means those that are not named: `quota_usd` and
    `quota_disk_gb` limit all spending, and all that is kept on the disk; `checkpoint_days` is for how long checkpoints
    are kept. Without a value there is no limit.
    """

    usd_per_million_tokens: ByTenant = {}
    quota_usd: ByTenant = {}
    quota_disk_gb: ByTenant = {}
    checkpoint_days: DaysByTenant = {}

    def __post_init__(self) -> None:
        if wrong := sorted(self.usd_per_million_tokens.keys() - set(PRICED)):
            raise ValueError(f"{wrong[0]!r} has no price: only {', '.join(PRICED)} have")


def of_tenant(limits: ByTenant, tenant: str) -> float | None:
    """Return a tenant's limit; None if it has none."""
    return limits.get(tenant, limits.get(OTHERS))


#: The version of a file that is not there.
GONE = (0, 0, 0)


class Tariff:
    """The prices and quotas of now, `quotas`: those of the service's file, which the operator may change meanwhile."""

    def __init__(self, quotas: Quotas, file: Path | None = None) -> None:
        self.quotas, self._file = quotas, file
        self._read: tuple[int, int, int] | None = None  # the file's version; it may have changed since the start
        self._seen: tuple[int, int, int] | None = None

    def reread(self) -> None:
        """Read the file again if it has changed, and no more since the last call: half of a file may be one without
        prices and quotas. A file with a mistake, or none, changes nothing, which the log says.
        """
        previous, self._seen = self._seen, self._version()
        if self._seen == self._read or self._seen != previous or self._file is None:
            return
        self._read = self._seen
        if self._seen == GONE:
            log.warning("prices and quotas stay as they were: %s is gone", self._file)
            return
        try:
            self.quotas = load(self._file).bills
            log.info("prices and quotas are those of %s as it is now", self._file)
        except UserError as error:
            log.warning("prices and quotas stay as they were: %s", error)

    def _version(self) -> tuple[int, int, int] | None:
        try:
            stat = None if self._file is None else self._file.stat()
        except OSError:  # or it is being replaced
            return GONE
        return None if stat is None else (stat.st_ino, stat.st_mtime_ns, stat.st_size)


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
        what, _, place = str(error).partition(" - at `$.")
        place = place.rstrip("`")
        kind = {"": ServiceSettings, "bills": Quotas, "fleet": FleetSettings}.get(place)
        keys = f" Keys: {', '.join(kind.__struct_fields__)}." if kind is not None else ""
        raise UserError(f"{path}: {f'{place}: ' if place else ''}{what[0].lower()}{what[1:]}.{keys}") from error
