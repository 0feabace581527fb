"""Formulas and forecasts: how many workers keep the learner busy, and which set of workers is cheapest."""
