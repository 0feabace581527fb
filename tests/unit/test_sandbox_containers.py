"""Containers of each runtime that is here: files stay, processes do not, limits hold, and faults are no failures."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from container_cases import EACH_RUNTIME, LIMITS, WITHOUT_IMAGES, image_for, inside, left_over, needs
from echo2.core.child import child_environment
from echo2.core.errors import UserError
from echo2.sandbox import containers, folders
from echo2.sandbox.containers import IMAGES, Container, Containers, Image, find_runtime
from echo2.sandbox.folders import FolderContainer, write_files
from echo2.sandbox.programs import ContainerFault, ContainerLimits, Ran

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="containers of Linux"),
]


@pytest.fixture(autouse=True)
def mask() -> Iterator[None]:
    """As a worker's: what it writes is for itself."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@EACH_RUNTIME
def test_files_stay_from_command_to_command_and_processes_do_not(runtime: str) -> None:
    mark = f"7{secrets.randbelow(10**6):06d}"

    async def scene(container: Container) -> None:
        assert (await container.run("cat given", 20)).output == "given\n"
        ran = await container.run(f"echo made > made; sleep {mark} & echo $WORD; exit 3", 20, {"WORD": "two words"})
        assert (ran.status, ran.output, ran.stopped) == (3, "two words\n", "")
        assert not left_over(mark)
        ran = await container.run("cat made; cat nothing", 20)
        assert ran.status == 1
        assert ran.output.startswith("made\n")
        assert "nothing" in ran.output  # what it says of its errors is read, too
        await container.put("/tests", {"deep/one.sh": (b"echo it is read", True)})
        assert (await container.run('sh "$ECHO2_ROOT/tests/deep/one.sh"', 20)).output == "it is read\n"
        await container.put("/tests", {"two.sh": (b"", False)})
        assert (await container.run('ls "$ECHO2_ROOT/tests"', 20)).output == "two.sh\n"

    inside(runtime, scene, given=b"given\n")


@EACH_RUNTIME
@pytest.mark.parametrize(
    ("command", "seconds", "stopped"),
    [
        ("sleep 1000", 0.5, ("time",)),
        ("yes", 30.0, ("output",)),
        ("tail /dev/zero", 30.0, ("memory", "")),  # images: the kernel kills it in the container, which lives
        ("b() { b | b & }; b; sleep 8", 30.0, ("processes", "")),  # or forks are refused
    ],
)
def test_a_command_over_a_limit_is_ended_and_the_next_one_runs(
    runtime: str, command: str, seconds: float, stopped: tuple[str, ...]
) -> None:
    async def scene(container: Container) -> None:
        await container.run("echo kept > file", 20)
        ran = await container.run(command, seconds)
        assert ran.stopped in stopped
        assert ran.status == 137 or "b()" in command
        assert len(ran.output) < 1100
        assert (await container.run("cat file", 20)).output == "kept\n"

    inside(runtime, scene)


@EACH_RUNTIME
def test_output_keeps_its_beginning_and_its_end(runtime: str) -> None:
    ran = inside(runtime, lambda container: container.run("seq 1 10000", 20))
    assert ran.output.startswith("1\n2\n3\n")
    assert ran.output.endswith("\n9999\n10000\n")
    assert "bytes left out" in ran.output


