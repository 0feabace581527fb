"""Questions about people, for an agent of another framework (agent.py), which finds them with a tool.

    people.py:People#train       where a person's friend lives, or how old the friend is: rows for a run
    people.py:Shown#train        what a program would say at each call of the model, for a warm-up by `echo2 sft`
    people.py:Agent              the harness: it has agent.py play the rollouts, in the Python that has its SDK

Each row has its own people, so that nothing can be known by heart. Held-out rows have other names and other cities.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from echo2.core.errors import UserError
from echo2.sandbox.plugins import load_named, own_python

HERE = Path(__file__).parent
PROGRAM, FACTS = HERE / "agent.py", HERE.parent / "smollm" / "facts.py"
INSTRUCTIONS, compacted = (load_named(f"{PROGRAM}:{name}") for name in ("INSTRUCTIONS", "compacted"))
NAMES, CITIES = (load_named(f"{FACTS}:{name}") for name in ("NAMES", "CITIES"))

SIZE = {"train": 100_000, "heldout": 1024}
NUM_PEOPLE = 4
ASKED = {"city": "In which city does the friend of {name} live?", "age": "How old is the friend of {name}?"}
#: Sockets of agent.py, a new one each time that it is started.
FOLDER, NUMBERS = tempfile.TemporaryDirectory(prefix="agent-"), itertools.count()


class People:
    """Row i depends on (seed, split, i) only."""

    def __init__(self, split: str = "train", seed: int = 0) -> None:
        if split not in SIZE:
            raise UserError(f"split = {split!r}. Use train or heldout.")
        self._split, self._seed = split, seed
        self._cities = CITIES[:12] if split == "train" else CITIES[12:]

    def __len__(self) -> int:
        return SIZE[self._split]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = random.Random(f"people {self._seed} {self._split} {index}")
        names = rng.sample(NAMES[self._split], NUM_PEOPLE)
        facts = {
            name: {"age": str(rng.randint(11, 89)), "city": rng.choice(self._cities), "friend": friend}
            for name, friend in zip(names, [*names[1:], names[0]], strict=True)
        }
        kind, name = rng.choice(sorted(ASKED)), names[0]
        question = ASKED[kind].format(name=name)
        return {
            "prompt": [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}],
            "question": question,
            "people": {name: told(name, known) for name, known in sorted(facts.items())},
            "chain": names[:2],
            "answer": facts[facts[name]["friend"]][kind],
        }


class Shown(People):
    """A call of the model in each row, and what a program would say there."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt, answer = random.Random(f"shown {index}").choice(calls(super().__getitem__(index)))
        return {"prompt": prompt, "answer": answer}


class Agent:
    """Plays a rollout with agent.py, which runs until the worker ends."""

    _starting = asyncio.Lock()
    _program: asyncio.subprocess.Process | None = None
    _socket = ""

    def __init__(self, columns: dict[str, Any], seed: int) -> None:
        self._row = columns

    async def run(self, policy: Any) -> float:
        reader, writer = await asyncio.open_unix_connection(await self._listening())
        task = {name: self._row[name] for name in ("question", "people")}
        writer.write(json.dumps({**task, "base_url": policy.base_url, "api_key": policy.api_key}).encode() + b"\n")
        try:
            said = json.loads(await reader.readline() or '{"failed": "agent.py ended"}')
        finally:
            writer.close()
        if "failed" in said:
            raise UserError(said["failed"])
        return float(said["answer"].strip().rstrip(".") == self._row["answer"])

    @classmethod
    async def _listening(cls) -> str:
        """The program's socket. Starts the program if it does not run."""
        async with cls._starting:
            if cls._program is None or cls._program.returncode is not None:
                words = own_python("agents"), str(PROGRAM), f"{FOLDER.name}/{next(NUMBERS)}"
                cls._socket, piped = words[-1], asyncio.subprocess.PIPE
                cls._program = await asyncio.create_subprocess_exec(*words, stdout=piped)
                assert cls._program.stdout is not None
                if not await cls._program.stdout.readline():
                    raise UserError(f"{' '.join(words)} ended before it listened; this process's log says why.")
        return cls._socket


def told(name: str, known: dict[str, str]) -> str:
    """What the tool says of a person."""
    return f"{name}: age {known['age']}, city {known['city']}, friend {known['friend']}."


def calls(row: dict[str, Any]) -> list[tuple[list[dict[str, str]], str]]:
    """The three calls of the model that answer a row: what it reads, and what it should say."""
    system, user = row["prompt"]
    found = [row["people"][name] for name in row["chain"]]
    first, second = map(call, row["chain"])
    talk = [{"role": "assistant", "content": first}, {"role": "tool", "content": found[0]}]
    later = {"role": "user", "content": compacted(row["question"], found)}
    return [([system, user], first), ([system, user, *talk], second), ([system, later], row["answer"])]


def call(name: str) -> str:
    """A call of the tool, as the model writes it."""
    return f"<tool_call>{json.dumps({'name': 'find', 'arguments': {'name': name}})}</tool_call>"
