"""Samples on machines that joined the service by ticket, and on this one."""
