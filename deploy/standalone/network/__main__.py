# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.standalone.network serve`: the network service's command.

It asks the identity service about tokens, and tells the compute service of events, as the user kilonova (see
deploy.standalone.guard).
"""

import argparse
import signal
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from deploy.standalone.database import Database
from deploy.standalone.guard import add_identity_options, guarded, identity_of
from deploy.standalone.network.app import build
from deploy.standalone.network.caller import OPEN
from deploy.standalone.network.fabric import Fabric, Settings
from deploy.standalone.network.schema import METADATA
from deploy.standalone.network.service import Service
from deploy.standalone.network.telling import Compute
from deploy.standalone.web import add_options, serve


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m deploy.standalone.network", description=__doc__)
    serving = parser.add_subparsers(required=True).add_parser("serve", help="serve until SIGTERM")
    add_options(serving, "127.0.0.1:9696")
    # Every host holds a thread for as long as nothing changes.
    serving.set_defaults(threads=32)
    serving.add_argument("--db", type=Path, required=True, metavar="FILE")
    add_identity_options(serving)
    serving.add_argument("--compute-url", metavar="URL", help="of the compute service; default: from the catalogue")
    serving.add_argument("--no-hosts", action="store_true", help="ports are wired as soon as they are bound")
    serving.add_argument("--dns", type=_addresses, default=(), metavar="ADDRESS,...",
                         help="where hosts' DNS asks what it does not know")
    serving.add_argument("--vni-base", type=int, default=1, metavar="N", help="the first vxlan segment")
    serving.add_argument("--mtu", type=int, default=1450, help="the largest MTU of a network")
    serving.add_argument("--wait-seconds", type=float, default=Settings.wait_seconds, metavar="S",
                         help="how long the maker of a port waits for its host")
    options = parser.parse_args()
    identity = identity_of(options)
    serve(lambda: guarded(_start(options, identity), identity, OPEN), options, lambda: None)


def _start(options: argparse.Namespace, identity: dict[str, Any]) -> Any:
    settings = Settings(has_hosts=not options.no_hosts, dns=options.dns, first_vni=options.vni_base, mtu=options.mtu,
                        wait_seconds=options.wait_seconds)
    fabric = Fabric(Database(options.db, METADATA), settings)
    service = Service(fabric, Compute(identity, options.compute_url))
    service.start()
    _before(signal.SIGTERM, service.end)
    return build(fabric)


def _before(number: signal.Signals, action: Callable[[], None]) -> None:
    """Let `action` come before what this process does on the signal: requests that wait would hold its end up."""
    handler = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        action()
        if callable(handler):
            handler(received, frame)

    signal.signal(number, handle)


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(str(ip_address(word)) for word in text.split(",") if word)


if __name__ == "__main__":
    main()
