"""Containers over folders of this machine, where there are no images: bubblewrap, or Landlock (`containers.py`).

No quota limits their files, so these are counted, while they change: a count is near the truth, and what it cannot see,
the room that is left on the disk shows.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from echo2.core.child import PACKAGE_ROOT
from echo2.core.errors import UserError
from echo2.sandbox import confinement
from echo2.sandbox.process_table import Used, num_ended_for_memory, usage
from echo2.sandbox.programs import (
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

#: A program with its arguments, and its environment.
Started = tuple[tuple[str, ...], Mapping[str, str]]
ROOT = "ECHO2_ROOT"
FILE_BYTES_MAX = 1 << 30  # of one file, where no image's storage limits it
#: Folders that a task's commands may write, where there is no image; `shm` is bubblewrap's /dev/shm.
FOLDERS = ("app", "logs", "root", "shm", "tmp")
#: Statuses of a command that was killed.
KILLED = (137, -9)
#: Limits that end a command: its container's, and the machine's.
STORAGE, DISK = "storage", "disk"
#: Of a container's folder: the filter of system calls, for bubblewrap.
CALLS = ".calls"
#: Starts bubblewrap: its descriptor 9 is the filter ($0).
BEGUN = f'exec 9<"$0" && echo {confinement.ENDED_FIRST} >/proc/self/oom_score_adj && exec "$@"'
#: Variables of a command, where there is no image.
PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
#: Removes a folder in which a command may have made folders without rights to enter them.
REMOVE = ("/bin/sh", "-c", 'chmod -R u+rwX "$0" 2>/dev/null; rm -rf "$0"')
#: What may be read of /etc without secrets.
ETC = ("alternatives", "ld.so.cache", "localtime", "passwd", "group")
#: Files and folders below a folder; with more, counting and removing them takes a machine minutes.
ENTRIES_MAX = 200_000
#: Of the disk, which commands leave to the machine.
LEFT_BYTES = 1 << 30


def write_files(folder: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    """Write files below a new folder that no other user can change.

    Raises:
        UserError: a path leads out of it.
        ContainerFault: the disk is full, or no disk takes such files.
    """
    for name in files:
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts:
            raise UserError(f"A task's file has the path {name!r}: it must be relative, and without '..'.")
    try:
        _write(folder, files)
    except OSError as error:
        raise ContainerFault(f"Cannot write a task's files: {error}.") from error


def _write(folder: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    folder.mkdir()
    for name, (data, is_executable) in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o755 if is_executable else 0o644)
    for place in (folder, *folder.rglob("*/")):
        if place.is_dir():
            place.chmod(0o755)  # whatever this process's mask is: commands run as another user


class FolderContainer:
    """A container over folders of this machine: bubblewrap, or Landlock where that is not there. What is in its folder
    itself, a command can neither make nor replace; it writes only what is in FOLDERS. Once it holds more than it may,
    no command runs any more. `folder`: of this machine."""

    def __init__(self, folder: Path, directory: str, limits: ContainerLimits, is_bubblewrap: bool) -> None:
        self.folder, self._directory, self._limits, self._is_bubblewrap = folder, directory, limits, is_bubblewrap
        self._has_room = True
        if is_bubblewrap:
            (folder / CALLS).write_bytes(confinement.filtered_calls().program)
            (folder / CALLS).chmod(0o644)

    async def run(self, command: str, seconds: float, variables: Mapping[str, str] | None = None) -> Ran:
        if (said_no := refused(command)) is not None:
            return said_no
        if not self._has_room:
            return Ran(137, "", STORAGE)
        self._open_folders()
        nonce, script = secrets.token_hex(8), WRAPPED.replace("{END}", "")
        all_variables = {**PLAIN, **(variables or {})}
        build = self._bubblewrap if self._is_bubblewrap else self._landlock
        program, environment = build(all_variables, ("/bin/sh", "-c", script, nonce, command))
        output_bytes = self._limits.output_bytes + len(nonce) + 1
        call = Program(program, seconds, output_bytes, environment, over=self._over, stored=self._stored)
        num_ended = num_ended_for_memory()
        ran = await call.run()
        if not ran.stopped:
            ran = replace(ran, stopped=await asyncio.to_thread(self._stored))
        if ran.stopped == DISK:
            raise ContainerFault(full_disk(self.folder.parent))
        self._has_room = ran.stopped != STORAGE
        if ran.status in KILLED and not ran.stopped and num_ended_for_memory() > num_ended:
            raise ContainerFault("The machine ran out of memory, and the kernel ended programs, perhaps this command.")
        if ran.status < 0 and not ran.stopped:
            raise ContainerFault(f"A container was killed from outside, by signal {-ran.status}.")
        return outcome(nonce, ran, "bubblewrap" if self._is_bubblewrap else "Landlock")

    async def put(self, place: str, files: Mapping[str, tuple[bytes, bool]]) -> None:
        target = self.folder / place.strip("/")
        await must(*REMOVE, str(target))
        await asyncio.to_thread(write_files, target, files)
        if target.name in FOLDERS and os.getuid() == 0:
            await must("chown", "-hR", str(confinement.NOBODY), str(target))

    async def close(self) -> None:
        await tidy_up(*REMOVE, str(self.folder))

    def _open_folders(self) -> None:
        """Give the owner of the folders all rights of them, which the last command may have taken."""
        for name in FOLDERS:
            if (mode := (self.folder / name).stat().st_mode) & 0o700 != 0o700:
                (self.folder / name).chmod(stat.S_IMODE(mode) | 0o700)

    def _over(self, used: Used) -> str:
        if len(used.pids) > self._limits.num_processes:
            return "processes"
        return "memory" if used.exceeds(self._limits.memory_bytes) else ""

    def _stored(self, pid: int | None = None) -> str:
        if is_full(self.folder):
            return DISK
        pids = usage(pid).pids if pid is not None else ()
        return STORAGE if exceeds(self.folder, pids, self._limits.storage_bytes) else ""

    def _bubblewrap(self, variables: Mapping[str, str], command: tuple[str, ...]) -> Started:
        words = ["setpriv", f"--reuid={confinement.NOBODY}", f"--regid={confinement.NOBODY}", "--clear-groups"]
        words = ["/bin/sh", "-c", BEGUN, str(self.folder / CALLS), *(words if os.getuid() == 0 else []), "bwrap"]
        words += ["--seccomp", "9", "--unshare-all", "--die-with-parent", "--new-session"]
        words += ["--uid", "0", "--gid", "0", "--hostname", "task", "--proc", "/proc", "--dev", "/dev", "--clearenv"]
        for place in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
            is_link = os.path.islink(place)
            words += ["--symlink", os.readlink(place), place] if is_link else ["--ro-bind-try", place, place]
        for name in ETC:
            words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for inner in sorted(self.folder.glob("[!.]*"), key=lambda inner: inner.name == "app"):  # the last one is seen
            place = {"app": self._directory, "shm": "/dev/shm"}.get(inner.name, f"/{inner.name}")
            words += ["--bind" if inner.name in FOLDERS else "--ro-bind", str(inner), place]
        for name, value in {"HOME": "/root", **variables}.items():
            words += ["--setenv", name, value]
        most = {"nproc": self._limits.num_processes, "fsize": FILE_BYTES_MAX}
        most |= {"nofile": confinement.FILES_OPEN_MAX, "core": confinement.NO_CORE}
        kinds = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in most}
        limits = ["prlimit", *(f"--{name}={confinement.within(kinds[name], value)}" for name, value in most.items())]
        # Through /proc a command could leave the first place of those that the kernel ends when memory runs out.
        words += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self._directory]
        words += ["--", *limits, "--", *command]
        return tuple(words), {"PATH": os.environ.get("PATH", os.defpath)}  # /proc/1/environ shows what bwrap began with

    def _landlock(self, variables: Mapping[str, str], command: tuple[str, ...]) -> Started:
        folder, processes = str(self.folder), str(self._limits.num_processes)
        words = (sys.executable, "-P", "-m", confinement.__name__, folder, str(FILE_BYTES_MAX), processes)
        own = {"HOME": f"{folder}/root", "TMPDIR": f"{folder}/tmp", ROOT: folder}
        env_words = [f"{name}={value}" for name, value in {**own, **variables}.items()]  # not for what runs before
        inner = ("/usr/bin/env", "-i", *env_words, "/bin/sh", "-c", 'cd "$0" && exec "$@"', f"{folder}/app", *command)
        return (*words, *inner), {"PYTHONPATH": PACKAGE_ROOT, "PATH": os.defpath}


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder has hardly any room left."""
    return shutil.disk_usage(folder).free < LEFT_BYTES


