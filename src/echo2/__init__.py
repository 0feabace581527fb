"""echo2: one learner you own, kept busy by rollouts from cheap machines anywhere."""

__version__ = "0.1.0"
