"""`echo2 sft`: supervised fine-tuning before a run. The prompts are the tasks of the run's configuration, tokenised as
in the run; a column of the tasks has the answers. Gradients are means over the answer tokens. A step depends on its
number and data alone, so a resumed training gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from echo2 import config as configuration
from echo2.config import Config
from echo2.core.devices import pick_device
from echo2.core.errors import UserError
from echo2.core.printable import PlainLines, shown
from echo2.core.types import Task
from echo2.engines.tokenizer import Tokenizer, answer_ids, encode_prompt, end_token, load_tokenizer
from echo2.learner.core import checkpoint
from echo2.learner.core.adapters import load_trained
from echo2.learner.core.datum import Datum
from echo2.learner.core.fitting import fitted
from echo2.learner.core.mesh import Mesh
from echo2.learner.core.model import Policy, computes_in_bfloat16
from echo2.learner.core.optimizer import learning_rate, refuse_vanishing_updates
from echo2.learner.core.trainer import AdamParams, Trainer
from echo2.models.evaluate import copy_model
from echo2.tasks.streams import Tasks, held_out_tasks, refuse_changed_rows, training_tasks
from echo2.weights.format.snapshot_files import end_tokens

#: Maximum number of held-out rows whose loss is reported before and after.
HELD_OUT_ROWS = 256
#: Number of steps between checkpoints.
SAVE_STEPS = 50
EXIT_INTERRUPTED = 130
POLICY = "policy"


class Answers:
    """Makes training data from rows: the prompt as in a run, then the answer and an end token."""

    def __init__(
        self, tasks: Tasks, column: str, tokenizer: Tokenizer, ends: tuple[int, ...], context: int | None
    ) -> None:
        self._tasks, self._column, self._tokenizer = tasks, column, tokenizer
        self._ends, self._context = ends, context

    def data(self, cursors: range) -> list[Datum]:
        """Return the rows at these positions of the task stream.

        Raises:
            UserError: a row has no answer, or is longer than the model's context.
        """
        return [self._datum(self._tasks.task(cursor)) for cursor in cursors]

    def _datum(self, task: Task) -> Datum:
        answer = task.columns.get(self._column)
        if not isinstance(answer, str) or not answer:
            have = ", ".join(sorted(task.columns)) or "none"
            column_value = (
                f"the row with the prompt {shown(task.prompt)} has {shown(answer)} there; its columns: {have}"
            )
            raise UserError(f"--column {self._column!r} must have text, and {column_value}.")
        prompt = encode_prompt(task, self._tokenizer)
        is_chat = not isinstance(task.prompt, str)
        end = end_token(self._tokenizer, self._ends, is_chat)
        tokens = answer_ids(self._tokenizer, is_chat, answer) + array("i", [] if end is None else [end])
        if self._context is not None and len(prompt) + len(tokens) > self._context:
            raise UserError(
                f"The row with the prompt {shown(task.prompt)} has {len(prompt)} tokens and {len(tokens)} of the "
                f"answer; the model's context is {self._context}. Leave such rows out."
            )
        return Datum(prompt, tokens, b"\x01" * len(tokens))


class SupervisedClient:
    """One policy's training on answers. `step`: completed steps of `num_steps`; `rows`: the digests of the sources
    of rows, by name; `order`: the settings that say which tokens a step trains on, by name. `loss`: of the last step;
    `loss_before`: on held-out rows before the first step.
    """

    def __init__(
        self,
        policy: Policy,
        config: Config,
        num_steps: int,
        rows: Mapping[str, str],
        order: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Raises:
        UserError: updates of `learner.lr` would vanish in the weights' precision.
        """
        self.step, self.num_steps, self._learner = 0, num_steps, config.learner
        self._rows, self._order = dict(rows), dict(order)
        self.loss: float | None = None
        self.loss_before: float | None = None
        policy.computes_in_bfloat16 = computes_in_bfloat16(config.model.compute_dtype, policy.device)
        refuse_vanishing_updates(policy.trained_parameters(), config.learner.lr)
        settled = fitted(policy, config, Mesh())
        self._trainer = Trainer(settled.tokens)
        self._trainer.add(POLICY, policy, True, config.learner.quantised == "moments", settled.offloaded)

    def train(self, data: Sequence[Datum]) -> float:
        """Train one step on these rows. Return the loss before the step, in nats per answer token.

        Raises:
            UserError: memory does not hold one of the rows.
        """
        loss, num_tokens, learner = self._sum(data, adds_gradients=True), _num_taught(data), self._learner
        lr = learning_rate(learner, self.step, self.num_steps)
        adam = AdamParams(lr, weight_decay=learner.weight_decay, grad_clip=learner.grad_clip)
        self._trainer.optim_step(POLICY, adam, num_tokens)
        self.step += 1
        self.loss = loss / num_tokens
        return self.loss

    def held_out_loss(self, data: Sequence[Datum]) -> float:
        """Return the loss on rows that are not trained on, in nats per answer token."""
        return self._sum(data, adds_gradients=False) / _num_taught(data)

    def save(self, directory: Path) -> None:
        """Write a checkpoint with everything needed to continue. Raises UserError: it can't be written."""
        state = {"step": self.step, "num_steps": self.num_steps, "rows": self._rows, "order": self._order}
        state |= {"loss": self.loss, "loss_before": self.loss_before}
        self._trainer.save_state(POLICY, directory, state).result()

    def resume(self, directory: Path) -> None:
        """Continue from a checkpoint that `save` wrote.

        Raises:
            UserError: the checkpoint is of another model, or of a training of another number of steps, on other rows or
                in another order.
        """
        client_data = self._trainer.load_state(POLICY, directory)
        if client_data.get("num_steps") != self.num_steps:
            before, now = client_data.get("num_steps"), self.num_steps
            raise UserError(
                f"{directory} belongs to a training of {before} steps, not of {now}, which has other learning rates."
            )
        refuse_changed_rows([*self._rows], [*self._rows.values()], client_data.get("rows", {}))
        for name, before in client_data.get("order", {}).items():
            if before != (now := self._order.get(name, before)):
                raise UserError(
                    f"{directory} belongs to a training with {name} = {before!r}, not {now!r}: rows would be left out, "
                    "or trained on twice. Go on with the same."
                )
        self.step, self.loss, self.loss_before = (
            client_data["step"],
            client_data.get("loss"),
            client_data.get("loss_before"),
        )

    def _sum(self, data: Sequence[Datum], adds_gradients: bool) -> float:
        done = self._trainer.forward_backward(
            POLICY, data, lambda logp_n, _: (-logp_n, -float(logp_n.detach().sum())), adds_gradients=adds_gradients
        )
        return sum(done.outputs)


