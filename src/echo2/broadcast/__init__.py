"""What carries snapshots to every worker: `origin` at the head, `peer` at each worker. The decisions are made in
`control/broadcast/origin.py` and `fetcher.py`; here are the connections, the reading and writing, the measuring.
"""
