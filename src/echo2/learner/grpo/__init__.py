"""The built-in client of the learner's verbs: trains on scored rollout groups, step by step.

Read `loop.py` first (the whole training loop), then `client.py` (a step), `data.py` (groups -> data).
"""
