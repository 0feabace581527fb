"""The commands before and after a run: plan, probe, simulate, cost, sft, eval, export, chat."""

from __future__ import annotations

import argparse
from pathlib import Path

from echo2.cli.adding import Add, module_command
from echo2.config.values import ENGINES, GGUF_FORMS, MLX_BITS


def add_plan(add: Add) -> None:
    """Add `plan`."""
    text = "Plan a run: the cheapest machines that keep the learner busy, and the bill."
    parser = add("plan", text, module_command("echo2.planning.plan_command"), takes_settings=True, has_json=True)
    text = "configuration file of the run (default: the settings of the run in --from DIR)"
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=text)
    text = "machines on offer, as in examples/offers.toml; `market`: today's prices, by gpuhunt (default: offers.toml, "
    text += "else the newest prices of the market that are here)"
    parser.add_argument("--offers", type=Path, metavar="FILE", help=text)
    parser.add_argument("--rent", action="store_true", help="print the commands that rent the plan's machines")
    parser.add_argument("--budget", type=float, metavar="USD", help="most that the run may cost")
    parser.add_argument("--rehearse", action="store_true", help="also simulate the plan with the real control code")
    text = "forecast the run on this machine's cores instead, with its local workers; PROBE: what `echo2 probe --json` "
    text += "printed"
    parser.add_argument("--here", type=Path, nargs="?", const=Path(), metavar="PROBE", help=text)
    figures = parser.add_argument_group("measured or estimated", "Flags override what --from DIR supplies.")
    text = "the learner's GPUs, as in 4xA100-80GB (sets learner.ranks, where the file does not): estimates what is not "
    text += "given from their data sheet (default: the cheapest for a step that hold the model)"
    figures.add_argument("--learner", metavar="GPUS", help=text)
    figures.add_argument("--from", dest="source", type=Path, metavar="DIR", help="a similar run that was measured")
    for flag, symbol, what in (
        ("--train-seconds", "T", "seconds of training in one step"),
        ("--reward-seconds", "R", "seconds that your reward functions need for one group"),
        ("--broadcast-seconds", "Tb", "seconds from publication until workers have a snapshot"),
        ("--snapshot-bytes", "G", "bytes of a full snapshot (default: from the model)"),
        ("--uplink-mbps", "B0", "upload rate of the head in Mbit/s (default: 1000)"),
        ("--answer-tokens", "N", "mean tokens of an answer (default: half of sampling.max_tokens)"),
        ("--learner-memory-gb", "M", "memory of each GPU of the learner in GB (default: this machine's)"),
    ):
        figures.add_argument(flag, type=float, metavar=symbol, help=what)
    market = parser.add_argument_group("machines of the market")
    market.add_argument("--gpus", metavar="NAMES", help="only these, as in RTX-4090,4xRTX-5090 (default: all)")
    market.add_argument("--region", metavar="NAME", help="only regions with this in their name (default: all)")
    text = "only GPUs with so much memory, at least (default: all)"
    market.add_argument("--memory-gb", type=float, metavar="M", help=text)
    text = "only these, as in runpod,vastai (default: all); price lists do not say how reliable machines are"
    market.add_argument("--providers", metavar="NAMES", help=text)
    market.add_argument("--spot", choices=("any", "yes", "no"), default="any", help="only spot machines, or none")
    text = "how many of each kind there are taken to be (default: 64)"
    market.add_argument("--each", type=int, default=64, metavar="N", help=text)
    mode = parser.add_argument_group("choices")
    mode.add_argument("--max-idle", type=float, default=0.02, help="share of time the learner may wait (default: 0.02)")


def add_planning(add: Add) -> None:
    """Add `probe`, `simulate` and `cost`."""
    text = "Measure this machine's rollouts per second, and print an entry for the offers file."
    parser = add("probe", text, module_command("echo2.planning.probe"), takes_settings=True, has_json=True)
    what = "configuration file, or a model directory"
    parser.add_argument("target", type=Path, metavar="CONFIG|MODEL_DIR", help=what)
    what = f"engine to measure: {', '.join(ENGINES)} (default: the run's)"
    parser.add_argument("--engine", default="", choices=ENGINES, metavar="NAME", help=what)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to sample (default: 30)")
    parser.add_argument("--name", default="this-machine", help="name of the entry (default: this-machine)")
    parser.add_argument("--price-usd-per-hour", type=float, default=0.0, metavar="USD", help="its price (default: 0)")
    text = "Simulate a run before you pay for it: the real control code with virtual machines and a virtual clock."
    parser = add("simulate", text, module_command("echo2.planning.simulate"), has_json=True)
    what = "scenario file (TOML), as in simulations/"
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help=what)
    parser.add_argument("--seed", type=int, default=0, help="seed of all randomness (default: 0)")
    text = "Show what a run has cost: dollars by machine and by cause."
    add("cost", text, module_command("echo2.head.ledger.costs"), directory="run directory", has_json=True)


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
    home = parser.add_mutually_exclusive_group()
    text = f"a file for llama.cpp instead, with tokenizer and chat template: {', '.join(GGUF_FORMS)} (default: q8_0)"
    home.add_argument(
        "--gguf", nargs="?", const=GGUF_FORMS[0], default="", choices=GGUF_FORMS, metavar="FORM", help=text
    )
    text = "a directory for MLX instead, with weights of 8 or 4 bits (default: 8)"
    home.add_argument("--mlx", nargs="?", const=MLX_BITS[0], default="", choices=MLX_BITS, metavar="BITS", help=text)
    text = "precision of the weights (default: float32, as in the checkpoint; with --mlx: bfloat16)"
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
    parser.add_argument(
        "--device", default="auto", help="cpu | cuda | cuda:0 | mps | xpu ... | auto (a GPU if there is one)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most likely token (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=512, help="most tokens in one answer (default: 512)")


def _step(text: str) -> int | str:
    if text == "best":
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor `best`")
