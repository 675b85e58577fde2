# SPDX-License-Identifier: Apache-2.0
"""Port bindings to two hosts during a move.

One suite runs against the network service in memory, which the workflow tests use, and through the
conductor's client against the embedded network service. Older services bind a port to one host.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from common.clients.network_bindings import ALIAS, Bindings
from common.domain import errors
from compute_api.metadata.proxy_headers import host_key
from conductor.engine.external_services import NetworkApi
from conductor.steps.service_clients import NetworkService
from deploy.one_machine.services.network.fabric import NetworkSettings
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key
from tests.contract.test_network_reads import EmbeddedNetwork
from tests.workflows import networks as in_memory


class Identity:
    """Kilonova's own identity, with one token."""

    def with_token(self, call: Callable[[str], Any], who: str) -> Any:
        return call("admin")


class Memory:
    """The network service in memory."""

    dead = "h9"

    def __init__(self) -> None:
        self.networks = in_memory.Networks()
        self.networks.cannot_bind = {self.dead}
        self.service: NetworkApi = self.networks

    def port(self, host: str) -> str:
        ports = self.service.create(
            [
                {
                    "network_id": "n1",
                    "device_id": str(uuid.uuid4()),
                    "binding:host_id": host,
                    "device_owner": "compute:nova",
                    "binding:profile": {"made_by": "kilonova"},
                }
            ]
        )
        return str(ports[0]["id"])

    def inactive(self, port: str) -> list[str]:
        return [binding["host"] for binding in self.networks.held[port]["bindings"]]

    def close(self) -> None:
        """There are no connections to close."""


class Embedded(EmbeddedNetwork):
    """The embedded network service behind the conductor's client."""

    dead = "never-heard-of"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NetworkSettings())
        for host in ("h1", "h2"):
            requests.get(
                f"{self._url}/v2.0/kilonova/hosts/{host}/description",
                timeout=10,
                headers={HEADER: wiring_key(host_key(self.fabric.settings.host_secret, host))},
            )
            self.fabric.hosts.acknowledge(host, 10**9)  # The host wires each revision at once.
        self.bindings = Bindings(self._url)
        self.service: NetworkApi = NetworkService(Identity(), self.bindings)  # type: ignore[arg-type]

    def port(self, host: str) -> str:
        network = self.add_network("n", "m" * 32)
        return self.add_port(
            network,
            "m" * 32,
            device_id=str(uuid.uuid4()),
            device_owner="compute:nova",
            **{"binding:host_id": host, "binding:profile": {"made_by": "kilonova"}},
        )

    def inactive(self, port: str) -> list[str]:
        return [
            binding["host"]
            for binding in self.bindings.bindings("admin", port)
            if binding["status"] == "INACTIVE"
        ]


class OlderEmbedded(Embedded):
    """The embedded network service without the extension for bindings."""

    def answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        if "/bindings" in environ["PATH_INFO"]:
            start_response("404 Not Found", [("Content-Type", "application/json")])
            return [
                b'{"NeutronError": {"type": "HTTPNotFound", "message": "no such resource", "detail": ""}}'
            ]
        answer = super().answer(environ, start_response)
        if environ["PATH_INFO"] != "/v2.0/extensions":
            return answer
        extensions = json.loads(b"".join(answer))["extensions"]
        text = json.dumps(
            {"extensions": [extension for extension in extensions if extension["alias"] != ALIAS]},
            separators=(",", ":"),
        )
        return [text.ljust(sum(map(len, answer))).encode()]  # The length was announced already.


class OlderMemory(Memory):
    """The network service in memory without the extension for bindings."""

    def __init__(self) -> None:
        super().__init__()
        self.networks.has_single_bindings = True


Rig = Memory | Embedded


@pytest.fixture(params=[Memory, Embedded])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from open_rig(request.param, tmp_path)


@pytest.fixture(params=[OlderMemory, OlderEmbedded])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from open_rig(request.param, tmp_path)


