"""The service's sampler: a separate process that samples from published adapters and base models."""
