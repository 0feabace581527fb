"""Containers in which a task's commands run: files that stay from one command to the next, and processes that do not.

What is there decides (`find_runtime`): podman or docker, which run images; else bubblewrap, whose containers see the
programs of this machine, read-only; else Landlock and seccomp (`confinement.py`), which give no files of their own. In
the last two, /app, /logs and so on are folders of this machine, and without bubblewrap they are not at these places:
scripts for all four begin their paths with $ECHO2_ROOT, which is empty elsewhere.

No container has a network unless its task asks for one, and its time, memory, processes and output have limits. A
command that exceeds one is ended with all that it started, and says so (`Ran.stopped`): that is the command's affair.
`ContainerFault` is the machine's: there is no runtime, it does not start, or it died.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from echo2.core.background import Shared
from echo2.core.child import ChildProcess
from echo2.core.errors import UserError
from echo2.sandbox import confinement
from echo2.sandbox.folders import FOLDERS, REMOVE, FolderContainer, full_disk, is_full, write_files
from echo2.sandbox.process_table import Used, usage_in
from echo2.sandbox.programs import (
    START_SECONDS,
    WRAPPED,
    ContainerFault,
    ContainerLimits,
    Program,
    Ran,
    must,
    outcome,
    refused,
    tidy_up,
)

#: Names one of RUNTIMES, in place of the first that works here.
VARIABLE = "ECHO2_CONTAINERS"
IMAGES = ("podman", "docker")
RUNTIMES = (*IMAGES, "bubblewrap", "landlock")
#: Of a container's folder, before the number of the process that owns it; and when one without an owner is removed.
PREFIX = "echo2-container-"
STALE_SECONDS = 3600.0
#: A container's first process: ends when our end of its stdin closes, and buries what others leave. It says its number,
#: for what ends a command ends all processes that it sees: where it is not the first, those are the machine's.
FIRST = 'echo "up $$ $PWD"; exec 3<&0; while :; do cat <&3 >/dev/null & wait $! && exit; done'
#: Of a runtime's description of itself: the folder that has its images and containers.
STORES = {"podman": "{{.Store.GraphRoot}}", "docker": "{{.DockerRootDir}}"}
CONTAINER_ID = re.compile("[0-9a-f]{32,}")
#: Of what a runtime says before that.
STARTUP_BYTES_MAX = 4096
#: Begins a command in the folder $2. A command before it may have removed that, and docker begins in no other.
IN_FOLDER = 'mkdir -p "$2" 2>/dev/null; cd "$2" 2>/dev/null; '


@dataclass(frozen=True, slots=True)
class Image:
    """What a container begins with. `directory`: where commands run; `files`: what is there, by relative path, each
    with whether it is executable. Images of podman and docker: `name`, or made of `files`, the context of a Dockerfile,
    in at most `build_seconds`; with a `name`, `files` are put into `directory`."""

    directory: str = "/app"
    files: Mapping[str, tuple[bytes, bool]] | None = None
    name: str = ""
    build_seconds: float = 600.0


class Container(Protocol):
    """A container, for one event loop; one command at a time."""

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        """Run a command of the shell. Raises ContainerFault."""

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        """Make the folder `place` (such as /tests) anew, with these files. Raises ContainerFault."""

    async def close(self) -> None:
        """End all processes and forget all files. What fails of that is logged."""


class ImageContainer:
    """A container of podman or docker. Its first process, of ours, ends with this one; a limit that is exceeded ends
    all its processes, and the next command starts it again with its files. `store`: the folder that has these."""

    def __init__(self, program: str, image: str, directory: str, limits: ContainerLimits, store: Path) -> None:
        self._program, self.image, self._directory, self._limits = program, image, directory, limits
        self._store = store
        self._name, self._id = f"echo2-{secrets.token_hex(8)}", ""
        self._main: ChildProcess | None = None
        self._lifeline: asyncio.StreamWriter | None = None  # its first process reads the end of this

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        if (said_no := refused(command)) is not None:
            return said_no
        main = await self._started()
        nonce, script = secrets.token_hex(8), IN_FOLDER + WRAPPED.replace("{END}", "kill -9 -1 2>/dev/null; ")
        env_words = [word for name, value in (variables or {}).items() for word in ("--env", f"{name}={value}")]
        words = ("sh", "-c", script, nonce, command, self._directory)
        program = (self._program, "exec", "--workdir", "/", *env_words, self._name, *words)
        output_bytes = self._limits.output_bytes + len(nonce) + 1
        used = partial(_used, self._id)
        ran = await Program(program, seconds, output_bytes, used=used, end=self._kill).run()
        if self._store.is_dir() and is_full(self._store):  # else it is on another machine
            raise ContainerFault(full_disk(self._store))
        if not ran.stopped and main.status is not None:
            format_ = "{{.State.OOMKilled}}"
            if "true" not in await must(self._program, "inspect", "--format", format_, self._name):
                raise ContainerFault(f"{self._program}'s container died during a command (status {main.status}).")
            ran = replace(ran, stopped="memory")
        return outcome(nonce, ran, self._program)

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        await self._started()
        with tempfile.TemporaryDirectory(prefix="echo2-files-") as folder:
            source = Path(folder) / "files"
            await asyncio.to_thread(write_files, source, files)
            made_anew = ("sh", "-c", 'rm -rf "$0" && mkdir -p "$0"', place)
            await must(self._program, "exec", "--workdir", "/", self._name, *made_anew)
            await must(self._program, "cp", f"{source}/.", f"{self._name}:{place}")

    async def close(self) -> None:
        if self._main is not None:
            await tidy_up(self._program, "rm", "--force", "--volumes", self._name)
            self._main.kill()

    async def _started(self) -> ChildProcess:
        if self._main is not None and self._main.status is None:
            return self._main
        words = [self._program, *(self._made() if self._main is None else ["start", "--attach", "--interactive"])]
        words += [self._name] if self._main is not None else []
        try:
            self._main = ChildProcess(("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *words), has_pipes=True)
            stream, self._lifeline = await self._main.streams()
            async with asyncio.timeout(START_SECONDS):
                folder = await _is_up(stream)
            self._directory = self._directory or folder
            self._id = self._id or (await must(self._program, "inspect", "--format", "{{.Id}}", self._name)).strip()
        except (OSError, TimeoutError) as error:
            if self._main is not None:  # else the next command would run in it
                self._main.kill()
                await self._main.ended(START_SECONDS)
            raise ContainerFault(
                f"{self._program} does not start {self.image}: {str(error) or 'it took too long'}"
            ) from error
        return self._main

    def _made(self) -> list[str]:
        memory = str(self._limits.memory_bytes)
        words = ["run", "--interactive", "--name", self._name, "--label", "echo2", "--stop-timeout", "0"]
        words += ["--log-driver", "none"]  # else what a command prints to /proc/1/fd/1 is kept on the machine
        words += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(self._limits.num_processes)]
        words += ["--cpus", f"{self._limits.cpus:g}", "--security-opt", "no-new-privileges", *ulimits()]
        words += [] if self._limits.has_network else ["--network", "none"]
        return [*words, "--entrypoint", "/bin/sh", self.image, "-c", FIRST]

    async def _kill(self) -> None:
        await Program((self._program, "kill", self._name), START_SECONDS).run()
        if self._main is not None and await self._main.ended(START_SECONDS) is None:
            raise ContainerFault(f"{self._program} did not end its container {self._name}.")


def _used(container_id: str, _: int) -> Used:
    """Return what a container's processes use, none of which is a child of ours: nothing, where its control group does
    not tell them apart."""
    return usage_in(container_id) if CONTAINER_ID.fullmatch(container_id) else Used()


async def _is_up(stream: asyncio.StreamReader) -> str:
    """Wait for the first process of a container; return the folder that it is in. What the runtime says before, as that
    swap has no limit, is no fault, unless it does without other limits.

    Raises:
        OSError: the container did not start, or without its limits, or it sees the machine's processes.
    """
    output = b""
    while not (up := re.fullmatch(rb"up (\d+) (/.*)\n", line := await stream.readline())):
        output += line
        if not line or len(output) > STARTUP_BYTES_MAX:
            break
    if up is None or b"ignored" in output or b"discarded" in output:
        raise OSError(output[:STARTUP_BYTES_MAX].decode(errors="replace").strip())
    if up[1] != b"1":
        raise OSError("its containers have the process ids of the machine (pidns = host?), which commands could end")
    return up[2].decode().strip()


def ulimits() -> list[str]:
    """Limits that this process can pass on; a runtime's own may be above them, and refused."""
    return ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=32768:32768"]