def full_disk(folder: Path) -> str:
    """Return what is said of it."""
    return f"The disk of {folder} is full: less than {LEFT_BYTES} bytes left."


def exceeds(folder: Path, pids: Iterable[int], bytes_max: int) -> bool:
    """Whether more bytes, or more than `ENTRIES_MAX` files, are below a folder or held open by processes without a name
    there. Paths that are longer than the kernel takes count as too much, because files behind them cannot be
    counted, and so does a folder whose owner's rights a command takes again as soon as they are given back."""
    num_bytes, linked = 0, set[int]()
    try:
        for number, facts in enumerate(_facts(folder)):
            if facts.st_ino not in linked:
                num_bytes += 512 * facts.st_blocks
            if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode):
                linked.add(facts.st_ino)
            if number >= ENTRIES_MAX or num_bytes > bytes_max:
                return True
    except OSError:
        return True
    return num_bytes + _nameless_bytes(pids, folder.stat().st_dev) > bytes_max


def _facts(folder: Path) -> Iterator[os.stat_result]:
    waiting = [str(folder)]
    while waiting:
        changed = suppress(FileNotFoundError, NotADirectoryError)
        with changed, _entries(waiting.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        waiting.append(entry.path)
                    yield facts


def _entries(path: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
    """Return what is in a folder. Commands may have taken its owner's rights, who is this user: they are given back,
    else its files would count for nothing."""
    try:
        return os.scandir(path)
    except PermissionError:
        if sys.platform != "linux":  # which alone has such containers
            raise
        place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)  # no link that a command puts there meanwhile
        try:
            os.chmod(f"/proc/self/fd/{place}", stat.S_IMODE(os.fstat(place).st_mode) | stat.S_IRWXU)
        finally:
            os.close(place)
        return os.scandir(path)


def _nameless_bytes(pids: Iterable[int], device: int) -> int:
    """Return what processes hold open of a device after its last name has gone."""
    bytes_by_inode = dict[int, int]()
    for pid in pids:
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                facts = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if not facts.st_nlink and facts.st_dev == device:
                    bytes_by_inode[facts.st_ino] = 512 * facts.st_blocks
        except OSError:  # it has ended, closed one, or hides its descriptors
            continue
    return sum(bytes_by_inode.values())
