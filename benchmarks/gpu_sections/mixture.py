"""A mixture of experts: the learner's and the engine's tokens a second, and how far they are apart, with the
learner's own choice of experts and with the engine's (`learner.routing_replay`)."""

from __future__ import annotations

from gpu_sections import engines, learner
from gpu_sections.bench import Bench, snapshot_of
from gpu_sections.learner import Case

from echo2.engines.routing import Routing


def run(bench: Bench) -> None:
    """Measure the learner, the engine, and the log ratios at lag 0."""
    for as_they_are in (False, True):
        learner.measured(bench, Case("mixture", 16, 512, False, experts_as_they_are=as_they_are))
    snapshot = snapshot_of(bench.policy("mixture", "bfloat16"))
    engines.measured(bench, "mixture", "transformers", snapshot)
    del snapshot
    bench.forget_peak()
    policy = bench.policy("mixture")
    policy.routing = Routing(policy.module)
    for dtype in bench.pick(("bfloat16",), ("bfloat16", "float32"), ("bfloat16", "float32")):
        engines.compared(bench, "mixture", "transformers", policy, dtype)
