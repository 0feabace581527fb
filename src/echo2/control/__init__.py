"""Pure decisions: state machines with one function, `handle(event, now) -> list[Command]`.

No clock, no randomness, no I/O, no torch, no numpy in this folder. Time comes in as an argument, timers go out as
commands, faults are events, and every command carries the event that caused it and a reason a person can read. The
same machines are driven by `runtime/` (real) and by `sim/` (virtual clock). The two machines are `planner` (the
head's) and `relay` (a worker's); the other modules are the tables and rules they compose.
"""
