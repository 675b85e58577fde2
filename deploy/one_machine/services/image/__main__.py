# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.image serve`: the image service's command.

The service validates tokens at the identity service as the user kilonova (see
deploy.one_machine.services.guard).
"""

import argparse
from pathlib import Path

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.guard import add_authentication, add_identity_options, identity_of
from deploy.one_machine.services.image.app import build
from deploy.one_machine.services.image.caller import is_open
from deploy.one_machine.services.image.files import ImageFiles
from deploy.one_machine.services.image.schema import METADATA
from deploy.one_machine.services.image.store import ImageStore
from deploy.one_machine.services.web import add_options, serve


def main() -> None:
    """Parse the command line and serve the image API until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.image", description=__doc__
    )
    serve_parser = parser.add_subparsers(required=True).add_parser(
        "serve", help="serve until SIGTERM"
    )
    serve_parser.add_argument(
        "--data", type=Path, required=True, help="the folder for images.db and the images"
    )
    add_options(serve_parser, "127.0.0.1:9292")
    serve_parser.add_argument("--max-megabytes", type=int, default=102400, help="of one image")
    add_identity_options(serve_parser)
    options = parser.parse_args()
    identity = identity_of(options)
    serve(
        lambda: add_authentication(build(_store(options)), identity, is_open),
        options,
        lambda: _recover(options),
    )


def _store(options: argparse.Namespace) -> ImageStore:
    files = ImageFiles(options.data / "images", options.max_megabytes * 1024 * 1024)
    return ImageStore(Database(options.data / "images.db", METADATA), files)


def _recover(options: argparse.Namespace) -> None:
    store = _store(options)
    store.recover()
    store.database.close()


if __name__ == "__main__":
    main()
