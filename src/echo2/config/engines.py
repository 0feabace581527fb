"""The engines, by the name that `workers.engine` and `--engine` give them."""

from __future__ import annotations

from collections.abc import Mapping

#: The module of each; `rollout/engines.py` calls its `make_engine(device, slots)`.
ENGINES: Mapping[str, str] = {
    "compact": "echo2.rollout.compact",
    "transformers": "echo2.rollout.hf_engine",
    "fake": "echo2.rollout.fake_engine",
}
#: Slots that a worker says it has if its owner sets no limit: any number.
NO_SLOT_LIMIT = 1 << 16
