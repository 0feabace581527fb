"""From a configuration file to a run: check, start, supervise, judge."""
