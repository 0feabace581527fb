"""The command `echo2`. Modules that need torch are imported only by the commands that use them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from echo2 import __version__, config
from echo2.cli.adding import NOT_INSTALLED, Command, add_command, add_service
from echo2.cli.planning import add_models, add_plan, add_planning
from echo2.cli.running import add_demo, add_processes, add_run
from echo2.cli.watching import add_tickets, add_views
from echo2.core.devices import NO_TORCH
from echo2.core.errors import NO_ROOM, Echo2Error, NoRoomError, did_you_mean
from echo2.core.printable import printable_lines

#: Maximum length of a printed error, which may quote a peer or a file.
ERROR_CHARS_MAX = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0 success, 1 a bug or a peer's fault, 2 the user's mistake, 3 a full
    disk, 130 interrupted.
    """
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    options.argv = sys.argv[1:] if arguments is None else arguments
    try:
        if options.takes_settings:
            refuse_unknown_settings(word for word in unknown if not _near_flag(word, options.parser, 0.8))
            options.overrides = {name: value for name, value in vars(options).items() if "." in name}
        if unknown:
            near = next((_near_flag(word, options.parser, 0.5) for word in unknown if word.startswith("--")), "")
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if near else ''}{near}")
        command: Command = options.command
        status = command(options)
        sys.stdout.flush()  # else it fails at the interpreter's exit, in words of its own
        return status
    except Echo2Error as error:
        text, code = printable_lines(str(error), ERROR_CHARS_MAX), error.exit_status
        is_json = getattr(options, "json", False)
        print(json.dumps({"error": text, "status": code}) if is_json else f"error: {text}", file=sys.stderr)
        return code
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "sqlalchemy"):
            raise
        print(f"error: {NO_TORCH if error.name == 'torch' else NOT_INSTALLED}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _discard_output()
        text = f"{error.filename or 'a file or the standard output'}: {error.strerror}. Free some space, and repeat it."
        print(f"error: Cannot write {text}", file=sys.stderr)
        return NoRoomError.exit_status
    except KeyboardInterrupt:
        text = getattr(options, "interrupted", "interrupted")
        as_json = {"error": text or "interrupted", "status": 130}
        print(json.dumps(as_json) if getattr(options, "json", False) else text, file=sys.stderr)
        return 130


def _discard_output() -> None:
    """The interpreter would try to write the rest when it exits, and say in words of its own that it cannot."""
    with suppress(OSError):  # there is no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _near_flag(word: str, parser: argparse.ArgumentParser, cutoff: float) -> str:
    """Return " Did you mean ...?" with the command's nearest flag that is not a setting; empty if none is similar."""
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--") and "." not in flag]
    return did_you_mean(word.partition("=")[0], flags, cutoff)


def refuse_unknown_settings(unknown: Iterable[str]) -> None:
    """Refuse a flag that argparse does not know: it may be a misspelt setting, or a setting without its section.

    Raises:
        UserError: names the nearest setting.
    """
    for word in unknown:
        if word.startswith("--"):
            section, _, name = word.removeprefix("--").partition("=")[0].partition(".")
            config.check_keys({section: {name: None} if name else None}, word)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="echo2",
        description="Reinforcement learning for language models: one learner, rollout workers on machines anywhere.",
    )
    parser.add_argument("--version", action="version", version=f"echo2 {__version__}")
    add = partial(add_command, parser.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    add_demo(add)
    add_run(add)
    add_processes(add)
    add_views(add)
    add_tickets(add)
    add_models(add)
    add_plan(add)
    add_planning(add)
    add_service(add)
    return parser
