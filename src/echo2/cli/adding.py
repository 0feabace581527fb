"""What the families of commands share: how a command is added, found and begun; and the door to the service
(`echo2_service`), a package of its own: its commands, and machines that sample for it.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from echo2 import config
from echo2.core.errors import UserError

Command = Callable[[argparse.Namespace], int]
#: `add_command` with its first argument.
Add = Callable[..., argparse.ArgumentParser]
SERVICE = "echo2_service"
NOT_INSTALLED = "The service is not installed. In a clone of echo2's repository: pip install . ./service"


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    command: Command,
    directory: str = "",
    takes_settings: bool = False,
    has_json: bool = False,
) -> argparse.ArgumentParser:
    """Add one command. `directory`: help text of its first argument DIR; empty: the command has none."""
    parser = commands.add_parser(name, help=text, description=textwrap.fill(text, 80), allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps the lines of `config.settings_help`
    parser.set_defaults(command=command, parser=parser, takes_settings=takes_settings)
    if directory:
        parser.add_argument("directory", type=Path, metavar="DIR", help=directory)
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    if takes_settings:
        for section, key, *_ in config.all_fields():
            parser.add_argument(f"--{section}.{key}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def module_command(name: str, function: str = "run") -> Command:
    """Return a command that imports a module when it runs, and calls the module's function."""
    return lambda options: int(getattr(import_module(name), function)(options))


def begin_process(name: str) -> None:
    """Do what head, learner, worker and service do before anything else. `name`: of the process, in its log.

    Raises:
        UserError: the environment names an unknown format of logs.
    """
    from echo2.core import child, logs
    from echo2.transport.sockets import raise_descriptor_limit

    child.end_with_supervisor()
    raise_descriptor_limit()
    logs.start(name)


def add_service(add: Add) -> None:
    """Add the commands of the service, or what says that it is not installed."""
    if find_spec(SERVICE) is not None:
        service_module("commands.parser").add_service(add)
        return
    for name, text in (("serve", "Serve training and sampling to others"), ("keys", "List the API keys of a service")):
        parser = add(name, f"{text}: needs the package in service/.", _missing)
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parser.error = _refuse  # type: ignore[method-assign] # of flags that stand first


def service_module(name: str) -> ModuleType:
    """Import a module of the service.

    Raises:
        UserError: the service is not installed.
    """
    if find_spec(SERVICE) is None:
        raise UserError(NOT_INSTALLED)
    return import_module(f"{SERVICE}.{name}")


def _missing(options: argparse.Namespace) -> int:
    raise UserError(NOT_INSTALLED)


def _refuse(message: str) -> NoReturn:
    raise UserError(NOT_INSTALLED)