@cache
def find_runtime() -> str:
    """Return the first of RUNTIMES that works here, or the one that ECHO2_CONTAINERS names.

    Raises:
        ContainerFault: none works; the message says why.
    """
    named = os.environ.get(VARIABLE, "")
    reasons = {}
    for name in [named] if named else RUNTIMES:
        reasons[name] = _unusable(name) or ("" if named else _unasked(name))
        if not reasons[name]:
            return name
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if named:
        raise ContainerFault(
            f"Tasks' commands need a container, and {VARIABLE} = {named!r} gives none ({reasons[named]}). Mend that, "
            f"or unset {VARIABLE}: then the first of {', '.join(RUNTIMES)} that works here is taken."
        )
    raise ContainerFault(f"Tasks' commands need a container, and this machine has none ({why}). Install bubblewrap.")


def _unasked(name: str) -> str:
    """Why a runtime must be asked for."""
    if name != "landlock" or os.getuid() == 0:
        return ""
    reason = "as no root its commands can change modes and times of all files of this user"
    return f"{reason}; {VARIABLE}=landlock takes it all the same"


def _unusable(name: str) -> str:
    if name not in RUNTIMES:
        return f"{VARIABLE} must be one of {', '.join(RUNTIMES)}"
    if name == "landlock":
        return confinement.missing()
    program = "bwrap" if name == "bubblewrap" else name
    if shutil.which(program) is None:
        return "it is not installed"
    if name == "bubblewrap" and (reason := confinement.missing_filter()):
        return reason
    trial = ["--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    try:
        words = [program, *(["info"] if name in IMAGES else trial)]
        done = subprocess.run(words, capture_output=True, timeout=START_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-300:]


class Containers:
    """Opens containers of this machine's runtime. Images are pulled or built once."""

    def __init__(self, runtime: str) -> None:
        self.runtime = runtime
        self._images = Shared[str, str](self._image)
        self._stores = Shared[str, Path](self._store)
        self._pending_images: dict[str, Image] = {}
        self._is_tidy = False

    async def open(self, image: Image, limits: ContainerLimits) -> Container:
        """Open a container.

        Raises:
            ContainerFault: the runtime cannot, or its network would be this machine's own.
        """
        if self.runtime in IMAGES:
            key = image.name or _tag(image)
            self._pending_images[key] = image
            name, store = await self._images.get(key), await self._stores.get(self.runtime)
            opened: Container = ImageContainer(self.runtime, name, image.directory, limits, store)
            try:
                if image.name and image.files:
                    await opened.put(image.directory or "/app", image.files)
            except BaseException:
                await opened.close()
                raise
            return opened
        if limits.has_network:
            raise ContainerFault(f"The task needs a network, and {self.runtime} has only this machine's own.")
        if below := [name for name in FOLDERS if image.directory.startswith(f"/{name}/")]:
            problem = f"The task's directory {image.directory} is below /{below[0]}, which {self.runtime} cannot do."
            raise ContainerFault(f"{problem} Install podman.")
        await self._tidy()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        if os.getuid() == 0:
            os.chmod(folder, 0o755)  # commands run as another user
        opened = FolderContainer(folder, image.directory, limits, self.runtime == "bubblewrap")
        for name in FOLDERS:
            await opened.put(name, (image.files or {}) if name == "app" else {})
        return opened

    async def _tidy(self) -> None:
        """Remove folders of processes that were killed: an hour old, so that a machine that shares its folder for
        temporary files with others, whose processes it does not see, removes none in use."""
        if self._is_tidy:
            return
        self._is_tidy = True
        for path in _stale_folders():
            await tidy_up(*REMOVE, path)

    async def _store(self, runtime: str) -> Path:
        return Path((await must(runtime, "info", "--format", STORES[runtime])).strip() or "/none")

    async def _image(self, key: str) -> str:
        image, program = self._pending_images.pop(key), self.runtime
        filters = ("--filter", "label=echo2", "--filter", "until=1h")
        await tidy_up(program, "container", "prune", "--force", *filters)  # of owners that were killed
        is_missing = (await Program((program, "image", "inspect", key), START_SECONDS).run()).status
        if is_missing and image.name:
            await must(program, "pull", "--quiet", key, seconds=image.build_seconds)
        elif is_missing:
            with tempfile.TemporaryDirectory(prefix="echo2-build-") as folder:
                context = Path(folder) / "context"
                await asyncio.to_thread(write_files, context, image.files or {})
                limits = ulimits() if program == "podman" else []
                build = (program, "build", "--quiet", "--label", "echo2", *limits, "--tag", key, str(context))
                await must(*build, seconds=image.build_seconds)
        return key


_of_this_process = cache(Containers)
#: Faults of the containers of one rollout, for whoever plays it: agents' frameworks hide what a tool raises.
FAULTS: ContextVar[list[ContainerFault]] = ContextVar("FAULTS")


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except ContainerFault as error:
        FAULTS.get([]).append(error)
        raise


@dataclass(frozen=True, slots=True)
class _NotedContainer:
    """A container whose faults are noted."""

    inner: Container

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        with _noted():
            return await self.inner.run(command, seconds, variables)

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        with _noted():
            await self.inner.put(place, files)

    async def close(self) -> None:
        await self.inner.close()


@asynccontextmanager
async def container(
    image: str = "", files: Mapping[str, str | bytes] | None = None, **limits: Any
) -> AsyncIterator[Container]:
    """Open a container of this machine's runtime for an environment of the user's (`echo2.container`). Behind the block
    it ends, with all that runs in it. `image`: of podman and docker; others have none. `files`: put where commands run,
    by relative path. `limits`: as in `ContainerLimits`. A ContainerFault loses the rollout of a harness also if that
    catches it.

    Raises:
        ContainerFault: this machine has no containers, or its runtime fails.
        UserError: the runtime needs an image, or a path leads out of the container's folder.
    """
    with _noted():
        containers = _of_this_process(await asyncio.to_thread(find_runtime))
    if not image and containers.runtime in IMAGES:
        raise UserError(f"{containers.runtime} needs an image: echo2.container(image='python:3.12-slim').")
    encoded_files = {
        name: (text.encode() if isinstance(text, str) else text, False) for name, text in (files or {}).items()
    }
    directory = "" if containers.runtime in IMAGES and not encoded_files else "/app"
    with _noted():
        opened = await containers.open(Image(directory, encoded_files, image), ContainerLimits(**limits))
    try:
        yield _NotedContainer(opened)
    finally:
        await opened.close()


def _stale_folders() -> list[str]:
    """Return those of this user: in a shared folder others may put links, or folders that they change meanwhile."""
    now, stale = time.time(), []
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{PREFIX}*-*")):
        owner = os.path.basename(path).removeprefix(PREFIX).partition("-")[0]
        try:
            facts = os.lstat(path)
        except FileNotFoundError:  # its owner has closed it
            continue
        is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
        if is_own and not os.path.exists(f"/proc/{owner}") and facts.st_mtime < now - STALE_SECONDS:
            stale.append(path)
    return stale


def _tag(image: Image) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, (data, is_executable) in sorted((image.files or {}).items()):
        digest.update(repr((name, is_executable, len(data))).encode() + data)
    return f"echo2-task:{digest.hexdigest()}"
