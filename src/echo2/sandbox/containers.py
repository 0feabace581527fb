"""Containers in which a task's commands run: files that stay from one command to the next, and processes that do not.

What is there decides (`find_runtime`): podman or docker, which run images; else bubblewrap, whose containers see the
programs of this machine, read-only; else Landlock and seccomp (`confinement.py`), which give no files of their own. Of
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
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from echo2.core.background import Shared
from echo2.core.child import PACKAGE_ROOT, ChildProcess
from echo2.core.errors import UserError
from echo2.sandbox import confinement
from echo2.sandbox.process_table import Used, usage

#: A program with its arguments, and its environment.
Started = tuple[tuple[str, ...], Mapping[str, str]]
#: Names one of RUNTIMES, in place of the first that works here.
VARIABLE = "ECHO2_CONTAINERS"
IMAGES = ("podman", "docker")
RUNTIMES = (*IMAGES, "bubblewrap", "landlock")
ROOT = "ECHO2_ROOT"
CHECK_SECONDS = 0.1  # between two looks at a command's processes
START_SECONDS = 60.0  # for the runtime to start or end a container
PRINTED_BYTES_MAX = 16 << 20  # what a command may print, whatever of it is kept
FILE_BYTES_MAX = 1 << 30  # of one file, where no image's storage limits it
#: Folders that a task's commands may write, where there is no image.
FOLDERS = ("app", "logs", "root", "tmp")
#: Variables of a command, where there is no image.
PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
#: Says that the container is there, then runs the command ($1) without input; what is put for END comes last.
WRAPPED = (
    'echo "$0"; if command -v bash >/dev/null; then bash -c "$1" </dev/null; else sh -c "$1" </dev/null; fi; '
    "status=$?; {END}exit $status"
)
#: Removes a folder in which a command may have made folders that nobody may enter.
REMOVE = ("/bin/sh", "-c", 'chmod -R u+rwX "$0" 2>/dev/null; rm -rf "$0"')
#: Of a container's folder, before the number of the process that owns it; and when one without an owner is removed.
PREFIX = "echo2-container-"
STALE_SECONDS = 3600.0
#: A container's first process: ends when our end of its stdin closes, and buries what others leave.
FIRST = "echo up; exec 3<&0; while :; do cat <&3 >/dev/null & wait $! && exit; done"
#: What may be read of /etc without secrets.
ETC = ("alternatives", "ld.so.cache", "localtime", "passwd", "group")


class ContainerFault(UserError):
    """The machine is at fault: no runtime, or one that does not start or died."""


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a container. `cpus` counts only with images. Shared memory is counted once."""

    memory_bytes: int = 2 << 30
    num_processes: int = 256
    output_bytes: int = 8 << 10
    cpus: float = 1.0
    has_network: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did. `status`: its exit status; `output`: the first and last of what it printed, at most
    `ContainerLimits.output_bytes`; `stopped`: the limit that ended it (time, memory, processes, output), or empty."""

    status: int
    output: str
    stopped: str = ""


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
        """End all processes and forget all files."""


class _Heard:
    """Keeps the first and the last of what a command prints."""

    def __init__(self, most: int) -> None:
        self._half, self.num_bytes = max(1, most // 2), 0
        self._first, self._last = bytearray(), bytearray()

    async def listen(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.num_bytes += len(data)
            room = self._half - len(self._first)
            self._first += data[: max(0, room)]
            self._last = (self._last + data[max(0, room) :])[-self._half :]

    def text(self) -> str:
        gap = self.num_bytes - len(self._first) - len(self._last)
        between = b"\n... %d bytes left out ...\n" % gap if gap else b""
        return (bytes(self._first) + between + bytes(self._last)).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _Call:
    """A program that is run to its end. `over(pid)` names a limit that its processes exceed; `end()` ends them."""

    program: tuple[str, ...]
    seconds: float
    output_bytes: int = 8 << 10
    environment: Mapping[str, str] | None = None
    over: Callable[[int], str] = lambda pid: ""
    end: Callable[[], Awaitable[None]] | None = None

    async def run(self) -> tuple[int, str, str]:
        """Return its status, what it printed, and the limit that ended it."""
        together = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *self.program)
        heard, stopped = _Heard(self.output_bytes), ""
        try:
            child = ChildProcess(together, environment=self.environment, has_pipes=True)
        except OSError as error:
            raise ContainerFault(f"{self.program[0]} does not start: {error}.") from error
        try:
            stream, _stdin = await child.streams()  # held: its end ends the command
            async with asyncio.TaskGroup() as group:
                group.create_task(heard.listen(stream))
                if stopped := await self._limit(child, heard):
                    await self._end(child)
        finally:
            if child.status is None:
                await asyncio.shield(self._end(child))
            child.kill()
        return child.status or 0, heard.text(), stopped

    async def _limit(self, child: ChildProcess, heard: _Heard) -> str:
        clock = asyncio.get_running_loop().time
        until = clock() + self.seconds
        while await child.ended(min(CHECK_SECONDS, self.seconds)) is None:
            exceeded = "time" if clock() > until else "output" if heard.num_bytes > PRINTED_BYTES_MAX else ""
            if exceeded := exceeded or self.over(child.pid):
                return exceeded
        return ""

    async def _end(self, child: ChildProcess) -> None:
        if self.end is not None:
            await self.end()
        for pid in usage(child.pid).inner:  # bubblewrap's own ends when the kernel has ended what it holds
            _kill(pid)
        if await child.ended(START_SECONDS if self.end is not None else 1.0) is None:
            child.kill()
            await child.ended(START_SECONDS)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


async def _must(*program: str, seconds: float = START_SECONDS) -> str:
    status, said, stopped = await _Call(program, seconds).run()
    if status or stopped:
        failed = f"failed with status {status}: {said.strip()[-1500:]}"
        reason = f"took longer than {seconds:g} s" if stopped else failed
        raise ContainerFault(f"`{' '.join(program[:3])}` {reason}")
    return said


def _outcome(nonce: str, status: int, said: str, stopped: str, what: str) -> Ran:
    """Read what a wrapped command printed. Raises ContainerFault: it was never begun."""
    line, _, output = said.partition("\n")
    if line != nonce and not stopped:
        raise ContainerFault(f"{what} does not run commands (status {status}): {said.strip()[-1500:]}")
    return Ran(128 - status if status < 0 else status, output, stopped)


def write_files(folder: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    """Write files below a new folder that nobody else can change. Raises UserError: a path leads out of it."""
    folder.mkdir()
    for name, (data, is_executable) in files.items():
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts:
            raise UserError(f"A task's file has the path {name!r}: it must be relative, and without '..'.")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o755 if is_executable else 0o644)
    for place in (folder, *folder.rglob("*/")):
        if place.is_dir():
            place.chmod(0o755)  # whatever this process's mask is: commands run as somebody else


class FolderContainer:
    """A container over folders of this machine: bubblewrap, or Landlock where that is not there. What is in its folder
    itself, a command can neither make nor replace; it writes only what is in FOLDERS."""

    def __init__(self, folder: Path, image: Image, limits: ContainerLimits, is_bubblewrap: bool) -> None:
        self._folder, self._image, self._limits, self._is_bubblewrap = folder, image, limits, is_bubblewrap

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        nonce, script = secrets.token_hex(8), WRAPPED.replace("{END}", "")
        given = {**PLAIN, **(variables or {})}
        build = self._bubblewrap if self._is_bubblewrap else self._landlock
        program, environment = build(given, ("/bin/sh", "-c", script, nonce, command))
        over, output_bytes = self._over, self._limits.output_bytes + len(nonce) + 1
        call = _Call(program, seconds, output_bytes, environment, over)
        status, said, stopped = await call.run()
        if status < 0 and not stopped:
            raise ContainerFault(f"A container was killed from outside, by signal {-status}.")
        return _outcome(nonce, status, said, stopped, program[0])

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        target = self._folder / place.strip("/")
        await _must(*REMOVE, str(target))
        await asyncio.to_thread(write_files, target, files)
        if target.name in FOLDERS and os.getuid() == 0:
            await _must("chown", "-hR", str(confinement.NOBODY), str(target))

    async def close(self) -> None:
        await _must(*REMOVE, str(self._folder))

    def _over(self, pid: int) -> str:
        used: Used = usage(pid)
        if len(used.pids) > self._limits.num_processes:
            return "processes"
        return "memory" if used.exceeds(self._limits.memory_bytes) else ""

    def _bubblewrap(self, variables: Mapping[str, str], command: tuple[str, ...]) -> Started:
        words = ["setpriv", f"--reuid={confinement.NOBODY}", f"--regid={confinement.NOBODY}", "--clear-groups"]
        words = [*(words if os.getuid() == 0 else []), "bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
        words += ["--uid", "0", "--gid", "0", "--hostname", "task", "--proc", "/proc", "--dev", "/dev", "--clearenv"]
        for place in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            is_link = os.path.islink(place)
            words += ["--symlink", os.readlink(place), place] if is_link else ["--ro-bind-try", place, place]
        for name in ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for inner in sorted(self._folder.iterdir()):
            place = self._image.directory if inner.name == "app" else f"/{inner.name}"
            words += ["--bind" if inner.name in FOLDERS else "--ro-bind", str(inner), place]
        for name, value in {"HOME": "/root", **variables}.items():
            words += ["--setenv", name, value]
        limits = ["prlimit", f"--nproc={self._limits.num_processes}", f"--fsize={FILE_BYTES_MAX}", "--core=0", "--"]
        words += ["--remount-ro", "/", "--chdir", self._image.directory, "--", *limits, *command]
        return tuple(words), {"PATH": os.environ.get("PATH", os.defpath)}  # /proc/1/environ shows what bwrap began with

    def _landlock(self, variables: Mapping[str, str], command: tuple[str, ...]) -> Started:
        folder, processes = str(self._folder), str(self._limits.num_processes)
        words = (sys.executable, "-P", "-m", confinement.__name__, folder, str(FILE_BYTES_MAX), processes)
        inner = ("/bin/sh", "-c", 'cd "$0" && exec "$@"', f"{folder}/app", *command)
        own = {"HOME": f"{folder}/root", "TMPDIR": f"{folder}/tmp", ROOT: folder, "PYTHONPATH": PACKAGE_ROOT}
        return (*words, *inner), {**own, **variables}


class ImageContainer:
    """A container of podman or docker. Its first process, of ours, ends with this one; a limit that is exceeded ends
    all its processes, and the next command starts it again with its files."""

    def __init__(self, program: str, image: str, directory: str, limits: ContainerLimits) -> None:
        self._program, self.image, self._directory, self._limits = program, image, directory, limits
        self._name = f"echo2-{secrets.token_hex(8)}"
        self._main: ChildProcess | None = None
        self._lifeline: asyncio.StreamWriter | None = None  # its first process reads the end of this

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        main = await self._started()
        nonce, script = secrets.token_hex(8), WRAPPED.replace("{END}", "kill -9 -1 2>/dev/null; ")
        given = [word for name, value in (variables or {}).items() for word in ("--env", f"{name}={value}")]
        where = ["--workdir", self._directory] if self._directory else []
        program = (self._program, "exec", *where, *given, self._name, "sh", "-c", script, nonce, command)
        output_bytes = self._limits.output_bytes + len(nonce) + 1
        status, said, stopped = await _Call(program, seconds, output_bytes, end=self._kill).run()
        if not stopped and main.status is not None:
            format_ = "{{.State.OOMKilled}}"
            if "true" not in await _must(self._program, "inspect", "--format", format_, self._name):
                raise ContainerFault(f"{self._program}'s container died during a command (status {main.status}).")
            stopped = "memory"
        return _outcome(nonce, status, said, stopped, self._program)

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        await self._started()
        with tempfile.TemporaryDirectory(prefix="echo2-files-") as folder:
            source = Path(folder) / "files"
            await asyncio.to_thread(write_files, source, files)
            await _must(self._program, "exec", self._name, "sh", "-c", 'rm -rf "$0" && mkdir -p "$0"', place)
            await _must(self._program, "cp", f"{source}/.", f"{self._name}:{place}")

    async def close(self) -> None:
        if self._main is not None:
            await _Call((self._program, "rm", "--force", "--volumes", self._name), START_SECONDS).run()
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
                said = await stream.readline()
                if said != b"up\n":
                    said += await stream.read(2000)
                    raise OSError(said.decode(errors="replace"))
        except (OSError, TimeoutError) as error:
            raise ContainerFault(
                f"{self._program} does not start {self.image}: {str(error) or 'it took too long'}"
            ) from error
        return self._main

    def _made(self) -> list[str]:
        memory = str(self._limits.memory_bytes)
        words = ["run", "--interactive", "--name", self._name, "--label", "echo2", "--stop-timeout", "0"]
        words += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(self._limits.num_processes)]
        words += ["--cpus", f"{self._limits.cpus:g}", "--security-opt", "no-new-privileges", *ulimits()]
        words += [] if self._limits.has_network else ["--network", "none"]
        return [*words, "--entrypoint", "/bin/sh", self.image, "-c", FIRST]

    async def _kill(self) -> None:
        await _Call((self._program, "kill", self._name), START_SECONDS).run()
        if self._main is not None and await self._main.ended(START_SECONDS) is None:
            raise ContainerFault(f"{self._program} did not end its container {self._name}.")


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
        reasons[name] = _unusable(name)
        if not reasons[name]:
            return name
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ContainerFault(f"Tasks' commands need a container, and this machine has none ({why}). Install bubblewrap.")


def _unusable(name: str) -> str:
    if name not in RUNTIMES:
        return f"{VARIABLE} must be one of {', '.join(RUNTIMES)}"
    if name == "landlock":
        return confinement.missing()
    program = "bwrap" if name == "bubblewrap" else name
    if shutil.which(program) is None:
        return "it is not installed"
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
        self._asked: dict[str, Image] = {}
        self._is_tidy = False

    async def open(self, image: Image, limits: ContainerLimits) -> Container:
        """Open a container.

        Raises:
            ContainerFault: the runtime cannot, or its network would be this machine's own.
        """
        if self.runtime in IMAGES:
            key = image.name or _tag(image)
            self._asked[key] = image
            opened: Container = ImageContainer(self.runtime, await self._images.get(key), image.directory, limits)
            try:
                if image.name and image.files:
                    await opened.put(image.directory or "/app", image.files)
            except BaseException:
                await opened.close()
                raise
            return opened
        if limits.has_network:
            raise ContainerFault(f"The task needs a network, and {self.runtime} has only this machine's own.")
        await self._tidy()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        os.chmod(folder, 0o755)
        opened = FolderContainer(folder, image, limits, self.runtime == "bubblewrap")
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
            await _Call((*REMOVE, path), START_SECONDS).run()

    async def _image(self, key: str) -> str:
        image, program = self._asked.pop(key), self.runtime
        prune = (program, "container", "prune", "--force", "--filter", "label=echo2", "--filter", "until=1h")
        await _Call(prune, START_SECONDS).run()  # of owners that were killed
        status, _, _ = await _Call((program, "image", "inspect", key), START_SECONDS).run()
        if status and image.name:
            await _must(program, "pull", "--quiet", key, seconds=image.build_seconds)
        elif status:
            with tempfile.TemporaryDirectory(prefix="echo2-build-") as folder:
                context = Path(folder) / "context"
                await asyncio.to_thread(write_files, context, image.files or {})
                limits = ulimits() if program == "podman" else []
                build = (program, "build", "--quiet", "--label", "echo2", *limits, "--tag", key, str(context))
                await _must(*build, seconds=image.build_seconds)
        return key


def _stale_folders() -> list[str]:
    now, stale = time.time(), []
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{PREFIX}*-*")):
        owner = os.path.basename(path).removeprefix(PREFIX).partition("-")[0]
        if not os.path.exists(f"/proc/{owner}") and os.path.getmtime(path) < now - STALE_SECONDS:
            stale.append(path)
    return stale


def _tag(image: Image) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, (data, is_executable) in sorted((image.files or {}).items()):
        digest.update(repr((name, is_executable, len(data))).encode() + data)
    return f"echo2-task:{digest.hexdigest()}"
