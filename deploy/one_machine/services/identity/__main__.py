# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.identity bootstrap|serve`: the identity service's command.

Passwords come from files, or without the option from KILONOVA_ADMIN_PASSWORD and
KILONOVA_SERVICE_PASSWORD. They are never command-line arguments, because every user of the machine
can read arguments.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

from sqlalchemy import select

from common.service.service import UMASK
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity.app import build
from deploy.one_machine.services.identity.bootstrap import bootstrap
from deploy.one_machine.services.identity.schema import METADATA, users
from deploy.one_machine.services.identity.service import IdentityService
from deploy.one_machine.services.web import add_options, secret, serve


def _endpoint(text: str) -> tuple[str, str]:
    kind, _, url = text.partition("=")
    if not kind or "://" not in url:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TYPE=URL, for example image=http://127.0.0.1:9292"
        )
    return kind, url


def main() -> None:
    """Parse the command line and run the command bootstrap or serve."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.identity", description=__doc__
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(required=True)
    bootstrap_parser = commands.add_parser("bootstrap", help="make the first rows; safe to repeat")
    bootstrap_parser.add_argument(
        "--db", type=Path, required=True, help="the SQLite file; made when absent"
    )
    bootstrap_parser.add_argument("--admin-password-file")
    bootstrap_parser.add_argument(
        "--service-password-file", help="of the user kilonova in the project service"
    )
    bootstrap_parser.add_argument(
        "--endpoint", type=_endpoint, action="append", default=[], metavar="TYPE=URL"
    )
    bootstrap_parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="TYPE",
        help="remove the endpoints of this type",
    )
    bootstrap_parser.set_defaults(run=_bootstrap)
    serve_parser = commands.add_parser("serve", help="serve until SIGTERM")
    serve_parser.add_argument("--db", type=Path, required=True)
    add_options(serve_parser, "127.0.0.1:5000")
    serve_parser.add_argument("--token-hours", type=float, default=12.0)
    serve_parser.set_defaults(run=_serve)
    options = parser.parse_args()
    options.run(options)


def _bootstrap(options: argparse.Namespace) -> None:
    user_passwords = {
        "admin": secret(options.admin_password_file, "KILONOVA_ADMIN_PASSWORD"),
        "kilonova": secret(options.service_password_file, "KILONOVA_SERVICE_PASSWORD"),
    }
    os.umask(UMASK)
    database = Database(options.db, METADATA)
    bootstrap(database, user_passwords, dict(options.endpoint), options.without)
    database.close()


def _serve(options: argparse.Namespace) -> None:
    os.umask(UMASK)
    database = Database(options.db, METADATA)
    with database.read() as connection:
        if connection.execute(select(users.c.id)).first() is None:
            raise SystemExit(
                f"The database {options.db} has no users: run the command bootstrap first."
            )
    database.close()
    lifetime = timedelta(hours=options.token_hours)
    serve(
        lambda: build(IdentityService(Database(options.db, METADATA), lifetime)),
        options,
        lambda: None,
    )


if __name__ == "__main__":
    main()
