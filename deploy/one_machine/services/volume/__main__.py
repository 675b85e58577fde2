# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.volume serve`: the volume service's command.

As the user kilonova, the service validates tokens at the identity service and calls the image and
compute services (see deploy.one_machine.services.guard).
"""

import argparse
import socket
from pathlib import Path

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.external import session_of
from deploy.one_machine.services.guard import add_authentication, add_identity_options, identity_of
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.volume.app import build
from deploy.one_machine.services.volume.caller import is_open
from deploy.one_machine.services.volume.exports import Exports
from deploy.one_machine.services.volume.files import VolumeFiles
from deploy.one_machine.services.volume.neighbours import ComputeNeighbour, ImageNeighbour
from deploy.one_machine.services.volume.schema import METADATA
from deploy.one_machine.services.volume.service import VolumeService, VolumeSettings
from deploy.one_machine.services.volume.worker import JobWorker
from deploy.one_machine.services.web import App, add_options, before_sigterm, serve

#: Seconds until a request to the image or compute service fails.
TIMEOUT_SECONDS = 30


def main() -> None:
    """Parse the command line, then serve until SIGTERM or end the exports."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.volume", description=__doc__
    )
    commands = parser.add_subparsers(required=True, dest="command")
    serve_parser = commands.add_parser("serve", help="serve until SIGTERM")
    add_options(serve_parser, "127.0.0.1:8776")
    serve_parser.set_defaults(threads=16)
    serve_parser.add_argument(
        "--data", type=Path, required=True, help="the folder for volumes.db and the volumes"
    )
    serve_parser.add_argument("--zone", default="nova", help="the one availability zone")
    serve_parser.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="NAME",
        help="this machine's name in connectors; servers on it open the volumes' files",
    )
    serve_parser.add_argument(
        "--also-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine in connectors; may be repeated",
    )
    serve_parser.add_argument("--image-url", metavar="URL", help="default: from the catalogue")
    serve_parser.add_argument("--compute-url", metavar="URL", help="default: from the catalogue")
    serve_parser.add_argument(
        "--max-image-gigabytes", type=int, default=VolumeSettings.max_image_gigabytes, metavar="N"
    )
    serve_parser.add_argument(
        "--export-address",
        default="",
        metavar="ADDRESS",
        help="the address at which other hosts reach volumes over NBD; default: no exports",
    )
    serve_parser.add_argument("--export-ports", type=_ports, default=(10900, 11899), metavar="A-B")
    serve_parser.add_argument(
        "--tls-folder",
        default="",
        metavar="DIR",
        help="ca-cert.pem, server-cert.pem and server-key.pem, for NBD; default: plain text",
    )
    add_identity_options(serve_parser)
    end_parser = commands.add_parser(
        "end-exports", help="end the processes that export volumes to other hosts"
    )
    end_parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "end-exports":
        Exports((options.data / "exports").resolve(), "", (0, 0), "").settle({})
        return
    identity = identity_of(options)
    serve(
        lambda: add_authentication(_start(options, identity), identity, is_open),
        options,
        lambda: None,
    )


def _start(options: argparse.Namespace, identity: Body) -> App:
    session = session_of(identity, TIMEOUT_SECONDS)
    service = VolumeService(
        Database(options.data / "volumes.db", METADATA),
        VolumeFiles(options.data / "volumes"),
        ImageNeighbour(session, options.image_url),
        ComputeNeighbour(session, options.compute_url),
        Exports(
            (options.data / "exports").resolve(),
            options.export_address,
            options.export_ports,
            options.tls_folder,
        ),
        VolumeSettings(
            zone=options.zone,
            host=options.host,
            more_hosts=frozenset(options.also_host),
            max_image_gigabytes=options.max_image_gigabytes,
        ),
    )
    worker = JobWorker(service)
    worker.start()
    before_sigterm(worker.end)
    return build(service)


def _ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


if __name__ == "__main__":
    main()
