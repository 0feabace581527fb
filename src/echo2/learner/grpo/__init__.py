"""The built-in client of the learner's verbs: scored rollout groups in, training steps out.

Read `loop.py` first (the learner's life on one screen), then `client.py` (a step), `data.py` (groups -> data).
"""
