"""What the kernel keeps a command of a task from, without images: system calls, other processes of its user, the files
that it hides, and a machine that runs out of memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from container_cases import WITHOUT_IMAGES, inside, needs
from echo2.core.child import PACKAGE_ROOT, child_environment
from echo2.sandbox import confinement
from echo2.sandbox.programs import Ran

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="containers of Linux"),
]


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Which another user may read, as none of pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


#: Calls the kernel with numbers; prints each that it carried out. For a command without images.
ASK = """
import ctypes
kernel = ctypes.CDLL(None, use_errno=True)
for name, *arguments in {calls!r}:
    if kernel.syscall(*arguments) >= 0:
        print(name, "carried out")
"""


@WITHOUT_IMAGES
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the commands of this test are Python's")
@pytest.mark.parametrize("x32", [0, 1 << 30])
def test_the_kernel_refuses_what_no_task_needs(runtime: str, x32: int) -> None:
    """Keys of whoever started it, memory that no process holds or that outlives it, namespaces of its own."""
    calls = [
        ("session keyring", call("keyctl"), 0, -3, 0),
        ("new key", call("add_key"), b"user", b"echo2", b"x", 1, -3),
        ("shared memory", call("shmget"), 0, 4096, 0o1600),
        ("semaphores", call("semget"), 0, 1, 0o1600),
        ("messages", call("msgget"), 0, 0o1600),
        ("memory file", call("memfd_create"), b"x", 0),
        ("namespace", call("unshare"), 0x10000000),
        ("clone", call("clone"), 0x10000000 | 17, 0, 0, 0, 0),
        ("rings", call("io_uring_setup"), 1, ctypes.create_string_buffer(200).raw),
    ]
    script = ASK.format(calls=[(name, number | x32, *rest) for name, number, *rest in calls])
    ran = inside(runtime, lambda container: container.run(f"/usr/bin/python3 - <<'END'\n{script}\nEND", 30))
    assert (ran.status, ran.output, ran.stopped) == (0, "", "")


@needs("landlock")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the command of this test is Python's")
def test_a_command_changes_no_other_process_of_its_user() -> None:
    """Landlock keeps its signals in. By a limit of a second of processor time it could end others, such as another
    rollout's commands, all the same."""
    user = confinement.NOBODY if os.getuid() == 0 else None
    with subprocess.Popen(["sleep", "100"], user=user, group=user) as other:
        pid, second, small = other.pid, struct.pack("QQ", 1, 1), struct.pack("QQ", 60, 60)
        calls = [
            ("its own limit", call("prlimit64"), 0, resource.RLIMIT_CPU, small, 0),
            ("limit", call("prlimit64"), pid, resource.RLIMIT_CPU, second, 0),
            ("priority", call("setpriority"), os.PRIO_PROCESS, pid, 19),
            ("all priorities", call("setpriority"), os.PRIO_USER, 0, 19),
            ("disk", call("ioprio_set"), 1, pid, 3 << 13),
            ("processors", call("sched_setaffinity"), pid, 8, (1).to_bytes(8, "little")),
            ("scheduler", call("sched_setscheduler"), pid, os.SCHED_BATCH, bytes(4)),
            ("names in folders", call("fanotify_init"), 0x200, 0),
        ]
        script = ASK.format(calls=calls)
        ran = inside("landlock", lambda container: container.run(f"/usr/bin/python3 - <<'END'\n{script}\nEND", 30))
        other.kill()
    assert ran == Ran(0, "its own limit carried out\n")


def call(name: str) -> int:
    number: int = pytest.importorskip("seccompy").syscall_nr(name)
    return number


@WITHOUT_IMAGES
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the command of this test is Python's")
def test_the_machine_ends_commands_before_itself_when_memory_runs_out(runtime: str) -> None:
    """Memory in sockets and pipes is counted by nobody."""
    limits = "import resource as r; print(*(r.getrlimit(one)[1] for one in (r.RLIMIT_NOFILE, r.RLIMIT_CORE)))"
    commands = f"cat /proc/self/oom_score_adj 2>/dev/null; /usr/bin/python3 -c '{limits}'"
    ran = inside(runtime, lambda container: container.run(commands, 20))
    *adjusted, files, core = map(int, ran.output.split())
    assert adjusted == ([1000] if runtime == "bubblewrap" else [])
    assert files <= 4096
    stays = inside(runtime, lambda container: container.run("echo 1000 >/proc/self/oom_score_adj && echo written", 20))
    assert "written" not in stays.output  # nor could it write a smaller number
    assert core == confinement.within(
        resource.RLIMIT_CORE, 1
    )  # 0 does not keep a dump from the program that kernel.core_pattern may name


#: Prints whether files count that a folder's owner cannot see, and whether a folder does that stays closed.
CLOSED = """
import os, sys
from pathlib import Path
from echo2.sandbox.folders import exceeds
folder, user = Path(sys.argv[1]), int(sys.argv[2])
if not os.getuid():
    os.setuid(user)
(folder / "outer" / "inner").mkdir(parents=True)
(folder / "outer" / "inner" / "file").write_bytes(bytes(1 << 20))
(folder / "outer" / "inner").chmod(0)
(folder / "outer").chmod(0)
print(exceeds(folder, (), 1 << 19), exceeds(folder, (), 1 << 21))
(folder / "outer").chmod(0)
os.chmod = lambda *_: None
print(exceeds(folder, (), 1 << 21))
"""


def test_files_count_behind_folders_that_a_command_has_closed(public_folder: Path) -> None:
    """To its owner, who is no root. A command went on writing to files that it had opened before, and to no end."""
    public_folder.chmod(0o777)
    variables = child_environment() | {"PYTHONPATH": PACKAGE_ROOT}
    words = [sys.executable, "-P", "-c", CLOSED, str(public_folder), str(confinement.NOBODY)]
    said = subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    assert said == "True False\nTrue\n"


@pytest.mark.skipif(bool(confinement.missing()), reason=confinement.missing())
def test_a_fork_bomb_leaves_processes_to_the_machine_before_its_own_are_counted(public_folder: Path) -> None:
    """As on a machine so busy that whoever counts comes late."""
    # More than its own limit: other commands of the same user, which count as well, may end meanwhile.
    count = "n=0; while [ $n -lt 1000 ]; do sleep 60 & n=$((n + 1)); echo $n; done"
    words = [confinement.__name__, str(public_folder), "4096", "4", "/bin/sh", "-c", count]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    variables = child_environment() | {"PYTHONPATH": PACKAGE_ROOT}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *words], **pipes, text=True, env=variables, process_group=0
    ) as child:
        try:
            said = [child.stdout.readline() for _ in range(4)]
            refused = next((line for line in child.stdout if "fork" in line or line == "1000\n"), "")
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert said[3] == "4\n"
    assert "fork" in refused
