"""RL as a service: many tenants train adapters on one learner and sample from them.

`backend.py` is the contract between the front (HTTP, keys, the store) and the back end that carries out the work.
"""
