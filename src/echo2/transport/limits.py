"""Every bound on what crosses a link, by name, and the reason for each."""

from __future__ import annotations

#: Spoken by both ends; a different number is refused at hello.
PROTOCOL_VERSION = 4
#: One message: a group of 64 rollouts of 64k tokens (12 bytes a token with logprob, mask and text) fits.
MESSAGE_BYTES_MAX = 64 << 20
#: One message to a worker: a chunk, or a request for 4,096 of them, with room to spare.
PEER_MESSAGE_BYTES_MAX = 2 << 20
#: Calls and streams under way on one connection; more wait at the caller.
CALLS_MAX = 1000
#: Rollouts in one group; as `sampling.group_size`.
SAMPLES_MAX = 1024
#: Tokens of a prompt, or after it; beyond any context length in use.
TOKENS_MAX = 1 << 20
#: Characters of a rollout's text, of a prompt, or of a task's columns.
TEXT_CHARS_MAX = 8 << 20
#: Named rewards of a rollout, and characters of a name.
REWARD_PARTS_MAX = 64
NAME_CHARS_MAX = 200
#: Version changes within one rollout.
VERSION_SPANS_MAX = 10_000
#: Turns of an attempt in an environment; as `sampling.max_turns`.
TURNS_MAX = 10_000
#: Messages of a chat prompt.
CHAT_MESSAGES_MAX = 10_000
#: Whole numbers that fit SQLite, JSON readers and signed 64 bits alike.
NUMBER_MAX = 2**53
#: Seconds anything may claim to have taken: four months.
DURATION_SECONDS_MAX = 1e7
#: Size of a reward and of each of its parts; as `reward/score.py` lets its functions return.
REWARD_MAX = 1e6
#: Dollars an hour that a worker may claim to cost; the largest machine for rent costs a hundredth of it.
PRICE_MAX_USD_PER_HOUR = 10_000.0
#: The least behaviour logprob. A token drawn with 32 random bits has -25 or so; what a log says is cut here, too.
LOGPROB_MIN = -100.0
#: Floating error a logprob may have above 0.
LOGPROB_SLACK = 1e-4
