"""The values that travel between processes. Frozen dataclasses; standard library only.

Token data is held in `array.array` ('i' for token ids, 'f' for logprobs): compact, and readable without a copy by
`numpy.frombuffer` and `torch.frombuffer`.

A *policy version* is a number of completed training steps. After a learner has fallen back to a checkpoint, numbers
are used again for other weights; the *lineage*, which grows by one at each such fall-back, tells them apart.

A *policy id* says whose version or group it is: each policy counts its lineages, versions and groups by itself.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

GroupKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]

#: Id of the one policy that a run trains.
RUN_POLICY = "policy"
#: What a policy id may be. Ids become file names, also on disks that do not tell upper from lower case.
_POLICY_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
#: Policy id of a base model: 16 hex digits of the digest of its content (`weights/manifest.py`).
_BASE_MODEL_ID = re.compile(r"base-[0-9a-f]{16}")

#: Column of a task whose rollouts were made long ago and are not sampled (`tasks/logs.py`).
LOGGED_ROLLOUTS = "logged_rollouts"
DEFAULT_LOGGED_ROLLOUTS = 8
#: Strings that end a rollout, and characters of each.
STOP_STRINGS_MAX, STOP_CHARS_MAX = 16, 128


def is_policy_id(text: str) -> bool:
    """Whether `text` can be a policy's id: 1 to 64 lower-case letters, digits, "_" and "-", no sign first."""
    return _POLICY_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class GroupRef:
    """Name of one rollout group of a policy. Train groups are numbered in issue order; eval groups by
    (version, position). Both count from 0 in every policy.
    """

    policy: str
    kind: GroupKind
    number: int

    def __str__(self) -> str:
        return f"{self.policy}/{self.kind}-{self.number}"


@dataclass(frozen=True, slots=True, order=True)
class SnapshotRef:
    """Name of one snapshot: the weights of `policy` after `version` training steps in `lineage`."""

    policy: str
    lineage: int
    version: int

    @property
    def history(self) -> tuple[str, int]:
        """(policy, lineage): within it, a version number means one set of weights, and versions only grow."""
        return self.policy, self.lineage

    @property
    def is_base_model(self) -> bool:
        """Whether it names a frozen model that adapters are laid over: it has one snapshot, and a name by content."""
        return not self.lineage and not self.version and _BASE_MODEL_ID.fullmatch(self.policy) is not None

    def __str__(self) -> str:
        return f"{self.policy}@{self.lineage}.{self.version}"


@dataclass(frozen=True, slots=True)
class PayloadId:
    """What a worker is sent of `ref`: what leads to it from nothing where `base` is None, else from `base`."""

    ref: SnapshotRef
    base: SnapshotRef | None = None

    def __str__(self) -> str:
        return str(self.ref) if self.base is None else f"{self.ref} over {self.base}"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve: a prompt (text, or chat messages) plus the columns its rewards read.

    `cursor` is the position in the run's task stream; the same cursor always gives the same task.
    """

    cursor: int
    prompt: str | tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited right of one worker to produce one group.

    The group is bound to training step `step`. Its tokens must come from `exact_version` where that is set, else from
    any version >= `min_version`. `deadline` is in seconds of the head's clock; `seconds` is how long that is from the
    grant.
    """

    lease_id: int
    group: GroupRef
    step: int
    cursor: int
    num_samples: int
    min_version: int
    exact_version: int | None
    deadline: float
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to one action: the text that follows it, the reward of this action, and whether the
    rollout is over. The rewards of a rollout's actions add up."""

    text: str
    reward: float
    done: bool


