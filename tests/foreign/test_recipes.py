"""The recipes of `launch/`, read by the tools that they are for; `make test-all` fetches these."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echo2.head.fleet.machines import filled
from echo2.planning.market import SHIPPED, MachineFilter, _read, market_offers
from echo2.planning.renting import rent_command
from house import REPOSITORY

LAUNCH = REPOSITORY / "launch"
SCRIPT = (LAUNCH / "worker.sh").read_text()
#: Programs that read a recipe, for the Python of an environment of their own. They print what they found as JSON.
KUBERNETES = """
import json, sys, kubernetes_validate, yaml
recipe = yaml.safe_load(open(sys.argv[1]))
wanted = kubernetes_validate.latest_version()
kubernetes_validate.validate(recipe, wanted, strict=True)
recipe["spec"]["template"]["spec"]["containers"][0]["imagine"] = "x"
try:
    kubernetes_validate.validate(recipe, wanted, strict=True)
except kubernetes_validate.ValidationError as error:
    print(json.dumps([recipe["kind"], error.message]))
"""
SKYPILOT = """
import json, sys, sky, yaml
given = [("ECHO2_TICKET", "a ticket")]
task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), secrets_overrides=given)
print(json.dumps([task.name, sorted(task.envs), sorted(task.secrets), [str(one) for one in task.resources]]))
"""
#: SkyPilot's optimizer, with two providers at which one could rent and a catalogue with their names (of November 2026).
RENTING = """
import csv, json, os, shlex, sys
from pathlib import Path
shown, sys.stdout = sys.stdout, sys.stderr
import sky
from sky import global_user_state, skypilot_config
from sky.client.cli import command
from sky.clouds.cloud import CloudCapability
from sky.optimizer import Optimizer
names = {
    "vast": "A100 B200 H100 H200 L40S RTX3090 RTX4090 RTX5090",
    "runpod": "A100-80GB A100-80GB-SXM B200 H100 H100-NVL H100-SXM H200-SXM L4 L40S RTX3090 RTX4090 RTX5090",
}
columns = "InstanceType AcceleratorName AcceleratorCount vCPUs MemoryGiB Region SpotPrice Price GpuInfo".split()
folder = Path.home() / ".sky" / "catalogs" / "v8"
for cloud, gpus in names.items():
    (folder / cloud).mkdir(parents=True, exist_ok=True)
    with (folder / cloud / "vms.csv").open("w") as file:
        rows = csv.writer(file)
        zones = cloud == "runpod"  # Vast.ai's has none
        rows.writerow(columns + ["AvailabilityZone"] * zones)
        for gpu in gpus.split():
            for cards in (1, 2, 4):
                row = [f"{cards}x_{gpu}", gpu, cards, 8, 64, "CA", cards * .5, cards, "{}"]
                rows.writerow(row + ["CA-MTL-1"] * zones)
(folder / "common").mkdir(exist_ok=True)
both = sorted({gpu for gpus in names.values() for gpu in gpus.split()})
clouds = [[gpu, str([cloud for cloud in names if gpu in names[cloud].split()])] for gpu in both]
csv.writer((folder / "common" / "accelerators.csv").open("w")).writerows([["AcceleratorName", "Clouds"], *clouds])
here = skypilot_config.get_active_workspace()
global_user_state.set_allowed_clouds(sky.check._get_workspace_allowed_clouds(here), here)
global_user_state.set_enabled_clouds(list(names), CloudCapability.COMPUTE, here)
found = []
for line in Path(sys.argv[1]).read_text().splitlines():
    read = command.launch.make_context("launch", shlex.split(line)[2:]).params
    wanted = sky.Resources(infra=read["infra"], accelerators=read["gpus"], use_spot=read["use_spot"])
    with sky.Dag() as dag:
        task = sky.Task.from_yaml_config({"name": "x", "run": "true"})
        task.set_resources(wanted)
    try:
        best = Optimizer.optimize(dag, quiet=True).tasks[0].best_resources
        found.append([line, str(best.accelerators), read["cluster"], [key for key, _ in read["secret"]]])
    except Exception as error:
        found.append([line, f"{type(error).__name__}: {error}", "", []])
