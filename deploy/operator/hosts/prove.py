# SPDX-License-Identifier: Apache-2.0
"""``kilonova host prove HOST``: a server is made on the host, reached, and removed again, as a user
would do it: over the Compute API, by Kilonova's own user.

It is run on the controller, where that user's password is: a host has no user of the cloud. What an
earlier proof left that was killed is removed first.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from oslo_config import cfg

from common.clients.http import Http, kind_of
from common.clients.identity import IdentityClient
from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.service import config
from common.store import upgrades
from common.store.engine import Store
from common.store.hosts import host_status

T = TypeVar("T")
PAUSE_SECONDS, ANSWER_SECONDS, SSH_SECONDS = 1.0, 30.0, 5.0
VERSION = "compute 2.79"  #: a host may be named since 2.74
NAME = "kilonova-prove-"
GIB = 1 << 30


@dataclass(frozen=True)
class Prover:
    """Compute and image service, asked as Kilonova's own user. ``seconds``: for each step."""

    identity: IdentityClient
    compute: Http
    image: Http
    seconds: int

    def ask(self, method: str, path: str, body: JsonObject | None = None, *fine: int) -> JsonValue:
        """The answer's JSON, None without one; ``fine``: statuses that are an answer too.

        Raises:
            Problem: it is refused, in the service's own words.
        """
        service = self.image if path.startswith("/v2/") else self.compute
        more: JsonObject = {"json": body} if body is not None else {}
        answer = service.send(
            method,
            service.base() + path,
            self.identity.token(),
            headers={"OpenStack-API-Version": VERSION},
            **more,
        )
        if answer.status_code >= 400 and answer.status_code not in fine:
            raise kind_of(answer.status_code)(
                f"The {service.name} answers {answer.status_code} to {method} {path}: {answer.text[:300]}"
            )
        return answer.json() if answer.status_code < 300 and answer.content else None

    def wait(self, what: str, look: Callable[[], T | None]) -> T:
        """What ``look`` finds. Raises Conflict: it found nothing in time."""
        until = time.monotonic() + self.seconds
        while (found := look()) is None:
            if time.monotonic() > until:
                raise errors.Conflict(f"{what} took longer than {self.seconds} s")
            time.sleep(PAUSE_SECONDS)
        return found


def prove(options: argparse.Namespace) -> int:
    """Make a server there, reach it, remove it; each step is said, with its seconds."""
    conf = config.load(options.config)
    store = Store.opened(conf)
    try:
        upgrades.check(store)
        prover = _prover(conf, options.timeout)
        _await_host(prover, store, options.host)
    finally:
        store.close()
    _remove_leftovers(prover, options.host)
    began = time.monotonic()
    server = _create(prover, options)
    try:
        _await_active(prover, server, options.host)
        _say("created", f"server {server}, ACTIVE on {options.host}", began)
        _reach(prover, server, options.network)
    finally:
        began = time.monotonic()
        _remove(prover, server)
    _say("removed", "nothing of it is left", began)
    print(f"host {options.host} is proved: it takes servers")
    return 0


def _prover(conf: cfg.ConfigOpts, seconds: int) -> Prover:
    identity = IdentityClient(conf, wait=ANSWER_SECONDS)
    compute = Http("compute service", identity.compute_url(), ANSWER_SECONDS)
    image = Http("image service", identity.image_url().removesuffix("/v2"), ANSWER_SECONDS)
    return Prover(identity, compute, image, seconds)


def _await_host(prover: Prover, store: Store, host: str) -> None:
    """Raises NotFound, Conflict: it never came, or takes no servers."""

    def look() -> host_status.HostState | None:
        known = store.read(lambda tx: host_status.host_states(tx, host)).get(host)
        return known if known is not None and known.answers else None

    try:
        state = prover.wait(f"Host {host} is not heard; it", look)
    except errors.Conflict as problem:
        raise errors.Conflict(
            f"{problem}: see journalctl -u kilonova-agent there; kilonova hosts lists those that are"
        ) from problem
    if state.disabled:
        raise errors.Conflict(
            f"Host {host} is disabled ({state.reason or 'no reason'}): kilonova host restore {host}"
        )


def _remove_leftovers(prover: Prover, host: str) -> None:
    found = prover.ask("GET", f"/servers?name=^{NAME}{host}$")
    for one in found["servers"]:
        if one["name"] == NAME + host:
            print(f"an earlier proof left server {one['id']}, which is removed", file=sys.stderr)
            _remove(prover, one["id"])


