"""The door to the service (`echo2_service`), a package of its own: its commands, and machines that sample for it."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

from echo2.cli.adding import Add
from echo2.core.errors import UserError

SERVICE = "echo2_service"
NOT_INSTALLED = "The service is not installed. In a clone of echo2's repository: pip install . ./service"


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
