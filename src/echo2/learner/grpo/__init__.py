"""The built-in client of the learner's verbs: trains on scored rollout groups, step by step. Read `loop.py` first."""
