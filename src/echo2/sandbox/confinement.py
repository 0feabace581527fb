"""Permanently drops all rights of a process that scoring text, or a task's commands, do not need.

After `confine`, the process can compute, read Python's own files and write to the descriptor it was left. It cannot
open anything else, write a file, use the network, start a program, signal or inspect another process, or exceed its
memory limit. Two mechanisms of the Linux kernel enforce this without root: Landlock (which files may be opened) and
seccomp (which system calls are allowed). They hold even if code in the process escapes Python's own restrictions.

`python -m echo2.sandbox.confinement FOLDER BYTES PROCESSES COMMAND ...` runs a command of a task (`containers.py`): it
reads the system's programs and FOLDER, writes the folders in it, files of at most so many bytes, and has no network.
All that it starts stays in its process group, so that its parent ends it whole.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.sandbox.process_table import FRESH_SECONDS, num_threads, usage

if TYPE_CHECKING:
    import seccompy

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
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: What root becomes before it runs a task's command.
NOBODY = 65534
#: Times a command's processes: what it may add to its user's threads.
BURST = 8
#: What programs read outside the folders of the system's programs, without secrets.
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: System calls that a task's command does not need: keys of its parent; memory that no process holds, or that
#: outlives it; namespaces, in which it would have more rights; parts of the kernel that few programs use.
REFUSED = (
    *("add_key", "keyctl", "request_key", "shmget", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret"),
    *("unshare", "setns", "mount", "bpf", "io_uring_setup", "perf_event_open", "userfaultfd"),
)
#: Where Landlock is all there is: the network, what would leave the process group, other processes, and names in
#: folders that it may not read.
ALSO_REFUSED = ("socket", "setsid", "setpgid", "ptrace", "inotify_init", "inotify_init1", "fanotify_init", "ioprio_set")
#: There, too, of all processes but the caller's own: their limits, their priority, their processors. By number of the
#: argument that must be 0.
OF_OTHERS = (
    *(("prlimit64", 0), ("setpriority", 0), ("setpriority", 1), ("sched_setaffinity", 0)),
    *(("sched_setscheduler", 0), ("sched_setparam", 0), ("sched_setattr", 0)),
)
EPERM, ENOSYS = 1, 38
CLONE_NEWUSER = 0x10000000
#: Of x86_64, a second set of numbers for the same calls.
X32 = 1 << 30
#: Descriptors that a process of a command may have.
FILES_OPEN_MAX = 4096
#: Bytes of a core dump: of 0 the kernel still gives one to a program that it has for them, and of 1 it makes none.
NO_CORE = 1
#: Of all processes of a machine whose memory runs out, the kernel ends these first.
ENDED_FIRST = 1000


def missing() -> str:
    """Why this machine cannot confine a process; empty if it can."""
    if reason := missing_filter():
        return reason
    try:
        import landlockpy
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'echo2[tasks]'"
    except ImportError as error:
        return f"landlockpy cannot be used: {error}"
    return "" if landlockpy.supported() else "its kernel has no Landlock (Linux 5.13 and newer, switched on at boot)"


def missing_filter() -> str:
    """Why this machine cannot refuse system calls; empty if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"it is {platform.system()} on {platform.machine()}, not Linux on x86_64 or aarch64"
    try:
        import seccompy
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'echo2[tasks]'"
    except ImportError as error:
        return f"seccompy cannot be used: {error}"
    return "" if seccompy.supported() else "its kernel has no seccomp filters"


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
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, used_bytes + MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, within(resource.RLIMIT_CORE, NO_CORE)),
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


def filtered_calls(names: tuple[str, ...] = REFUSED, of_others: tuple[tuple[str, int], ...] = ()) -> seccompy.Filter:
    """Return the filter of a command's system calls, which refuses `names`, namespaces of users, and `of_others` where
    their argument is not 0."""
    import seccompy

    calls = seccompy.Filter()
    refused: list[tuple[str, list[seccompy.ArgCmp] | None]] = [(name, None) for name in names]
    refused += [(name, [seccompy.ArgCmp(place, seccompy.CmpOp.NE, 0)]) for name, place in of_others]
    for name, args in refused:
        calls.errno(name, EPERM, args=args)
        if platform.machine() == "x86_64":
            calls.errno(X32 | seccompy.syscall_nr(name), EPERM, args=args)
    user = [seccompy.ArgCmp(0, seccompy.CmpOp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER)]
    calls.errno("clone", EPERM, args=user)
    calls.errno("clone3", ENOSYS)  # its flags cannot be seen, and C libraries then use clone
    if platform.machine() == "x86_64":
        calls.errno(X32 | seccompy.syscall_nr("clone"), EPERM, args=user)
        calls.errno(X32 | seccompy.syscall_nr("clone3"), ENOSYS)
    return calls


