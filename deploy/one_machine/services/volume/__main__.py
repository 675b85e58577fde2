# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.volume serve`: the volume service's command.

It validates tokens at the identity service, and asks the image and the compute service, as the user
kilonova (see deploy.one_machine.services.guard).
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

#: For how long a request to the image or the compute service may wait.
TIMEOUT_SECONDS = 30


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.volume", description=__doc__
    )
    commands = parser.add_subparsers(required=True, dest="command")
    serving = commands.add_parser("serve", help="serve until SIGTERM")
    add_options(serving, "127.0.0.1:8776")
    serving.set_defaults(threads=16)
    serving.add_argument(
        "--data", type=Path, required=True, help="the folder for volumes.db and the volumes"
    )
    serving.add_argument("--zone", default="nova", help="the one availability zone")
    serving.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="NAME",
        help="this machine in connectors: servers here open the volumes' files",
    )
    serving.add_argument(
        "--also-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine in connectors; may be repeated",
    )
    serving.add_argument("--image-url", metavar="URL", help="default: from the catalogue")
    serving.add_argument("--compute-url", metavar="URL", help="default: from the catalogue")
    serving.add_argument(
        "--max-image-gigabytes", type=int, default=VolumeSettings.max_image_gigabytes, metavar="N"
    )
    serving.add_argument(
        "--export-address",
        default="",
        metavar="ADDRESS",
        help="where other hosts reach volumes over NBD; default: nowhere",
    )
    serving.add_argument("--export-ports", type=_ports, default=(10900, 11899), metavar="A-B")
    serving.add_argument(
        "--tls-folder",
        default="",
        metavar="DIR",
        help="ca-cert.pem, server-cert.pem and server-key.pem, for NBD; default: plain text",
    )
    add_identity_options(serving)
    ending = commands.add_parser("end-exports", help="end what serves volumes to other hosts")
    ending.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "end-exports":
        Exports((options.data / "exports").resolve(), "", (0, 0), "").settle({})
        return
    identity = identity_of(options)
    serve(lambda: add_authentication(_start(options, identity), identity, is_open), options, lambda: None)


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
