"""`echo2 chat`: talk to the model of a run, or to any other model, from a terminal or through a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from echo2.config.rundir import RunDir
from echo2.core.errors import UserError
from echo2.core.printable import printable_lines
from echo2.engines.tokenizer import Tokenizer, load_tokenizer
from echo2.models.evaluate import Step, load_model

HELP = "An empty line or Ctrl-D ends, /reset starts again, Ctrl-C stops an answer."
ANSWER_CHARS_MAX = 1 << 20


def run(options: argparse.Namespace) -> int:
    """Talk until an empty line or the end of input; answer once if stdin is not a terminal.

    Raises:
        UserError: there is no such checkpoint or model, it can't be loaded, or the input is empty.
    """
    if options.temperature < 0 or options.max_tokens < 1:
        raise UserError("Give --temperature 0 or more and --max-tokens 1 or more.")
    from echo2.engines.dialogue import Dialogue

    dialogue = Dialogue(*_load(options.target, options.step, options.device), options.temperature, options.system)
    if options.json or not sys.stdin.isatty():
        message = sys.stdin.read().rstrip("\n")
        if not message:
            raise UserError("The input is empty: pipe a message to `echo2 chat`, or run it in a terminal.")
        answer = dialogue.answer(message, options.max_tokens, lambda _: None)
        print(json.dumps({"message": message, **answer}) if options.json else _safe(answer["answer"]))
        return 0
    console = Console()
    console.print(f"[bold]{escape(str(options.target))}[/]. {HELP}", highlight=False)
    if not dialogue.is_chat:
        console.print("It has no chat template: it goes on with your text, and each text stands alone.")
    while message := _typed(console):
        if message == "/reset":
            dialogue.reset()
            continue
        try:
            dialogue.answer(message, options.max_tokens, lambda piece: print(_safe(piece), end="", flush=True))
        except UserError as error:
            print(error, end="")
        print("\n")
    return 0


def _load(target: Path, step: Step, device: str) -> tuple[Any, Tokenizer, Mapping[str, bytes]]:
    """Load the model of a run's checkpoint, or of any model path. Return it with its tokenizer and its files."""
    from echo2.learner.core.model import load_policy

    rundir = RunDir(target)
    if rundir.checkpoints.is_dir():
        return load_model(rundir, step, device)
    policy = load_policy(str(target), "stored", device)
    return policy.module, load_tokenizer(policy.files), policy.files


def _typed(console: Console) -> str:
    try:
        return console.input("[bold cyan]you[/] ").strip()
    except EOFError:
        print()
        return ""


def _safe(text: str) -> str:
    return printable_lines(text, ANSWER_CHARS_MAX)
