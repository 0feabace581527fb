"""The learner: trains policies on data.

Read `trainer.py` first (the verbs), then `datum.py`, `batch.py`, `losses.py`. `grpo/` is the client that the built-in
training loop is; start there with `loop.py`. `session.py` and `head_client.py` are its line to the head.
"""
