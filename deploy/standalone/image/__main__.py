# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.standalone.image serve`: the image service's command.

It asks the identity service about tokens as the user kilonova, whose password comes from a file or, without
the option, from KILONOVA_SERVICE_PASSWORD; never from an argument, which every user of the machine can read.
"""

import argparse
from pathlib import Path
from typing import Any

from deploy.standalone.database import Database
from deploy.standalone.image.app import build, guarded
from deploy.standalone.image.files import Files
from deploy.standalone.image.schema import METADATA
from deploy.standalone.image.shelf import Shelf
from deploy.standalone.web import add_options, secret, serve

TOKEN_CACHE_SECONDS = 30
"""For how long a revoked token may still work here."""


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m deploy.standalone.image", description=__doc__)
    serving = parser.add_subparsers(required=True).add_parser("serve", help="serve until SIGTERM")
    serving.add_argument("--data", type=Path, required=True, help="the folder for images.db and the images")
    add_options(serving, "127.0.0.1:9292")
    serving.add_argument("--max-megabytes", type=int, default=102400, help="of one image")
    serving.add_argument("--auth-url", required=True, metavar="URL", help="of the identity service, with /v3")
    serving.add_argument("--username", default="kilonova")
    serving.add_argument("--project", default="service")
    serving.add_argument("--password-file")
    options = parser.parse_args()
    identity = _identity(options)
    serve(lambda: guarded(build(_shelf(options)), identity), options, lambda: _recover(options))


def _shelf(options: argparse.Namespace) -> Shelf:
    files = Files(options.data / "images", options.max_megabytes * 1024 * 1024)
    return Shelf(Database(options.data / "images.db", METADATA), files)


def _recover(options: argparse.Namespace) -> None:
    shelf = _shelf(options)
    shelf.recover()
    shelf.database.close()


def _identity(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "auth_type": "password",
        "auth_url": options.auth_url,
        "username": options.username,
        "password": secret(options.password_file, "KILONOVA_SERVICE_PASSWORD"),
        "project_name": options.project,
        "user_domain_id": "default",
        "project_domain_id": "default",
        "www_authenticate_uri": options.auth_url,
        "token_cache_time": TOKEN_CACHE_SECONDS,
        "include_service_catalog": False,
        "service_token_roles_required": True,
    }


if __name__ == "__main__":
    main()
