"""The names of the engines, as in `workers.engine` and `--engine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echo2.errors import UserError, did_you_mean

#: Token servers, which run beside the worker; `rollout/engines.py` calls their module's `make_server(place, slots)`.
SERVERS: Mapping[str, str] = {
    "vllm": "echo2.rollout.servers.vllm",
}
#: The module of each; `rollout/engines.py` calls its `make_engine(device, slots)`.
ENGINES: Mapping[str, str] = {
    "compact": "echo2.rollout.compact",
    "transformers": "echo2.rollout.hf_engine",
    "fake": "echo2.rollout.fake_engine",
    **SERVERS,
}
#: Those whose tokens are drawn with the head's random numbers (`rollout/sampler.py`), and which can check who does.
STREAM_ENGINES = frozenset({"compact", "transformers"})
#: Slots that a worker says it has if its owner sets no limit: any number.
NO_SLOT_LIMIT = 1 << 16


def refuse_unknown_engine(name: str) -> None:
    """Raises UserError if there is no engine of this name; the message names those that there are."""
    if name not in ENGINES:
        raise UserError(f"There is no engine {name!r}.{did_you_mean(name, ENGINES)} Use {', '.join(ENGINES)}.")


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Where a token server is. `python`: of the environment that has its package (empty: this one); `arguments`: more
    of its own; `url`: of one that runs already, which then is not started. `directory` takes its model, socket and log;
    None: a temporary one. The server sees it too: it reads weights from there."""

    python: str = ""
    url: str = ""
    arguments: tuple[str, ...] = ()
    directory: Path | None = None
