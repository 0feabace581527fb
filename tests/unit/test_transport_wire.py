"""The committed protobuf module is what `wire.proto` says; the methods are what both say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import house
from echo2.transport import wire_pb2 as wire
from echo2.transport.base import METHODS

TRANSPORT = house.SOURCE / "echo2" / "transport"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proto")
    outputs = [f"--python_out={folder}", f"--pyi_out={folder}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{house.SOURCE}", *outputs, str(TRANSPORT / "wire.proto")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "echo2" / "transport"


@pytest.mark.parametrize("name", ["wire_pb2.py", "wire_pb2.pyi"])
def test_generated_module_is_fresh(generated: Path, name: str) -> None:
    assert (TRANSPORT / name).read_text() == (generated / name).read_text(), "run `make proto`"


def test_every_number_is_bound_for_sqlite_by_hand() -> None:
    """Python's integers have no end, SQLite's do: fields wider than 64 bits unsigned do not exist, and signed ones are
    not used, so that `whole_number` need only look upward.
    """
    signed = [
        f"{message.name}.{field.name}"
        for message in wire.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.type in (field.TYPE_INT32, field.TYPE_INT64, field.TYPE_SINT32, field.TYPE_SINT64)
    ]
    assert signed == []


def test_methods_speak_messages_of_the_proto() -> None:
    known = {message.name for message in wire.DESCRIPTOR.message_types_by_name.values()}
    assert {method.request.__name__ for method in METHODS.values()} <= known
    assert {method.reply.__name__ for method in METHODS.values()} <= known
    assert all(name == method.name for name, method in METHODS.items())
