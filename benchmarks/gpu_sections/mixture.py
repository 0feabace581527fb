"""A mixture of experts: the learner's and the engine's tokens a second, and how far they are apart."""

from __future__ import annotations

from gpu_sections import engines, learner
from gpu_sections.bench import Bench, snapshot_of
from gpu_sections.learner import Case


def run(bench: Bench) -> None:
    """Measure the learner, the engine, and the log ratios at lag 0."""
    for as_they_are in (False, True):
        learner.measured(bench, Case("mixture", 16, 512, False, experts_as_they_are=as_they_are))
    snapshot = snapshot_of(bench.policy("mixture", "bfloat16"))
    engines.measured(bench, "mixture", "transformers", snapshot)
    del snapshot
    bench.forget_peak()
    engines.compared(bench, "mixture", "transformers", bench.policy("mixture"), "bfloat16")
