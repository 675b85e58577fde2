# SPDX-License-Identifier: Apache-2.0
"""The hosts that a port is bound to (Neutron's extension binding-extended), for servers that move
while they run.

One binding of a port is active: the port's own binding:host_id. ``bind_also`` makes another,
``activate`` lets it take the active one's place, ``unbind_at`` gives it up; only the conductor
calls them, and each may be repeated. What is there is asked, not guessed from a refusal; the doctor
asks too. With a service that knows one host a port nothing is bound ahead, and activating is
binding: the guest arrives just as well, only its frames come later.
"""

from __future__ import annotations

from urllib.parse import quote

from common.clients.http import HttpAnswer, document
from common.clients.network import NAME, NetworkClient, refusal_of
from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.statuses import PORT_ACTIVE

ALIAS = "binding-extended"
FAILED = "binding_failed"


class Bindings(NetworkClient):
    """A client that also binds ports to more than one host."""

    def bindings(self, token: str, port_id: str) -> list[JsonObject]:
        """All of a server's port; none where it is gone, or where the service knows one host a
        port."""
        if ALIAS not in self.extensions(token):
            return []
        try:
            return list(self._json("GET", _path(port_id), token)["bindings"])
        except errors.NotFound:
            return []

    def bind_also(self, token: str, port: JsonObject, host: str) -> JsonObject | None:
        """Bind a port to this host too; its profile goes with it, which says whose the port is.

        Returns:
            The binding: host, status, vif_type, vif_details, profile. Its vif_type is
            "binding_failed" when the port cannot be bound there. None: the service knows one host a
            port.

        Raises:
            NotFound: the port is gone. BadRequest, Forbidden, Conflict: the service refuses.
        """
        if ALIAS not in self.extensions(token):
            return None
        wanted = {
            "host": host,
            "profile": port.get("binding:profile") or {},
            "vnic_type": port.get("binding:vnic_type") or "normal",
        }
        answer = self._answer(
            "POST", _path(port["id"]), token, {"binding": wanted}, refusal=_cannot_bind
        )
        if answer.status_code == 409 and (found := self._binding(token, port["id"], host)):
            return found
        if answer.status_code >= 500:
            return {"host": host, "vif_type": FAILED, "vif_details": {}}
        if answer.status_code >= 300:
            raise refusal_of(answer)
        return dict(document(answer, NAME)["binding"])

    def activate(self, token: str, port_id: str, host: str) -> None:
        """This host's binding is the active one from now on, or is already.

        Raises:
            NotFound: the port or this binding of it is gone. BadRequest, Forbidden, Conflict: the
            service refuses.
        """
        if ALIAS not in self.extensions(token):
            self.update_port(token, port_id, {"binding:host_id": host})
            return
        try:
            self._json("PUT", f"{_path(port_id, host)}/activate", token)
        except errors.Conflict:
            found = self._binding(token, port_id, host)
            if found is None or found["status"] != PORT_ACTIVE:
                raise

    def unbind_at(self, token: str, port_id: str, host: str) -> None:
        """Give an inactive binding up. One that is gone is fine; the active one is never
        touched."""
        if ALIAS not in self.extensions(token):
            return
        try:
            found = self._binding(token, port_id, host)
            if found is not None and found["status"] != PORT_ACTIVE:
                self._json("DELETE", _path(port_id, host), token)
        except errors.NotFound:
            return

    def _binding(self, token: str, port_id: str, host: str) -> JsonObject | None:
        found = self._json("GET", f"{_path(port_id)}?host={quote(host, safe='')}", token)[
            "bindings"
        ]
        return next((dict(one) for one in found if one["host"] == host), None)


def _path(port_id: str, *host: str) -> str:
    return "/".join([f"/ports/{port_id}/bindings", *(quote(one, safe="") for one in host)])


def _cannot_bind(answer: HttpAnswer) -> bool:
    """Is it the host that is wrong, not the service? Neutron says so with status 500."""
    try:
        return bool(answer.json()["NeutronError"]["type"] == "PortBindingError")
    except (ValueError, KeyError, TypeError):
        return False
