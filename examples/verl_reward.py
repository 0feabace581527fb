"""A reward in verl's style: one rollout in, a number (or {"score": number}) out. Used by verl_reward.toml."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    if data_source != "digit_sorting":
        raise ValueError(f"no rule for {data_source}")
    return float(solution_str.strip() == ground_truth)
