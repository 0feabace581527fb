"""The processes of a run: they drive the state machines of `control/` with real time, connections and files.

This is the only package that connects all others: `head` (control plane), `worker`, `learner`, and `launch`, whose
`supervisor` starts and watches them on one machine.
"""
