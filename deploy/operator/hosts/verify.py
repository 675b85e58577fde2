# SPDX-License-Identifier: Apache-2.0
"""``kilonova host verify HOST``: tests a host with a server that is deleted afterwards.

The command uses the Compute API with Kilonova's own user. Run the command on the controller, where
the password of that user is. First the command deletes servers of earlier runs that were killed.
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
#: The API accepts a host since 2.74.
VERSION = "compute 2.79"
NAME = "kilonova-verify-"
GIB = 1 << 30


@dataclass(frozen=True)
class Prover:
    """Clients of the compute and image services with the tokens of Kilonova's own user."""

    identity: IdentityClient
    compute: Http
    image: Http
    #: The limit of each step, in seconds.
    seconds: int

    def ask(
        self, method: str, path: str, body: JsonObject | None = None, *accepted: int
    ) -> JsonValue:
        """Send a request, and return the JSON of the answer.

        Paths below ``/v2/`` go to the image service, all others to the compute service.

        Args:
            method: The HTTP method.
            path: The path with the query.
            body: The JSON body, or None.
            accepted: Error statuses for which the result is None.

        Returns:
            The JSON, or None for an accepted error status or an answer without a body.

        Raises:
            Problem: The service does not answer, or answers with another error status.
        """
        service = self.image if path.startswith("/v2/") else self.compute
        options: JsonObject = {"json": body} if body is not None else {}
        answer = service.send(
            method,
            service.base() + path,
            self.identity.token(),
            headers={"OpenStack-API-Version": VERSION},
            **options,
        )
        if answer.status_code >= 400 and answer.status_code not in accepted:
            raise kind_of(answer.status_code)(
                f"The {service.name} answers {answer.status_code} to {method} {path}: {answer.text[:300]}"
            )
        return answer.json() if answer.status_code < 300 and answer.content else None

    def wait(self, subject: str, look: Callable[[], T | None]) -> T:
        """Call ``look`` each ``PAUSE_SECONDS`` until the result is not None, and return the result.

        Args:
            subject: The subject of the error text "… took longer than … s".
            look: Returns None as long as the caller has to wait.

        Raises:
            Conflict: The result was None for longer than ``seconds``.
        """
        until = time.monotonic() + self.seconds
        while (value := look()) is None:
            if time.monotonic() > until:
                raise errors.Conflict(f"{subject} took longer than {self.seconds} s")
            time.sleep(PAUSE_SECONDS)
        return value


def verify(options: argparse.Namespace) -> int:
    """Create, reach and delete a server on the host, and print each step with its duration.

    Servers of earlier runs of this command are deleted first. The server is also deleted after a
    failure. Return 0.

    Raises:
        Conflict: The host is silent or disabled, or a step failed or took too long.
        Problem: A service does not answer or refuses a request, or no image or flavor is usable.
    """
    conf = config.load(options.config)
    store = Store.open(conf)
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
        _report("created", f"server {server}, ACTIVE on {options.host}", began)
        _reach(prover, server, options.network)
    finally:
        began = time.monotonic()
        _remove(prover, server)
    _report("removed", "the server was deleted", began)
    print(f"host {options.host} is proved: it takes servers")
    return 0


def _prover(conf: cfg.ConfigOpts, seconds: int) -> Prover:
    identity = IdentityClient(conf, wait=ANSWER_SECONDS)
    compute = Http("compute service", identity.compute_url(), ANSWER_SECONDS)
    image = Http("image service", identity.image_url().removesuffix("/v2"), ANSWER_SECONDS)
    return Prover(identity, compute, image, seconds)


def _await_host(prover: Prover, store: Store, host: str) -> None:
    """Wait until the host is up and not forced down, and check that the host is enabled.

    Raises:
        Conflict: The host did not come up in time, does not exist, or is disabled.
    """

    def look() -> host_status.HostState | None:
        state = store.read(lambda tx: host_status.host_states(tx, host)).get(host)
        return state if state is not None and state.answers else None

    try:
        state = prover.wait(f"Host {host} is not up; waiting for it", look)
    except errors.Conflict as problem:
        raise errors.Conflict(
            f"{problem}: see journalctl -u kilonova-agent on the host, and the list of hosts: kilonova hosts"
        ) from problem
    if state.disabled:
        raise errors.Conflict(
            f"Host {host} is disabled ({state.reason or 'no reason'}): kilonova host restore {host}"
        )


def _remove_leftovers(prover: Prover, host: str) -> None:
    answer = prover.ask("GET", f"/servers?name=^{NAME}{host}$")
    for server in answer["servers"]:
        if server["name"] == NAME + host:
            print(
                f"deleting server {server['id']}, which an earlier run of this command left",
                file=sys.stderr,
            )
            _remove(prover, server["id"])


