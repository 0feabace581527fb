"""Debian's Slurm on the loopback, for tests: one node with two pretended GPUs, configured in a temporary directory."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from real_runs import pause

#: Debian's packages munge, slurmctld, slurmd and slurm-client.
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch")
READY_SECONDS = 60.0
#: The node claims more than the machine may have, so that what the recipe asks for fits. A job of `urgent` preempts
#: those of `main`, which are told five seconds before, and start again once their credential has expired.
CONFIGURATION = """
ClusterName=trial
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5
GresTypes=gpu
NodeName=localhost CPUs=16 RealMemory=64000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=localhost Default=YES MaxTime=1-00:00:00 GraceTime=5
PartitionName=urgent Nodes=localhost PriorityTier=10
"""


class SlurmCluster:
    """Runs while it is used as a context."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the socket's path is bounded
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.folder)
        ports = {"controller_port": _free_port(), "node_port": _free_port()}
        text = CONFIGURATION.format(folder=self.folder, user=getpass.getuser(), **ports)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (self.folder / "spool").mkdir()
        (self.folder / "state").mkdir()
        self._environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @staticmethod
    def missing() -> list[str]:
        """The programs that are not installed."""
        path = f"{os.environ['PATH']}:/usr/sbin"
        return [name for name in PROGRAMS if shutil.which(name, path=path) is None]

    def __enter__(self) -> SlurmCluster:
        self.call("mungekey", "--create", f"--keyfile={self.folder}/munge.key")
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in places.items()]
        try:
            self._start("munged", "--foreground", "--force", *options)
            self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D")
            self._wait(lambda: self.output("sinfo", "--noheader", "--format=%T") == "idle", "node")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def call(self, program: str, *arguments: str, cwd: Path | None = None, **variables: str) -> str:
        """What a program printed; it must not fail."""
        done = self._run(program, *arguments, cwd=cwd, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, program: str, *arguments: str) -> str:
        """What a program printed, whether it failed or not."""
        return self._run(program, *arguments).stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """The fields of `scontrol show job`, which knows a job for five minutes after its end."""
        words = self.call("scontrol", "show", "job", "--oneliner", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _run(
        self, program: str, *arguments: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**self._environment, "PATH": f"{os.environ['PATH']}:/usr/sbin", **variables}
        command = [program, *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"{program}.out").open("w") as output:
            process = subprocess.Popen(
                [shutil.which(program) or f"/usr/sbin/{program}", *arguments],
                stdout=output,
                stderr=output,
                env=self._environment,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not holds():
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.[lo][ou][gt]")))
            assert time.monotonic() < deadline, f"no {what}\n{logs}"
            pause()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
