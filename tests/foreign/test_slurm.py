"""`launch/slurm.sh` in a cluster of one node, beside a real run; skipped where Debian's Slurm is not installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_runs import REPOSITORY, Run, run_without_workers
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    if missing := SlurmCluster.missing():
        pytest.skip(f"no {', '.join(missing)} here: apt-get install munge slurmctld slurmd slurm-client")
    with SlurmCluster() as running:
        yield running


def attending(run: Run) -> dict[str, int]:
    """The pid of each worker that the run has, by the worker's id."""
    entries: list[dict[str, Any]] = run.status().get("workers", [])
    return {entry["id"]: entry["pid"] for entry in entries if entry["attends"]}


def test_jobs_return_leases_when_cancelled_and_rejoin_after_preemption(
    tmp_path: Path, sort_model: Path, cluster: SlurmCluster
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(REPOSITORY / "launch", clone / "launch")
    (clone / ".venv").symlink_to(sys.prefix)
    with run_without_workers(tmp_path / "run", sort_model) as (run, crew):
        ticket = f"@{run.out}/ticket"
        job = cluster.call("sbatch", "--parsable", "--array=0-1", "launch/slurm.sh", cwd=clone, ECHO2_TICKET=ticket)
        crew.callback(cluster.output, "scancel", job)
        run.wait(lambda: len(attending(run)) == 2, "two workers")
        run.wait_version(max(0, run.status()["version"]) + 4)
        before = attending(run)

        cluster.call("scancel", f"{job}_1")
        run.wait(lambda: cluster.job(f"{job}_1")["JobState"] == "CANCELLED", "end of the cancelled job")
        assert cluster.job(f"{job}_1")["ExitCode"] == "0:0"
        run.wait(lambda: len(attending(run)) == 1, "worker left")
        (kept,) = attending(run)

        cluster.call("sbatch", "--partition=urgent", "--exclusive", "--wrap=true", cwd=clone)
        run.wait(lambda: attending(run).get(kept, before[kept]) != before[kept], "the preempted job's worker")
        run.wait_version(run.status()["version"] + 4)
        assert cluster.job(f"{job}_0")["Restarts"] == "1"
        for output in clone.glob(f"slurm-{job}_*.out"):
            assert "its leases go to other workers" in output.read_text()
    audit = run.command("audit")
    assert audit["lost"] == audit["doubled"] == 0
