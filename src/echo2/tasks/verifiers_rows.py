"""`verifiers:<taskset>`: the tasks of a verifiers v1 taskset as rows, read once, in the Python that has verifiers.

As a script (`python -m echo2.tasks.verifiers_rows`), it runs in that Python: it reads a request and writes the rows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from echo2.core.child import child_environment, take_pipes
from echo2.core.errors import PeerError, UserError
from echo2.sandbox import pipes
from echo2.sandbox.plugins import own_python

SIZE = 1024
SIZE_MAX = 1_000_000
#: Limit on loading a taskset: imports take seconds, and some tasksets read data from a hub.
READ_SECONDS = 600.0
ERROR_CHARS = 1500
#: Parameters of `VerifiersRows` itself; all others are the taskset's configuration.
OWN_PARAMS = ("agent", "first", "size")


class VerifiersRows:
    """The tasks of a taskset as rows. `params`: `agent` (the agent whose conversation is trained on, if a task has
    several), `first` and `size` (the first row, and how many rows at most), and the taskset's own configuration.

    Raises:
        UserError: verifiers cannot load the taskset, or `first` or `size` is invalid.
    """

    def __init__(self, taskset: str, params: Mapping[str, Any]) -> None:
        first, size = params.get("first", 0), params.get("size", SIZE)
        if not (isinstance(first, int) and isinstance(size, int) and first >= 0 and 0 < size <= SIZE_MAX - first):
            raise UserError(
                f"verifiers:{taskset}: first = {first!r} and size = {size!r}: up to {SIZE_MAX} rows in all."
            )
        config = {name: value for name, value in params.items() if name not in OWN_PARAMS}
        request = {"taskset": {"id": taskset, **config}, "agent": str(params.get("agent", "")), "most": first + size}
        self._rows = _load_rows(request)[first:]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self._rows[index]


def _load_rows(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    command = [own_python("verifiers"), "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=pipes.encode(dict(request)),
            capture_output=True,
            timeout=READ_SECONDS,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"The taskset {request['taskset']} took longer than {READ_SECONDS:g} s to load.") from error
    try:
        answer = pipes.read(BytesIO(done.stdout)) or {}
    except PeerError as error:
        raise UserError(f"The taskset {request['taskset']} gave no rows: {error}") from error
    if "rows" not in answer:
        problem = answer.get("failed") or done.stderr.decode(errors="replace").strip()[-ERROR_CHARS:]
        raise UserError(f"The taskset {request['taskset']} gave no rows: {problem}")
    rows: list[dict[str, Any]] = answer["rows"]
    return rows


def main() -> None:
    """Read one request from standard input, and write the rows to standard output."""
    inbox, outbox = take_pipes()
    request = pipes.read(inbox) or {}
    from echo2.tasks.verifiers_play import rows

    try:
        answer: dict[str, Any] = {"rows": list(rows(request["taskset"], request["agent"], request["most"]))}
    except UserError as error:
        answer = {"failed": str(error)}
    outbox.write(pipes.encode(answer))
    outbox.flush()


if __name__ == "__main__":
    main()
    sys.exit(0)
