"""The learner: groups in, next policy version out.

Read `loop.py` first (the learner's life on one screen), then `trainer.py` (the verbs), then `batch.py`, `losses.py`.
"""
