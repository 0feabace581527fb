"""Digit sorting as an environment of OpenEnv, served here: two tries, and the digits again after a wrong one.

    make openenv; .venv-openenv/bin/python examples/openenv/server.py 8003

Used by examples/openenv.toml.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

TRIES = 2
SESSIONS_MAX = 1024


class Sorted(Action):
    digits: str


class Unsorted(Observation):
    digits: str = ""


class Sorting(Environment):
    """One session: the digits of `reset` are to be sorted."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._digits, self._tries = "", 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, digits: str = "", **_: Any) -> Unsorted:
        self._digits, self._tries = digits, 0
        return Unsorted(digits=digits, done=False, reward=0.0)

    def step(self, action: Sorted, **_: Any) -> Unsorted:
        self._tries += 1
        is_right = action.digits == "".join(sorted(self._digits))
        return Unsorted(digits=self._digits, done=is_right or self._tries == TRIES, reward=float(is_right))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Sorting, Sorted, Unsorted, max_concurrent_envs=SESSIONS_MAX)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
