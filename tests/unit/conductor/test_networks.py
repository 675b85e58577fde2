# SPDX-License-Identifier: Apache-2.0
"""What moves do with ports, one call at a time: bind ahead, activate, give up, bind elsewhere; each
repeated."""

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
    """What of an action's row is read here."""

    phase: str = "do"
    sends: int = 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Server:
    """What of a server's row is read here."""

    interfaces: list[dict[str, Any]] | None
    id: str = "server"
    host: str = "h1"
    hostname: str = "vm"
    project_id: str = "project"
    availability_zone: str | None = "north"


class Move:
    """A server on h1 with two ports, one of its user's, that moves to h2."""

    def __init__(self) -> None:
        self.networks = Networks()
        self.engine = Engine(Store("sqlite://"), Clock(), None, "c1", networks=self.networks)  # type: ignore[arg-type]
        known = {"device_id": "server", "device_owner": "compute:north", "binding:host_id": "h1"}
        made = self.networks.create(
            [
                {"network_id": "n1", "binding:profile": {"made_by": "kilonova"}, **known},
                {"network_id": "n2", "binding:profile": {"own": "yes"}, **known},
            ]
        )
        self.ports = [str(port["id"]) for port in made]
        described = self.networks.described(made, floating=False)
        self.server = Server(
            [to_wire(one) | {"tag": f"tag{number}"} for number, one in enumerate(described)]
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
        """Of each port: its host, and the hosts that it is bound to besides."""
        held = self.networks.held
        return [
            (held[port]["binding:host_id"], [one["host"] for one in held[port]["bindings"]])
            for port in self.ports
            if port in held
        ]


def left(run: PortRun, name: str) -> list[Interface]:
    return [from_wire(Interface, one) for one in getattr(run.data, name)]


def test_ports_are_bound_ahead_then_activated_and_the_source_is_forgotten() -> None:
    move = Move()
    for _ in range(2):
        run = move.call(networks.bind_at_destination)
        assert run.problem is None
        assert [(one.port, one.tag, one.vif_type, one.own) for one in left(run, "arriving")] == [
            (move.ports[0], "tag0", "bridge", True),
            (move.ports[1], "tag1", "bridge", False),
        ]
        assert [one.bridge for one in left(run, "arriving")] == ["brqn1", "brqn2"]
        assert move.places() == [("h1", ["h2"])] * 2
    for _ in range(2):
        run = move.call(networks.activate_at_destination)
        assert [(one.tag, one.active, one.own) for one in left(run, "plugged")] == [
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


def test_withdrawing_leaves_the_ports_as_they_were() -> None:
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
    networks.unbind_destination(move.engine, run)  # it never had a destination
    assert move.places() == [("h1", [])] * 2


def test_a_destination_that_cannot_bind_is_another_hosts_chance() -> None:
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
def test_bind_refuses_hybrid_plug_by_name(call: Call) -> None:
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
def test_bind_refuses_port_request_of_no_host_by_name(call: Call, change: dict[str, Any]) -> None:
    move = Move()
    move.networks.held[move.ports[1]].update(change)
    run = move.call(call)
    assert run.problem is not None
    [name] = change
    assert name in str(run.problem) and move.ports[1] in str(run.problem)
    assert not run.problem.retryable


def test_undo_binds_to_host_with_hybrid_plug_without_failure() -> None:
    move = Move()
    move.networks.hybrid = {"h1"}
    back = move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert back.problem is None
    assert {one.vif_type for one in left(back, "plugged")} == {"ovs_hybrid"}


def test_a_service_that_knows_one_host_a_port_binds_late() -> None:
    move = Move()
    move.networks.one_host_a_port = True
    run = move.call(networks.bind_at_destination)
    assert run.problem is None
    assert [one.bridge for one in left(run, "arriving")] == ["brqn1", "brqn2"]
    assert move.places() == [("h1", [])] * 2
    move.call(networks.activate_at_destination)
    move.call(networks.unbind_source)
    assert move.places() == [("h2", [])] * 2


def test_a_binding_that_somebody_took_away_is_made_good() -> None:
    move = Move()
    move.call(networks.bind_at_destination)
    for port in move.ports:
        move.networks.unbind_at(port, "h2")
    run = move.call(networks.activate_at_destination)
    assert move.places() == [("h2", [])] * 2
    assert len(left(run, "plugged")) == 2


@pytest.mark.parametrize("calls", range(len(CALLS)))
def test_a_port_that_its_user_has_removed_is_no_failure(calls: int) -> None:
    move = Move()
    for call in CALLS[:calls]:
        move.call(call)
    move.networks.delete(move.ports[0])
    for call in CALLS[calls:]:
        assert move.call(call).problem is None
    assert len(move.places()) == 1


@pytest.mark.parametrize("call", CALLS)
def test_a_silent_service_is_asked_again(call: Call) -> None:
    move = Move()
    move.networks.silent = 1
    with pytest.raises(errors.Unavailable):
        move.call(call)


def test_the_owner_of_ports_follows_the_zone() -> None:
    move = Move()
    move.call(networks.bind_at_destination, zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:north"}
    move.call(networks.activate_at_destination, zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:south"}
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:north"}
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"), zone="south")
    assert {port["device_owner"] for port in move.networks.held.values()} == {"compute:south"}


def test_a_cold_move_binds_to_the_destination_and_back() -> None:
    move = Move()
    move.call(networks.bind_at_destination)  # of a move that was given up in its middle
    for _ in range(2):
        run = move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"))
        assert [(one.tag, one.active) for one in left(run, "plugged")] == [
            ("tag0", True),
            ("tag1", True),
        ]
        assert move.places() == [("h2", [])] * 2
    move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert move.places() == [("h1", [])] * 2


def test_a_host_that_cannot_bind_fails_the_way_there_and_not_the_way_back() -> None:
    move = Move()
    move.networks.cannot_bind = {"h1", "h2"}
    there = move.call(lambda engine, run: networks.rebind_to(engine, run, "h2"))
    assert there.problem is not None
    assert there.problem.retryable
    back = move.call(lambda engine, run: networks.rebind_to(engine, run, "h1"), phase="undo")
    assert back.problem is None
    assert len(left(back, "plugged")) == 2


def test_what_became_of_the_ports_is_written_and_nobody_waits() -> None:
    move = Move()
    run = move.run(plugged=[{"port": "p", "active": False}])
    networks.store_interfaces(None, move.engine, [run])  # type: ignore[arg-type]
    assert run.changes == {"interfaces": [{"port": "p", "active": False}]}
    assert not run.data.paused
