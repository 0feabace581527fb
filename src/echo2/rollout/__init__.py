"""Samples rollout groups: tasks and a policy in, groups out.

Read `engine.py` first (what an engine is), then `generate.py` (leases in, groups out), then `torch_engine.py` (the
decode loop), `sampler.py` (how a token is drawn) and `compact.py` (the fast forward pass).
"""
