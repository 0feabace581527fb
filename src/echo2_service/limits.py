"""Every limit of what a tenant can make the service read, keep, send and do.

`tests/unit/test_service_limits.py` exceeds each one as a client would. Limits of one request protect memory and the
event loop; limits of a tenant leave room for the others; those in all are what the machine can bear. What a tenant
spends and keeps on the disk is limited by the operator's quotas (`settings.Quotas`).
"""

from __future__ import annotations

# ---- connections and bodies ------------------------------------------------------------------------------------------

HEADER_BYTES_MAX = 64 << 10
#: Maximum seconds from a connection's start or its last response to the complete head of its next request.
HEAD_SECONDS = 75.0
#: Share of the connections that one address may have. A proxy in front of the service is one address.
ADDRESS_CONNECTIONS_SHARE = 0.75
#: Bytes of a body, as received and unpacked: of training data, of adapters, of chats, which a template of any speed
#: reads, and of everything else.
BODY_BYTES_MAX = 32 << 20
ADAPTER_BYTES_MAX = 256 << 20
CHAT_BYTES_MAX = 1 << 20
SMALL_BODY_BYTES_MAX = 4 << 20
#: A body, or a client that reads an answer, must make this much progress in this time (64 kB/s).
PROGRESS_BYTES, PROGRESS_SECONDS = 640_000, 10.0
#: Bytes of bodies being read or handled, and of answers being sent: of one tenant, in all, and the part of that for
#: tenants which have few of them.
TENANT_BYTES_MAX = 320 << 20
ALL_BYTES_MAX = 768 << 20
RESERVED_BYTES, FEW_BYTES = 192 << 20, 48 << 20
#: Requests of one tenant being handled, polls included: an SDK with 2000 samples polls 2000 times at once.
AT_ONCE_MAX = 4096

# ---- what is stored --------------------------------------------------------------------------------------------------

#: Rows of one tenant: sessions and models that are not deleted yet; each of these with those whose rows are kept, for
#: a day or for a checkpoint; samplers, checkpoints.
SESSIONS_MAX = 4096
MODELS_MAX = 4096
ENDED_MAX = 1 << 17
SAMPLERS_MAX = 1 << 17
CHECKPOINTS_MAX = 1 << 17
#: Bytes of a client's own data about a session, model or checkpoint (`user_metadata`), as JSON.
LABELS_BYTES_MAX = 4096
#: Open requests: of one tenant, their bytes, and those of one model that wait for an earlier one.
OPEN_MAX = 8192
OPEN_BYTES_MAX = 1 << 30
HELD_MAX = 4096
#: Bytes of a tenant's stored answers beyond which they are kept for minutes, not for a day.
ANSWERS_BYTES_MAX = 4 << 30
#: Bytes beyond a tenant's quota of disk for requests that are refused for lack of room: they use up their numbers.
REFUSED_BYTES_MAX = 1 << 20
#: Bytes of a form with a key.
SIGN_IN_BYTES_MAX = 4096
#: Points of a model's curves.
CURVE_POINTS_MAX = 512
#: Temporary URLs of archives of one tenant that are valid at once.
ARCHIVES_MAX = 256
#: Archives of one tenant that are being sent: each has a file or two open, and needs no key.
DOWNLOADS_MAX = 64
#: Rows in one answer of a listing.
PAGE_MAX = 1000

# ---- what a request asks for -----------------------------------------------------------------------------------------

#: Objects and lists in a body, in JSON or protobuf: two bytes may be one, and reading each takes a microsecond, for
#: which all tenants wait, and 256 bytes of memory.
PARTS_MAX = 1 << 18
#: Sizes in a tensor's shape: numpy's own limit.
DIMENSIONS_MAX = 64
#: Numbers in one tensor; numbers in all tensors of a request once dense; data in one request.
TENSOR_NUMBERS_MAX = 1 << 22
NUMBERS_MAX = 1 << 24
DATA_MAX = 8192
#: Samples of one request; their tokens in all; scores beside them (likely tokens, targets and alternatives together).
SAMPLES_MAX = 1024
SAMPLED_TOKENS_MAX = 1 << 23
SCORES_MAX = 1 << 22
#: Stop tokens and strings of a request, and characters of a string.
STOPS_MAX, STOP_CHARS_MAX = 256, 256
#: Rank of an adapter; memory of one adapter in the learner, with gradients and moments.
RANK_MAX = 1024
ADAPTER_MEMORY_BYTES = 4 << 30
#: Entries of an uploaded tar file; uploads of one tenant that wait to be checked.
ENTRIES_MAX = 64
UPLOADS_MAX = 4

# ---- what is done at once --------------------------------------------------------------------------------------------

#: Samples at the back end: in all, and the part that no single tenant may use.
SAMPLES_AT_ONCE = 512
SAMPLES_FOR_OTHERS = 32
#: Operations of one model at the back end.
OPERATIONS_MAX = 16
#: Bytes of the bodies that, once read, wait in memory for their turn; others are read again from the store.
DATA_BYTES_MAX = 256 << 20
#: Bytes of a model's journal while it has gradients, so that no checkpoint can take its place.
JOURNAL_BYTES_MAX = 1 << 30

#: Adapters that are stored a second time, in chunks, for the machines of the fleet, and their bytes; the least recently
#: used ones go.
FLEET_ADAPTERS_MAX, FLEET_ADAPTER_BYTES_MAX = 256, 8 << 30
