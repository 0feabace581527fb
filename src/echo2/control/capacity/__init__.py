"""Formulas and forecasts: how many workers keep the learner busy, and which of them are cheapest."""
