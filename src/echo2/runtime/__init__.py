"""The real driver of the machines in `control/`: clock, event log, metrics, and the processes of a run.

This is the only place that wires rooms together: `head` (control plane), `worker`, `learner_process`, and the
`supervisor` that starts and watches them on one machine.
"""
