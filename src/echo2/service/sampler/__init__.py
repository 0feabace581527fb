"""The service's sampler: a process of its own, which samples from published adapters and base models."""