def _create(prover: Prover, options: argparse.Namespace) -> str:
    image = options.image or _choose_image(prover)
    flavor = options.flavor or _choose_flavor(prover, image)
    body = {
        "name": NAME + options.host,
        "imageRef": image,
        "flavorRef": flavor,
        "host": options.host,
        "networks": [{"uuid": options.network}] if options.network else "none",
    }
    return str(prover.ask("POST", "/servers", {"server": body})["server"]["id"])


def _choose_image(prover: Prover) -> str:
    """Return the id of the smallest qcow2 or raw image among the first 200 active images.

    Raises:
        NotFound: There is no such image.
    """
    images = prover.ask("GET", "/v2/images?status=active&limit=200")["images"]
    usable = [
        image
        for image in images
        if image.get("disk_format") in ("qcow2", "raw") and image.get("size")
    ]
    if not usable:
        raise errors.NotFound(
            "The image service has no active image in the formats qcow2 and raw: upload one, or give --image ID"
        )
    return str(min(usable, key=lambda image: int(image["size"]))["id"])


def _choose_flavor(prover: Prover, image: str) -> str:
    """Return the id of the flavor with the least memory among the flavors that the image fits.

    Raises:
        NotFound: The image fits no flavor.
    """
    image_record = prover.ask("GET", f"/v2/images/{image}")
    size = int(image_record.get("virtual_size") or image_record.get("size") or 0)
    disk = max(int(image_record.get("min_disk") or 0), -(-size // GIB))
    answer = prover.ask("GET", f"/flavors/detail?minRam={int(image_record.get('min_ram') or 0)}")
    usable = [flavor for flavor in answer["flavors"] if int(flavor["disk"]) >= disk]
    if not usable:
        raise errors.NotFound(
            f"No flavor has enough memory and {disk} GiB of disk for image {image}: create one, or give --flavor ID"
        )
    return str(
        min(usable, key=lambda flavor: (flavor["ram"], flavor["vcpus"], flavor["disk"]))["id"]
    )


def _await_active(prover: Prover, server: str, host: str) -> None:
    """Wait until the server is ACTIVE, and check that the server is on the host.

    Raises:
        Conflict: The server failed, is on another host, or took too long.
        Problem: The compute service does not answer, or refuses a request.
    """

    def look() -> JsonObject | None:
        shown: JsonObject = prover.ask("GET", f"/servers/{server}")["server"]
        if shown["status"] == "ERROR":
            reason = (shown.get("fault") or {}).get("message", "the server has no fault.")
            raise errors.Conflict(
                f"Server {server} failed on host {host}: {reason} Run: kilonova timeline {server}"
            )
        return shown if shown["status"] == "ACTIVE" else None

    shown = prover.wait(f"Server {server} is not ACTIVE: its creation", look)
    actual_host = shown.get("OS-EXT-SRV-ATTR:host")
    if actual_host != host:
        raise errors.Conflict(
            f"Server {server} is on {actual_host}, not on {host}: the user [identity] username needs the role admin"
        )


def _reach(prover: Prover, server: str, network: str | None) -> None:
    """Read the guest's console log, or create a console URL if the log stays empty.

    With a network, also wait for an answer of the guest's ssh server. Print the results.

    Raises:
        Conflict: The ssh server does not answer in time, or the server has no address.
        Problem: The compute service does not answer, or refuses a request.
    """
    began = time.monotonic()

    def read_console() -> str | None:
        answer = prover.ask(
            "POST", f"/servers/{server}/action", {"os-getConsoleOutput": {}}, 404, 409
        )
        return (answer or {}).get("output") or None

    try:
        result = (
            f"its console log has {len(prover.wait('The console log', read_console))} characters"
        )
    except errors.Conflict:
        body = {"remote_console": {"protocol": "serial", "type": "serial"}}
        prover.ask("POST", f"/servers/{server}/remote-consoles", body)
        result = "its console log is empty, and its console can be opened"
    _report("reached", result, began)
    if network:
        began = time.monotonic()
        address = _address(prover.ask("GET", f"/servers/{server}")["server"])
        banner = prover.wait(f"An answer of ssh at {address}", lambda: _banner(address))
        _report("reached", f"ssh at {address}: {banner}", began)


def _address(server: JsonObject) -> str:
    addresses = [entry["addr"] for entries in server["addresses"].values() for entry in entries]
    if not addresses:
        raise errors.Conflict(f"Server {server['id']} has no address.")
    return str(addresses[0])


def _banner(address: str) -> str | None:
    """Connect to port 22, and return the greeting of an ssh server (RFC 4253, 4.2).

    Return None if the connection fails or the peer sends another greeting.
    """
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

    prover.wait(f"Server {server} still exists: its removal", look)


def _report(step: str, text: str, began: float) -> None:
    print(f"{step}: {text} ({time.monotonic() - began:.0f} s)", flush=True)