#: Of one rollout: its reward, and the parts that add up to it by name of the function.
Score = tuple[float, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout at one task, exactly as sampled (never tokenised again).

    T = number of tokens after the prompt, including tokens that an environment wrote between turns.

    tokens        [T] token ids
    logprobs      [T] behaviour logprobs, under the distribution that was sampled from (after temperature, top-k,
                  top-p); 0.0 where `loss_mask` is 0
    loss_mask     [T] one byte a token: 1 = sampled by the policy (trained on), 0 = written by the environment
    version_spans ((first token index, policy version), ...): the version of each token, run-length coded, ascending
    finish        "stop" (end token, stop string, or the environment ended it) or "length" (cut off at max_tokens or
                  max_turns)
    text          the decoded tokens, for rewards and people; empty until the head has decoded them
    reward        weighted sum of `reward_parts`; None until scored
    reward_parts  by name of the function; before scoring, `environment` alone: what the environment gave
    support_tokens, support_offsets
                  where top-k or top-p narrowed the distribution: the token ids that token t was drawn from are
                  support_tokens[support_offsets[t]:support_offsets[t + 1]]  (offsets have T + 1 entries); else None
    top_tokens, top_logprobs
                  where the run asks for them: the k most likely tokens of the distribution that each sampled token was
                  drawn from, one row after the other [loss_mask.count(1) * k], and their logprobs (float16,
                  little-endian); k is the vocabulary's size where that is less; else empty
    """

    tokens: array[int]
    logprobs: array[float]
    loss_mask: bytes
    version_spans: tuple[tuple[int, int], ...]
    finish: FinishReason
    text: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    support_tokens: array[int] | None = None
    support_offsets: array[int] | None = None
    top_tokens: array[int] = field(default_factory=lambda: array("i"))
    top_logprobs: bytes = b""

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token."""
        return min(version for _, version in self.version_spans)

    @property
    def newest_version(self) -> int:
        """The policy version of the newest token."""
        return max(version for _, version in self.version_spans)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The K rollouts at one task that are compared with each other. `prompt_tokens` is shared by all of them.
    `worker_id`: who sampled them.

    `logged`: they come from a log and not from a policy of this run. Their versions are bookkeeping, not an age.
    `by_harness`: a harness played them, so that prompt and rewards are its worker's word (not kept: the head knows).
    """

    group: GroupRef
    step: int
    lineage: int
    cursor: int
    prompt_tokens: array[int]
    rollouts: tuple[Rollout, ...]
    worker_id: str = ""
    generate_seconds: float = 0.0
    logged: bool = False
    by_harness: bool = False

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token of any rollout: what staleness is counted from."""
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def newest_version(self) -> int:
        """The policy version of the newest token of any rollout."""
        return max(rollout.newest_version for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote, in all rollouts: no prompt, nothing of an environment's."""
        return sum(rollout.loss_mask.count(1) for rollout in self.rollouts)

    @property
    def is_scored(self) -> bool:
        """Whether every rollout has its reward."""
        return all(rollout.reward is not None for rollout in self.rollouts)

    @property
    def is_flat(self) -> bool:
        """Scored, and every reward is the same: its advantages are 0."""
        return self.is_scored and len({rollout.reward for rollout in self.rollouts}) == 1


class Attachment:
    """What travels with an event and with the commands that it leads to, and is read by nobody on the way. It is
    not in an event log. `data`: the bytes of a group's rollouts, or of its scores, as they are stored and fed. `group`:
    the whole group at that time, with its scores where `data` is those; None where nobody has parsed it.
    """

    __slots__ = ("data", "group")

    def __init__(self, data: bytes, group: RolloutGroup | None = None) -> None:
        self.data, self.group = data, group


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `top_k` = 0, `top_p` = 1.0 and `min_p` = 0.0 (the least probability that a token may have,
    as a share of the most likely one's): no narrowing; `temperature` = 0.0: greedy (eval only).
    `top_logprobs`: how many of the most likely tokens come back with each that is drawn (only without narrowing).
    `stop`: strings that end a rollout of one turn (`rollout/stop_strings.py`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    top_logprobs: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether tokens are drawn from a part of the distribution, which must then be told with each."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody is waiting: for whom, since when, until when, and why. Times in seconds of the head's clock."""

    waiter: str
    waits_for: str
    since: float
    until: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """A lease with all that a worker needs to work on it, and no more: it asks no hub and no head again, and nothing
    here tells it what would be rewarded.

    `environment` answers the policy's turns, `max_turns` of them at most; empty: one turn, and nobody answers.
    `is_chat`: the prompt was chat messages, so the environment's words are too. `columns`: what the environment begins
    with, or the rollouts to be replayed; else none.
    """

    lease: Lease
    prompt_tokens: array[int]
    params: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    max_turns: int = 1
    is_chat: bool = False


class TensorSource(Protocol):
    """A tensor whose bytes may be anywhere until they are read: in memory, on a device, in a file."""

    @property
    def dtype(self) -> str:
        """As in safetensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""

    @property
    def read(self) -> Callable[[int, int], bytes | memoryview]:
        """Gives the bytes from one place to another, little-endian and row-major; both are multiples of an item's."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that is to be written or sent. `read` gives its little-endian bytes, row-major, from one place to
    another, when they are needed; both are multiples of an item's. Nothing is copied where they are the tensor's own.
    """

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[int, int], bytes | memoryview]


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor as stored and sent: little-endian bytes, row-major. `dtype` as in safetensors: F32, BF16, I64 ..."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def num_bytes(self) -> int:
        """Bytes of all its items."""
        return memoryview(self.data).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """A view of the bytes from `start` to `stop`."""
        return memoryview(self.data).cast("B")[start:stop]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights for workers, whole and verified: `tensors` by Hugging Face parameter name, and the `files` that make them
    a model (config.json, tokenizer.json, chat_template.jinja, ...), so that a worker needs no hub.

    `base_model`: None, it is a whole model. Else it is a LoRA adapter over that frozen model, named and described as
    PEFT does (`adapter_model.safetensors`, adapter_config.json); its other files are the base model's.

    On a worker the tensors are read from disk each time, and the next payload changes them there."""

    ref: SnapshotRef
    tensors: Mapping[str, TensorSource]
    files: Mapping[str, bytes]
    base_model: SnapshotRef | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """Bytes of memory in all, and of each GPU: none of it is asked for what is free."""

    memory_bytes: int
    gpus: tuple[int, ...] = ()
