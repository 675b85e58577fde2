# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.network serve|host-key`: the network service's command.

As the user kilonova, the service validates tokens at the identity service and sends events to the
compute service (see deploy.one_machine.services.guard).
"""

import argparse
from ipaddress import ip_address
from pathlib import Path

from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.services.database import Database
from deploy.one_machine.services.external import ComputeEvents, session_of
from deploy.one_machine.services.guard import add_authentication, add_identity_options, identity_of
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.network.app import build
from deploy.one_machine.services.network.background import BackgroundThread
from deploy.one_machine.services.network.caller import is_open
from deploy.one_machine.services.network.fabric import Fabric, NetworkSettings
from deploy.one_machine.services.network.schema import METADATA
from deploy.one_machine.services.web import App, add_options, before_sigterm, secret, serve

#: Seconds until a request to the compute service fails.
TIMEOUT_SECONDS = 10


def main() -> None:
    """Parse the command line and run the command serve or host-key."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.network", description=__doc__
    )
    commands = parser.add_subparsers(required=True, dest="command")
    serve_parser = commands.add_parser("serve", help="serve until SIGTERM")
    add_options(serve_parser, "127.0.0.1:9696")
    # The long poll of each host holds a thread.
    serve_parser.set_defaults(threads=32)
    serve_parser.add_argument("--db", type=Path, required=True, metavar="FILE")
    add_identity_options(serve_parser)
    serve_parser.add_argument(
        "--compute-url", metavar="URL", help="of the compute service; default: from the catalogue"
    )
    serve_parser.add_argument(
        "--no-hosts", action="store_true", help="ports are wired as soon as they are bound"
    )
    serve_parser.add_argument(
        "--dns",
        type=_addresses,
        default=(),
        metavar="ADDRESS,...",
        help="the servers that hosts' DNS forwards to",
    )
    serve_parser.add_argument(
        "--vni-base", type=int, default=1, metavar="N", help="the first vxlan segment"
    )
    serve_parser.add_argument("--mtu", type=int, default=1450, help="the largest MTU of a network")
    serve_parser.add_argument(
        "--wait-seconds",
        type=float,
        default=NetworkSettings.wait_seconds,
        metavar="S",
        help="how long the request that makes a port waits for its host",
    )
    key_parser = commands.add_parser("host-key", help="print the key of a host, for its --key-file")
    key_parser.add_argument("host", metavar="NAME")
    for command in (serve_parser, key_parser):
        command.add_argument(
            "--metadata-secret-file",
            metavar="FILE",
            help="with [metadata] proxy_shared_secret, from which hosts' keys follow",
        )
    options = parser.parse_args()
    if options.command == "host-key":
        print(host_key(_host_secret(options), options.host))
        return
    identity = identity_of(options)
    serve(
        lambda: add_authentication(_start(options, identity), identity, is_open),
        options,
        lambda: None,
    )


def _host_secret(options: argparse.Namespace) -> str:
    return secret(options.metadata_secret_file, "KILONOVA_METADATA_SECRET")


def _start(options: argparse.Namespace, identity: Body) -> App:
    settings = NetworkSettings(
        has_hosts=not options.no_hosts,
        dns=options.dns,
        first_vni=options.vni_base,
        mtu=options.mtu,
        wait_seconds=options.wait_seconds,
        host_secret="" if options.no_hosts else _host_secret(options),
    )
    fabric = Fabric(Database(options.db, METADATA), settings)
    compute = ComputeEvents(session_of(identity, TIMEOUT_SECONDS), options.compute_url)
    service = BackgroundThread(fabric, compute)
    service.start()
    before_sigterm(service.end)
    return build(fabric)


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(str(ip_address(word)) for word in text.split(",") if word)


if __name__ == "__main__":
    main()
