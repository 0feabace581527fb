"""One thread per process: on two cores, OpenMP barriers make two threads several times slower. And no example of a
property test fails for being slow: that is the machine's affair. Examples are the same in every run, so that a change
is to blame for a failure, and three times as many in `make test-all`; `HYPOTHESIS_PROFILE=explore` draws new ones.
Tests import scripts of benchmarks/ by their names."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from house import REPOSITORY
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from echo2_service.settings import Quotas
    from front_service import Service

BENCHMARKS = REPOSITORY / "benchmarks"
sys.path += [str(folder) for folder in (BENCHMARKS, *sorted(BENCHMARKS.iterdir())) if folder.is_dir()]

at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", at_any_speed, derandomize=True, max_examples=20)
settings.register_profile("all", at_any_speed, derandomize=True, max_examples=60)
settings.register_profile("explore", at_any_speed)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def sort_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, as `echo2 demo` builds it, with a fraction of the parameters: once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "models" / "digit_sorting"
    out.parent.mkdir(exist_ok=True)
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():  # it is there whole or not at all
            command = [sys.executable, "-m", "echo2.demo.digit_sorting", "--out", str(out), "--heads", "3"]
            subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY)
    return out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system of one's own is not allowed here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return small_disk


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, sort_model: Path) -> Path:
    """A directory as a user has it after `make demo` and `examples/make_data.py`."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPOSITORY / "examples", root / "examples")
    shutil.copytree(sort_model, root / "outputs" / "models" / "digit_sorting")
    subprocess.run([sys.executable, "examples/make_data.py"], cwd=root, check=True, capture_output=True)
    return root


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Debian's server, where it is installed."""
    pytest.importorskip("psycopg")
    if not PostgresServer.is_there():
        pytest.skip("no PostgreSQL here: apt install postgresql")
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A folder in a bucket of moto's server, where it is installed: `make test-foreign FOREIGN=s3`."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/run"
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of a service, in each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/service.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def quotas() -> Quotas:
    """Of the services below; files of tests have their own."""
    from echo2_service.front.app import NO_QUOTAS  # not for the tests of the core

    return NO_QUOTAS


@pytest.fixture
def service(tmp_path: Path, quotas: Quotas) -> Iterator[Service]:
    from front_service import Service

    with closing(Service(tmp_path, f"sqlite:///{tmp_path}/service.sqlite", quotas)) as made:
        yield made


@pytest.fixture
def anywhere(tmp_path: Path, url: str, quotas: Quotas) -> Iterator[Service]:
    """A service with each kind of database."""
    from front_service import Service

    with closing(Service(tmp_path, url, quotas)) as made:
        yield made


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """Settings that pass: a directory that looks like a model, rows and a reward."""
    from model_cases import model_directory

    model = model_directory(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    return {
        "model": {"path": str(model)},
        "tasks": {"source": str(rows)},
        "reward": {"functions": ["exact_match"]},
        "sampling": {"max_tokens": 8},
    }
