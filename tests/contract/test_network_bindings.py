# SPDX-License-Identifier: Apache-2.0
"""A port that is bound to two hosts while its server moves: one suite for the network service in
memory, which the workflows' tests use, and for the conductor's way to the standalone one, which may
be older and know one host a port."""

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
from tests.contract.test_network_reads import Standalone
from tests.workflows import networks as in_memory


class Identity:
    """Kilonova's own, with one token."""

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
        made = self.service.create(
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
        return str(made[0]["id"])

    def inactive(self, port: str) -> list[str]:
        return [one["host"] for one in self.networks.held[port]["bindings"]]

    def close(self) -> None:
        """Nothing is open."""


class Behind(Standalone):
    """The standalone service, asked as the conductor does."""

    dead = "never-heard-of"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NetworkSettings())
        for host in ("h1", "h2"):
            requests.get(
                f"{self._url}/v2.0/kilonova/hosts/{host}/description",
                timeout=10,
                headers={HEADER: wiring_key(host_key(self.fabric.settings.host_secret, host))},
            )
            self.fabric.hosts.acknowledge(host, 10**9)  # it wires at once
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
            one["host"]
            for one in self.bindings.bindings("admin", port)
            if one["status"] == "INACTIVE"
        ]


class Older(Behind):
    """The same before it learned of bindings."""

    def answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        if "/bindings" in environ["PATH_INFO"]:
            start_response("404 Not Found", [("Content-Type", "application/json")])
            return [
                b'{"NeutronError": {"type": "HTTPNotFound", "message": "no such resource", "detail": ""}}'
            ]
        answer = super().answer(environ, start_response)
        if environ["PATH_INFO"] != "/v2.0/extensions":
            return answer
        known = json.loads(b"".join(answer))["extensions"]
        text = json.dumps(
            {"extensions": [one for one in known if one["alias"] != ALIAS]}, separators=(",", ":")
        )
        return [text.ljust(sum(map(len, answer))).encode()]  # as long as was said


class OlderMemory(Memory):
    """The one in memory, as an older one."""

    def __init__(self) -> None:
        super().__init__()
        self.networks.one_host_a_port = True


Rig = Memory | Behind


@pytest.fixture(params=[Memory, Behind])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from _made(request.param, tmp_path)


@pytest.fixture(params=[OlderMemory, Older])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from _made(request.param, tmp_path)


def _made(kind: Any, folder: Path) -> Iterator[Rig]:
    made = kind(folder) if issubclass(kind, Behind) else kind()
    yield made
    made.close()


def place(rig: Rig, port: str) -> str:
    return str(rig.service.port(port)["binding:host_id"])


def test_binding_steps_of_a_move_may_be_repeated(rig: Rig) -> None:
    port = rig.port("h1")
    before = rig.service.port(port)
    for _ in range(2):
        also = rig.service.bind_also(before, "h2")
        assert also is not None
        assert (also["host"], also["vif_type"], also["status"]) == ("h2", "bridge", "INACTIVE")
    assert rig.service.port(port)["status"] == before["status"]
    assert (place(rig, port), rig.inactive(port)) == ("h1", ["h2"])
    for _ in range(2):
        rig.service.activate(port, "h2")
    assert (place(rig, port), rig.inactive(port)) == ("h2", ["h1"])
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
    assert (place(rig, port), rig.inactive(port)) == ("h2", [])


def test_the_active_binding_is_never_given_up(rig: Rig) -> None:
    port = rig.port("h1")
    rig.service.bind_also(rig.service.port(port), "h2")
    rig.service.unbind_at(port, "h1")
    assert (place(rig, port), rig.inactive(port)) == ("h1", ["h2"])
    rig.service.unbind_at(port, "h2")
    assert (place(rig, port), rig.inactive(port)) == ("h1", [])


def test_a_host_that_cannot_bind_is_no_failure_of_the_service(rig: Rig) -> None:
    port = rig.port("h1")
    for _ in range(4):  # the breaker would open after three
        also = rig.service.bind_also(rig.service.port(port), rig.dead)
        assert also is not None
        assert also["vif_type"] == "binding_failed"
    assert (place(rig, port), rig.inactive(port)) == ("h1", [])


def test_what_is_gone_is_said_or_fine(rig: Rig) -> None:
    port = rig.port("h1")
    held = rig.service.port(port)
    with pytest.raises(errors.NotFound):
        rig.service.activate(port, "h2")
    rig.service.delete(port)
    with pytest.raises(errors.NotFound):
        rig.service.bind_also(held, "h2")
    with pytest.raises(errors.NotFound):
        rig.service.activate(port, "h2")
    rig.service.unbind_at(port, "h2")


def test_new_host_id_of_port_leaves_no_other_binding(rig: Rig) -> None:
    port = rig.port("h1")
    rig.service.bind_also(rig.service.port(port), "h2")
    rig.service.update(port, {"binding:host_id": "h1"})
    assert rig.inactive(port) == ["h2"]
    rig.service.update(port, {"binding:host_id": "h2"})
    assert (place(rig, port), rig.inactive(port)) == ("h2", [])


def test_an_older_service_binds_when_it_is_activated(older: Rig) -> None:
    port = older.port("h1")
    assert older.service.bind_also(older.service.port(port), "h2") is None
    assert place(older, port) == "h1"
    older.service.unbind_at(port, "h2")
    for _ in range(2):
        older.service.activate(port, "h2")
    assert place(older, port) == "h2"
    older.service.unbind_at(port, "h1")
    assert (place(older, port), older.inactive(port)) == ("h2", [])
    older.service.delete(port)
    with pytest.raises(errors.NotFound):
        older.service.activate(port, "h1")
