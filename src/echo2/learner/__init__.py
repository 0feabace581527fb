"""The learner: trains policies on data.

Read `trainer.py` first (the verbs), then `datum.py`, `batch.py`, `losses.py`. `grpo/` is the built-in training loop, a
client of the verbs; start there with `loop.py`. `session.py` and `head_client.py` connect the learner to the head.
"""
