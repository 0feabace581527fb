"""Task sets in Harbor's format as rows: a directory that has a directory with a `task.toml` for each task.

    task.toml         limits, image, variables          tests/test.sh    writes the reward
    instruction.md    what the policy reads             environment/     a Dockerfile, and files for its image

A row carries its task's files, packed, so that workers elsewhere need no copy of the directory. What echo2 does not
run is refused by name before the run starts: steps, services, GPUs, secrets of the machine. The reference solution
stays where it is. Format: https://www.harborframework.com/docs/tasks, schema 1.4.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echo2.core.documents import parse_json, parse_toml
from echo2.core.errors import UserError
from echo2.core.printable import shown

#: The column that carries a task.
COLUMN = "harbor"
TASK_FILE, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "Dockerfile"
FILES_MAX = 1000
#: Of all its files, before they are packed.
BYTES_MAX = 16 << 20
#: Of the same as JSON: a byte becomes up to six.
TEXT_BYTES_MAX = 7 * BYTES_MAX
#: Of a packed task: with its other columns, a row may have a megabyte.
PACKED_BYTES_MAX = 700_000
#: Parts of the format that are refused, and why.
REFUSED = {
    "steps": "tasks of several steps",
    "environment.mcp_servers": "tool servers (MCP)",
    "environment.tpu": "TPUs",
    "verifier.environment": "a verifier's own image",
    "verifier.collect": "hooks before the tests",
}
#: Folders of a task that a row carries.
ENVIRONMENT, TESTS = "environment", "tests"
#: Contents of a file, and whether it is executable, by path.
Files = dict[str, tuple[bytes, bool]]


@dataclass(frozen=True, slots=True)
class HarborTask:
    """What `task.toml` says of one task, in our units. `image`: a prebuilt image, or empty."""

    name: str
    agent_seconds: float = 600.0
    tests_seconds: float = 600.0
    build_seconds: float = 600.0
    image: str = ""
    directory: str = ""
    cpus: float = 1.0
    memory_bytes: int = 2 << 30
    storage_bytes: int = 10 << 30
    has_network: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    tests_variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError: the image or the directory has a name that none has."""
        if self.image and not re.fullmatch(r"\w[\w.:/@-]*", self.image):  # a program's option, too
            raise ValueError(f"docker_image = {shown(self.image)} names no image")
        _directory(self.directory)


class HarborRows:
    """The tasks of a directory, in the order of their names. All are read once at the start, so that the mistakes of
    each are known, and again when their turn comes.

    Raises:
        UserError: a task cannot be read, or needs what is not supported; the message names it.
    """

    def __init__(self, root: Path) -> None:
        self._folders = [folder for folder in sorted(root.iterdir()) if (folder / TASK_FILE).exists()]
        self._digests = [_digest(read_task(folder)) for folder in self._folders]

    def __len__(self) -> int:
        return len(self._folders)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = read_task(self._folders[index])
        if _digest(row) != self._digests[index]:
            raise UserError(f"{self.where(index)} has changed since the run began. Put the old files back.")
        return row

    def digest(self) -> str:
        return hashlib.blake2b("".join(self._digests).encode(), digest_size=16).hexdigest()

    def where(self, index: int) -> str:
        return str(self._folders[index])


def is_task_set(path: Path) -> bool:
    """Whether a directory has tasks in Harbor's format."""
    return any(path.glob(f"*/{TASK_FILE}"))


def read_task(folder: Path) -> dict[str, Any]:
    """Read one task as a row.

    Raises:
        UserError: a file is missing, no plain file or too large, or the task needs what is not supported.
    """
    files = _files(folder)
    try:
        content = parse_toml(files[TASK_FILE][0].decode())
        instruction = files[INSTRUCTION][0].decode()
        files[f"{TESTS}/test.sh"]
    except KeyError as error:
        raise UserError(f"{folder} has no {error.args[0]}, which a Harbor task needs.") from error
    except ValueError as error:  # TOML's and UTF-8's
        raise UserError(f"{folder} cannot be read: {error}.") from error
    task = _task(folder, content)
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if f"{ENVIRONMENT}/{name}" in files:
            raise UserError(f"{folder} has {ENVIRONMENT}/{name}: tasks of several containers are not supported.")
    carried = {name: entry for name, entry in files.items() if name.startswith((f"{ENVIRONMENT}/", f"{TESTS}/"))}
    packed = packed_files(carried)
    if len(packed) > PACKED_BYTES_MAX:
        raise UserError(
            f"{folder} has {len(packed)} bytes of files, packed; {PACKED_BYTES_MAX} are the most. Put large files into "
            "an image, and name it as environment.docker_image."
        )
    prompt = [{"role": "user", "content": instruction}]
    return {"prompt": prompt, COLUMN: {**asdict(task), "instruction": instruction, "files": packed}}


def packed_files(files: Files) -> str:
    """Pack files into text."""
    plain = {name: [data.decode("latin-1"), executable] for name, (data, executable) in sorted(files.items())}
    return base64.b64encode(zlib.compress(json.dumps(plain).encode(), 9)).decode()


