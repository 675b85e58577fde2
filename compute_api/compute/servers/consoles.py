# SPDX-License-Identifier: Apache-2.0
"""Consoles: URLs of a guest's screen or terminal, tokens, and the output of the serial console.

A URL is made from records alone; the host is asked when the console service opens it. Only for one
of SPICE the host is asked before, since guests have it or not. Types that a host does not have are
refused with Nova's texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import quote, urlsplit

from common.domain import errors, states
from common.domain.console_types import HOST_KINDS, SPICE_DIRECT, SPICE_PAGE
from common.domain.json_types import JsonObject
from common.store.hosts import hosts
from common.store.rows import ServerRecord
from common.store.servers import console_tokens, servers
from compute_api.compute.request.host_queries import query_host
from compute_api.compute.request.request import Request

#: Answers an action at once.
Query = Callable[[Request, ServerRecord], JsonObject | None]
MAX_CONSOLE_BYTES = 102400  # bytes of a console that are ever shown
#: Controls that a terminal may carry out, among them those that are one character (C1).
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Protocol -> the types that belong to it.
TYPES = {
    "vnc": ("novnc",),
    "serial": ("serial",),
    "spice": ("spice-html5", "spice-direct"),
    "rdp": ("rdp-html5",),
    "mks": ("webmks",),
}
#: Power states of a guest that has a screen.
_LIVE = (states.RUNNING, states.POWER_PAUSED, states.POWER_SUSPENDED)


def create(request: Request, server: ServerRecord) -> JsonObject:
    """POST …/remote-consoles"""
    wanted = request.body["remote_console"]
    return {
        "remote_console": {
            **wanted,
            "url": _url(request, server, wanted["protocol"], wanted["type"]),
        }
    }


def by_action(key: str, protocol: str) -> Query:
    """The handler of an action before 2.6."""

    def get(request: Request, server: ServerRecord) -> JsonObject:
        kind = request.body[key]["type"]
        return {"console": {"type": kind, "url": _url(request, server, protocol, kind)}}

    return get


def _url(request: Request, server: ServerRecord, protocol: str, kind: str) -> str:
    """Make a token and the URL that carries it."""
    if kind not in TYPES[protocol]:
        raise errors.BadRequest(f"Invalid console type {kind}")
    settings, vault = request.services.settings, request.services.vault
    if kind not in HOST_KINDS or (kind == SPICE_DIRECT and not settings.spice_direct_url):
        raise errors.BadRequest(f"Unavailable console type {kind}.")
    if not server.host:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    if protocol == "spice":
        _require_host_with_spice(request, server.host, kind)
    if server.power_state not in _LIVE:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    if protocol == "spice":
        _require_guest_with_spice(request, server)
    # The console service asks with it whether the user may still have the console.
    caller = vault.seal({"token": request.context.token}) if vault is not None else None
    token = request.make(
        console_tokens.is_created,
        console_tokens.create,
        server.id,
        kind,
        project_id=request.context.project_id,
        user_id=request.context.user_id,
        seconds=settings.console_token_seconds,
        caller=caller,
    )
    if kind == SPICE_DIRECT:
        return f"{settings.spice_direct_url}?token={token}"
    return address(settings.console_url, kind, token)


def _require_host_with_spice(request: Request, host: str, kind: str) -> None:
    """Raises BadRequest: its operator has not switched SPICE on there."""
    if not request.read(hosts.facts_of, [host]).get(host, {}).get("spice"):
        raise errors.BadRequest(f"Unavailable console type {kind}.")


def _require_guest_with_spice(request: Request, server: ServerRecord) -> None:
    """Raises BadRequest: it was made before its host had SPICE. Conflict: it does not run."""
    answer = query_host(request, server, "console_kinds", {"server": server.id})
    if "spice" not in answer["kinds"]:
        raise errors.BadRequest("Unavailable console type spice.")


def address(public_url: str, kind: str, token: str) -> str:
    """Where the console service is reached with this token: a page for a screen, a websocket for a
    terminal."""
    base = urlsplit(public_url.rstrip("/"))
    if kind == "serial":
        return (
            f"{'wss' if base.scheme == 'https' else 'ws'}://{base.netloc}{base.path}/?token={token}"
        )
    folder = base.path.strip("/")
    path = f"{folder}/?token={token}" if folder else f"?token={token}"
    page = SPICE_PAGE if kind == "spice-html5" else "vnc_lite.html"
    return f"{base.geturl()}/{page}?path={quote(path, safe='')}"


def refused_token(request: Request, token: str) -> None:
    """GET /os-console-auth-tokens/{token} before 2.31, which knew tokens of RDP consoles only;
    there are none."""
    raise errors.BadRequest("The requested console type details are not accessible.")


def show_token(request: Request, token: str) -> JsonObject:
    """GET /os-console-auth-tokens/{token}: where a proxy reaches the console. internal_access_path
    is the secret that it must send first there, good once and for half a minute; null: the proxy is
    known by its address (spice-direct). The token itself is not used up."""
    return {"console": _opened(request, token)[0]}


def show_token_with_tls(request: Request, token: str) -> JsonObject:
    """GET /os-console-auth-tokens/{token} since 2.99; one of spice-direct may have a port for
    TLS."""
    opened, of_tls = _opened(request, token)
    return {"console": opened | of_tls}


def _opened(request: Request, token: str) -> tuple[JsonObject, JsonObject]:
    """Where it is, and its port for TLS, if its type has one."""
    record = request.read(console_tokens.find, token)
    if record is None:
        raise errors.NotFound("Token not found")
    server = request.read(servers.show, record.server_id, None)
    opened = query_host(
        request, server, "console", {"server": server.id, "kind": HOST_KINDS[record.kind]}
    )
    found = {
        "instance_uuid": server.id,
        "host": opened["host"],
        "port": opened["port"],
        "internal_access_path": opened.get("secret"),
    }
    return found, ({"tls_port": opened["tls_port"]} if record.kind == SPICE_DIRECT else {})


def console_output(request: Request, server: ServerRecord) -> JsonObject:
    """The end of what the guest has written to its serial console."""
    length = request.body["os-getConsoleOutput"].get("length")
    answer = query_host(
        request, server, "console_output", {"server": server.id, "length_bytes": MAX_CONSOLE_BYTES}
    )
    output = answer["output"][-MAX_CONSOLE_BYTES:]
    lines = None if length in (None, -1, "-1") else int(length)
    if lines is not None:
        output = "\n".join(output.split("\n")[-lines:]) if lines else ""
    return {"output": _UNPRINTABLE.sub("", output)}
