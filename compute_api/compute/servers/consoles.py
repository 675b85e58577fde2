# SPDX-License-Identifier: Apache-2.0
"""Consoles: URLs of a guest's screen or terminal, tokens, and the output of the serial console.

A URL is created from records alone. The host receives a request only when the console service opens
the URL. SPICE is the exception: only some guests have a SPICE display, so the host is queried
first. Errors for console types that a host does not have use Nova's texts.
"""

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

#: Carries out an action and returns the response body, or None for an empty body.
Query = Callable[[Request, ServerRecord], JsonObject | None]
#: Limit for the output of a console in a response.
MAX_CONSOLE_BYTES = 102400
#: Control characters that terminals interpret, including C1 controls. Tab and line feed stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
#: Protocol -> console types.
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
    """Create a console token, and return its URL, for POST /servers/{id}/remote-consoles.

    Raises:
        BadRequest, Conflict, Unavailable: As in ``_create_url``.
    """
    body = request.body["remote_console"]
    return {
        "remote_console": {
            **body,
            "url": _create_url(request, server, body["protocol"], body["type"]),
        }
    }


def by_action(key: str, protocol: str) -> Query:
    """Return the handler of a console action (before 2.6).

    Args:
        key: Key of the action in the body, for example os-getVNCConsole.
        protocol: The key of ``TYPES`` with the types that the action allows, for example vnc.
    """

    def get(request: Request, server: ServerRecord) -> JsonObject:
        kind = request.body[key]["type"]
        return {"console": {"type": kind, "url": _create_url(request, server, protocol, kind)}}

    return get


def _create_url(request: Request, server: ServerRecord, protocol: str, kind: str) -> str:
    """Create a console token, and return the URL that contains the token.

    Args:
        request: The request, whose caller may use the token.
        server: The row of the server.
        protocol: A key of ``TYPES``, for example vnc.
        kind: Type of the console, for example novnc.

    Raises:
        BadRequest: The protocol does not have the type, or the cloud, the host or the guest has no
            consoles of the type.
        Conflict: The server has no guest on its host, the guest is neither running, paused nor
            suspended, or for SPICE the host is down or does not answer (HostDown).
        Unavailable: For SPICE, too many requests are waiting for hosts, or the host has no key.
    """
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
    # The console service uses the caller's token to check that the caller still has access.
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
    """Raise BadRequest if SPICE is not enabled on the host."""
    if not request.read(hosts.facts_of, [host]).get(host, {}).get("spice"):
        raise errors.BadRequest(f"Unavailable console type {kind}.")


def _require_guest_with_spice(request: Request, server: ServerRecord) -> None:
    """Query the host, and raise BadRequest if the guest has no SPICE display.

    For example, the guest was started before the operator enabled SPICE on the host.

    Raises:
        Problem: As in ``query_host``, for example HostDown.
    """
    answer = query_host(request, server, "console_kinds", {"server": server.id})
    if "spice" not in answer["kinds"]:
        raise errors.BadRequest("Unavailable console type spice.")


def address(public_url: str, kind: str, token: str) -> str:
    """Return the URL of a console: a page for a screen, or a websocket for the serial console.

    Args:
        public_url: URL of the console service, option ``console_url``.
        kind: Type of the console, for example novnc or serial.
        token: The console token, which the URL contains.
    """
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
    """Refuse GET /os-console-auth-tokens/{token} before 2.31 with BadRequest.

    At these microversions only tokens of RDP consoles are valid, which do not exist here.
    """
    raise errors.BadRequest("The requested console type details are not accessible.")


def show_token(request: Request, token: str) -> JsonObject:
    """Return host and port of a console to a proxy, for GET /os-console-auth-tokens/{token}.

    ``internal_access_path`` is a secret that the proxy must send first on its connection. The
    secret is valid for one connection within half a minute. For spice-direct it is null, because
    the host recognizes the proxy by address. The request does not use up the token.

    Raises:
        NotFound: The token does not exist, has expired, or is in use by a browser. Or the guest has
            moved or is deleted.
        Conflict: The guest does not run, or the host is down or does not answer (HostDown).
        Unavailable: Too many requests are waiting for hosts, or too many consoles are open.
    """
    return {"console": _open_console(request, token)[0]}


def show_token_with_tls(request: Request, token: str) -> JsonObject:
    """Return the same as ``show_token``, for spice-direct with ``tls_port`` (since 2.99)."""
    console, tls_fields = _open_console(request, token)
    return {"console": console | tls_fields}


def _open_console(request: Request, token: str) -> tuple[JsonObject, JsonObject]:
    """Return the response fields of a console, and separately ``tls_port``.

    The second object is empty except for spice-direct.

    Raises:
        NotFound, Conflict, Unavailable: As in ``show_token``.
    """
    record = request.read(console_tokens.find, token)
    if record is None:
        raise errors.NotFound("Token not found")
    server = request.read(servers.show, record.server_id, None)
    answer = query_host(
        request, server, "console", {"server": server.id, "kind": HOST_KINDS[record.kind]}
    )
    console = {
        "instance_uuid": server.id,
        "host": answer["host"],
        "port": answer["port"],
        "internal_access_path": answer.get("secret"),
    }
    return console, ({"tls_port": answer["tls_port"]} if record.kind == SPICE_DIRECT else {})


def console_output(request: Request, server: ServerRecord) -> JsonObject:
    """Return the end of the guest's serial console output (action os-getConsoleOutput).

    ``length`` in the body is the number of lines. Without a length, or with -1, the response has
    all lines of the last ``MAX_CONSOLE_BYTES``. Control characters are removed.

    Raises:
        Problem: As in ``query_host``, for example HostDown.
    """
    length = request.body["os-getConsoleOutput"].get("length")
    answer = query_host(
        request, server, "console_output", {"server": server.id, "length_bytes": MAX_CONSOLE_BYTES}
    )
    output = answer["output"][-MAX_CONSOLE_BYTES:]
    lines = None if length in (None, -1, "-1") else int(length)
    if lines is not None:
        output = "\n".join(output.split("\n")[-lines:]) if lines else ""
    return {"output": _UNPRINTABLE.sub("", output)}
