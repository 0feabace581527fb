"""Permanently drops all rights of a process that scoring text does not need.

After `confine`, the process can compute, read Python's own files and write to the descriptor it was left. It cannot
open anything else, write a file, use the network, start a program, signal or inspect another process, or exceed its
memory limit. Two mechanisms of the Linux kernel enforce this without root: Landlock (which files may be opened) and
seccomp (which system calls are allowed). They hold even if code in the process escapes Python's own restrictions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
from pathlib import Path

MEMORY_BYTES = 1 << 30  # beyond what the process holds when it is confined
CPU_SECONDS = 600  # in case no parent is left to kill it
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store")
#: System calls that an interpreter needs for computing and for imports; all others fail with EPERM.
SYSTEM_CALLS = frozenset(
    {"read", "pread64", "write", "close", "lseek", "getdents64", "uname"}
    | {"stat", "fstat", "lstat", "newfstatat", "statx", "readlink", "readlinkat", "access", "faccessat", "faccessat2"}
    | {"mmap", "munmap", "mprotect", "mremap", "brk", "madvise", "futex", "getrandom", "getpid", "gettid"}
    | {"rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "sched_yield", "restart_syscall"}
    | {"clock_gettime", "clock_nanosleep", "gettimeofday", "exit", "exit_group"}
)
#: System calls that are allowed for reading only, with the index of their flags argument. Landlock decides which files
#: may be opened, but does not cover truncation before Linux 6.2.
OPENING = {"openat": 2, "open": 1}
WRITING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY
PR_SET_PDEATHSIG = 1


def missing() -> str:
    """Why this machine cannot confine a process; empty if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"it is {platform.system()} on {platform.machine()}, not Linux on x86_64 or aarch64"
    try:
        import landlockpy
        import seccompy
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'echo2[tasks]'"
    except ImportError as error:
        return f"landlockpy and seccompy cannot be used: {error}"
    if not landlockpy.supported():
        return "its kernel has no Landlock (Linux 5.13 and newer, switched on at boot)"
    if not seccompy.supported():
        return "its kernel has no seccomp filters"
    return ""


def confine(keep: int, parent: int) -> None:
    """Give up everything but computing, Python's own files and the descriptor `keep`; end when process `parent` does.

    The process must have a single thread.

    Raises:
        OSError: the kernel refuses; the process still has its rights and must not go on.
    """
    import landlockpy
    import seccompy

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which asked, is gone")
    nothing = os.open(os.devnull, os.O_RDWR)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, held + MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    reading = landlockpy.AccessFS.READ_FILE | landlockpy.AccessFS.READ_DIR
    scopes = landlockpy.Scope.ABSTRACT_UNIX_SOCKET | landlockpy.Scope.SIGNAL
    with landlockpy.Ruleset(scoped=scopes) as rules:
        for place in _readable():
            rules.allow_path(place, reading)
        rules.restrict()
    calls = seccompy.Filter(default=seccompy.Action.ERRNO | 1)  # EPERM
    for name in SYSTEM_CALLS | OPENING.keys():
        reads = [seccompy.ArgCmp(OPENING[name], seccompy.CmpOp.MASKED_EQ, 0, WRITING)] if name in OPENING else None
        try:
            calls.allow(name, args=reads)
        except ValueError:  # aarch64 never had open, stat, lstat, access and readlink
            continue
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    calls.load()


def _readable() -> list[str]:
    """Directories of Python and of the loaded packages. Not `sys.path`, which may contain a project's own folder."""
    packages = {name.partition(".")[0] for name in sys.modules}
    files = (getattr(sys.modules.get(package), "__file__", None) for package in packages)
    places = {sys.prefix, sys.base_prefix, *SYSTEM_LIBRARIES, *(os.path.dirname(file) for file in files if file)}
    return sorted(place for place in places if os.path.isabs(place) and place != "/" and os.path.exists(place))
