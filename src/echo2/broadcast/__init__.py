"""Carries snapshots to every worker: `origin` at the head, `peer` at each worker. `control/broadcast/origin.py` and
`fetcher.py` decide; this package connects, reads, writes and measures.
"""
