"""Recipes of the Tinker cookbook as they are, against a running service. Run by the Python that has the cookbook:

    python tests/sdk/recipes.py RECIPE URL LOG_DIRECTORY

It runs where the tokenizer of the base model lies. What the recipe measured is in LOG_DIRECTORY/metrics.jsonl.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import tinker_cookbook
from tinker_cookbook.recipes.chat_sl import train as chat_sl
from tinker_cookbook.recipes.math_rl import arithmetic_env
from tinker_cookbook.recipes.math_rl import train as math_rl
from tinker_cookbook.rl import train as rl

BASE, RENDERER = "echo2/tiny", "qwen3"
CONVERSATIONS = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"


def chat(url: str, log: str) -> None:
    """Supervised, with rolling checkpoints; a directory of a run that was killed is gone on with."""
    chat_sl.cli_main(
        chat_sl.CLIConfig(
            log_path=log,
            model_name=BASE,
            renderer_name=RENDERER,
            dataset=str(CONVERSATIONS),
            base_url=url,
            learning_rate=2e-2,
            lr_schedule="constant",
            lora_rank=8,
            batch_size=8,
            max_length=256,
            num_epochs=2,
            max_steps=14,
            eval_every=0,
            save_every=6,
            rolling_save_every=1,
            behavior_if_log_dir_exists="resume",
        )
    )


def math(url: str, log: str, loss: Any, max_steps_off_policy: int | None) -> None:
    """Sums, with a tenth of the reward for an answer that ends: what a random model can learn."""
    asyncio.run(
        math_rl.cli_main(
            math_rl.CLIConfig(
                log_path=log,
                model_name=BASE,
                renderer_name=RENDERER,
                base_url=url,
                learning_rate=2e-2,
                lora_rank=8,
                group_size=16,
                groups_per_batch=4,
                max_tokens=8,
                max_steps=10,
                eval_every=0,
                save_every=5,
                loss_fn=loss,
                max_steps_off_policy=max_steps_off_policy,
                behavior_if_log_dir_exists="raise",
            )
        )
    )


def math_kl(url: str, log: str) -> None:
    """The same with a penalty for leaving the base model: its logprobs of each sample are asked for."""
    dataset = arithmetic_env.ArithmeticDatasetBuilder(
        batch_size=4, model_name_for_tokenizer=BASE, renderer_name=RENDERER, n_batches=3, group_size=8
    )
    config = rl.Config(
        learning_rate=2e-2,
        dataset_builder=dataset,
        model_name=BASE,
        recipe_name="math_kl",
        renderer_name=RENDERER,
        lora_rank=8,
        max_tokens=8,
        log_path=log,
        base_url=url,
        loss_fn="importance_sampling",
        kl_penalty_coef=0.1,
        kl_reference_config=rl.KLReferenceConfig(base_model=BASE),
        eval_every=0,
        save_every=0,
    )
    asyncio.run(rl.main(config))


def main() -> None:
    recipe, url, log = sys.argv[1:]
    match recipe:
        case "chat":
            chat(url, log)
        case "math_kl":
            math_kl(url, log)
        case _:
            _, loss, stale = recipe.split("-")
            math(url, log, loss, int(stale) or None)


if __name__ == "__main__":
    main()
