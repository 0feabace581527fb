"""The processes of a run: they drive the state machines of `control/` with real time, connections and files.

This is the only place that wires rooms together: `head` (control plane), `worker`, `learner_process`, and the
`supervisor` that starts and watches them on one machine.
"""
