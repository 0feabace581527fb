"""Plays tasks in Harbor's format (`harbor_rows.py`): the policy has a shell in a container, and the task's tests give
the reward. A harness of the house (`harness_process.py`: environment = "harbor").

The policy calls the tool `bash`; a model whose chat template knows no tools writes a block of code. Each command is a
shell of its own; files stay. An answer without a command ends the conversation, as do the room of the rollout and the
task's time, which is that of its commands: how fast the model answers is the machine's affair. Then `tests/test.sh`
runs in the same container, in a fresh process, with fresh /tests and /logs.

A command or a test that exceeds a limit is the policy's affair. A container that does not start or dies, and tests that
leave no reward, are nobody's zero: the rollout is lost by that cause.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from echo2.core.devices import num_cores
from echo2.core.documents import is_number, parse_json
from echo2.core.errors import UserError
from echo2.sandbox.containers import IMAGES, Container, Containers, Image, find_runtime
from echo2.sandbox.folders import ROOT
from echo2.sandbox.programs import ContainerLimits, Ran
from echo2.tasks.harbor_rows import COLUMN, DOCKERFILE, ENVIRONMENT, TESTS, Files, HarborTask, unpacked_files
from echo2.tasks.loopback_model import LoopbackModel, OutOfRoomError

if TYPE_CHECKING:
    from echo2.tasks.loopback_model import Play

COMMAND_SECONDS = 60.0
#: Commands that run at once, for each core: most wait for something.
COMMANDS_PER_CORE = 4
SYSTEM = (
    "You solve a task in a Linux shell. Run a command with the tool bash, or write it in a block that begins with "
    "```bash and ends with ```. Each command is a new shell; files stay. When all is done, answer without a command."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell and read what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)(?:```|\Z)", re.DOTALL)
#: What prints one of the files that the tests may write, if it is one.
READ_REWARD = f'cd "${ROOT}/logs/verifier" && test -f {{0}} && head -c 4000 {{0}}'
REWARDS = ("reward.txt", "reward.json")
KILLED = 137
#: Of the tests: they do not begin with modules that the policy left in its home.
OF_TESTS = {"PYTHONNOUSERSITE": "1"}
ALONE = ".echo2-alone.sh"
#: What the tests' shell reads first. Before it writes a reward itself it ends what a tested program has left behind, to
#: write another one: processes that this shell neither began nor stems from. What it cannot end in 50 rounds, because
#: it forks all the time, ends the tests. Where there is no /proc (Landlock) it sees no process.
ALONE_TEXT = r"""unset BASH_ENV
__echo2_others() {
  local file line pid rest; local -A parent=() mine=()
  for file in /proc/[0-9]*/stat; do
    { read -r line < "$file"; } 2>/dev/null || continue
    rest=${line##*) }; rest=${rest#? }; parent[${line%% *}]=${rest%% *}
  done
  pid=$BASHPID; while [[ $pid -gt 0 ]]; do mine[$pid]=1; pid=${parent[$pid]:-0}; done
  others=()
  for pid in "${!parent[@]}"; do
    rest=$pid; while [[ $rest -gt 1 && $rest -ne $$ ]]; do rest=${parent[$rest]:-0}; done
    [[ $rest -eq $$ || -n ${mine[$pid]:-} || $pid -eq 1 ]] || others+=("$pid")
  done
}
__echo2_alone() {
  local others round
  for round in {1..50}; do
    __echo2_others
    [[ ${#others[@]} -gt 0 ]] || return 0
    kill -9 "${others[@]}" 2>/dev/null || true
  done
  kill -9 $$
}
set -T
trap 'case $BASH_COMMAND in (echo*/logs/verifier/reward.*|printf*/logs/verifier/reward.*) __echo2_alone ;; esac' DEBUG
"""


def make_play() -> Play:
    """Return a function that plays one rollout of a row of `HarborRows`.

    Raises:
        ContainerFault: this machine has no containers.
    """
    containers = Containers(find_runtime())
    running = asyncio.Semaphore(COMMANDS_PER_CORE * num_cores())

    async def play(columns: Mapping[str, Any], seed: int, model: LoopbackModel) -> float:
        row = columns.get(COLUMN)
        if not isinstance(row, Mapping):
            raise UserError(f"The row has no column {COLUMN!r}: tasks.source must be a directory of Harbor tasks.")
        task = HarborTask(**{one.name: row[one.name] for one in fields(HarborTask)})
        image = image_of(task, unpacked_files(row["files"], ENVIRONMENT), containers.runtime)
        limits = ContainerLimits(
            memory_bytes=task.memory_bytes,
            cpus=task.cpus,
            has_network=task.has_network,
            storage_bytes=task.storage_bytes,
        )
        talk: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["instruction"]},
        ]
        container = await containers.open(image, limits)
        try:
            with suppress(OutOfRoomError):  # what was done until then counts
                await _converse(model, talk, container, task, running)
            return await _reward(container, task, unpacked_files(row["files"], TESTS), running)
        finally:
            await container.close()

    return play


def image_of(task: HarborTask, files: Files, runtime: str) -> Image:
    """Return what the task's container begins with. Without images, of a Dockerfile only FROM, which is the machine
    itself, WORKDIR and COPY into it can be done.

    Raises:
        UserError: the Dockerfile has more, or a path leads out of its folder.
    """
    if runtime in IMAGES:
        if DOCKERFILE in files and not task.image:
            return Image(task.directory, files, build_seconds=task.build_seconds)
        if not task.image:
            raise UserError(f"The task {task.name} has neither {ENVIRONMENT}/{DOCKERFILE} nor docker_image.")
        added_files = {name: entry for name, entry in files.items() if DOCKERFILE not in files}
        return Image(task.directory, added_files, task.image, task.build_seconds)
    if DOCKERFILE not in files:
        return Image(task.directory or "/app", files)
    directory, put = "/app", Files()
    text = re.sub(r"\\\n", " ", files[DOCKERFILE][0].decode(errors="replace"))
    for line in text.splitlines():
        try:
            word, *rest = shlex.split(line) or ["#"]
        except ValueError:
            word, rest = line, []  # no instruction
        match word.upper(), rest:
            case (("FROM" | "CMD"), _):
                continue
            case _ if word.startswith("#"):
                continue
            case "WORKDIR", [path] if re.fullmatch(r"(/[\w-][\w.-]*)+/?", path):
                directory = path.rstrip("/")
            case "COPY", [*sources, target] if sources and not any(one.startswith("--") for one in rest):
                put |= _copied(files, sources, target, directory, task.name)
            case _:
                raise UserError(
                    f"The task {task.name} needs an image made by {line[:80]!r}: {runtime} makes none. Install podman."
                )
    return Image(task.directory or directory, put)


def _copied(files: Files, sources: list[str], target: str, directory: str, name: str) -> Files:
    """Return what a COPY of a Dockerfile puts below the directory."""
    is_absolute = target.startswith("/")
    below = target.removeprefix(directory if is_absolute else "./").strip("/")
    if (is_absolute and not f"{target}/".startswith(f"{directory}/")) or ".." in target.split("/"):
        raise UserError(f"The task {name} copies to {target}, outside {directory}. For that install podman.")
    prefix = "" if below in ("", ".") else f"{below}/"
    put: Files = {}
    for source in (one.removeprefix("./").strip("/") for one in sources):
        if source in files:  # a file: its target is a folder, or its new name
            is_folder = not prefix or target.endswith("/") or len(sources) > 1
            put[prefix + source.rpartition("/")[2] if is_folder else below] = files[source]
            continue
        inner = {one: entry for one, entry in files.items() if source in ("", ".") or one.startswith(f"{source}/")}
        if not inner:
            raise UserError(f"The task {name} copies {source!r}, and its {ENVIRONMENT}/ does not have that.")
        start = "" if source in ("", ".") else f"{source}/"
        put |= {prefix + one.removeprefix(start): entry for one, entry in inner.items() if one != DOCKERFILE}
    return put


async def _converse(
    model: LoopbackModel, talk: list[dict[str, Any]], container: Container, task: HarborTask, running: asyncio.Semaphore
) -> None:
    """Go on with the talk until an answer has no command, or its commands have had their time."""
    seconds_left = task.agent_seconds
    while True:
        message = await model.chat(talk, tools=[TOOL])
        talk.append(message)
        calls = message.get("tool_calls") or []
        commands = [_command(call["function"]) for call in calls] or BLOCK.findall(message["content"] or "")[:1]
        if not commands:
            return
        for number, command in enumerate(commands):
            content = "The tool is bash, with the argument command." if command is None else ""
            if command is not None:
                async with running:
                    ran = await container.run(command, min(COMMAND_SECONDS, seconds_left), task.variables)
                content, seconds_left = command_report(ran), seconds_left - ran.seconds
                if seconds_left <= 0.0:
                    return
            role = {"role": "tool", "tool_call_id": calls[number]["id"]} if calls else {"role": "user"}
            talk.append({**role, "content": content})


def _command(function: Mapping[str, Any]) -> str | None:
    try:
        command = parse_json(function["arguments"])["command"]
    except (KeyError, TypeError, ValueError):
        return None
    return command if function["name"] == "bash" and isinstance(command, str) else None


def command_report(ran: Ran) -> str:
    """Return what the policy reads of a command."""
    ended = f"[stopped: it exceeded its limit of {ran.stopped}]" if ran.stopped else f"[exit status {ran.status}]"
    return ran.output if ran.status == 0 and ran.output.strip() else f"{ran.output.rstrip()}\n{ended}".lstrip()


async def _reward(container: Container, task: HarborTask, tests: Files, running: asyncio.Semaphore) -> float:
    """Run the tests, and read what they wrote. Of two rewards the lower counts: the tested program may have written
    one, and so can only lose.

    Raises:
        UserError: they ended by themselves and wrote no reward.
    """
    async with running:
        await container.put("/tests", {**tests, ALONE: (ALONE_TEXT.encode(), False)})
        await container.put("/logs", {"verifier/.keep": (b"", False)})
        variables = {**OF_TESTS, **task.variables, **task.tests_variables}
        command = f'BASH_ENV="${ROOT}/tests/{ALONE}" bash "${ROOT}/tests/test.sh"'
        ran = await container.run(command, task.tests_seconds, variables)
        outputs = [await container.run(READ_REWARD.format(name), COMMAND_SECONDS) for name in REWARDS]
    rewards, why = [], ""
    for one in outputs:
        try:
            rewards.append(reward_in(one.output))
        except ValueError as error:
            why = f"{why}; {error}" if why else str(error)
    if not rewards and not ran.stopped and ran.status != KILLED:
        raise UserError(
            f"The tests of {task.name} wrote no reward to /logs/verifier ({why}); exit status {ran.status}: "
            f"{ran.output.strip()[-1000:]}"
        )
    return min(rewards, default=0.0)  # none: the work that they tested exceeded a limit, or ended them


def reward_in(text: str) -> float:
    """Return the reward: a number, or of a JSON object the entry `reward`, or its only entry.

    Raises:
        ValueError: the text is neither.
    """
    reward = parse_json(text)
    if isinstance(reward, dict):
        reward = reward["reward"] if "reward" in reward else next(iter(reward.values())) if len(reward) == 1 else None
    if not is_number(reward):
        raise ValueError(f"it is {text.strip()[:100]!r}")
    return float(reward)
