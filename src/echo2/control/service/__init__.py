"""Decisions of the service: the order of a model's requests, and which tenant comes next."""
