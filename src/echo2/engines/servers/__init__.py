"""Token servers as engines: processes beside the worker that sample over HTTP, token ids in and out.

Read `engine.py` first (an `Engine` over `vllm.py`); `answers.py` checks the servers' answers.
"""
