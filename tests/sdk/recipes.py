"""Recipes of the Tinker or the Logits cookbook as they are, against a running service. Run by a Python that has it:

    python tests/sdk/recipes.py tinker|logits RECIPE URL LOG_DIRECTORY

It runs where the tokenizers of the base models and the data sets lie. What a recipe measured is in metrics.jsonl in
LOG_DIRECTORY, of the loops in its folders `sl` and `rl`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

BASE, RENDERER = "echo2/tiny", "qwen3"
#: The same made-up model under a name that the cookbooks know: their loops take the renderer from the name.
KNOWN_BASE = "Qwen/Qwen3-8B"


def small(url: str, log: str) -> dict[str, Any]:
    """Options of a short run that samples."""
    return {
        "log_path": log,
        "model_name": BASE,
        "renderer_name": RENDERER,
        "base_url": url,
        "learning_rate": 2e-2,
        "lora_rank": 8,
        "groups_per_batch": 4,
        "max_steps": 10,
        "eval_every": 0,
        "behavior_if_log_dir_exists": "raise",
    }


def chat(cookbook: str, url: str, log: str) -> None:
    """Supervised, with checkpoints at each step; a directory of a run that was killed is gone on with."""
    recipe = module(cookbook, "recipes.chat_sl.train")
    conversations = Path(module(cookbook).__file__).parent / "example_data" / "conversations.jsonl"
    saving = {"save_every": 6, "rolling_save_every": 1} if cookbook == "tinker" else {"save_every": 1}
    recipe.cli_main(
        recipe.CLIConfig(
            log_path=log,
            model_name=BASE,
            renderer_name=RENDERER,
            dataset=str(conversations),
            base_url=url,
            learning_rate=2e-2,
            lr_schedule="constant",
            lora_rank=8,
            batch_size=8,
            max_length=256,
            num_epochs=2,
            max_steps=14,
            eval_every=0,
            behavior_if_log_dir_exists="resume",
            **saving,
        )
    )


def math(cookbook: str, url: str, log: str, loss: Any, max_steps_off_policy: int | None) -> None:
    """Sums, with a tenth of the reward for an answer that ends: what a random model can learn."""
    recipe = module(cookbook, "recipes.math_rl.train")
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **small(url, log),
                group_size=16,
                max_tokens=8,
                save_every=5,
                loss_fn=loss,
                max_steps_off_policy=max_steps_off_policy,
            )
        )
    )


def math_kl(cookbook: str, url: str, log: str) -> None:
    """The same with a penalty for leaving the base model: its logprobs of each sample are asked for."""
    rl = module(cookbook, "rl.train")
    dataset = module(cookbook, "recipes.math_rl.arithmetic_env").ArithmeticDatasetBuilder(
        batch_size=4, model_name_for_tokenizer=BASE, renderer_name=RENDERER, n_batches=3, group_size=8
    )
    config = rl.Config(
        learning_rate=2e-2,
        dataset_builder=dataset,
        model_name=BASE,
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
        **({"recipe_name": "math_kl"} if cookbook == "tinker" else {}),
    )
    asyncio.run(rl.main(config))


def distill(cookbook: str, url: str, log: str) -> None:
    """On-policy distillation, without a reward: a fresh adapter learns from the one that `chat` trained beside its log,
    whose logprobs of each sample are asked for."""
    recipe = module(cookbook, "recipes.distillation.on_policy_distillation")
    saved = Path(log).with_name("chat").joinpath("checkpoints.jsonl").read_text().splitlines()
    taught = [json.loads(line) for line in saved]
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **small(url, log),
                teacher_model=BASE,
                teacher_checkpoint=[one["sampler_path"] for one in taught if one.get("sampler_path")][-1],
                dataset="tulu3",
                group_size=8,
                max_tokens=12,
                save_every=0,
            )
        )
    )


def loops(cookbook: str, url: str, log: str) -> None:
    """`sl_loop` shows the right answer, and `rl_loop` goes on from its checkpoint."""
    sl, rl = module(cookbook, "recipes.sl_loop"), module(cookbook, "recipes.rl_loop")
    common = {"base_url": url, "model_name": KNOWN_BASE, "lora_rank": 8, "save_every": 0}
    last = sl.renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE
    shown = {"batch_size": 8, "max_length": 512, "train_on_what": last}
    sl.main(sl.Config(log_path=f"{log}/sl", learning_rate=1e-2, **shown, **common))
    taught = json.loads(Path(log, "sl", "checkpoints.jsonl").read_text().splitlines()[-1])
    Path(log, "rl").mkdir()
    Path(log, "rl", "checkpoints.jsonl").write_text(json.dumps({**taught, "batch": 0}) + "\n")
    sampled = {"batch_size": 8, "group_size": 8, "max_tokens": 12}
    rl.main(rl.Config(log_path=f"{log}/rl", learning_rate=1e-3, **sampled, **common))


def module(cookbook: str, name: str = "") -> Any:
    return importlib.import_module(f"{cookbook}_cookbook" + (f".{name}" if name else ""))


def main() -> None:
    cookbook, recipe, url, log = sys.argv[1:]
    match recipe:
        case "chat":
            chat(cookbook, url, log)
        case "loops":
            loops(cookbook, url, log)
        case "distill":
            distill(cookbook, url, log)
        case "math_kl":
            math_kl(cookbook, url, log)
        case _:
            _, loss, stale = recipe.split("-")
            math(cookbook, url, log, loss, int(stale) or None)


if __name__ == "__main__":
    main()
