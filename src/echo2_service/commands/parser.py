"""The command line of the service: `echo2 serve` and `echo2 keys`."""

from __future__ import annotations

import argparse
from pathlib import Path

from echo2.cli.adding import Add, begin_process, module_command


def add_service(add: Add) -> None:
    """Add `serve` and `keys`."""
    text = "Serve training and sampling on your machines to users of the Tinker and Logits SDKs."
    parser = add("serve", text, _serve, has_json=True)
    parser.set_defaults(interrupted="")
    text = "configuration file, like examples/serve.toml; or `status`: show requests, spending and machines"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=text)
    parser.add_argument("--port", type=int, help="port, instead of the file's (0: any)")
    where = "directory for models, database and the first API key (default: outputs/service)"
    parser.add_argument("--out", type=Path, default=Path("outputs/service"), metavar="DIR", help=where)
    parser.add_argument("--database", default="", metavar="URL", help="with `status`: database, if not SQLite in DIR")
    text = "List, add and revoke the API keys of a service."
    parser = add(
        "keys", text, module_command("echo2_service.commands.keys"), directory="directory of the service", has_json=True
    )
    parser.add_argument("--add", default="", metavar="TENANT", help="print a new key for this tenant")
    parser.add_argument(
        "--scopes", default="train,sample", help="what the new key may do: train, sample, owner (default: train,sample)"
    )
    parser.add_argument("--days", type=float, help="days until the new key expires (default: never)")
    parser.add_argument("--per-minute", type=int, default=100_000, help="most calls a minute (default: 100000)")
    parser.add_argument("--revoke", default="", metavar="KEY_ID", help="refuse this key from now on")
    parser.add_argument("--database", default="", metavar="URL", help="database, if it is not SQLite in DIR")


def _serve(options: argparse.Namespace) -> int:
    if options.config == Path("status"):
        return module_command("echo2_service.commands.status")(options)
    from echo2_service.commands.serve import serve

    begin_process("serve")
    return serve(options.config, options.out, options.port)
