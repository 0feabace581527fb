"""Links between processes: typed, versioned, bounded messages over authenticated and encrypted connections.

`base` is the interface (unary calls and server streams), `grpc_link` the real backend, `memory` the one for tests and
simulation, `messages` the wire form of `echo2.types`, `identity` who is who.
"""
