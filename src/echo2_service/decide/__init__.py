"""In which order requests run, and which machine samples for which policy."""
