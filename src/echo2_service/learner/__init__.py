"""The service's learner: a separate process that carries out operations on many tenants' adapters."""
