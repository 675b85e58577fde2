# SPDX-License-Identifier: Apache-2.0
"""Port steps of moves, each called several times: bind, activate, unbind and bind again.

The network service is the simulator's ``Networks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from common.domain import errors
from common.domain.clock import Clock
from common.domain.models import Interface
from common.domain.wire import from_wire, to_wire
from common.store.engine import Store
from conductor.engine.action_args import ActionArgs
from conductor.engine.engine import Engine
from conductor.engine.run import Run
from conductor.steps import networks
from conductor.steps.networks import PortData, PortRun
from tests.workflows.networks import Networks

CALLS = (
    networks.bind_at_destination,
    networks.activate_at_destination,
    networks.unbind_destination,
    networks.unbind_source,
)

Call = Callable[[Engine, PortRun], None]


@dataclass
class Head:
    """The columns of an action that the steps read."""

    phase: str = "do"
    sends: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """The columns of a server that the steps read."""

    interfaces: list[dict[str, Any]] | None
    id: str = "server"
    host: str = "h1"
    hostname: str = "vm"
    project_id: str = "project"
    availability_zone: str | None = "north"


class Move:
    """A move from h1 to h2 of a server with a port of Kilonova and a port of its user."""

    def __init__(self) -> None:
        self.networks = Networks()
        self.engine = Engine(Store("sqlite://"), Clock(), None, "c1", networks=self.networks)  # type: ignore[arg-type]
        binding = {"device_id": "server", "device_owner": "compute:north", "binding:host_id": "h1"}
        new_ports = self.networks.create(
            [
                {"network_id": "n1", "binding:profile": {"made_by": "kilonova"}, **binding},
                {"network_id": "n2", "binding:profile": {"own": "yes"}, **binding},
            ]
        )
        self.ports = [str(port["id"]) for port in new_ports]
        interfaces = self.networks.described(new_ports, floating=False)
        self.server = Server(
            [
                to_wire(interface) | {"tag": f"tag{number}"}
                for number, interface in enumerate(interfaces)
            ]
        )

    def run(self, phase: str = "do", **data: Any) -> PortRun:
        return Run(
            Head(phase),
            self.server,
            ActionArgs(),  # type: ignore[arg-type]
            PortData(source="h1", dest="h2", **data),
        )

    def call(self, call: Call, phase: str = "do", **data: Any) -> PortRun:
        run = self.run(phase, **data)
        call(self.engine, run)
        return run

    def places(self) -> list[tuple[str, list[str]]]:
        """Return, for each port, its host and the hosts of its inactive bindings."""
        ports = self.networks.held
        return [
            (
                ports[port]["binding:host_id"],
                [binding["host"] for binding in ports[port]["bindings"]],
            )
            for port in self.ports
            if port in ports
        ]


def read_interfaces(run: PortRun, name: str) -> list[Interface]:
    return [from_wire(Interface, stored) for stored in getattr(run.data, name)]


def test_live_migration_binds_ports_at_destination_and_unbinds_at_source() -> None:
    move = Move()
    for _ in range(2):
        run = move.call(networks.bind_at_destination)
        assert run.problem is None
        assert [
            (interface.port, interface.tag, interface.vif_type, interface.own)
            for interface in read_interfaces(run, "arriving")
        ] == [
            (move.ports[0], "tag0", "bridge", True),
            (move.ports[1], "tag1", "bridge", False),
        ]
        assert [interface.bridge for interface in read_interfaces(run, "arriving")] == [
            "brqn1",
            "brqn2",
        ]
        assert move.places() == [("h1", ["h2"])] * 2
    for _ in range(2):
        run = move.call(networks.activate_at_destination)
        assert [
            (interface.tag, interface.active, interface.own)
            for interface in read_interfaces(run, "plugged")
        ] == [
            ("tag0", True, True),
            ("tag1", True, False),
        ]
        assert move.places() == [("h2", ["h1"])] * 2
    for _ in range(2):
        move.call(networks.unbind_source)
        assert move.places() == [("h2", [])] * 2
    assert [move.networks.held[port]["binding:profile"] for port in move.ports] == [
        {"made_by": "kilonova"},
        {"own": "yes"},
    ]


def test_unbind_destination_restores_the_ports() -> None:
    move = Move()
    before = move.networks.ports("server")
    move.call(networks.bind_at_destination)
    assert [port | {"bindings": [], "looks": 0} for port in move.networks.held.values()] == [
        port | {"looks": 0} for port in before
    ]
    for _ in range(2):
        move.call(networks.unbind_destination, phase="undo")
        assert move.places() == [("h1", [])] * 2
    run = Run(Head("undo"), move.server, ActionArgs(), PortData())  # type: ignore[arg-type]
    # This move has no destination.
    networks.unbind_destination(move.engine, run)
    assert move.places() == [("h1", [])] * 2


def test_bind_at_destination_failure_is_retryable_on_another_host() -> None:
    move = Move()
    move.networks.cannot_bind = {"h2"}
    run = move.call(networks.bind_at_destination)
    assert run.problem is not None
    assert run.problem.retryable
    assert "h2" in run.problem.details
    move.call(networks.unbind_destination, phase="undo")
    assert move.places() == [("h1", [])] * 2


def rebind_to_h2(engine: Engine, run: PortRun) -> None:
    networks.rebind_to(engine, run, "h2")


@pytest.mark.parametrize("call", [networks.bind_at_destination, rebind_to_h2])
def test_bind_refuses_hybrid_plug_and_names_the_port(call: Call) -> None:
    move = Move()
    move.networks.hybrid = {"h2"}
    run = move.call(call)
    assert run.problem is not None
    assert "ovs_hybrid_plug" in str(run.problem) and move.ports[0] in str(run.problem)
    assert run.problem.retryable, "another host may have another firewall"


@pytest.mark.parametrize(
    "change",
    [
        {"binding:vnic_type": "direct"},
        {
            "resource_request": {
                "request_groups": [{"resources": {"NET_BW_EGR_KILOBIT_PER_SEC": 1}}]
            }
        },
    ],
)
@pytest.mark.parametrize("call", [networks.bind_at_destination, rebind_to_h2])
def test_bind_refuses_unsupported_port_request_and_names_the_port(
    call: Call, change: dict[str, Any]
) -> None:
    move = Move()
    move.networks.held[move.ports[1]].update(change)
    run = move.call(call)
    assert run.problem is not None
    [name] = change
    assert name in str(run.problem) and move.ports[1] in str(run.problem)
    assert not run.problem.retryable


def test_undo_rebinds_to_host_with_hybrid_plug_without_failure() -> None:
    move = Move()
    move.networks.hybrid = {"h1"}
    back = move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert back.problem is None
    assert {interface.vif_type for interface in read_interfaces(back, "plugged")} == {"ovs_hybrid"}


def test_ports_are_bound_at_activation_without_multiple_binding_support() -> None:
    move = Move()
    move.networks.has_single_bindings = True
    run = move.call(networks.bind_at_destination)
    assert run.problem is None
    assert [interface.bridge for interface in read_interfaces(run, "arriving")] == [
        "brqn1",
        "brqn2",
    ]
    assert move.places() == [("h1", [])] * 2
    move.call(networks.activate_at_destination)
    move.call(networks.unbind_source)
    assert move.places() == [("h2", [])] * 2


def test_activate_at_destination_restores_a_removed_binding() -> None:
    move = Move()
    move.call(networks.bind_at_destination)
    for port in move.ports:
        move.networks.unbind_at(port, "h2")
    run = move.call(networks.activate_at_destination)
    assert move.places() == [("h2", [])] * 2
    assert len(read_interfaces(run, "plugged")) == 2


@pytest.mark.parametrize("calls", range(len(CALLS)))
def test_port_steps_ignore_a_port_deleted_by_its_user(calls: int) -> None:
    move = Move()
    for call in CALLS[:calls]:
        move.call(call)
    move.networks.delete(move.ports[0])
    for call in CALLS[calls:]:
        assert move.call(call).problem is None
    assert len(move.places()) == 1


@pytest.mark.parametrize("call", CALLS)
def test_port_step_raises_unavailable_when_the_network_service_is_silent(call: Call) -> None:
    move = Move()
    move.networks.silent = 1
    with pytest.raises(errors.Unavailable):
        move.call(call)


def test_port_device_owner_follows_the_zone_of_the_host() -> None:
    move = Move()
    move.call(networks.bind_at_destination, zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:north"}
    move.call(networks.activate_at_destination, zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:south"}
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:north"}
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"), zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:south"}


def test_rebind_to_moves_the_ports_to_the_destination_and_back() -> None:
    move = Move()
    # The binding of an earlier move that failed.
    move.call(networks.bind_at_destination)
    for _ in range(2):
        run = move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"))
        assert [
            (interface.tag, interface.active) for interface in read_interfaces(run, "plugged")
        ] == [
            ("tag0", True),
            ("tag1", True),
        ]
        assert move.places() == [("h2", [])] * 2
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert move.places() == [("h1", [])] * 2


def test_rebind_to_failure_fails_the_move_but_not_its_undo() -> None:
    move = Move()
    move.networks.cannot_bind = {"h1", "h2"}
    forward = move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"))
    assert forward.problem is not None
    assert forward.problem.retryable
    back = move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert back.problem is None
    assert len(read_interfaces(back, "plugged")) == 2


def test_store_interfaces_writes_plugged_ports_without_pausing() -> None:
    move = Move()
    run = move.run(plugged=[{"port": "p", "active": False}])
    networks.store_interfaces(None, move.engine, [run])  # type: ignore[arg-type]
    assert run.changes == {"interfaces": [{"port": "p", "active": False}]}
    assert not run.data.paused
