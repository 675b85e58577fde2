# SPDX-License-Identifier: Apache-2.0
"""The doubles of the conductor's neighbours: each call of each can go wrong in each way of the
table, and says the truth about what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.domain import errors
from conductor.engine import external_services
from tests.answers import DONE, REFUSALS, UNKNOWN, Answer, calls_of
from tests.fault_matrix.stage import Fencer
from tests.workflows.images import Images
from tests.workflows.neighbours import Neighbour
from tests.workflows.networks import Networks
from tests.workflows.shares import Shares
from tests.workflows.volumes import Volumes

SERVER, HOST, OTHER = "server", "h1", "h2"
PORT = {"network_id": "n1", "device_id": SERVER, "binding:host_id": HOST}
CONNECTOR = {"host": HOST}
Furnished = tuple[Neighbour, dict[str, Any]]


def images() -> Furnished:
    made = Images()
    made.create({"id": "i", "name": "one"})
    return made, {
        "create": ({"id": "j"},),
        "show": ("i",),
        "look": ("i",),
        "delete": ("i",),
        "find": ({"name": "one"},),
        "leave_empty": ("i",),
    }


def networks() -> Furnished:
    made = Networks()
    port = made.create([PORT])[0]
    made.bind_also(port, OTHER)
    return made, {
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


def shares() -> Furnished:
    made = Shares()
    made.allow("share", "192.0.2.1")
    return made, {"allow": ("share", "192.0.2.2"), "deny": ("share", "192.0.2.1")}


def volumes() -> Furnished:
    made = Volumes()
    free, used = made.make(), made.make()
    held = made.attach(used, SERVER).id
    connected = made.attach(made.make(), SERVER, CONNECTOR, "/dev/vdc", "rw").id
    migrates = made.make()
    target, taken = made.migrate(migrates), made.begin_assisted(used, "creating")
    return made, {
        "volume": (free,),
        "delete": (free,),
        "reimage": (used, "image"),
        "snapshot": (taken,),
        "update_snapshot_status": (taken, "creating"),
        "delete_snapshot": (made.make_snapshot(free),),
        "end_migration": (migrates, target, True),
        "attachments": (SERVER,),
        "attach": (free, SERVER),
        "connect": (held, CONNECTOR, "/dev/vdb", "rw"),
        "complete": (connected,),
        "detach": (connected,),
    }


def fencer() -> Furnished:
    return Fencer(), {"fence": (HOST,)}


#: Each double, furnished, with what each of its calls is asked.
DOUBLES: dict[str, Callable[[], Furnished]] = {
    one.__name__: one for one in (images, networks, shares, volumes, fencer)
}
INTERFACES = {
    "images": external_services.ImageApi,
    "networks": external_services.NetworkApi,
    "shares": external_services.ShareApi,
    "volumes": external_services.VolumeApi,
}
CALLS = [(name, call) for name, make in DOUBLES.items() for call in make()[1]]


def memory(double: Neighbour) -> str:
    """What it has, but how it answers."""
    own = Neighbour("").__dict__
    return repr({key: value for key, value in vars(double).items() if key not in own})


def test_every_call_of_every_interface_is_asked() -> None:
    for name, interface in INTERFACES.items():
        double, asked = DOUBLES[name]()
        assert set(asked) == set(calls_of(interface)) == set(double.calls_known)
    of_neighbours = [name for name in vars(external_services) if name.endswith("Api")]
    assert len(of_neighbours) == len(INTERFACES), "an interface has no double"


@pytest.mark.parametrize("how", Answer, ids=lambda how: how.name.lower())
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_every_call_can_go_wrong_in_every_way(name: str, call: str, how: Answer) -> None:
    double, asked = DOUBLES[name]()
    others: list[str] = []
    double.meanwhile = lambda: others.append(memory(double))
    before, number = memory(double), double.calls + 1
    double.script[number] = how
    if how in REFUSALS:
        with pytest.raises(type(REFUSALS[how])):
            getattr(double, call)(*asked[call])
    elif how in UNKNOWN:
        with pytest.raises(errors.Unavailable):
            getattr(double, call)(*asked[call])
    else:
        getattr(double, call)(*asked[call])
    assert (double.asked[number - 1][0], double.calls) == (call, number)
    assert others == ([before] if how is Answer.SLOW else [])
    if how is Answer.LATE:
        assert memory(double) == before
        double.catches_up()
    changed = memory(double) != before
    assert changed == (how in DONE and changes(name, call))


def changes(name: str, call: str) -> bool:
    """Does an answered call change anything there?"""
    double, asked = DOUBLES[name]()
    before = memory(double)
    getattr(double, call)(*asked[call])
    return memory(double) != before


def test_most_calls_that_change_something_are_seen_to() -> None:
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
