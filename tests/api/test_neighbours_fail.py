# SPDX-License-Identifier: Apache-2.0
"""Every call that an operation of the compute API makes to a neighbour, refused, silent, lost, or
answered by half.

Generated: an undisturbed request tells the calls. Whatever becomes of one of them, its user is told
what, with a status that is no 500; and a request that was refused has written nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from common.store import schema
from compute_api.compute.request import dependencies
from compute_api.compute.request.quota import KeystoneLimits
from tests.answers import REFUSALS, UNKNOWN, Answer, calls_of
from tests.api.conftest import IMAGE
from tests.api.faulty import LOCAL, Faulty
from tests.api.test_shares import SHARE, TRAITS, Shares
from tests.api.volumes import SNAPSHOT, VOLUME, Volumes
from tests.surface.operations import Operation
from tests.surface.site import Site
from tests.surface.world import World

PERSONAS = ("member", "admin")
INTERFACES = {
    "images": dependencies.TenantImages,
    "networks": dependencies.TenantNetworks,
    "shares": dependencies.TenantShares,
    "volumes": dependencies.TenantVolumes,
}


@dataclass(frozen=True)
class Asked(Operation):
    """An operation with a body of its own, so that it makes calls that its simplest one does not.
    ``vm_state``: the state of its server; ``boots_from_volume``: it boots_from_volume from its volume."""

    content: Any = None
    vm_state: str = ""
    boots_from_volume: bool = False

    def body(self, site: Site, owner: str = "own") -> Any:
        return self.content


def boot(**mapping: Any) -> Asked:
    disk = {"boot_index": 0, "volume_size": 5, "destination_type": "volume", **mapping}
    server = {"name": "s", "flavorRef": "1", "networks": "none", "block_device_mapping_v2": [disk]}
    wanted = {"server": server}
    return Asked("compute", "POST", "/servers", version="2.103", success=202, content=wanted)


MORE = [
    boot(source_type="image", uuid=IMAGE, volume_type="fast"),
    boot(source_type="snapshot", uuid=SNAPSHOT),
    boot(source_type="volume", uuid=VOLUME),
    Asked(
        "compute",
        "POST",
        "/servers/{server_id}/shares",
        version="2.103",
        success=201,
        content={"share": {"share_id": SHARE}},
        vm_state="stopped",
    ),
    Asked(
        "compute",
        "POST",
        "/servers/{server_id}/action",
        version="2.103",
        success=202,
        content={"createImage": {"name": "i"}},
        vm_state="active",
        boots_from_volume=True,
    ),
]
HOW = (*REFUSALS, *UNKNOWN)
#: A neighbour, who asks for what, the call's number, and the status of the undisturbed answer.
Call = tuple[str, str, Operation, int, int]


class Neighbours:
    """The world's compute service with neighbours that fail."""

    def __init__(self, world: World) -> None:
        self.world, self.site = world, world.sites["compute"]
        services = world.compute.cloud.services
        self.before = {name: getattr(services, name) for name in INTERFACES}
        volumes, shares = Volumes(), Shares()
        attached = world.compute.ids["own"]["os-volume_attachments"]
        volumes.held[attached] = replace(volumes.held[VOLUME], id=attached)
        inner = {**self.before, "volumes": volumes, "shares": shares}
        self.faulty = {
            name: Faulty(name, inner[name], interface) for name, interface in INTERFACES.items()
        }
        self.own = [volumes, shares]
        self.kept = [copy.deepcopy(vars(one)) for one in self.own]
        self.operations = [
            one
            for one in world.operations
            if one.service == "compute" and not one.path.startswith("/os-volumes_boot")
        ]
        for name, made in self.faulty.items():
            setattr(services, name, made)
        world.compute.cloud.change(schema.hosts, schema.hosts.c.name == "host1", traits=TRAITS)

    def set_back(self) -> None:
        self.site.set_back()
        for one, kept in zip(self.own, self.kept, strict=True):
            vars(one).update(copy.deepcopy(kept))

    def close(self) -> None:
        for name, one in self.before.items():
            setattr(self.world.compute.cloud.services, name, one)
        self.site.set_back()

    def arrange(self, operation: Operation) -> None:
        if isinstance(operation, Asked) and operation.vm_state:
            cloud, server = self.world.compute.cloud, self.site.ids["own"]["servers"]
            cloud.rest(server, operation.vm_state, volumes=int(operation.boots_from_volume))
            if operation.boots_from_volume:
                devices = schema.block_devices
                cloud.change(devices, devices.c.server_id == server, boot_index=0)

    def ask(self, persona: str, operation: Operation, **script: Any) -> Any:
        """``script``: what becomes of which call of a neighbour."""
        for name, one in self.faulty.items():
            one.begin(**script.get(name, {}))
        body = operation.body(self.site)
        return self.site.ask(
            persona,
            operation.method,
            operation.url(self.site, "own"),
            body,
            operation.headers(self.site),
        )


