"""The recipes of `launch/`, read by the tools that they are for; `make test-all` fetches these."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

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
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
read = parse_run_configuration(yaml.safe_load(open(sys.argv[1])))
print(json.dumps([read.type, read.name, sorted(read.env)]))
"""


def read_by(environment: str, program: str, recipe: Path) -> Any:
    """What the tool of `.venv-<environment>` reads in a recipe."""
    python = REPOSITORY / f".venv-{environment}" / "bin" / "python"
    if not (python.parent.parent / ".installed").is_file():
        pytest.skip(f".venv-{environment} is not here: `make test-foreign FOREIGN={environment}` makes it")
    done = subprocess.run([python, "-c", program, recipe], capture_output=True, text=True, check=False)
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