def _num_taught(data: Sequence[Datum]) -> int:
    return sum(sum(datum.loss_mask) for datum in data)


def run(options: argparse.Namespace) -> int:
    """Train, and write a model directory, or a PEFT directory for an adapter. Return the exit status.

    Raises:
        UserError: settings, model or rows are invalid, or the target can't be written.
    """
    config = configuration.load(options.config, options.overrides)
    to: Path = options.to
    working = to.with_name(f"{to.name}.unfinished")
    if to.exists() or (working.exists() and not options.resume):
        there = to if to.exists() else working
        raise UserError(f"{there} exists: choose another --to" + ("." if to.exists() else ", or go on with --resume."))
    if options.steps < 1 or options.rows_per_step < 1:
        raise UserError("Give --steps and --rows-per-step of 1 or more.")
    if config.learner.ranks > 1:
        raise UserError(f"learner.ranks = {config.learner.ranks}: sft trains in one process. Give --learner.ranks=1.")
    policy = load_trained(config, str(pick_device("auto")))
    tasks = training_tasks(config.tasks, config.run.seed)
    rows_read = refuse_changed_rows(config.tasks.sources, tasks.digests(), {})
    order = {"--rows-per-step": options.rows_per_step, "--column": options.column, "run.seed": config.run.seed}
    order |= {"model.chat_template_args": dict(config.model.chat_template_args)}
    client = SupervisedClient(policy, config, options.steps, rows_read, order)
    if (before := checkpoint.latest(working)) is not None:
        client.resume(before)
    tokenizer = load_tokenizer(policy.files, config.model.chat_template_args)

    def answers(tasks: Tasks) -> Answers:
        return Answers(tasks, options.column, tokenizer, end_tokens(policy.files), policy.max_positions)

    rows = answers(tasks)
    judged = held_out_tasks(config.eval, config.run.seed)
    held_out = [] if judged is None else answers(judged).data(range(min(HELD_OUT_ROWS, len(judged))))
    if held_out and client.step == 0:
        client.loss_before = client.held_out_loss(held_out)
    with _told_to_end() as is_told:
        _train(client, rows, options.rows_per_step, working, is_told)
    if client.step < client.num_steps:
        print(f"stopped after step {client.step} of {client.num_steps}; go on with --resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    copy_model(checkpoint.step_directory(working, client.step), to)
    shutil.rmtree(working)
    summary = {
        "model": str(to),
        "steps": client.step,
        "loss": client.loss,
        "held_out_loss_before": client.loss_before,
        "held_out_loss": client.held_out_loss(held_out) if held_out else None,
    }
    print(json.dumps(summary) if options.json else _summary(summary))
    return 0


def _train(client: SupervisedClient, rows: Answers, rows_per_step: int, working: Path, is_told: list[int]) -> None:
    """Train the remaining steps, or until a signal. Save the last step in either case."""
    console = Console(stderr=True)
    columns = (
        TextColumn("sft"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    plain = PlainLines(console.is_terminal)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=client.num_steps, completed=client.step)
        while client.step < client.num_steps and not is_told:
            start = client.step * rows_per_step
            loss = client.train(rows.data(range(start, start + rows_per_step)))
            progress.update(bar, completed=client.step, description=f"loss {loss:.3f}")
            is_last = client.step == client.num_steps
            plain.print_due(f"step {client.step} of {client.num_steps}, loss {loss:.3f}", is_last)
            if client.step % SAVE_STEPS == 0 and not is_last:
                _save(client, working)
    _save(client, working)


def _save(client: SupervisedClient, working: Path) -> None:
    directory = checkpoint.step_directory(working, client.step)
    if not directory.exists():
        client.save(directory)
        checkpoint.prune(working, 1)


@contextmanager
def _told_to_end() -> Iterator[list[int]]:
    """Yield the list of signals received that end this process; the current step is finished and saved first."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in signals}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(summary: dict[str, object]) -> str:
    losses = [summary[name] for name in ("held_out_loss_before", "held_out_loss") if summary[name] is not None]
    kind, shown = ("held-out loss", losses) if losses else ("loss", [summary["loss"]])
    change = " to ".join(f"{loss:.3f}" for loss in shown if loss is not None)
    return f"{kind} {change} in {summary['steps']} steps; wrote {summary['model']}"