@EACH_RUNTIME
def test_a_command_sees_nothing_of_the_machine(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_MACHINE", "told")
    (tmp_path / "secret").write_text("told")
    commands = [
        f"cat {tmp_path}/secret",
        "env",
        "cat /etc/shadow /root/.ssh/*; cat /proc/*/environ /proc/*/cmdline",
        f"echo x > {tmp_path}/made; echo x > /usr/made",
        "kill -9 -1",  # all that it may
        f"kill -9 {os.getpid()}",
    ]

    async def scene(container: Container) -> list[str]:
        return [(await container.run(command, 20)).output for command in commands]

    said = inside(runtime, scene, replace(LIMITS, output_bytes=1 << 20))  # else the middle is not looked at
    assert not any("told" in text for text in said)
    assert not (tmp_path / "made").exists()
    assert not Path("/usr/made").exists()


@EACH_RUNTIME
def test_a_container_has_no_network(runtime: str) -> None:
    """Not even this machine's own: a listener on loopback hears of nobody."""
    ask = "exec 3<>/dev/tcp/127.0.0.1/%d && echo reached"
    if runtime in IMAGES:
        ask = "busybox nc -w 2 127.0.0.1 %d </dev/null && echo reached"

    async def scene(container: Container) -> str:
        calls: list[Any] = []
        server = await asyncio.start_server(lambda reader, writer: calls.append(writer.close()), "127.0.0.1", 0)
        said = (await container.run(ask % server.sockets[0].getsockname()[1], 20)).output
        server.close()
        assert not calls
        return said

    assert "reached" not in inside(runtime, scene)


@EACH_RUNTIME
def test_a_container_ends_with_its_owner_even_if_that_is_killed(runtime: str) -> None:
    """A child owns the container, and is killed while a command runs."""
    image_for(runtime)  # skips where there is none
    mark = f"8{secrets.randbelow(10**6):06d}"
    owner = f"""
import asyncio
from container_cases import image_for
from echo2.sandbox.containers import Containers
from echo2.sandbox.programs import ContainerLimits

async def play():
    container = await Containers({runtime!r}).open(image_for({runtime!r}), ContainerLimits())
    running = asyncio.ensure_future(container.run("echo up > up; sleep {mark}", 100))
    while (await asyncio.sleep(0.1)) or not running.done():
        print("sleeping", flush=True)

asyncio.run(play())
"""
    variables = child_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            if any(line.startswith("sleep") for line in left_over(mark)):
                break
        process.send_signal(signal.SIGKILL)
    while any(line.startswith("sleep") for line in left_over(mark)):  # the test's own limit ends this
        pass


@EACH_RUNTIME
@pytest.mark.parametrize(
    "spoil",
    ["chmod 000 /app /tmp /root", "chmod 000 $ECHO2_ROOT/app $ECHO2_ROOT/tmp", "cd /; rm -rf /app", "kill -9 0"],
)
def test_no_command_causes_a_fault_of_the_machine(runtime: str, spoil: str) -> None:
    async def scene(container: Container) -> None:
        await container.run(spoil, 20)
        assert (await container.run("echo it runs", 20)).output == "it runs\n"
        await container.put("/tests", {"file": (b"", False)})

    inside(runtime, scene)


@EACH_RUNTIME
@pytest.mark.parametrize("command", ["true " + "x" * (1 << 17), "echo \ud800", "echo \0"])
def test_an_invalid_shell_command_is_not_blamed_on_the_machine(runtime: str, command: str) -> None:
    async def scene(container: Container) -> None:
        ran = await container.run(command, 20)
        assert (ran.status, ran.stopped) == (126, "")
        assert "is not a command" in ran.output

    inside(runtime, scene)


@WITHOUT_IMAGES
@pytest.mark.parametrize("names", [["a", "a/b"], ["x" * 300], ["a/b", "a"]])
def test_files_that_cannot_be_written_are_reported(runtime: str, names: list[str]) -> None:
    with pytest.raises(ContainerFault, match="Cannot write a task's files"):
        inside(runtime, lambda container: container.put("/tests", dict.fromkeys(names, (b"", False))))


@needs("bubblewrap")
@pytest.mark.parametrize("directory", ["/root", "/tmp", "/srv/deep"])
def test_commands_run_in_the_folder_of_the_image(directory: str) -> None:
    async def play() -> str:
        container = await Containers("bubblewrap").open(Image(directory, {"given": (b"here", False)}), LIMITS)
        try:
            return (await container.run("pwd; cat given", 20)).output
        finally:
            await container.close()

    assert asyncio.run(play()) == f"{directory}\nhere"
    with pytest.raises(ContainerFault, match="below /root"):  # a command could put a link in its place
        asyncio.run(Containers("bubblewrap").open(Image("/root/deep"), LIMITS))


@needs("bubblewrap")
def test_a_task_cannot_plant_what_is_put_later(tmp_path: Path) -> None:
    """Links to where this process writes lead nowhere, and deep folders are removed."""

    async def scene(container: Container) -> None:
        await container.run(f"ln -s {tmp_path} $ECHO2_ROOT/tests; rm -rf /logs; ln -s {tmp_path} /logs/verifier", 20)
        deep = "d=$(printf 'd/%.0s' $(seq 500)); for i in 1; do mkdir -p $d; cd $d; done"
        assert (await container.run(f"mkdir x; chmod 000 x; {deep}", 20)).status == 0
        for place in ("/tests", "/logs"):
            await container.put(place, {"verifier/file": (b"", False)})

    inside("bubblewrap", scene)
    assert not list(tmp_path.iterdir())


def test_a_failure_of_the_runtime_is_not_a_result_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that is not there, or that dies as it starts."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    broken = tmp_path / "podman"
    broken.write_text("#!/bin/sh\necho no storage >&2; exit 125\n")
    broken.chmod(0o755)

    async def play(runtime: str, image: Image) -> None:
        container = await Containers(runtime).open(image, ContainerLimits())
        try:
            await container.run("true", 20)
        finally:
            await container.close()

    with pytest.raises(ContainerFault, match="no storage"):
        asyncio.run(play("podman", Image(name="some/image")))
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: no namespaces >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    (tmp_path / "setpriv").write_text('#!/bin/sh\nshift 3; exec "$@"\n')
    (tmp_path / "setpriv").chmod(0o755)
    with pytest.raises(ContainerFault, match="no namespaces"):
        asyncio.run(play("bubblewrap", Image()))
    with pytest.raises(ContainerFault, match="network"):
        asyncio.run(Containers("bubblewrap").open(Image(), ContainerLimits(has_network=True)))
    monkeypatch.setenv(containers.VARIABLE, "podmen")
    find_runtime.cache_clear()
    with pytest.raises(ContainerFault, match=r"'podmen' gives none \(.*must be one of podman.*unset ECHO2_CONTAINERS"):
        find_runtime()
    find_runtime.cache_clear()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", "", "."])
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="must be relative"):
        write_files(tmp_path / "new", {name: (b"", False)})
    assert not list(tmp_path.iterdir())


