# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.one_machine.services.network.host serve|help|clean`: a host's network agent.

An agent runs on each host. `serve` makes the networks of the host's guests until SIGTERM, and
leaves them in place. This needs root with --state, or any user with --helper. Then `help` runs
as root and does the privileged part. `clean` removes all objects that an agent with this state
folder ever made. With --netns the commands work in that network namespace. Secrets come from files,
and never from command-line arguments, because every user of the machine can read arguments.
"""

import argparse
import fcntl
import logging
import os
import pwd
import signal
from ipaddress import ip_address
from pathlib import Path

from common.service.service import UMASK
from deploy.one_machine.services.network.host.client import HostApiClient
from deploy.one_machine.services.network.host.desired import HostPlace
from deploy.one_machine.services.network.host.helper import Helper, HelperClient, listening_socket
from deploy.one_machine.services.network.host.host_part import (
    CHECK_SECONDS,
    HostPart,
    LocalHostPart,
    Loop,
    clean,
)
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.metadata import (
    MetadataListeners,
    MetadataUpstream,
    NamespaceSockets,
)
from deploy.one_machine.services.network.host.names import Names
from deploy.one_machine.services.network.host.state import StateFolder
from deploy.one_machine.services.web import log_to_stdout, secret

STATE_HELP = "the state folder of this network agent"


def main() -> None:
    """Parse the command line and run the command serve, help or clean."""
    options = _parser().parse_args()
    os.umask(UMASK)
    if os.geteuid() != 0 and options.state is not None:
        raise SystemExit(
            "With --state the network agent must run as root, because it makes bridges and rules. "
            "Run it as root, or use --helper."
        )
    log_to_stdout()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    if options.state is None:
        try:
            client = HelperClient(options.helper)
        except OSError as error:
            raise SystemExit(f"No helper listens at {options.helper}: {error}") from error
        client.listeners = _listeners(options, client)
        _serve(options, client)
    options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    kernel, names = Kernel(options.netns), Names.of(options.state)
    with (options.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"A network agent runs with the state folder {options.state}: stop it first."
            ) from None
        if options.command == "clean":
            remaining = clean(names, kernel, options.state)
            raise SystemExit(
                "\n".join(["These objects could not be removed:", *remaining]) if remaining else 0
            )
        place = HostPlace(
            names, options.tunnel_address, options.vxlan_port, options.external_gateway
        )
        if options.command == "help":
            host = LocalHostPart(place, kernel, StateFolder(options.state), None)
            Helper(host, kernel, pwd.getpwnam(options.user).pw_uid).serve(
                listening_socket(options.socket)
            )
        _serve(
            options,
            LocalHostPart(place, kernel, StateFolder(options.state), _listeners(options, kernel)),
        )


def _listeners(options: argparse.Namespace, sockets: NamespaceSockets) -> MetadataListeners:
    return MetadataListeners(
        sockets,
        MetadataUpstream(
            options.metadata_url, options.host, _key(options), options.metadata_ca_file
        ),
    )


def _key(options: argparse.Namespace) -> str:
    return secret(options.key_file, "KILONOVA_HOST_KEY")


def _serve(options: argparse.Namespace, host: HostPart) -> None:
    service = HostApiClient(options.url, options.host, _key(options))
    host_attributes = {
        "tunnel_address": str(options.tunnel_address),
        "external_gateway": options.external_gateway,
    }
    loop = Loop(
        host,
        service.description,
        lambda revision, failed: service.acknowledge(
            {"revision": revision, "failed": failed, **host_attributes}
        ),
        options.check_seconds,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: loop.stop())
    try:
        loop.run()
    except (KernelError, OSError) as error:
        raise SystemExit(f"The network agent cannot work on this host: {error}") from error
    # Do not wait for threads that wait for the service or for a guest.
    logging.shutdown()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.one_machine.services.network.host", description=__doc__
    )
    commands = parser.add_subparsers(required=True, dest="command")
    serve_parser = commands.add_parser("serve", help="serve until SIGTERM")
    serve_parser.add_argument("--host", required=True, help="this host's name, as its agent has it")
    serve_parser.add_argument("--url", required=True, help="of the network service, without /v2.0")
    serve_parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="the output of the network service's command host-key for this host",
    )
    serve_parser.add_argument("--metadata-url", default="http://127.0.0.1:8775", metavar="URL")
    serve_parser.add_argument(
        "--metadata-ca-file", default="", help="PEM file; for a metadata URL with https://"
    )
    serve_parser.add_argument(
        "--check-seconds",
        type=float,
        default=CHECK_SECONDS,
        help="seconds between full checks of the kernel",
    )
    access = serve_parser.add_mutually_exclusive_group(required=True)
    access.add_argument("--state", type=Path, metavar="DIR", help=STATE_HELP)
    access.add_argument(
        "--helper",
        type=Path,
        metavar="SOCKET",
        help="the socket of the helper that does the work of root",
    )
    help_parser = commands.add_parser(
        "help", help="do the work of root for another process, until SIGTERM"
    )
    help_parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="the socket to listen on; not needed if systemd passes one",
    )
    help_parser.add_argument(
        "--user", required=True, help="the user of the only process that may call"
    )
    for command in (serve_parser, help_parser):
        command.add_argument(
            "--tunnel-address",
            required=True,
            type=ip_address,
            help="the address at which other hosts reach this host",
        )
        command.add_argument("--vxlan-port", type=int, default=4789, metavar="UDP")
        command.add_argument(
            "--external-gateway",
            action="store_true",
            help="be the gateway of external networks; turns IP forwarding on",
        )
    clean_parser = commands.add_parser(
        "clean", help="remove all objects that an agent with this state folder made"
    )
    for command in (serve_parser, help_parser, clean_parser):
        command.add_argument(
            "--netns", type=Path, metavar="PATH", help="the network namespace to work in"
        )
    for command in (help_parser, clean_parser):
        command.add_argument("--state", type=Path, required=True, metavar="DIR", help=STATE_HELP)
    return parser


if __name__ == "__main__":
    main()