def within(limit: int, most: int) -> int:
    """Return the most that this process may pass on of a limit, and at most so much: only root may raise its own."""
    _, allowed = resource.getrlimit(limit)
    return most if allowed == resource.RLIM_INFINITY else min(most, allowed)


def confine_command(folder: Path, file_bytes: int, num_processes: int) -> None:
    """Give up what a task's command does not need, root's rights first. `folder`: the only one outside the system.

    The kernel counts the threads of a user, not of a command: the limit is what the user has now and `BURST` times
    `num_processes`. It keeps a machine alive until the counter of the command's own processes has ended it.

    Raises:
        OSError: the kernel refuses; the process still has its rights and must not go on.
    """
    import landlockpy

    Path("/proc/self/oom_score_adj").write_text(str(ENDED_FIRST))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for limit, most in (
        (resource.RLIMIT_NPROC, num_threads(os.getuid()) + BURST * num_processes),
        (resource.RLIMIT_NOFILE, FILES_OPEN_MAX),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, NO_CORE),
    ):
        value = within(limit, most)
        resource.setrlimit(limit, (value, value))
    abi = landlockpy.abi_version()
    rights, scopes = landlockpy.fs_for_abi(abi), landlockpy.Scope.ABSTRACT_UNIX_SOCKET | landlockpy.Scope.SIGNAL
    if scopes & ~landlockpy.scope_for_abi(abi):
        raise OSError("Landlock keeps no signals in before Linux 6.12")
    reading = landlockpy.AccessFS.READ_FILE | landlockpy.AccessFS.READ_DIR
    device = landlockpy.AccessFS.READ_FILE | landlockpy.AccessFS.WRITE_FILE
    with landlockpy.Ruleset(handled_fs=rights, scoped=scopes) as rules:
        for place in (*SYSTEM_LIBRARIES, "/usr", "/bin", "/sbin", *SYSTEM_FILES):
            if os.path.isdir(place):
                rules.allow_path(place, reading | landlockpy.AccessFS.EXECUTE)
            elif os.path.exists(place):
                rules.allow_path(place, landlockpy.AccessFS.READ_FILE)
        for name in DEVICES:
            rules.allow_path(name, device)
        rules.allow_path(folder, reading | landlockpy.AccessFS.EXECUTE)
        for inner in folder.iterdir():
            if os.access(inner, os.W_OK):
                rules.allow_path(inner, rights)
        rules.restrict()
    filtered_calls((*REFUSED, *ALSO_REFUSED), OF_OTHERS).load()


def _readable() -> list[str]:
    """Directories of Python and of the loaded packages. Not `sys.path`, which may contain a project's own folder."""
    packages = {name.partition(".")[0] for name in sys.modules}
    files = (getattr(sys.modules.get(package), "__file__", None) for package in packages)
    places = {sys.prefix, sys.base_prefix, *SYSTEM_LIBRARIES, *(os.path.dirname(file) for file in files if file)}
    return sorted(place for place in places if os.path.isabs(place) and place != "/" and os.path.exists(place))


def main() -> None:
    """Confine a child that runs the command; end all of the process group with it, or at the end of standard input."""
    if reason := missing():
        raise SystemExit(f"commands cannot be confined here: {reason}")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        try:
            confine_command(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
            os.execvp(sys.argv[4], sys.argv[4:])
        finally:  # no other code prints the exception
            traceback.print_exc()
            os._exit(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (ended := os.waitpid(-1, 0))[0] != child:
        pass  # whom the command has left
    _end_all()
    status = os.waitstatus_to_exitcode(ended[1])
    os._exit(128 - status if status < 0 else status)


def _end_all() -> None:
    """End and bury all that the command has left. The parent of this process ends what goes on in spite of that."""
    while True:
        for pid in usage(os.getpid()).pids - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(FRESH_SECONDS)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(0, signal.SIGKILL)  # its process group


if __name__ == "__main__":
    main()
