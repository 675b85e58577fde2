# SPDX-License-Identifier: Apache-2.0
"""Tests of the doubles of external services that the simulated cloud uses.

Each call of each double is made with each outcome of ``tests.answers.Answer``. The call changes the
double only if the outcome includes an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.domain import errors
from conductor.engine import external_services
from tests.answers import DONE, REFUSALS, UNKNOWN, Answer, calls_of
from tests.fault_matrix.stage import Fencer
from tests.workflows.images import Images
from tests.workflows.networks import Networks
from tests.workflows.service_doubles import ServiceDouble
from tests.workflows.shares import Shares
from tests.workflows.volumes import Volumes

SERVER, HOST, OTHER = "server", "h1", "h2"
PORT = {"network_id": "n1", "device_id": SERVER, "binding:host_id": HOST}
CONNECTOR = {"host": HOST}
PreparedDouble = tuple[ServiceDouble, dict[str, Any]]


def images() -> PreparedDouble:
    service = Images()
    service.create({"id": "i", "name": "one"})
    return service, {
        "create": ({"id": "j"},),
        "show": ("i",),
        "look": ("i",),
        "delete": ("i",),
        "find": ({"name": "one"},),
        "leave_empty": ("i",),
    }


def networks() -> PreparedDouble:
    service = Networks()
    port = service.create([PORT])[0]
    service.bind_also(port, OTHER)
    return service, {
        "ports": (SERVER,),
        "port": (port["id"],),
        "create": ([PORT, PORT],),
        "update": (port["id"], {"device_owner": "another"}),
        "delete": (port["id"],),
        "bind_also": (port, "h3"),
        "activate": (port["id"], OTHER),
        "unbind_at": (port["id"], OTHER),
        "names_guests": (),
        "described": ([port], True),
    }


def shares() -> PreparedDouble:
    service = Shares()
    service.allow("share", "192.0.2.1")
    return service, {"allow": ("share", "192.0.2.2"), "deny": ("share", "192.0.2.1")}


def volumes() -> PreparedDouble:
    service = Volumes()
    free, used = service.make(), service.make()
    attached = service.attach(used, SERVER).id
    connected = service.attach(service.make(), SERVER, CONNECTOR, "/dev/vdc", "rw").id
    migrating = service.make()
    target, assisted = service.migrate(migrating), service.begin_assisted(used, "creating")
    return service, {
        "volume": (free,),
        "delete": (free,),
        "reimage": (used, "image"),
        "snapshot": (assisted,),
        "update_snapshot_status": (assisted, "creating"),
        "delete_snapshot": (service.make_snapshot(free),),
        "end_migration": (migrating, target, True),
        "attachments": (SERVER,),
        "attach": (free, SERVER),
        "connect": (attached, CONNECTOR, "/dev/vdb", "rw"),
        "complete": (connected,),
        "detach": (connected,),
    }


def fencer() -> PreparedDouble:
    return Fencer(), {"fence": (HOST,)}


#: Service -> function that returns a double with content, and the arguments of each call.
DOUBLES: dict[str, Callable[[], PreparedDouble]] = {
    function.__name__: function for function in (images, networks, shares, volumes, fencer)
}
INTERFACES = {
    "images": external_services.ImageApi,
    "networks": external_services.NetworkApi,
    "shares": external_services.ShareApi,
    "volumes": external_services.VolumeApi,
}
CALLS = [(name, call) for name, make in DOUBLES.items() for call in make()[1]]


def read_content(double: ServiceDouble) -> str:
    """Return the content of a double without the scripted outcomes."""
    scripted = ServiceDouble("").__dict__
    return repr({key: value for key, value in vars(double).items() if key not in scripted})


def test_service_doubles_implement_every_call_of_every_interface() -> None:
    for name, interface in INTERFACES.items():
        double, arguments = DOUBLES[name]()
        assert set(arguments) == set(calls_of(interface)) == set(double.call_names)
    interfaces = [name for name in vars(external_services) if name.endswith("Api")]
    assert len(interfaces) == len(INTERFACES), "an interface has no double"


@pytest.mark.parametrize("outcome", Answer, ids=lambda outcome: outcome.name.lower())
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_service_double_changes_content_only_if_scripted_call_has_effect(
    name: str, call: str, outcome: Answer
) -> None:
    double, arguments = DOUBLES[name]()
    contents_meanwhile: list[str] = []
    double.meanwhile = lambda: contents_meanwhile.append(read_content(double))
    before, number = read_content(double), double.calls + 1
    double.script[number] = outcome
    if outcome in REFUSALS:
        with pytest.raises(type(REFUSALS[outcome])):
            getattr(double, call)(*arguments[call])
    elif outcome in UNKNOWN:
        with pytest.raises(errors.Unavailable):
            getattr(double, call)(*arguments[call])
    else:
        getattr(double, call)(*arguments[call])
    assert (double.asked[number - 1][0], double.calls) == (call, number)
    assert contents_meanwhile == ([before] if outcome is Answer.SLOW else [])
    if outcome is Answer.LATE:
        assert read_content(double) == before
        double.catches_up()
    changed = read_content(double) != before
    assert changed == (outcome in DONE and changes_content(name, call))


def changes_content(name: str, call: str) -> bool:
    """Return True if an answered call changes the content of the double."""
    double, arguments = DOUBLES[name]()
    before = read_content(double)
    getattr(double, call)(*arguments[call])
    return read_content(double) != before


def test_service_doubles_change_content_except_in_reads_and_fence() -> None:
    assert {(name, call) for name, call in CALLS if not changes_content(name, call)} == {
        ("images", "show"),
        ("images", "look"),
        ("images", "find"),
        ("networks", "port"),
        ("networks", "names_guests"),
        ("networks", "described"),
        ("volumes", "volume"),
        ("volumes", "snapshot"),
        ("volumes", "attachments"),
        ("fencer", "fence"),
    }
