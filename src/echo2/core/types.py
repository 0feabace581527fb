"""The values that travel between processes. Frozen dataclasses; standard library only.

Token data is held in `array.array` ('i' for token ids, 'f' for logprobs): compact, and readable without a copy by
`numpy.frombuffer` and `torch.frombuffer`.

A *policy version* is the number of completed training steps. After a learner falls back to a checkpoint, the same
numbers name other weights; the *lineage*, which grows by one at each fall-back, tells them apart.

A *policy id* names the policy that a version or group belongs to: each policy counts its own lineages, versions and
groups.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias

GroupKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]
#: Why a worker cannot produce a group (`head/decide/groups.py: FAILURES`). Another word of a peer is `engine_failed`.
SamplingFailure = Literal["prompt_too_long", "environment_failed", "log_unfit", "engine_failed", "snapshot_gone"]

#: Id of the policy that a run trains.
RUN_POLICY = "policy"
#: Allowed policy ids. They become file names, also on file systems that ignore case.
_POLICY_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
#: Policy id of a base model: 16 hex digits of the digest of its content (`weights/format/manifest.py`).
_BASE_MODEL_ID = re.compile(r"base-[0-9a-f]{16}")

#: Column of a task that holds logged rollouts, which are used instead of sampling (`tasks/logs.py`).
LOGGED_ROLLOUTS = "logged_rollouts"
DEFAULT_LOGGED_ROLLOUTS = 8
#: Maximum number of stop strings, and of characters in each.
STOP_STRINGS_MAX, STOP_CHARS_MAX = 16, 128
#: Stands for the worker of a group whose rollouts are of more than one.
SEVERAL = "several"
#: A rollout's reward, and the parts that add up to it, by name of the reward function.
Score = tuple[float, Mapping[str, float]]


def is_policy_id(text: str) -> bool:
    """Whether `text` is a valid policy id: 1 to 64 lower-case letters, digits, "_" and "-", first a letter or digit."""
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
        """(policy, lineage). Within one history a version number names one set of weights, and versions only grow."""
        return self.policy, self.lineage

    @property
    def is_base_model(self) -> bool:
        """Whether this names a frozen base model of adapters: it has one snapshot, and its id is a content digest."""
        return not self.lineage and not self.version and _BASE_MODEL_ID.fullmatch(self.policy) is not None

    def __str__(self) -> str:
        return f"{self.policy}@{self.lineage}.{self.version}"


@dataclass(frozen=True, slots=True)
class PayloadId:
    """Name of the data that produces `ref`: the whole snapshot if `base` is None, else a delta from `base`."""

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
    """A time-limited right of a worker to produce one group.

    The group is bound to training step `step`. Its tokens must come from `exact_version` where that is set, else from
    any version >= `min_version`. Its samples are numbered from `first_sample`, which is not 0 if the group has rollouts
    already and lacks some. `deadline` is in seconds of the head's clock; `seconds` is the time from the grant to
    the deadline.
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
    first_sample: int = 0

    @property
    def granted_at(self) -> float:
        """When it was granted, in seconds of the head's clock."""
        return self.deadline - self.seconds


