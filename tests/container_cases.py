"""Containers of every runtime that works on this machine; tests of the others are skipped, saying why."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.sandbox import containers
from echo2.sandbox.containers import IMAGES, Container, Containers, Image
from echo2.sandbox.programs import ContainerLimits

LIMITS = ContainerLimits(memory_bytes=96 << 20, num_processes=40, output_bytes=1000)


def needs(runtime: str) -> pytest.MarkDecorator:
    reason = containers._unusable(runtime)
    return pytest.mark.skipif(bool(reason), reason=f"no {runtime} here: {reason}")


EACH_RUNTIME, WITHOUT_IMAGES = (
    pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in names])
    for names in (containers.RUNTIMES, [name for name in containers.RUNTIMES if name not in IMAGES])
)


def image_for(runtime: str, **files: bytes) -> Image:
    """An image with these files where commands run, made without a network."""
    plain = {name: (data, False) for name, data in files.items()}
    if runtime not in IMAGES:
        return Image("/app", plain)
    if (busybox := shutil.which("busybox")) is None:
        pytest.skip("an image needs a program, and there is no busybox here: apt-get install busybox-static")
    links = 'RUN ["/bin/busybox", "--install", "-s", "/bin"]'
    text = f"FROM scratch\nCOPY busybox bash /bin/\n{links}\nWORKDIR /app\nCOPY files /app\n"
    context = {f"files/{name}": entry for name, entry in {**plain, "none": (b"", False)}.items()}
    context["bash"] = b'#!/bin/sh\nexec sh "$@"\n', True  # as far as these tests need it
    return Image("", {**context, "Dockerfile": (text.encode(), False), "busybox": (Path(busybox).read_bytes(), True)})


def inside(
    runtime: str, scene: Callable[[Container], Awaitable[Any]], limits: ContainerLimits = LIMITS, **files: bytes
) -> Any:
    async def play() -> Any:
        container = await Containers(runtime).open(image_for(runtime, **files), limits)
        try:
            return await scene(container)
        finally:
            await container.close()

    return asyncio.run(play())


def left_over(name: str) -> list[str]:
    """Processes of this machine whose command line has this name."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if name in line and int(pid) != os.getpid():
            found.append(line)
    return found