def unpacked_files(packed: str, folder: str) -> Files:
    """Return the packed files below a folder, by their paths in it.

    Raises:
        UserError: they unpack to more than a task may have.
    """
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(base64.b64decode(packed), TEXT_BYTES_MAX)
    if not unpacking.eof:
        raise UserError(f"A task's files unpack to more than {BYTES_MAX} bytes, or are cut off.")
    plain = parse_json(text)
    files = {name: (text.encode("latin-1"), bool(executable)) for name, (text, executable) in plain.items()}
    return {name.removeprefix(f"{folder}/"): entry for name, entry in files.items() if name.startswith(f"{folder}/")}


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(row).encode(), digest_size=16).hexdigest()


def _files(folder: Path) -> Files:
    """Read a task's files but its solution. Only plain files are read, and no link is followed."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: put the task itself there.")
    files: Files = {}
    room = BYTES_MAX
    for place, folders, names in os.walk(folder):
        folders[:] = [] if Path(place) == folder / "solution" else sorted(folders)
        for name in sorted([*names, *(one for one in folders if os.path.islink(os.path.join(place, one)))]):
            path = Path(place, name)
            if Path(place) == folder / "solution":
                continue
            data, is_executable = _plain_file(path, room)
            files[path.relative_to(folder).as_posix()] = data, is_executable
            room -= len(data)
            if len(files) > FILES_MAX or room < 0:
                raise UserError(
                    f"{folder} has more than {FILES_MAX} files, or {BYTES_MAX} bytes. Put them into an image, and name "
                    "it as environment.docker_image."
                )
    return files


def _plain_file(path: Path, room: int) -> tuple[bytes, bool]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}. A task has plain files, and no links.") from error
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{path} is not a plain file.")
        data = file.read(room + 1)
    return data, bool(mode & stat.S_IXUSR)


def _task(folder: Path, content: Mapping[str, Any]) -> HarborTask:
    parts = {name: content.get(name, {}) for name in (ENVIRONMENT, "agent", "verifier")}
    if wrong := [name for name, part in parts.items() if not isinstance(part, Mapping)]:
        raise UserError(f"{folder}/{TASK_FILE}: {wrong[0]} = {shown(parts[wrong[0]])} is not a table.")
    for name, why in REFUSED.items():
        table, _, key = name.rpartition(".")
        if (parts[table] if table else content).get(key):
            raise UserError(f"{folder}/{TASK_FILE} has {name}: {why} are not supported.")
    environment, agent, verifier = parts.values()
    modes = [part.get("network_mode", "no-network") for part in parts.values()]
    has_network = "public" in modes or environment.get("allow_internet", False) is True
    unsupported = {
        "gpus": environment.get("gpus", 0) not in (0, None),
        "os": environment.get("os", "linux") != "linux",
        "network_mode": any(mode not in ("public", "no-network") for mode in modes),
        "environment_mode": verifier.get("environment_mode", "shared") != "shared",
    }
    if names := [name for name, is_there in unsupported.items() if is_there]:
        raise UserError(f"{folder}/{TASK_FILE}: {names[0]} is something that echo2 does not support.")
    try:
        return HarborTask(
            name=folder.name,
            agent_seconds=_number(agent, "timeout_sec", 600.0),
            tests_seconds=_number(verifier, "timeout_sec", 600.0),
            build_seconds=_number(environment, "build_timeout_sec", 600.0),
            image=str(environment.get("docker_image") or ""),
            directory=_directory(environment.get("workdir") or ""),
            cpus=_number(environment, "cpus", 1.0),
            memory_bytes=_bytes(environment, "memory", 2048),
            storage_bytes=_bytes(environment, "storage", 10_240),
            has_network=has_network,
            variables=_variables(environment.get("env", {})),
            tests_variables=_variables(verifier.get("env", {})),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}/{TASK_FILE}: {error}.") from error


def _number(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name, default)
    if not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ValueError(f"{name} = {shown(value)} must be a number above 0")
    return float(value)


def _bytes(environment: Mapping[str, Any], name: str, default_mb: int) -> int:
    """Return bytes: of `memory_mb`, or of the older `memory` ("2G")."""
    if (text := environment.get(name)) and f"{name}_mb" not in environment:
        parts = re.fullmatch(r"(\d{1,6})\s*([MG])i?B?", str(text), re.IGNORECASE)
        if parts is None:
            raise ValueError(f'{name} = {shown(text)} must be like "2G"')
        return int(parts[1]) << (30 if parts[2] in "Gg" else 20)
    return int(_number(environment, f"{name}_mb", default_mb)) << 20


def _directory(path: Any) -> str:
    if (path and not re.fullmatch(r"(/[\w.-]+)+", str(path))) or ".." in str(path).split("/"):
        raise ValueError(f"workdir = {shown(path)} must be an absolute path")
    return str(path)


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    for name, value in table.items():
        if not isinstance(value, str) or "${" in value or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"env.{name} = {shown(value)} must be text that names no variable of the machine")
    return dict(table)
