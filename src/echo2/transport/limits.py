"""Every bound on what crosses a link, by name, and the reason for each."""

from __future__ import annotations

#: Spoken by both ends; a different number is refused at hello.
PROTOCOL_VERSION = 1
#: One message: a group of 64 rollouts of 64k tokens (12 bytes a token with logprob, mask and text) fits.
MESSAGE_BYTES_MAX = 64 << 20
#: One chunk of a snapshot, as the store takes it, plus its hash and framing.
CHUNK_BYTES_MAX = 1 << 20
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
#: Messages of a chat prompt.
CHAT_MESSAGES_MAX = 10_000
#: Token ids are 32-bit; a larger vocabulary does not exist.
TOKEN_ID_MAX = 2**31 - 1
#: Whole numbers that fit SQLite, JSON readers and signed 64 bits alike.
NUMBER_MAX = 2**53
#: Floating error a logprob may have above 0.
LOGPROB_SLACK = 1e-4
