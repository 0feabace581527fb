"""All limits on messages and connections, by name, with the reason for each."""

from __future__ import annotations

#: Spoken by both ends; a different number is refused at hello.
PROTOCOL_VERSION = 7
#: One message: a group of 64 rollouts of 64k tokens (12 bytes a token with logprob, mask and text) fits.
MESSAGE_BYTES_MAX = 64 << 20
#: One message to a worker: a chunk, or a request for 4,096 of them, with room to spare.
PEER_MESSAGE_BYTES_MAX = 2 << 20
#: Calls and streams under way on one connection; more wait at the caller. What they send and nobody reads is held by
#: gRPC: at most 32 MiB (`grpc_options.WINDOW_BYTES` each).
CALLS_MAX = 128

# ---- the door (transport/door.py) and the budgets behind it (transport/budgets.py) -----------------------------------
#: Connections of one process; fewer where the system allows it fewer descriptors (`door.connections_max`).
CONNECTIONS_MAX = 16_384
#: Of one address: workers behind a common router.
CONNECTIONS_PER_ADDRESS_MAX = 1024
#: Connections that have not proven who they are yet: of one address, and in all.
UNPROVEN_PER_ADDRESS_MAX = 128
UNPROVEN_MAX = 1024
#: Of one peer: a worker has one, one or eight for chunks, and while it measures its link as many more.
CONNECTIONS_PER_PEER_MAX = 64
#: Handshakes, each about 1 ms of a core: of one address, and in all.
HANDSHAKES_PER_SECOND_PER_ADDRESS = 16.0
HANDSHAKES_BURST_PER_ADDRESS = 256.0
HANDSHAKES_PER_SECOND = 128.0
HANDSHAKES_BURST = 1024.0
#: Calls of one peer to the head: a heartbeat, results, news of a download; a measurement of its link has a thousand.
CALLS_PER_SECOND_MAX = 100.0
CALLS_BURST = 4000.0
#: Of all who came by one ticket for strangers.
TICKET_CALLS_PER_SECOND_MAX = 400.0
TICKET_CALLS_BURST = 16_000.0
#: Of one worker to another: each chunk may be a call.
PEER_CALLS_PER_SECOND_MAX = 4000.0
PEER_CALLS_BURST = 8000.0
#: Enrolments with one ticket.
ENROLMENTS_PER_SECOND = 4.0
ENROLMENTS_BURST = 64.0
#: Calls beyond its budget that a peer is told so; at the next its connection is cut.
REFUSALS_MAX = 1000.0
#: Calls and streams of one peer under way, over all of its connections.
CALLS_PER_PEER_MAX = 256
#: Bodies that the head reads at a time, each at most `MESSAGE_BYTES_MAX`: of one peer (128 MiB), of all who came by one
#: ticket for strangers (512 MiB), and of all strangers, or of all machines of the owner (2 GiB). More wait unread.
READS_PER_PEER_MAX = 2
READS_PER_TICKET_MAX = 8
READS_MAX = 32
#: And a worker of others, each at most `PEER_MESSAGE_BYTES_MAX`: of one, and in all (128 MiB).
PEER_READS_PER_PEER_MAX = 8
PEER_READS_MAX = 64
#: Waiting for that turn and reading together; as long as who delivers waits for an answer.
READ_SECONDS = 60.0
#: Bytes of bodies that one peer sends the head: what is beyond is read later. A measurement of its link sends 32 MiB.
BYTES_PER_SECOND_MAX = 32 << 20
BYTES_BURST = 256 << 20
#: Bytes that have come in for calls which wait for that turn, and which gRPC holds: of one peer, of all who came by one
#: ticket for strangers, and of all strangers, or of all machines of the owner. Whoever has most of them is cut then.
UNREAD_PER_PEER_MAX = 192 << 20
UNREAD_PER_TICKET_MAX = 512 << 20
UNREAD_MAX = 2 << 30
#: And at a worker: of one other, and of all.
PEER_UNREAD_PER_PEER_MAX = 128 << 20
PEER_UNREAD_MAX = 512 << 20
#: Before a caller has asked anything.
UNREAD_UNNAMED_MAX = 32 << 20
#: Names (addresses, peers) whose recent use is remembered.
BUCKETS_MAX = 10_000

# ---- messages --------------------------------------------------------------------------------------------------------
#: Rollouts in one group; as `sampling.group_size`.
SAMPLES_MAX = 1024
#: Tokens of a prompt, or after it; beyond any context length in use.
TOKENS_MAX = 1 << 20
#: Characters of a rollout's text, or of a task's columns.
TEXT_CHARS_MAX = 8 << 20
#: Characters of a name.
NAME_CHARS_MAX = 200
#: Version changes within one rollout.
VERSION_SPANS_MAX = 10_000
#: Tokens that one token may have been drawn from: where top-k and top-p leave more, the sampler cuts there.
SUPPORT_WIDTH_MAX = 4096
#: Most likely tokens told with each that is drawn; as `learner.loss_params.score_centering`.
TOP_WIDTH_MAX = 1024
#: Turns of a rollout in an environment; as `sampling.max_turns`.
TURNS_MAX = 10_000
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
#: Relative error of a sampler's most likely tokens, which travel as float16, and of their sum.
TOP_ERROR = 5e-3
