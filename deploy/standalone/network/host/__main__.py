# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.standalone.network.host serve|clean`: the host part of the standalone network service.

One runs beside each agent, as root. `serve` makes the networks of this host's guests until SIGTERM, and leaves them
in place; `clean` removes all that a host part with this state folder ever made. Both with --netns work in that
network namespace. Secrets come from files, never from arguments, which every user of the machine can read.
"""
from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
from ipaddress import ip_address
from pathlib import Path

from deploy.standalone.network.host.desired import Place
from deploy.standalone.network.host.kernel import Failed, Kernel
from deploy.standalone.network.host.ledger import Ledger
from deploy.standalone.network.host.metadata import Listeners, Upstream
from deploy.standalone.network.host.names import Names
from deploy.standalone.network.host.service import CHECK, Host, Loop, clean
from deploy.standalone.network.host.upstream import NetworkService
from deploy.standalone.web import secret


def main() -> None:
    """Parse the command line and do what it says."""
    options = _parser().parse_args()
    if os.geteuid() != 0:
        raise SystemExit("The host part makes bridges and rules: run it as root.")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO,
                        format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("keystoneauth", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    kernel, names = Kernel(options.netns), Names.of(options.state)
    with (options.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"A host part runs with {options.state}: stop it first.") from None
        if options.command == "clean":
            left = clean(names, kernel, options.state)
            raise SystemExit("\n".join(["Left over:", *left]) if left else 0)
        _serve(options, kernel, names)


def _serve(options: argparse.Namespace, kernel: Kernel, names: Names) -> None:
    service = NetworkService(options.url, options.host, options.auth_url,
                             secret(options.password_file, "KILONOVA_SERVICE_PASSWORD"), options.username)
    upstream = Upstream(options.metadata_url, secret(options.metadata_secret_file, "KILONOVA_METADATA_SECRET").encode())
    listeners = Listeners(kernel, upstream)
    place = Place(names, options.tunnel_address, options.vxlan_port, options.external_gateway)
    about = {"tunnel_address": str(options.tunnel_address), "external_gateway": options.external_gateway}
    loop = Loop(Host(place, kernel, Ledger(options.state), listeners), service.ask,
                lambda revision, failed: service.acknowledge({"revision": revision, "failed": failed, **about}),
                options.check_seconds)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: loop.stop())
    try:
        loop.run()
    except (Failed, OSError) as problem:
        raise SystemExit(f"The host part cannot work here: {problem}") from problem
    # Threads that wait for an answer of the service or of a guest are not waited for.
    logging.shutdown()
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.standalone.network.host", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    serving = commands.add_parser("serve", help="serve until SIGTERM")
    serving.add_argument("--host", required=True, help="this host's name, as its agent has it")
    serving.add_argument("--url", required=True, help="of the network service, without /v2.0")
    serving.add_argument("--auth-url", required=True, metavar="URL", help="of the identity service, with /v3")
    serving.add_argument("--username", default="kilonova")
    serving.add_argument("--password-file")
    serving.add_argument("--tunnel-address", required=True, type=ip_address, help="where other hosts reach this one")
    serving.add_argument("--vxlan-port", type=int, default=4789, metavar="UDP")
    serving.add_argument("--external-gateway", action="store_true",
                         help="be the gateway of external networks; turns IP forwarding on")
    serving.add_argument("--metadata-url", default="http://127.0.0.1:8775", metavar="URL")
    serving.add_argument("--metadata-secret-file")
    serving.add_argument("--check-seconds", type=float, default=CHECK, help="between looks whether all is still there")
    for command in (serving, commands.add_parser("clean", help="remove everything that was made here")):
        command.add_argument("--state", type=Path, required=True, metavar="DIR", help="what it remembers is here")
        command.add_argument("--netns", type=Path, metavar="PATH", help="the network namespace to work in")
    return parser


if __name__ == "__main__":
    main()
