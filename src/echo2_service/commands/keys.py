"""`echo2 keys`: manages the API keys of a service, which may be running meanwhile."""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime

from echo2.core.errors import UserError
from echo2.core.printable import printable
from echo2_service.commands.serve import open_database
from echo2_service.front.database import keys
from echo2_service.front.request_guard import ApiKeys

_ENDS = ("expires", "revoked")


def run(options: argparse.Namespace) -> int:
    """Add a key, revoke one, or list them.

    Raises:
        UserError: there is no service in that directory, no such key or no such scope.
    """
    if not options.database and not (options.directory / "service.sqlite").is_file():
        raise UserError(f"{options.directory} is not a directory of `echo2 serve`: it has no service.sqlite.")
    database = open_database(options.directory, options.database)
    api_keys = ApiKeys(database, time.time)
    if options.add:
        print(api_keys.add_key(options.add, options.scopes.split(","), options.days, options.per_minute))
    elif options.revoke:
        api_keys.revoke(options.revoke)
        print(f"{options.revoke} is revoked")
    else:
        columns = ("id", "tenant", "scopes", "per_minute", "created", "expires", "revoked")
        rows = [{name: getattr(row, name) for name in columns} for row in database.select(keys, "created")]
        print(json.dumps(rows) if options.json else "\n".join(map(_line, rows)))
    database.close()
    return 0


def _line(row: dict[str, object]) -> str:
    ends = [f"{name} {datetime.fromtimestamp(float(str(row[name])), UTC):%Y-%m-%d}" for name in _ENDS if row[name]]
    return f"{row['id']}  {printable(str(row['tenant']))}  {row['scopes']}  {', '.join(ends) or 'valid'}"