@dataclass(frozen=True, slots=True)
class Reply:
    """An environment's answer to one action: the text that follows it, the reward of this action, and whether the
    rollout is over. The rewards of a rollout's actions add up."""

    text: str
    reward: float
    done: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout at one task, exactly as sampled (never tokenised again); or one row of it (`RolloutGroup`).

    T = number of tokens after the prompt, including tokens that an environment wrote between turns.

    tokens        [T] token ids
    logprobs      [T] behaviour logprobs, under the distribution that each token was sampled from (after temperature,
                  top-k, top-p); 0.0 where `loss_mask` is 0
    loss_mask     [T] one byte a token: 1 = sampled by the policy (trained on), 0 = written by the environment
    version_spans ((first token index, policy version), ...): the version of each token, run-length coded; both ascend
    finish        "stop" (end token, stop string, or the environment ended it) or "length" (cut off at max_tokens or
                  max_turns)
    text          the decoded tokens, for rewards and people; empty until the head has decoded them
    reward        weighted sum of `reward_parts`; None until scored
    reward_parts  by name of the reward function; before scoring, only `environment`: the environment's reward
    support_tokens, support_offsets
                  if top-k or top-p narrowed the distribution: the token ids that token t was drawn from are
                  support_tokens[support_offsets[t]:support_offsets[t + 1]]  (offsets have T + 1 entries); else None
    routes        the experts that a mixture chose for each token that was read, as bytes (`transport/routes.py`); empty
                  if nobody asked, or once they are packed in `RolloutGroup.routes`
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
    routes: bytes = b""

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token."""
        return min(version for _, version in self.version_spans)

    @property
    def newest_version(self) -> int:
        """The policy version of the newest token."""
        return max(version for _, version in self.version_spans)


@dataclass(frozen=True, slots=True)
class Teaching:
    """The name of the teacher of a group (empty: the only one), and the prompt that it reads in place of the group's
    (empty: the same).
    """

    teacher: str = ""
    prompt_tokens: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class LostRollout:
    """A rollout whose environment, judge or reward failed, not its sampling. `cause`: one word."""

    sample: int
    cause: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The rollouts at one task that are compared with each other: K, or fewer if some failed. `prompt_tokens` is shared
    by all of them. `worker_id`: the worker that sampled them, or the last of several.

    `samples`: the numbers of the samples that the rollouts are; empty: 0, 1, ... A rollout that is several token
    sequences is several entries of `rollouts`, its *rows*: they stand side by side with the number of one sample, and
    have one reward. `lost`: the samples that failed under the present lease; only between the worker and the ledger.

    `logged`: the rollouts come from a log and not from a policy of this run; their versions do not measure staleness.
    `by_harness`: a harness produced the rollouts, so prompt and rewards are the worker's unverified claims. This flag
    is not stored: the head knows it from the configuration. `routes`: those of all rollouts, packed
    (`transport/routes.py`); empty: none. `teaching`: known with the scores, for a learner with teachers.
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
    routes: bytes = b""
    teaching: Teaching = field(default_factory=Teaching)
    samples: tuple[int, ...] = ()
    lost: tuple[LostRollout, ...] = ()

    @property
    def sample_numbers(self) -> Sequence[int]:
        """The number of the sample that each row belongs to."""
        return self.samples or range(len(self.rollouts))

    @property
    def by_rollout(self) -> list[tuple[Rollout, ...]]:
        """The rows of each rollout."""
        pairs = zip(self.sample_numbers, self.rollouts, strict=True)
        return [tuple(row for _, row in rows) for _, rows in groupby(pairs, key=lambda pair: pair[0])]

    @property
    def num_rollouts(self) -> int:
        """How many rollouts there are, however many rows each has."""
        return len(set(self.sample_numbers))

    @property
    def rewards(self) -> list[float]:
        """The rewards of the rollouts that have one."""
        return [rows[0].reward for rows in self.by_rollout if rows[0].reward is not None]

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest token of any rollout; staleness is counted from it."""
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def newest_version(self) -> int:
        """The policy version of the newest token of any rollout."""
        return max(rollout.newest_version for rollout in self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled by the policy in all rollouts, without prompts and tokens of an environment."""
        return sum(rollout.loss_mask.count(1) for rollout in self.rollouts)

    @property
    def is_scored(self) -> bool:
        """Whether every rollout has a reward."""
        return all(rollout.reward is not None for rollout in self.rollouts)

    @property
    def is_flat(self) -> bool:
        """Whether the group is scored and all rewards are equal, so that its advantages are 0."""
        return self.is_scored and len({rollout.reward for rollout in self.rollouts}) == 1


class Attachment:
    """Data that travels with an event and with the resulting commands, unread on the way. It is not in the event log.
    `data`: the bytes of a group's rollouts, or of its scores, as they are stored and fed. `group`: the whole group at
    that time, with its scores if `data` holds scores; None if the group was not parsed.
    """

    __slots__ = ("data", "group")

    def __init__(self, data: bytes, group: RolloutGroup | None = None) -> None:
        self.data, self.group = data, group


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `min_p`: the least probability of a token, as a share of the most likely token's. With
    `top_k` = 0, `top_p` = 1.0 and `min_p` = 0.0 the distribution is not narrowed. `temperature` = 0.0: greedy (eval
    only). `stop`: strings that end a rollout of one turn (`engines/tokenizer.py`). `routes`: whether the experts that a
    mixture chooses are returned with the tokens, if the engine can.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    routes: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether tokens are drawn from a part of the distribution. Each token's support must then be recorded."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait: who waits for whom, since when, until when, and why. Times in seconds of the head's clock."""

    waiter: str
    waits_for: str
    since: float
    until: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """A lease with everything that a worker needs for it: the worker asks neither a hub nor the head again. Nothing
    here reveals what is rewarded.

    `environment` answers the policy's turns, at most `max_turns`; empty: a single turn without an environment.
    `is_chat`: the prompt was chat messages, so the environment's answers are too. `columns`: the input of the
    environment, or the rollouts to replay; else empty.
    """

    lease: Lease
    prompt_tokens: array[int]
    params: SamplingParams
    columns: Mapping[str, Any] = field(default_factory=dict)
    environment: str = ""
    max_turns: int = 1
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor to be written or sent. `read(start, stop)` returns its bytes on demand, little-endian and row-major;
    both offsets are multiples of the item size. Bytes are not copied where the tensor's own memory can be returned.
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
        return memoryview(self.data).nbytes

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data).cast("B")[start:stop]


#: A tensor whose bytes are read on demand, from memory, a device or a file.
TensorSource: TypeAlias = StoredTensor | TensorBytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights for workers, whole and verified: `tensors` by Hugging Face parameter name, and the other `files` of a
    model (config.json, tokenizer.json, chat_template.jinja, ...), so that a worker needs no hub.

    `base_model`: None for a whole model. Otherwise the snapshot is a LoRA adapter over that frozen model, with PEFT's
    names and files (`adapter_model.safetensors`, adapter_config.json); its other files are the base model's.

    On a worker every access reads the tensors from disk, and the next payload overwrites them there."""

    ref: SnapshotRef
    tensors: Mapping[str, TensorSource]
    files: Mapping[str, bytes]
    base_model: SnapshotRef | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """Total memory of a machine in bytes, and of each GPU. It does not say how much is free."""

    memory_bytes: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that begin with `first_seconds`, and grow by this factor after each failure, up to `most_seconds`."""

    first_seconds: float
    most_seconds: float
    growth: float = 2.0

    def after(self, num_failures: int) -> float:
        """Return the pause in seconds after this many failures in a row, at least 1."""
        num_growths = min(num_failures - 1, 64)  # more would overflow, and no pause is that long
        return min(self.most_seconds, self.first_seconds * self.growth**num_growths)
