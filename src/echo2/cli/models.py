"""The commands about models: eval, export, sft, chat."""

from __future__ import annotations

import argparse
from pathlib import Path

from echo2.cli.adding import Add, module_command


def add_models(add: Add) -> None:
    """Add `eval`, `export`, `sft` and `chat`."""
    text = "Evaluate a checkpoint of a run, or any model, on the run's held-out tasks."
    parser = add("eval", text, module_command("echo2.models.evaluate"), takes_settings=True, has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|CONFIG", help="run directory, or configuration file")
    parser.add_argument("--step", type=_step, help="checkpoint to evaluate: a step, or `best` (default: the newest)")
    parser.add_argument("--model", default="", help="evaluate this model directory or hub id instead of a checkpoint")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token each time; a run samples")
    text = "also write all rollouts to this new file, one task a line (JSON)"
    parser.add_argument("--to", type=Path, metavar="FILE", help=text)
    text = "Write a checkpoint as a Hugging Face model directory."
    parser = add("export", text, module_command("echo2.models.export"), directory="run directory", has_json=True)
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="directory to write")
    parser.add_argument("--step", type=_step, help="checkpoint to export: a step, or `best` (default: the newest)")
    text = "for a LoRA run: merge the adapter into its base model, instead of writing a PEFT directory"
    parser.add_argument("--merged", action="store_true", help=text)
    text = "precision of the weights (default: float32, as in the checkpoint)"
    parser.add_argument("--dtype", default="", choices=["float32", "bfloat16", "float16"], help=text)
    text = "also upload it to the Hugging Face hub, with a model card; a new repository is private"
    parser.add_argument("--push", default="", metavar="OWNER/NAME", help=text)
    parser.add_argument("--public", action="store_true", help="with --push: allow a public repository")
    text = "Supervised fine-tuning before a run, on the tasks of CONFIG and the answers in one of their columns."
    parser = add("sft", text, module_command("echo2.models.sft"), takes_settings=True, has_json=True)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file; set --learner.lr, too")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="model directory to write")
    parser.add_argument("--column", default="completion", help="column that has the answers (default: completion)")
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="training steps")
    parser.add_argument("--rows-per-step", type=int, default=32, metavar="N", help="rows in one step (default: 32)")
    parser.add_argument("--resume", action="store_true", help="continue what was interrupted")
    text = "Talk to a checkpoint of a run, or to any model. Piped text is one message."
    parser = add("chat", text, module_command("echo2.models.chat"), has_json=True)
    parser.add_argument("target", type=Path, metavar="DIR|MODEL", help="run directory, model directory or hub id")
    parser.add_argument("--step", type=_step, help="checkpoint of the run: a step, or `best` (default: the newest)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt before the conversation")
    parser.add_argument("--device", default="auto", help="cpu | cuda | cuda:0 ... | auto (a GPU if there is one)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely token (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens in one answer (default: 512)")


def _step(text: str) -> int | str:
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `best`")
