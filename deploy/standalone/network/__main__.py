# SPDX-License-Identifier: Apache-2.0
"""`python -m deploy.standalone.network serve`: the network service's command.

It asks the identity service about tokens, and tells the compute service of events, as the user kilonova, whose
password comes from a file or, without the option, from KILONOVA_SERVICE_PASSWORD; never from an argument, which every
user of the machine can read.
"""

import argparse
import signal
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from deploy.standalone.database import Database
from deploy.standalone.network.app import build, guarded
from deploy.standalone.network.fabric import Fabric, Settings
from deploy.standalone.network.schema import METADATA
from deploy.standalone.network.service import Service
from deploy.standalone.network.telling import Compute
from deploy.standalone.web import add_options, secret, serve

TOKEN_CACHE_SECONDS = 30
"""For how long a revoked token may still work here."""


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m deploy.standalone.network", description=__doc__)
    serving = parser.add_subparsers(required=True).add_parser("serve", help="serve until SIGTERM")
    add_options(serving, "127.0.0.1:9696")
    # Every host holds a thread for as long as nothing changes.
    serving.set_defaults(threads=32)
    serving.add_argument("--db", type=Path, required=True, metavar="FILE")
    serving.add_argument("--auth-url", required=True, metavar="URL", help="of the identity service, with /v3")
    serving.add_argument("--username", default="kilonova")
    serving.add_argument("--project", default="service")
    serving.add_argument("--password-file")
    serving.add_argument("--compute-url", metavar="URL", help="of the compute service; default: from the catalogue")
    serving.add_argument("--no-hosts", action="store_true", help="ports are wired as soon as they are bound")
    serving.add_argument("--dns", type=_addresses, default=(), metavar="ADDRESS,...",
                         help="where hosts' DNS asks what it does not know")
    serving.add_argument("--vni-base", type=int, default=1, metavar="N", help="the first vxlan segment")
    serving.add_argument("--mtu", type=int, default=1450, help="the largest MTU of a network")
    options = parser.parse_args()
    identity = _identity(options)
    serve(lambda: guarded(_start(options, identity), identity), options, lambda: None)


def _start(options: argparse.Namespace, identity: dict[str, Any]) -> Any:
    settings = Settings(has_hosts=not options.no_hosts, dns=options.dns, first_vni=options.vni_base, mtu=options.mtu)
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
