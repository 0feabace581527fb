"""Sampling on machines that joined the service by ticket, and on the service's own machine."""
