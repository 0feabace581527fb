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
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **small(url, log),
                teacher_model=BASE,
                teacher_checkpoint=taught_before(log),
                dataset="tulu3",
                group_size=8,
                max_tokens=12,
                save_every=0,
            )
        )
    )


def distill_from_two(cookbook: str, url: str, log: str) -> None:
    """The same with two data sets and a teacher for each: the adapter that `chat` trained, and the base model."""
    recipe = module(cookbook, "recipes.distillation.on_policy_multi_teacher")
    options = small(url, log)
    groups = options.pop("groups_per_batch")
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **options,
                deepmath_teacher_model=BASE,
                deepmath_teacher_checkpoint=taught_before(log),
                tulu3_teacher_model=BASE,
                deepmath_groups_per_batch=groups,
                tulu3_groups_per_batch=groups,
                group_size=8,
                max_tokens=12,
                save_every=0,
            )
        )
    )


def self_distill(cookbook: str, url: str, log: str) -> None:
    """The policy that reads the answer teaches the one that does not: the likely tokens of the first are the targets of
    the second, weighted by their probabilities."""
    recipe = module(cookbook, "recipes.sdft.train")
    options = {**small(url, log), "groups_per_batch": 8}
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **options,
                group_size=2,
                max_tokens=12,
                topk=8,
                teacher_sync_every=4,
                max_context_length=512,
                save_every=0,
            )
        )
    )


def off_policy(cookbook: str, url: str, log: str) -> None:
    """Supervised on a stream of what another model wrote."""
    recipe = module(cookbook, "recipes.distillation.off_policy_reasoning")
    options = without(small(url, log), "groups_per_batch")
    sizes = {"batch_size": 8, "max_length": 256, "buffer_size": 32, "max_prompts": 128, "save_every": 0}
    recipe.cli_main(recipe.CLIConfig(**{**options, **sizes}))


def prompt_distill(cookbook: str, url: str, log: str) -> None:
    """Supervised without the long prompt that the answers were made with."""
    recipe = module(cookbook, "recipes.prompt_distillation.train")
    options = without(small(url, log), "groups_per_batch")
    conversations = Path(module(cookbook).__file__).parent / "example_data" / "conversations.jsonl"
    options |= {"file_path": str(conversations), "lr_schedule": "constant"}
    recipe.cli_main(recipe.CLIConfig(**options, batch_size=8, max_length=256, save_every=0))


def shorter(cookbook: str, url: str, log: str) -> None:
    """All answers of a group are compared in pairs, and the shorter one wins. It takes no address but the
    environment's."""
    recipe = module(cookbook, "recipes.preference.shorter.train")
    options = without(small(url, log), "base_url", "lora_rank", "groups_per_batch")
    recipe.cli_main(recipe.CLIConfig(**options, batch_size=4, group_size=8, max_tokens=16))


def preferences(cookbook: str, url: str, log: str) -> None:
    """DPO: a loss of the client's own, over the logprobs of two forward passes."""
    recipe = module(cookbook, "recipes.preference.dpo.train")
    options = without(small(url, log), "lora_rank", "groups_per_batch", "eval_every")
    recipe.cli_main(recipe.CLIConfig(**{**options, "learning_rate": 1e-3}, dataset="hhh", batch_size=8, max_length=256))


def rubric(cookbook: str, url: str, log: str) -> None:
    """A model of the service grades; a random one gives no grade."""
    recipe = module(cookbook, "recipes.rubric.train")
    rows = Path(log).with_name("rubric.jsonl")
    item = {"rubric_str": "Is it right?", "extraction_regex": "(.*)", "grader_output_format_instruction": "A number."}
    row = {"convo": [{"role": "user", "content": "What is 4 + 5?"}], "rubric_items": [item]}
    rows.write_text("\n".join([json.dumps(row)] * 16))
    asyncio.run(
        recipe.cli_main(
            recipe.CLIConfig(
                **{**small(url, log), "max_steps": 3},
                grader_llm_name=BASE,
                grader_renderer_name=RENDERER,
                train_group_size=4,
                train_jsonl_path=str(rows),
                test_jsonl_path=str(rows),
                max_tokens=8,
                save_every=0,
            )
        )
    )


def taught_before(log: str) -> str:
    """The last checkpoint of `chat`, whose log is beside this one."""
    saved = Path(log).with_name("chat").joinpath("checkpoints.jsonl").read_text().splitlines()
    found: str = [one["sampler_path"] for one in map(json.loads, saved) if one.get("sampler_path")][-1]
    return found


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


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
    if recipe in RECIPES:
        RECIPES[recipe](cookbook, url, log)
    else:
        _, loss, stale = recipe.split("-")
        math(cookbook, url, log, loss, int(stale) or None)


#: By name; others are math-LOSS-STALENESS.
TAUGHT = chat, loops, distill, distill_from_two, self_distill, off_policy, prompt_distill
REWARDED = math_kl, shorter, preferences, rubric
RECIPES = {one.__name__: one for one in (*TAUGHT, *REWARDED)}


if __name__ == "__main__":
    main()
