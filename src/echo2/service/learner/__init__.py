"""The service's learner: a process of its own, which carries out operations on many tenants' adapters."""
