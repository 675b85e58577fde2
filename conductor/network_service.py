# SPDX-License-Identifier: Apache-2.0
"""The network service as the conductor uses it (``saga.Networks``): as Kilonova's own user, with a token of its own."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from common.clients.identity import Identity
from common.clients.network_bindings import Bindings
from common.models import Interface

T = TypeVar("T")


class NetworkService:
    """One process's way to it; made after the process has forked. Only its lane and the cleanups call it."""

    def __init__(self, identity: Identity, client: Bindings) -> None:
        self._identity, self._client = identity, client

    def ports(self, server: str) -> list[dict[str, Any]]:
        return self._ask(lambda token: self._client.ports(token, device_id=server))

    def port(self, port_id: str) -> dict[str, Any]:
        return self._ask(lambda token: self._client.port(token, port_id))

    def create(self, ports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._ask(lambda token: self._client.create_ports(token, ports))

    def update(self, port_id: str, values: dict[str, Any]) -> dict[str, Any]:
        return self._ask(lambda token: self._client.update_port(token, port_id, values))

    def delete(self, port_id: str) -> None:
        self._ask(lambda token: self._client.delete_port(token, port_id))

    def bind_also(self, port: dict[str, Any], host: str) -> dict[str, Any] | None:
        return self._ask(lambda token: self._client.bind_also(token, port, host))

    def activate(self, port_id: str, host: str) -> None:
        self._ask(lambda token: self._client.activate(token, port_id, host))

    def unbind_at(self, port_id: str, host: str) -> None:
        self._ask(lambda token: self._client.unbind_at(token, port_id, host))

    def names_guests(self) -> bool:
        return self._ask(lambda token: "dns-integration" in self._client.extensions(token))

    def described(self, ports: Sequence[dict[str, Any]], floating: bool) -> list[Interface]:
        return self._ask(lambda token: self._client.described(token, ports, floating))

    def _ask(self, call: Callable[[str], T]) -> T:
        return self._identity.with_token(call, "The network service")
