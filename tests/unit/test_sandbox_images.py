"""What podman and docker say of their own, with stand-ins: those that are installed are tested in
test_sandbox_containers.py."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from echo2.sandbox import folders
from echo2.sandbox.containers import Containers, Image
from echo2.sandbox.programs import ContainerFault, ContainerLimits, Ran

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers of Linux")


@pytest.mark.parametrize(
    ("warning", "refused"),
    [
        ("WARNING: Your kernel does not support swap limit capabilities. Memory limited without swap.", False),
        ("WARNING: Your kernel does not support memory limit capabilities. Limitation discarded.", True),
        ("Resource limits are not supported and ignored on cgroups V1 rootless systems", True),
    ],
)
def test_a_runtime_may_warn_but_not_do_without_limits(
    warning: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Docker 20.10 and podman 4.3 do; the last one says so beside a container that runs."""
    runs = f"run) echo '{warning}' >&2; echo up 1 /srv; exec cat;;"
    (tmp_path / "podman").write_text(f"#!/bin/sh\ncase $1 in {runs} esac\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def play() -> None:
        container = await Containers("podman").open(
            Image(name="some/image", files={"a": (b"", False)}), ContainerLimits()
        )
        await container.close()

    if refused:
        with pytest.raises(ContainerFault, match="podman does not start some/image: .*" + warning[-20:]):
            asyncio.run(play())
    else:
        asyncio.run(play())


def test_a_container_that_sees_the_machines_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends a command ends all that it sees. (podman's settings may say pidns = "host".)"""
    (tmp_path / "podman").write_text(
        "#!/bin/sh\ncase $1 in run | start) echo up 4711 /srv; exec cat;; exec) echo ran;; esac\n"
    )
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def play() -> None:
        container = await Containers("podman").open(Image(name="some/image"), ContainerLimits())
        try:
            for _ in range(2):
                with pytest.raises(ContainerFault, match="the process ids of the machine"):
                    await container.run("true", 5.0)
        finally:
            await container.close()

    asyncio.run(play())


def test_a_full_disk_of_the_runtime_is_a_fault_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else commands would fail for lack of room, and tests with them."""
    answers = f"run) echo up 1 /srv; exec cat;; info) echo {tmp_path};; exec) echo $8;;"  # the nonce of a command
    (tmp_path / "podman").write_text(f"#!/bin/sh\ncase $1 in {answers} esac\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def play() -> Ran:
        container = await Containers("podman").open(Image(name="some/image"), ContainerLimits())
        try:
            return await container.run("true", 5.0)
        finally:
            await container.close()

    assert asyncio.run(play()) == Ran(0, "")
    monkeypatch.setattr(folders, "LEFT_BYTES", 1 << 60)
    with pytest.raises(ContainerFault, match=f"The disk of {tmp_path} is full"):
        asyncio.run(play())