@needs("bubblewrap")
def test_folders_of_killed_owners_are_removed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers.tempfile, "tempdir", str(tmp_path))
    dead, fresh, live = (tmp_path / f"{containers.PREFIX}{pid}-x" for pid in (2**30, 2**30 + 1, os.getpid()))
    for folder in (dead, fresh, live):
        (folder / "app").mkdir(parents=True)
        if folder != fresh:
            os.utime(folder, (0, 0))
    others = tmp_path / "others"  # another user of the machine puts a link to it
    others.mkdir(mode=0o500)
    os.utime(others, (0, 0))
    link = tmp_path / f"{containers.PREFIX}{2**30 + 2}-x"
    link.symlink_to(others)
    tmp_path.chmod(0o755)
    asyncio.run(Containers("bubblewrap").open(Image(), LIMITS))
    assert link.is_symlink()
    assert stat.S_IMODE(others.stat().st_mode) == 0o500
    assert not dead.exists()
    assert fresh.exists()
    assert live.exists()


@needs("bubblewrap")
def test_files_in_memory_are_files_of_the_container() -> None:
    async def scene(container: Container) -> None:
        ran = await container.run("echo x > /dev/shm/made; df -P /dev/shm /app | tail -n 2 | cut -d' ' -f1", 20)
        shared, app = ran.output.split()
        assert shared == app
        assert (await container.run("echo x > /dev/made", 20)).status != 0
        assert (await container.run("echo x > /made", 20)).status != 0
        assert (await container.run("echo x > /dev/null; head -c 1 /dev/zero > /dev/full", 20)).status != 0

    inside("bubblewrap", scene)


#: Each writes 64 MB, or makes folders until it is ended; none ends by itself.
FILL = {
    "a file": "head -c 64M /dev/zero > file; sleep 100",
    "files of every folder": "for d in app logs root tmp; do head -c 16M /dev/zero > $ECHO2_ROOT/$d/x; done; sleep 100",
    "a file without a name": "exec 7>file; rm file; head -c 64M /dev/zero >&7; sleep 100",
    "a path that is too long": "perl -e 'for (1..40) { mkdir q(d) x 250; chdir q(d) x 250 } sleep 100'",
    "many files": "mkdir d; cd d; while :; do n=$((n + 1)); : > $n; done",
}