print(json.dumps(found), file=shown)
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
read = parse_run_configuration(yaml.safe_load(open(sys.argv[1])))
print(json.dumps([read.type, read.name, sorted(read.env)]))
"""


def read_by(environment: str, program: str, recipe: Path, home: Path | None = None) -> Any:
    """What the tool of `.venv-<environment>` reads in a recipe. `home`: a folder for what the tool writes."""
    python = REPOSITORY / f".venv-{environment}" / "bin" / "python"
    if not (python.parent.parent / ".installed").is_file():
        pytest.skip(f".venv-{environment} is not here: `make test-foreign FOREIGN={environment}` makes it")
    variables = {**os.environ, "HOME": str(home or Path.home()), "ECHO2_TICKET": "a ticket"}
    done = subprocess.run([python, "-c", program, recipe], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kubernetes_reads_the_deployment() -> None:
    kind, complaint = read_by("kubernetes", KUBERNETES, LAUNCH / "kubernetes.yaml")
    assert kind == "Deployment"
    assert "imagine" in str(complaint)  # so it does look


def test_skypilot_reads_the_task() -> None:
    name, variables, secrets, (resources,) = read_by("skypilot", SKYPILOT, LAUNCH / "skypilot.yaml")
    assert name == "echo2-worker"
    assert {"ECHO2_MACHINE", "ECHO2_PRICE_USD_PER_HOUR"} <= set(variables)
    assert secrets == ["ECHO2_TICKET"]
    assert "RTX4090" in resources


def test_skypilot_finds_each_machine_that_a_plan_would_rent(tmp_path: Path) -> None:
    """Cards under our names were not there at RunPod ("H200" is "H200-SXM"), or were slower ones ("H100": PCIe)."""
    rows = (
        ("runpod", "any", "RTX-5090", 1, "RTX5090"),
        ("runpod", "CA-MTL-1", "H100", 2, "H100-SXM"),
        ("runpod", "CA", "H100-PCIe", 1, "H100"),
        ("runpod", "any", "H200", 4, "H200-SXM"),
        ("runpod", "any", "A100-80GB", 1, "A100-80GB"),
        ("vastai", "any", "RTX-4090", 2, "RTX4090"),
        ("vastai", "any", "B200", 1, "B200"),
    )
    commands = [
        filled(rent_command(*row[:3], row[3], spot, 1.0), {"name": "one-1"}) for row in rows for spot in (True, False)
    ]
    shipped = [filled(offer.rent, {"name": offer.name}) for offer in market_offers(_read(SHIPPED), MachineFilter())]
    assert sum(not command for command in shipped) == 1  # Vast.ai's A100 with 80 GB
    (tmp_path / "commands").write_text("\n".join(command for command in [*commands, *shipped] if command))
    found = read_by("skypilot", RENTING, tmp_path / "commands", tmp_path)
    assert [entry for entry in found if "Error" in entry[1]] == []
    expected = [str({row[4]: row[3]}) for row in rows for _ in (True, False)]
    assert [entry[1] for entry in found[: len(expected)]] == expected
    assert {tuple(entry[3]) for entry in found} == {("ECHO2_TICKET",)}


def test_dstack_reads_the_task() -> None:
    kind, name, variables = read_by("dstack", DSTACK, LAUNCH / "dstack.yml")
    assert (kind, name) == ("task", "echo2-worker")
    assert "ECHO2_TICKET" in variables


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    here = REPOSITORY / ".venv-kubernetes" / "bin" / "shellcheck"
    shellcheck = str(here) if here.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck here: `make test-foreign FOREIGN=kubernetes` fetches it")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_variable_of_a_recipe_is_one_that_the_script_knows() -> None:
    known = set(re.findall(r"^#   (ECHO2_\w+)", SCRIPT, re.MULTILINE))
    assert known == set(re.findall(r"\$\{(ECHO2_\w+)", SCRIPT))
    for recipe in filter(Path.is_file, LAUNCH.iterdir()):
        assert set(re.findall(r"\bECHO2_\w+", recipe.read_text())) <= known, recipe.name


def test_the_containerfile_copies_what_is_there_and_starts_what_it_copies() -> None:
    text = re.sub(r"^#.*\n", "", (LAUNCH / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    assert {word for word, _ in lines} <= {"FROM", "RUN", "ARG", "COPY", "USER", "WORKDIR", "ENV", "ENTRYPOINT"}
    copies = [rest.split() for word, rest in lines if word == "COPY"]
    for *sources, _ in copies:
        assert all((REPOSITORY / source).exists() for source in sources)
    (entry,) = [json.loads(rest) for word, rest in lines if word == "ENTRYPOINT"]
    assert entry == [next(target for *sources, target in copies if "launch/worker.sh" in sources)]
    assert (LAUNCH / "worker.sh").stat().st_mode & 0o111  # COPY keeps it
    asked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    (image,) = [rest for word, rest in lines if word == "FROM"]
    minor = re.search(r"python:3\.(\d+)", image)
    assert minor is not None
    assert int(minor[1]) >= int(asked.rpartition(".")[2])
    torch = re.findall(r"torch==[\d.]+", (REPOSITORY / "Makefile").read_text())[0]
    assert f"ARG TORCH={torch}" in text
    (state,) = re.findall(r"ECHO2_STATE=(\S+)", text)
    assert f"install --directory --owner worker {state}" in text  # whose owner Docker gives a new volume
