# SPDX-License-Identifier: Apache-2.0
"""Consoles: the URL with which a person reaches a guest's screen or terminal, and what a token stands for.

A URL is made from records alone; the host is asked when the console service opens it. Kinds that no host of this
cloud has are refused in the words that the API has for them.
"""
from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

from common import errors, states
from common.store import console_tokens, servers
from compute_api.asking import ask
from compute_api.request import Request

#: Protocol -> the types that belong to it.
TYPES = {"vnc": ("novnc",), "serial": ("serial",), "spice": ("spice-html5", "spice-direct"), "rdp": ("rdp-html5",),
         "mks": ("webmks",)}
#: Those that there are -> what the host calls them.
HOST_KINDS = {"novnc": "vnc", "serial": "serial"}
#: Power states of a guest that has a screen.
_LIVE = (states.RUNNING, states.POWER_PAUSED, states.POWER_SUSPENDED)


def create(request: Request, server: Any) -> dict[str, Any]:
    """POST …/remote-consoles"""
    wanted = request.body["remote_console"]
    return {"remote_console": {**wanted, "url": _url(request, server, wanted["protocol"], wanted["type"])}}


def by_action(key: str, protocol: str) -> Any:
    """The handler of an action before 2.6."""
    def get(request: Request, server: Any) -> dict[str, Any]:
        kind = request.body[key]["type"]
        return {"console": {"type": kind, "url": _url(request, server, protocol, kind)}}
    return get


def _url(request: Request, server: Any, protocol: str, kind: str) -> str:
    """Make a token and the URL that carries it."""
    if kind not in TYPES[protocol]:
        raise errors.BadRequest(f"Invalid console type {kind}")
    if kind not in HOST_KINDS:
        raise errors.BadRequest(f"Unavailable console type {kind}.")
    if not server.host or server.power_state not in _LIVE:
        raise errors.Conflict(f"Instance {server.id} is not ready")
    settings = request.services.settings
    token = request.make(console_tokens.is_made, console_tokens.create, server.id, kind,
                         project_id=request.context.project_id, user_id=request.context.user_id,
                         seconds=settings.console_token_seconds)
    return address(settings.console_url, kind, token)


def address(public_url: str, kind: str, token: str) -> str:
    """Where the console service is reached with this token: a page for a screen, a websocket for a terminal."""
    base = urlsplit(public_url.rstrip("/"))
    if kind == "serial":
        return f"{'wss' if base.scheme == 'https' else 'ws'}://{base.netloc}{base.path}/?token={token}"
    folder = base.path.strip("/")
    path = f"{folder}/?token={token}" if folder else f"?token={token}"
    return f"{base.geturl()}/vnc_lite.html?path={quote(path, safe='')}"


def refused_token(request: Request, token: str) -> None:
    """GET /os-console-auth-tokens/{token} before 2.31, which knew tokens of RDP consoles only; there are none."""
    raise errors.BadRequest("The requested console type details are not accessible.")


def show_token(request: Request, token: str) -> dict[str, Any]:
    """GET /os-console-auth-tokens/{token}: where a proxy reaches the console. internal_access_path is the secret that
    it must send first there, good once and for half a minute; the token itself is not used up."""
    return {"console": _opened(request, token)}


def show_token_with_tls(request: Request, token: str) -> dict[str, Any]:
    """GET /os-console-auth-tokens/{token} since 2.99; no console here has a port for TLS."""
    return {"console": {**_opened(request, token), "tls_port": None}}


def _opened(request: Request, token: str) -> dict[str, Any]:
    record = request.read(console_tokens.find, token)
    if record is None:
        raise errors.NotFound("Token not found")
    server = request.read(servers.show, record.server_id, None)
    opened = ask(request, server, "console", {"server": server.id, "kind": HOST_KINDS[record.kind]})
    return {"instance_uuid": server.id, "host": opened["host"], "port": opened["port"],
            "internal_access_path": opened["secret"]}