@pytest.fixture
def neighbours(world: World) -> Iterator[Neighbours]:
    made = Neighbours(world)
    yield made
    made.close()


def calls(neighbours: Neighbours) -> Iterator[tuple[Call, str]]:
    """All that are made in undisturbed requests, with the method's name."""
    for operation in [*neighbours.operations, *MORE]:
        for persona in PERSONAS:
            neighbours.arrange(operation)
            answer = neighbours.ask(persona, operation)
            found = {name: list(one.asked) for name, one in neighbours.faulty.items()}
            if operation.method != "GET":
                neighbours.set_back()
            assert answer.status_code not in (500, 503), (operation.name, answer.text)
            for name, asked in found.items():
                for number, method in enumerate(asked, 1):
                    yield (name, persona, operation, number, answer.status_code), method


def wrong(neighbours: Neighbours, call: Call, how: Answer) -> str:
    """What is wrong with the answer; empty: nothing."""
    name, persona, operation, number, usual = call
    database = neighbours.site.database
    neighbours.arrange(operation)
    before = database.content()
    answer = neighbours.ask(persona, operation, **{name: {f"n{number}": how}})
    said = f"{persona}, {operation.name}, call {number} of {name} {how.name}: {answer.status_code} {answer.text[:160]}"
    if len(neighbours.faulty[name].asked) < number:
        return f"{said}: its call was not made"
    after = database.content()
    if operation.method != "GET":
        neighbours.set_back()
    if answer.status_code == 500 or (answer.status_code > 500 and how in REFUSALS):
        return said
    if how in UNKNOWN and 400 <= answer.status_code not in (503, usual):
        return f"{said}: not 503"
    if answer.status_code >= 400 and after != before:
        return f"{said}: it was refused, and has written {sorted(set(after) ^ set(before))[:3]}"
    return ""


def test_every_call_of_every_interface_is_made(neighbours: Neighbours) -> None:
    made = {(call[0], method) for call, method in calls(neighbours)}
    every = {
        (name, method)
        for name, interface in INTERFACES.items()
        for method in calls_of(interface)
        if method not in LOCAL
    }
    undone = {("volumes", "delete"), ("volumes", "delete_snapshot")}
    assert every - made == undone  # of what a refused request has made
    assert {name for name in vars(dependencies) if name.startswith("Tenant")} == {
        one.__name__ for one in INTERFACES.values()
    }
    assert calls_of(KeystoneLimits) == ["of"]  # tests/api/test_unified_limits.py


@pytest.mark.slice("guests")
def test_whatever_becomes_of_a_call_is_told(neighbours: Neighbours) -> None:
    found = [wrong(neighbours, call, how) for call, _ in list(calls(neighbours)) for how in HOW]
    assert not any(found), "\n".join(filter(None, found))
    assert len(found) > 1000