@WITHOUT_IMAGES
@pytest.mark.parametrize("command", FILL.values(), ids=FILL)
def test_a_container_that_holds_too_much_runs_nothing_any_more(
    runtime: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "ENTRIES_MAX", 2000)

    async def scene(container: Container) -> None:
        ran = await container.run(command, 60)
        assert (ran.status, ran.stopped) == (137, "storage")
        assert (await container.run("true", 20)).stopped == "storage"
        await container.put("/tests", {"file": (b"", False)})

    inside(runtime, scene, replace(LIMITS, storage_bytes=32 << 20))


@WITHOUT_IMAGES
def test_files_left_by_a_command_count_towards_its_limits(runtime: str) -> None:
    async def scene(container: Container) -> None:
        for command in ("head -c 8M /dev/zero > file", "for n in 1 2 3 4 5 6; do ln file $n; done"):
            assert (await container.run(command, 20)).stopped == ""
        assert (await container.run("head -c 32M /dev/zero > more", 20)).stopped == "storage"

    inside(runtime, scene, replace(LIMITS, storage_bytes=32 << 20))


@WITHOUT_IMAGES
def test_a_full_disk_is_a_fault_of_the_machine(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LEFT_BYTES", 1 << 60)
    with pytest.raises(ContainerFault, match="bytes left"):
        inside(runtime, lambda container: container.run("sleep 100", 60))


@needs("landlock")
def test_landlock_is_not_chosen_where_a_command_would_own_its_users_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not see modes and times of files: a command that runs as a user can change those of all its files."""
    others = {name: "it is not installed" for name in containers.RUNTIMES if name != "landlock"}
    monkeypatch.setattr(containers, "_unusable", lambda name: others.get(name, ""))
    monkeypatch.delenv(containers.VARIABLE, raising=False)
    find = find_runtime.__wrapped__
    monkeypatch.setattr(containers.os, "getuid", lambda: 0)
    assert find() == "landlock"
    monkeypatch.setattr(containers.os, "getuid", lambda: 1000)
    with pytest.raises(ContainerFault, match="ECHO2_CONTAINERS=landlock"):
        find()
    monkeypatch.setenv(containers.VARIABLE, "landlock")
    assert find() == "landlock"


ORPHAN = "perl -e 'if (fork) { exit } select(undef, undef, undef, 0.3); print getppid()'; sleep 1"


@needs("landlock")
@pytest.mark.skipif(not os.path.exists("/usr/bin/perl"), reason="the command of this test is Perl's")
def test_orphans_of_a_command_are_reaped_by_its_own_process() -> None:
    """The first process of many a machine buries nobody: it would run out of numbers for processes."""
    before = subprocess.run(["/bin/sh", "-c", ORPHAN], capture_output=True, text=True, check=True).stdout
    many = "for n in $(seq 100); do (true &) ; done; sleep 0.5; echo done"

    async def scene(container: Container) -> None:
        assert (await container.run(ORPHAN, 20)).output not in (before, "")
        assert await container.run(many, 20) == Ran(0, "done\n")  # the dead do not count as its processes
        assert (await container.run("(sleep 100 &) ; (sleep 100 &) ; echo done", 20)).output == "done\n"

    inside("landlock", scene)


@WITHOUT_IMAGES
def test_a_container_is_not_for_other_users(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command may leave programs there that run with its user's rights. (Root's commands run as nobody.)"""
    monkeypatch.setattr(containers.os, "getuid", lambda: 1000)
    found = asyncio.run(Containers(runtime).open(Image("/app", {}), LIMITS))
    assert isinstance(found, FolderContainer)
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700
    asyncio.run(found.close())


@WITHOUT_IMAGES
def test_a_tasks_variables_are_its_commands_alone(runtime: str) -> None:
    """They are not read by what confines the command, as root."""
    given = {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere", "PATH": "/usr/bin:/bin", "WORD": "a\nb = c"}
    told = 'printf \'%s,\' "$PYTHONPATH" "$PYTHONHOME" "$PATH" "$WORD" "$SECRET_OF_THE_MACHINE"'
    ran = inside(runtime, lambda container: container.run(told, 20, given))
    assert ran == Ran(0, ",".join([*given.values(), ",", ""])[:-1])
