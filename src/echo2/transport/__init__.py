"""Links between processes: typed, versioned, bounded messages over authenticated and encrypted connections.

`base` is the interface (unary calls and server streams), `grpc_link` and `grpc_server` the two ends of it over gRPC,
`messages` the wire form of `echo2.types`, `chunks` that of chunks, `identity` who is who, `tickets` what lets somebody
in, `door` and `budgets` what bounds strangers and members.
"""

import os

# Read by gRPC when it is first used. Its newer event engine hands every packet from thread to thread: at 100 Mbit/s in
# packets of 1500 bytes, receiving cost three context switches a packet and 20 CPU seconds per GB, against one and 8
# with the engine before it. What the user says there goes first.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC prints a line for every handshake that fails, so that strangers could fill a disk. The door counts them instead,
# and what goes wrong with a call its caller is told.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
