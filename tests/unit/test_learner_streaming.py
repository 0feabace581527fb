"""Training while the groups of a step still come, against training on all of them: the same weights, bit for bit."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from echo2.core.types import RolloutGroup
from echo2.learner.grpo.loop import GrpoClient
from echo2.learner.grpo.step_meter import LossStats
from echo2.transport import wire_pb2 as wire
from learner_cases import config_of, random_group, tiny_policy
from test_learner_loop import OPTIONS, ScriptedHead, run, weights, with_step


class HalvingHead(ScriptedHead):
    """It feeds half of a step's groups and, if `has_begun` is given, the others when training has begun."""

    has_begun: threading.Event | None = None

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        whole = wire.FedGroups()
        async for fed in super().stream(method, request):
            if method != "TakeGroups":
                yield fed
            elif self.has_begun is None:
                whole.MergeFrom(fed)
            else:
                if len(self.fed[request.step]) == 5:
                    while not self.has_begun.is_set():  # noqa: ASYNC110 - another thread sets it
                        await asyncio.sleep(0)
                    self.has_begun.clear()
                yield fed
        if method == "TakeGroups" and self.has_begun is None:
            yield whole


def test_training_while_groups_arrive_gives_the_bits_of_training_on_all_of_them(tmp_path: Path) -> None:
    """In micro-batches of two or three groups, half of which come when the first half is being trained on."""

    class Begins(GrpoClient):
        def forward_backward(self, groups: Sequence[RolloutGroup]) -> LossStats:
            begun.set()
            return super().forward_backward(groups)

    begun, found = threading.Event(), []
    for is_streamed in (False, True):
        head, trainer = HalvingHead(max_steps=2), Begins(tiny_policy(), config_of(OPTIONS, tokens_per_microbatch=60))
        head.groups = lambda step: [with_step(random_group(random.Random(i), 9 * step + i), step) for i in range(8)]
        begun.clear()
        head.has_begun = begun if is_streamed else None
        run(head, trainer, tmp_path / str(is_streamed), deterministic=True)
        found.append(weights(trainer))
    assert found[0] == found[1]


def test_the_head_says_how_many_steps_lie_between_snapshots(tmp_path: Path) -> None:
    head = ScriptedHead()
    head.publish_every = lambda step: {1: 1, 3: 3}.get(step, 0)
    run(head, GrpoClient(tiny_policy(), OPTIONS), tmp_path, publish_every=4, max_staleness=3)
    assert sorted(head.published) == [0, 2, 3, 5], (
        "each after the second and third step, then every third, and the last"
    )
