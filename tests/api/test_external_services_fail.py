# SPDX-License-Identifier: Apache-2.0
"""Failures of each call of a Compute API operation to an external service.

An undisturbed request shows the calls. Then each call is refused, unanswered, lost, or answered
incompletely. The user gets a reason, and the status is not 500. A refused request must not change
the database.
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
class RequestWithBody(Operation):
    """An operation with a body of its own, which leads to more calls than the simplest body.

    ``vm_state`` is the state of the server. With ``boots_from_volume`` the server boots from a
    volume.
    """

    content: Any = None
    vm_state: str = ""
    boots_from_volume: bool = False

    def body(self, site: Site, owner: str = "own") -> Any:
        return self.content


def boot(**mapping: Any) -> RequestWithBody:
    disk = {"boot_index": 0, "volume_size": 5, "destination_type": "volume", **mapping}
    server = {"name": "s", "flavorRef": "1", "networks": "none", "block_device_mapping_v2": [disk]}
    body = {"server": server}
    return RequestWithBody(
        "compute", "POST", "/servers", version="2.103", success=202, content=body
    )


MORE = [
    boot(source_type="image", uuid=IMAGE, volume_type="fast"),
    boot(source_type="snapshot", uuid=SNAPSHOT),
    boot(source_type="volume", uuid=VOLUME),
    RequestWithBody(
        "compute",
        "POST",
        "/servers/{server_id}/shares",
        version="2.103",
        success=201,
        content={"share": {"share_id": SHARE}},
        vm_state="stopped",
    ),
    RequestWithBody(
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
OUTCOMES = (*REFUSALS, *UNKNOWN)
#: Service, persona, operation, number of the call, and status of the undisturbed answer.
Call = tuple[str, str, Operation, int, int]


class FailingServices:
    """The world's compute service with external services that fail."""

    def __init__(self, world: World) -> None:
        self.world, self.site = world, world.sites["compute"]
        services = world.compute.cloud.services
        self.original_doubles = {name: getattr(services, name) for name in INTERFACES}
        volumes, shares = Volumes(), Shares()
        attached = world.compute.ids["own"]["os-volume_attachments"]
        volumes.by_id[attached] = replace(volumes.by_id[VOLUME], id=attached)
        inner = {**self.original_doubles, "volumes": volumes, "shares": shares}
        self.faulty = {
            name: Faulty(name, inner[name], interface) for name, interface in INTERFACES.items()
        }
        self.new_doubles = [volumes, shares]
        self.initial_states = [copy.deepcopy(vars(double)) for double in self.new_doubles]
        self.operations = [
            operation
            for operation in world.operations
            if operation.service == "compute" and not operation.path.startswith("/os-volumes_boot")
        ]
        for name, double in self.faulty.items():
            setattr(services, name, double)
        world.compute.cloud.change(schema.hosts, schema.hosts.c.name == "host1", traits=TRAITS)

    def restore(self) -> None:
        self.site.reset()
        for double, state in zip(self.new_doubles, self.initial_states, strict=True):
            vars(double).update(copy.deepcopy(state))

    def close(self) -> None:
        for name, double in self.original_doubles.items():
            setattr(self.world.compute.cloud.services, name, double)
        self.site.reset()

    def prepare(self, operation: Operation) -> None:
        if isinstance(operation, RequestWithBody) and operation.vm_state:
            cloud, server = self.world.compute.cloud, self.site.ids["own"]["servers"]
            cloud.set_state(server, operation.vm_state, volumes=int(operation.boots_from_volume))
            if operation.boots_from_volume:
                devices = schema.block_devices
                cloud.change(devices, devices.c.server_id == server, boot_index=0)

    def request(self, persona: str, operation: Operation, **script: Any) -> Any:
        """Send a request. ``script`` has the outcomes of calls by service."""
        for name, double in self.faulty.items():
            double.begin(**script.get(name, {}))
        body = operation.body(self.site)
        return self.site.ask(
            persona,
            operation.method,
            operation.url(self.site, "own"),
            body,
            operation.headers(self.site),
        )


@pytest.fixture
def failing_services(world: World) -> Iterator[FailingServices]:
    services = FailingServices(world)
    yield services
    services.close()


def iterate_calls(failing_services: FailingServices) -> Iterator[tuple[Call, str]]:
    """Yield all calls of undisturbed requests, with the name of the method."""
    for operation in [*failing_services.operations, *MORE]:
        for persona in PERSONAS:
            failing_services.prepare(operation)
            answer = failing_services.request(persona, operation)
            calls = {name: list(double.queries) for name, double in failing_services.faulty.items()}
            if operation.method != "GET":
                failing_services.restore()
            assert answer.status_code not in (500, 503), (operation.name, answer.text)
            for name, methods in calls.items():
                for number, method in enumerate(methods, 1):
                    yield (name, persona, operation, number, answer.status_code), method


def describe_difference(failing_services: FailingServices, call: Call, outcome: Answer) -> str:
    """Return a description of the error in the answer, or an empty string."""
    name, persona, operation, number, undisturbed_status = call
    database = failing_services.site.database
    failing_services.prepare(operation)
    before = database.content()
    answer = failing_services.request(persona, operation, **{name: {f"n{number}": outcome}})
    description = (
        f"{persona}, {operation.name}, call {number} of {name} {outcome.name}: "
        f"{answer.status_code} {answer.text[:160]}"
    )
    if len(failing_services.faulty[name].queries) < number:
        return f"{description}: its call was not made"
    after = database.content()
    if operation.method != "GET":
        failing_services.restore()
    if answer.status_code == 500 or (answer.status_code > 500 and outcome in REFUSALS):
        return description
    if outcome in UNKNOWN and 400 <= answer.status_code not in (503, undisturbed_status):
        return f"{description}: not 503"
    if answer.status_code >= 400 and after != before:
        return (
            f"{description}: it was refused, and has written {sorted(set(after) ^ set(before))[:3]}"
        )
    return ""


def test_sample_requests_make_every_external_service_call_except_rollbacks(
    failing_services: FailingServices,
) -> None:
    calls = {(call[0], method) for call, method in iterate_calls(failing_services)}
    expected = {
        (name, method)
        for name, interface in INTERFACES.items()
        for method in calls_of(interface)
        if method not in LOCAL
    }
    rollback_calls = {("volumes", "delete"), ("volumes", "delete_snapshot")}
    # Only the rollback of a refused request makes these calls.
    assert expected - calls == rollback_calls
    assert {name for name in vars(dependencies) if name.startswith("Tenant")} == {
        interface.__name__ for interface in INTERFACES.values()
    }
    # tests/api/test_unified_limits.py covers this call.
    assert calls_of(KeystoneLimits) == ["of"]


@pytest.mark.slice("guests")
def test_failed_external_service_call_causes_no_500_and_no_partial_change(
    failing_services: FailingServices,
) -> None:
    results = [
        describe_difference(failing_services, call, outcome)
        for call, _ in list(iterate_calls(failing_services))
        for outcome in OUTCOMES
    ]
    assert not any(results), "\n".join(filter(None, results))
    assert len(results) > 1000