def _create(prover: Prover, options: argparse.Namespace) -> str:
    image = options.image or _image(prover)
    flavor = options.flavor or _flavor(prover, image)
    body = {
        "name": NAME + options.host,
        "imageRef": image,
        "flavorRef": flavor,
        "host": options.host,
        "networks": [{"uuid": options.network}] if options.network else "none",
    }
    return str(prover.ask("POST", "/servers", {"server": body})["server"]["id"])


def _image(prover: Prover) -> str:
    """The smallest one of which a server can be made."""
    found = prover.ask("GET", "/v2/images?status=active&limit=200")["images"]
    usable = [
        one for one in found if one.get("disk_format") in ("qcow2", "raw") and one.get("size")
    ]
    if not usable:
        raise errors.NotFound(
            "The image service has no active image in the formats qcow2 and raw: upload one, or --image ID"
        )
    return str(min(usable, key=lambda one: int(one["size"]))["id"])


def _flavor(prover: Prover, image: str) -> str:
    """The smallest one that the image fits in."""
    about = prover.ask("GET", f"/v2/images/{image}")
    size = int(about.get("virtual_size") or about.get("size") or 0)
    disk = max(int(about.get("min_disk") or 0), -(-size // GIB))
    found = prover.ask("GET", f"/flavors/detail?minRam={int(about.get('min_ram') or 0)}")
    usable = [one for one in found["flavors"] if int(one["disk"]) >= disk]
    if not usable:
        raise errors.NotFound(
            f"No flavor has {disk} GiB of disk for image {image}: make one, or --flavor ID"
        )
    return str(min(usable, key=lambda one: (one["ram"], one["vcpus"], one["disk"]))["id"])


def _await_active(prover: Prover, server: str, host: str) -> None:
    """Raises Conflict: it failed, or is elsewhere."""

    def look() -> JsonObject | None:
        found: JsonObject = prover.ask("GET", f"/servers/{server}")["server"]
        if found["status"] == "ERROR":
            why = (found.get("fault") or {}).get("message", "no reason is given")
            raise errors.Conflict(
                f"Server {server} failed on host {host}: {why} kilonova timeline {server} tells more"
            )
        return found if found["status"] == "ACTIVE" else None

    found = prover.wait(f"Server {server} is not ACTIVE: its creation", look)
    there = found.get("OS-EXT-SRV-ATTR:host")
    if there != host:
        raise errors.Conflict(
            f"Server {server} is on {there}, not on {host}: [identity] username needs the role admin"
        )


def _reach(prover: Prover, server: str, network: str | None) -> None:
    """What the guest says, or a console of it; with a network also its ssh."""
    began = time.monotonic()

    def hear() -> str | None:
        said = prover.ask(
            "POST", f"/servers/{server}/action", {"os-getConsoleOutput": {}}, 404, 409
        )
        return (said or {}).get("output") or None

    try:
        heard = f"its console has said {len(prover.wait('The first word of its console', hear))} characters"
    except errors.Conflict:
        body = {"remote_console": {"protocol": "serial", "type": "serial"}}
        prover.ask("POST", f"/servers/{server}/remote-consoles", body)
        heard = "it is silent, and its console can be opened"
    _say("reached", heard, began)
    if network:
        began = time.monotonic()
        address = _address(prover.ask("GET", f"/servers/{server}")["server"])
        banner = prover.wait(f"An answer of ssh at {address}", lambda: _banner(address))
        _say("reached", f"ssh at {address}: {banner}", began)


def _address(server: JsonObject) -> str:
    found = [one["addr"] for listed in server["addresses"].values() for one in listed]
    if not found:
        raise errors.Conflict(f"Server {server['id']} has no address on that network.")
    return str(found[0])


def _banner(address: str) -> str | None:
    """How a server of ssh greets; RFC 4253, 4.2."""
    try:
        with socket.create_connection((address, 22), SSH_SECONDS) as connection:
            connection.settimeout(SSH_SECONDS)
            greeting = connection.recv(255)
    except OSError:
        return None
    return greeting.decode("ascii", "replace").strip() if greeting.startswith(b"SSH-") else None


def _remove(prover: Prover, server: str) -> None:
    prover.ask("DELETE", f"/servers/{server}", None, 404)

    def look() -> bool | None:
        return prover.ask("GET", f"/servers/{server}", None, 404) is None or None

    prover.wait(f"Server {server} is still there: its removal", look)


def _say(step: str, text: str, began: float) -> None:
    print(f"{step}: {text} ({time.monotonic() - began:.0f} s)", flush=True)
