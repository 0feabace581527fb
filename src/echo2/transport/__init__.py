"""Links between processes: typed, versioned, bounded messages over authenticated and encrypted connections.

`base` is the interface (unary calls and server streams), `grpc_link` and `grpc_server` the two ends of it over gRPC,
`messages` the wire form of `echo2.core.types`, `message_bytes` that of chunks and logprobs, `identity` the certificates
of peers, `tickets` the tickets that admit machines, `door` and `budgets` the bounds on strangers and members.
"""

import os

# gRPC reads this variable at first use; a value set by the user wins. gRPC's newer event engine hands every packet from
# thread to thread: at 100 Mbit/s in packets of 1500 bytes, receiving cost three context switches a packet and 20 CPU
# seconds per GB, against one switch and 8 seconds with the previous engine.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC prints a line for every failed handshake, so strangers could fill a disk. The door counts failed handshakes
# instead, and the errors of a call are reported to its caller.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
