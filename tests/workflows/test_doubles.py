# SPDX-License-Identifier: Apache-2.0
"""Tests of the doubles of external services that the simulated cloud uses.

Each call of each double meets each fault of ``tests.answers.Answer``, and takes effect only if the
fault allows an effect.
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
from tests.workflows.neighbours import ServiceDouble
from tests.workflows.networks import Networks
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
    held = service.attach(used, SERVER).id
    connected = service.attach(service.make(), SERVER, CONNECTOR, "/dev/vdc", "rw").id
    migrates = service.make()
    target, taken = service.migrate(migrates), service.begin_assisted(used, "creating")
    return service, {
        "volume": (free,),
        "delete": (free,),
        "reimage": (used, "image"),
        "snapshot": (taken,),
        "update_snapshot_status": (taken, "creating"),
        "delete_snapshot": (service.make_snapshot(free),),
        "end_migration": (migrates, target, True),
        "attachments": (SERVER,),
        "attach": (free, SERVER),
        "connect": (held, CONNECTOR, "/dev/vdb", "rw"),
        "complete": (connected,),
        "detach": (connected,),
    }


def fencer() -> PreparedDouble:
    return Fencer(), {"fence": (HOST,)}


#: Name -> a function that returns a double with content, and the arguments of each call.
DOUBLES: dict[str, Callable[[], PreparedDouble]] = {
    one.__name__: one for one in (images, networks, shares, volumes, fencer)
}
INTERFACES = {
    "images": external_services.ImageApi,
    "networks": external_services.NetworkApi,
    "shares": external_services.ShareApi,
    "volumes": external_services.VolumeApi,
}
CALLS = [(name, call) for name, make in DOUBLES.items() for call in make()[1]]


def read_content(double: ServiceDouble) -> str:
    """Return the double's content, without the script of its answers."""
    own = ServiceDouble("").__dict__
    return repr({key: value for key, value in vars(double).items() if key not in own})


def test_doubles_cover_every_call_of_every_interface() -> None:
    for name, interface in INTERFACES.items():
        double, arguments = DOUBLES[name]()
        assert set(arguments) == set(calls_of(interface)) == set(double.call_names)
    of_neighbours = [name for name in vars(external_services) if name.endswith("Api")]
    assert len(of_neighbours) == len(INTERFACES), "an interface has no double"


@pytest.mark.parametrize("how", Answer, ids=lambda how: how.name.lower())
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_double_call_takes_effect_only_if_fault_allows(name: str, call: str, how: Answer) -> None:
    double, arguments = DOUBLES[name]()
    others: list[str] = []
    double.meanwhile = lambda: others.append(read_content(double))
    before, number = read_content(double), double.calls + 1
    double.script[number] = how
    if how in REFUSALS:
        with pytest.raises(type(REFUSALS[how])):
            getattr(double, call)(*arguments[call])
    elif how in UNKNOWN:
        with pytest.raises(errors.Unavailable):
            getattr(double, call)(*arguments[call])
    else:
        getattr(double, call)(*arguments[call])
    assert (double.asked[number - 1][0], double.calls) == (call, number)
    assert others == ([before] if how is Answer.SLOW else [])
    if how is Answer.LATE:
        assert read_content(double) == before
        double.catches_up()
    changed = read_content(double) != before
    assert changed == (how in DONE and changes(name, call))


def changes(name: str, call: str) -> bool:
    """Return True if an answered call changes the content of the double."""
    double, arguments = DOUBLES[name]()
    before = read_content(double)
    getattr(double, call)(*arguments[call])
    return read_content(double) != before


def test_doubles_change_content_in_all_calls_except_reads() -> None:
    assert {(name, call) for name, call in CALLS if not changes(name, call)} == {
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
