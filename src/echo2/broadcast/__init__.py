"""Broadcasts snapshots to every worker: `origin` runs at the head, `peer` at each worker. The state machines
`control/broadcast/origin.py` and `fetcher.py` decide; this package connects, reads, writes and measures.
"""