def open_rig(kind: Any, folder: Path) -> Iterator[Rig]:
    service_rig = kind(folder) if issubclass(kind, Embedded) else kind()
    yield service_rig
    service_rig.close()


def bound_host(rig: Rig, port: str) -> str:
    return str(rig.service.port(port)["binding:host_id"])


def test_port_binding_steps_of_move_are_repeatable(rig: Rig) -> None:
    port = rig.port("h1")
    before = rig.service.port(port)
    for _ in range(2):
        also = rig.service.bind_also(before, "h2")
        assert also is not None
        assert (also["host"], also["vif_type"], also["status"]) == ("h2", "bridge", "INACTIVE")
    assert rig.service.port(port)["status"] == before["status"]
    assert (bound_host(rig, port), rig.inactive(port)) == ("h1", ["h2"])
    for _ in range(2):
        rig.service.activate(port, "h2")
    assert (bound_host(rig, port), rig.inactive(port)) == ("h2", ["h1"])
    after = rig.service.port(port)
    assert (after["binding:profile"], after["binding:vif_type"]) == (
        {"made_by": "kilonova"},
        "bridge",
    )
    again = rig.service.bind_also(after, "h2")
    assert again is not None
    assert again["status"] == "ACTIVE"
    for _ in range(2):
        rig.service.unbind_at(port, "h1")
    assert (bound_host(rig, port), rig.inactive(port)) == ("h2", [])


def test_unbind_at_keeps_active_port_binding(rig: Rig) -> None:
    port = rig.port("h1")
    rig.service.bind_also(rig.service.port(port), "h2")
    rig.service.unbind_at(port, "h1")
    assert (bound_host(rig, port), rig.inactive(port)) == ("h1", ["h2"])
    rig.service.unbind_at(port, "h2")
    assert (bound_host(rig, port), rig.inactive(port)) == ("h1", [])


def test_bind_also_of_port_on_host_unable_to_bind_returns_binding_failed(rig: Rig) -> None:
    port = rig.port("h1")
    for _ in range(4):  # The circuit breaker would open after three failures.
        also = rig.service.bind_also(rig.service.port(port), rig.dead)
        assert also is not None
        assert also["vif_type"] == "binding_failed"
    assert (bound_host(rig, port), rig.inactive(port)) == ("h1", [])


def test_port_binding_of_missing_port_raises_not_found_except_unbind(rig: Rig) -> None:
    port = rig.port("h1")
    port_record = rig.service.port(port)
    with pytest.raises(errors.NotFound):
        rig.service.activate(port, "h2")
    rig.service.delete(port)
    with pytest.raises(errors.NotFound):
        rig.service.bind_also(port_record, "h2")
    with pytest.raises(errors.NotFound):
        rig.service.activate(port, "h2")
    rig.service.unbind_at(port, "h2")


def test_port_update_of_host_id_to_other_host_removes_old_binding(rig: Rig) -> None:
    port = rig.port("h1")
    rig.service.bind_also(rig.service.port(port), "h2")
    rig.service.update(port, {"binding:host_id": "h1"})
    assert rig.inactive(port) == ["h2"]
    rig.service.update(port, {"binding:host_id": "h2"})
    assert (bound_host(rig, port), rig.inactive(port)) == ("h2", [])


def test_activate_binds_port_on_network_service_without_binding_extension(older: Rig) -> None:
    port = older.port("h1")
    assert older.service.bind_also(older.service.port(port), "h2") is None
    assert bound_host(older, port) == "h1"
    older.service.unbind_at(port, "h2")
    for _ in range(2):
        older.service.activate(port, "h2")
    assert bound_host(older, port) == "h2"
    older.service.unbind_at(port, "h1")
    assert (bound_host(older, port), older.inactive(port)) == ("h2", [])
    older.service.delete(port)
    with pytest.raises(errors.NotFound):
        older.service.activate(port, "h1")
