"""Debian's PostgreSQL on the loopback, for tests: a cluster of its own in a temporary directory."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import sqlalchemy as sql

#: Where Debian has the programs of each version.
PROGRAMS = Path("/usr/lib/postgresql")


class PostgresServer:
    """Runs while it is used as a context, but between `stop` and `start`."""

    def __init__(self) -> None:
        self._programs = max(PROGRAMS.glob("*/bin"), key=lambda path: int(path.parent.name))
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))  # short: the socket's path is bounded
        if os.geteuid() == 0:  # the server refuses to be root
            shutil.chown(self._folder, "postgres", "postgres")
        self._numbers = itertools.count()
        self._call("initdb", "--auth=trust", "--username=postgres", "--no-sync", "-D", f"{self._folder}/data")

    @staticmethod
    def is_there() -> bool:
        """Whether Debian's package is installed."""
        return bool(list(PROGRAMS.glob("*/bin/initdb")))

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def stop(self) -> None:
        """All connections break; what was committed stays."""
        self._call("pg_ctl", "stop", "-m", "immediate", "-D", f"{self._folder}/data")

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"service_{next(self._numbers)}"
        engine = sql.create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sql.text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return self._url(name)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self._folder} -c fsync=off"
        log = f"{self._folder}/log"
        self._call("pg_ctl", "start", "--wait", "-D", f"{self._folder}/data", "-l", log, "-o", options)

    def _url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        name = "postgres" if os.geteuid() == 0 else None  # it does not run as root
        done = subprocess.run(
            command,
            cwd="/",
            user=name,
            group=name,
            extra_groups=[] if name else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
