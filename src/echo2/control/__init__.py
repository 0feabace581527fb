"""Pure decisions: state machines with one function, `handle(event, now) -> list[Command]`.

No clock, no randomness, no I/O, no torch, no numpy in this folder. Time comes in as an argument, timers go out as
commands, faults are events, and every command carries the number of the event that caused it and a readable reason.
The same machines are driven by `runtime/` (real clock) and by `sim/` (virtual clock). The two main machines are
`head/planner.py` (the head) and `worker/scheduler.py` (a worker); `broadcast/` has one more for each of the two sides.
The other modules are the tables and rules that the machines use.
"""
