"""Logprobs of a step's first groups under the policy that was trained: from the learner to the head, for people."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

from echo2.errors import PeerError
from echo2.transport import wire_pb2 as wire
from echo2.transport.limits import LOGGED_GROUPS, LOGGED_TOKENS

LearnerLogprobs = Mapping[int, "Sequence[array[float]]"]
"""By group number, for each rollout the logprobs 'f' of its first tokens."""


def logged_tokens(num_rollouts: int) -> int:
    """Return how many first tokens of each rollout of a group are written for people one by one."""
    return LOGGED_TOKENS // (LOGGED_GROUPS * num_rollouts)


def encode_logprobs(logprobs: LearnerLogprobs) -> list[wire.GroupLogprobs]:
    """Encode the logprobs for a StepReport."""
    return [
        wire.GroupLogprobs(group=number, rollouts=[each.tobytes() for each in of_rollouts])
        for number, of_rollouts in logprobs.items()
    ]


def decode_logprobs(messages: Iterable[wire.GroupLogprobs]) -> LearnerLogprobs:
    """Decode the logprobs of a StepReport.

    Raises:
        PeerError: "malformed": more than `LOGGED_GROUPS` groups or `LOGGED_TOKENS` tokens, or no whole float32.
    """
    found = {message.group: message.rollouts for message in messages}
    sizes = [len(data) for rollouts in found.values() for data in rollouts]
    if len(found) > LOGGED_GROUPS or sum(sizes) > 4 * LOGGED_TOKENS or any(size % 4 for size in sizes):
        raise PeerError("malformed", f"logprobs of {len(found)} groups in {sum(sizes)} bytes")
    return {number: [array("f", data) for data in rollouts] for number, rollouts in found.items()}
