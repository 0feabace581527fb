"""Count the lines of a file with a shell: an environment of your own whose commands run in a container. Used by
own_shell.toml."""

import random
import re
from collections.abc import Mapping
from typing import Any

import echo2

TASK = [{"role": "user", "content": "Write the number of lines of names.txt to answer.txt.\n"}]
COMMAND = re.compile(r"```bash\n(.*?)```", re.DOTALL)


class Files:
    """The rows: a file, and what is right."""

    def __init__(self, size: int = 1000, seed: int = 0) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        count = random.Random(f"{self.seed} {index}").randrange(2, 20)
        return {"prompt": TASK, "text": "a name\n" * count, "answer": str(count)}


class Shell:
    """One rollout. Files stay from command to command, processes do not."""

    def __init__(self, columns: Mapping[str, Any], seed: int) -> None:
        self.row = columns

    async def run(self, policy: Any) -> float:
        """Play it, and return its reward."""
        talk = list(TASK)
        files = {"names.txt": self.row["text"]}
        async with echo2.container("debian:stable-slim", files, memory_bytes=256 << 20) as box:
            message = await policy.chat(talk)
            while command := COMMAND.search(message["content"] or ""):
                ran = await box.run(command[1], 10)
                talk += [message, {"role": "user", "content": f"{ran.output}[exit status {ran.status}]"}]
                message = await policy.chat(talk)
            answer = await box.run("cat answer.txt", 10)
        return float(answer.output.strip() == self.row["answer"])
