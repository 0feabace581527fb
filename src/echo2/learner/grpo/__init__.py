"""The built-in client of the learner's verbs: trains on scored rollout groups, step by step.

Read `loop.py` first: it is the whole algorithm. `feed.py` has the groups of a step, `data.py` their advantages,
`pulls.py` a reference and teachers, `trained_policy.py` what a step changes, `saving.py` checkpoints.
"""
