# SPDX-License-Identifier: Apache-2.0
"""Bindings of a port to several hosts (Neutron's extension binding-extended), for live migration.

One binding of a port is active: the port's own binding:host_id. ``bind_also`` creates another
binding, ``activate`` makes that one active, and ``unbind_at`` deletes it. Only the conductor
changes bindings, and each call may be repeated. Existing bindings are read and not guessed from a
refusal. The doctor reads them too. If the service lacks the extension, no port is bound ahead, and
``activate`` binds the port. Then the migration works too, but the guest's network is interrupted
for longer.
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
    """A client that can also bind ports to several hosts."""

    def bindings(self, token: str, port_id: str) -> list[JsonObject]:
        """Return all bindings of a port, active and inactive.

        The list is empty if the port does not exist, or if the service lacks the extension
        ``binding-extended`` and so binds a port to one host only.

        Raises:
            Problem: The service does not answer, or refuses the request.
        """
        if ALIAS not in self.extensions(token):
            return []
        try:
            return list(self._json("GET", _path(port_id), token)["bindings"])
        except errors.NotFound:
            return []

    def bind_also(self, token: str, port: JsonObject, host: str) -> JsonObject | None:
        """Add an inactive binding of a port to a host, with the port's profile.

        Args:
            token: Kilonova's own token.
            port: The port in Neutron's format.
            host: Name of the host.

        Returns:
            The new binding, or the existing binding to this host, which may be active: host,
            status, vif_type, vif_details, profile. If the host cannot bind the port, only host,
            vif_type "binding_failed" and empty vif_details. None if the service binds a port to
            one host only.

        Raises:
            NotFound: The port does not exist.
            BadRequest, Forbidden, Conflict: The service refuses.
        """
        if ALIAS not in self.extensions(token):
            return None
        values = {
            "host": host,
            "profile": port.get("binding:profile") or {},
            "vnic_type": port.get("binding:vnic_type") or "normal",
        }
        answer = self._answer(
            "POST", _path(port["id"]), token, {"binding": values}, refusal=_cannot_bind
        )
        if answer.status_code == 409 and (binding := self._binding(token, port["id"], host)):
            return binding
        if answer.status_code >= 500:
            return {"host": host, "vif_type": FAILED, "vif_details": {}}
        if answer.status_code >= 300:
            raise refusal_of(answer)
        return dict(document(answer, NAME)["binding"])

    def activate(self, token: str, port_id: str, host: str) -> None:
        """Make the binding to a host the active binding. A binding that is active is no error.

        If the service lacks the extension, bind the port to the host instead.

        Raises:
            NotFound: The port or this binding does not exist.
            BadRequest, Forbidden, Conflict: The service refuses.
        """
        if ALIAS not in self.extensions(token):
            self.update_port(token, port_id, {"binding:host_id": host})
            return
        try:
            self._json("PUT", f"{_path(port_id, host)}/activate", token)
        except errors.Conflict:
            binding = self._binding(token, port_id, host)
            if binding is None or binding["status"] != PORT_ACTIVE:
                raise

    def unbind_at(self, token: str, port_id: str, host: str) -> None:
        """Delete the inactive binding to a host. An active binding stays.

        Do nothing if the binding or the port does not exist, or the service lacks the extension.
        """
        if ALIAS not in self.extensions(token):
            return
        try:
            binding = self._binding(token, port_id, host)
            if binding is not None and binding["status"] != PORT_ACTIVE:
                self._json("DELETE", _path(port_id, host), token)
        except errors.NotFound:
            return

    def _binding(self, token: str, port_id: str, host: str) -> JsonObject | None:
        bindings = self._json("GET", f"{_path(port_id)}?host={quote(host, safe='')}", token)[
            "bindings"
        ]
        return next((dict(binding) for binding in bindings if binding["host"] == host), None)


def _path(port_id: str, *host: str) -> str:
    return "/".join([f"/ports/{port_id}/bindings", *(quote(name, safe="") for name in host)])


def _cannot_bind(answer: HttpAnswer) -> bool:
    """Return True if the response reports that the host cannot bind the port.

    Neutron reports this as PortBindingError with status 500.
    """
    try:
        return bool(answer.json()["NeutronError"]["type"] == "PortBindingError")
    except (ValueError, KeyError, TypeError):
        return False
