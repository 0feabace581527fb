"""All limits on messages and connections, by name, with the reason for each."""

from __future__ import annotations

#: Protocol version of both ends; a peer with another version is refused at hello.
PROTOCOL_VERSION = 13
#: Size of one message: a group of 64 rollouts of 64k tokens (12 bytes a token with logprob, mask and text) fits.
MESSAGE_BYTES_MAX = 64 << 20
#: Size of one message to a worker: a chunk, or a request for 4,096 chunks, with room to spare.
PEER_MESSAGE_BYTES_MAX = 2 << 20
#: Calls and streams under way on one connection; more wait at the caller. gRPC holds at most 32 MiB of their unread
#: bytes (`grpc_options.WINDOW_BYTES` each).
CALLS_MAX = 128
#: Expert ids of one group, before they are compressed; a larger group goes without. With the rollouts themselves they
#: fit into a message, and the head unpacks and checks so many in half a second.
ROUTES_BYTES_MAX = 48 << 20
#: Rollouts that are written for people: groups of each step, and tokens of these groups one by one, an equal share of
#: first tokens per rollout (some 250 KB of text).
LOGGED_GROUPS = 4
LOGGED_TOKENS = 16_384

# ---- the door (transport/door.py) and the budgets behind it (transport/budgets.py) -----------------------------------
#: Connections of one process; fewer where its descriptor limit is low (`sockets.connections_max`).
CONNECTIONS_MAX = 16_384
#: Connections of one address: workers may share a router.
CONNECTIONS_PER_ADDRESS_MAX = 1024
#: Connections that have not proven their identity yet: of one address, and in all.
UNPROVEN_PER_ADDRESS_MAX = 128
UNPROVEN_MAX = 1024
#: Connections of one peer: a worker has one, plus one or eight for chunks, and as many more while it measures its link.
#: Of all strangers: this share of all connections. Beyond that, of the ticket with the most connections, the peer with
#: the most loses its newest one.
CONNECTIONS_PER_PEER_MAX = 64
STRANGERS_SHARE = 0.5
#: Share of all connections that have not made a call yet.
UNNAMED_SHARE = 0.25
#: Handshakes (about 1 ms of a core each): of one address, and in all.
HANDSHAKES_PER_SECOND_PER_ADDRESS = 16.0
HANDSHAKES_BURST_PER_ADDRESS = 256.0
HANDSHAKES_PER_SECOND = 128.0
HANDSHAKES_BURST = 1024.0
#: Calls of one peer to the head: heartbeats, results, download reports. Measuring its link takes a thousand calls.
CALLS_PER_SECOND_MAX = 100.0
CALLS_BURST = 4000.0
#: Calls to the head of all peers that joined with one ticket for strangers.
TICKET_CALLS_PER_SECOND_MAX = 400.0
TICKET_CALLS_BURST = 16_000.0
#: Calls of one worker to another: each chunk may be a call.
PEER_CALLS_PER_SECOND_MAX = 4000.0
PEER_CALLS_BURST = 8000.0
#: Enrolments with one ticket.
ENROLMENTS_PER_SECOND = 4.0
ENROLMENTS_BURST = 64.0
#: Calls over budget that are answered with a refusal; at the next one the peer's connection is cut.
REFUSALS_MAX = 1000.0
#: Calls and streams of one peer under way, over all its connections.
CALLS_PER_PEER_MAX = 256
#: Large bodies (`Method.is_large`) that the head reads at a time, each at most `MESSAGE_BYTES_MAX`: of one peer (128
#: MiB), and of all peers of one ticket for strangers (512 MiB). More wait unread. There is no such bound on all
#: strangers, because a few tickets could use it up. Their memory is bounded by `UNREAD_MAX`.
READS_PER_PEER_MAX = 2
READS_PER_TICKET_MAX = 8
#: Waiting for a turn to be read and reading, together: as long as a delivering worker waits for its answer.
READ_SECONDS = 60.0
#: Bytes of bodies that one peer sends the head; bodies beyond this rate are read later. Measuring a link sends 32 MiB.
BYTES_PER_SECOND_MAX = 32 << 20
BYTES_BURST = 256 << 20
#: Received bytes of bodies that wait, are read or are handled: of one peer, of all peers of one ticket for strangers,
#: and of all strangers, or of all machines of the owner. Beyond a limit, the peer with the most such bytes is cut off,
#: in the ticket with the most. A peer has room for the two that are read at a time; a worker sends one after the other.
#: What these bytes take in the head's memory is up to three times as much.
UNREAD_PER_PEER_MAX = 136 << 20
UNREAD_PER_TICKET_MAX = 512 << 20
UNREAD_MAX = 2 << 30
#: The same at a worker: of one peer, and of all peers.
PEER_UNREAD_PER_PEER_MAX = 128 << 20
PEER_UNREAD_MAX = 512 << 20
#: Bytes of answers to one stranger, and to all of one ticket, without chunks (`broadcast.serving.COPIES` bounds these).
#: Answers beyond this rate are sent later. They are orders, manifests, and 32 MiB for each measurement of a link.
SENT_PER_SECOND_MAX = 1 << 20
SENT_BURST = 128 << 20
TICKET_SENT_PER_SECOND_MAX = 4 << 20
TICKET_SENT_BURST = 512 << 20
#: Unread bytes of a connection that has not made a call yet, or whose peer is enrolling.
UNREAD_UNNAMED_MAX = 32 << 20
#: Names (addresses, peers) whose recent use is remembered.
BUCKETS_MAX = 10_000

# ---- messages --------------------------------------------------------------------------------------------------------
#: Rollouts in one group; as `sampling.group_size`.
SAMPLES_MAX = 1024
#: Tokens of a prompt, of a row, or of all rows of a rollout; beyond any context length in use.
TOKENS_MAX = 1 << 20
#: Rows of one rollout. An agent that shortens its history with every call begins one with every call.
ROWS_MAX = 256
#: Tokens in all rows of a group, an equal share for each rollout of several rows: they fit into a message, at 9 bytes.
GROUP_TOKENS_MAX = 4 << 20
#: Characters of a rollout's text, or of a JSON object such as a task's columns.
TEXT_CHARS_MAX = 8 << 20
#: Characters of a name.
NAME_CHARS_MAX = 200
#: Version spans of one rollout.
VERSION_SPANS_MAX = 10_000
#: Tokens in the support of one token: where top-k and top-p leave more, the sampler truncates the
#: support to this size. The reported support is exact.
SUPPORT_WIDTH_MAX = 4096
#: Turns of a rollout in an environment; as `sampling.max_turns`.
TURNS_MAX = 10_000
#: Largest whole number: fits SQLite, JSON readers and signed 64 bits alike.
NUMBER_MAX = 2**53
#: Largest duration that a peer may report: four months.
DURATION_SECONDS_MAX = 1e7
#: Absolute value of a reward, of each of its parts, and of what an environment gives for one action: beyond it, one
#: rollout would outweigh all the others of its step.
REWARD_MAX = 1e6
#: Price that a worker may report; the most expensive machine for rent costs a hundredth of it.
PRICE_MAX_USD_PER_HOUR = 10_000.0
#: Smallest behaviour logprob. Sampling with 32 random bits gives about -25 at least; those of logs are clipped here.
LOGPROB_MIN = -100.0
#: Rounding error that lets a logprob exceed 0.
LOGPROB_SLACK = 1e-4
