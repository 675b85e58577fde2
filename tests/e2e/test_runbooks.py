# SPDX-License-Identifier: Apache-2.0
"""The commands of the operator's pages in docs, as an operator reads them there, on a cloud in
memory: each is accepted and does what its chapter says.

tests/unit/test_runbooks.py demands that every command of these pages is here, or named there with
the test that runs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from common.domain import ids
from tests.e2e.live import PROGRAMS, Live
from tests.runbooks import AGGREGATES, HOST_FAILURE, HOSTS, OPERATE, commands_of
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")
ADMIN, JSON = "kilonova-admin", " -f json"
NODE = "one"  #: which the pages call node7


class Operator:
    """Types what a page says, with the cloud's own names in place of the page's."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.words = {"node7": NODE, "HOST": NODE, "[node7]": NODE}

    def types(self, page: str, heading: str, *, status: int = 0) -> str:
        """All commands below a heading; what ``kilonova`` printed. ``status``: of each of these."""
        told = ""
        for command in commands_of(page, heading):
            text = re.sub(r"\[?\b[\w-]+\b\]?", lambda one: self.words.get(one[0], one[0]), command)
            if text.startswith("openstack --") or '"' in text:
                self.openstack(text.removeprefix("openstack "))
            elif text.startswith("openstack "):
                said, complaints = self.live.type(text.removeprefix("openstack "), cloud=ADMIN)
                assert complaints == "", f"{text}\n{said}\n{complaints}"
            else:
                done = self.live.kilonova(*text.split()[1:])
                assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
                told += done.stdout
        return told

    def openstack(self, text: str) -> str:
        """As a command of its own: one that is open takes no options before a command, and no
        quotes."""
        done = self.live.run(PROGRAMS / "openstack", *shlex.split(text), **self.live._as(ADMIN))
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def asks(self, command: str) -> list[dict[str, object]]:
        [found] = self.live.openstack(command + JSON, cloud=ADMIN)
        return list(found)

    def service(self) -> dict[str, object]:
        """The host's, as the API shows it."""
        listed = self.asks("compute service list --service nova-compute --long")
        return next(one for one in listed if one["Host"] == NODE)


@pytest.fixture
def operator(in_memory: Live) -> Iterator[Operator]:
    yield Operator(in_memory)
    in_memory.type(f"compute service set --up {NODE} nova-compute", cloud=ADMIN)
    in_memory.type(f"compute service set --enable {NODE} nova-compute", cloud=ADMIN)


def test_what_an_operator_asks(operator: Operator) -> None:
    """Everything of the list that changes nothing."""
    rest = operator.live.rest()
    server = rest.create(
        image=operator.live.image("empty"), flavor=operator.live.flavor(), name="asked"
    )
    rest.await_status(server, "ACTIVE")
    operator.words |= {"SERVER": server, "RULE": "os_compute_api:servers:show", "ROLE": "reader"}
    told = operator.types(OPERATE, "Commands")
    for said in ("the options are fine", "OPTION", "already", NODE, server, "all is well"):
        assert said in told
    rest.call("DELETE", f"/servers/{server}")
    rest.await_gone(server)


def test_aggregates_and_images_fetched_ahead(operator: Operator) -> None:
    operator.words |= {"debian-12": "empty"}
    operator.types(AGGREGATES, "Aggregates")
    [zone] = [
        one
        for one in operator.asks("availability zone list --compute")
        if one["Zone Name"] == "az1"
    ]
    assert zone["Zone Status"] == "available"
    operator.types(AGGREGATES, "Images fetched ahead")
    [shown] = operator.live.openstack(f"aggregate show rack1{JSON}", cloud=ADMIN)
    assert shown["hosts"] == [NODE]
    assert shown["properties"] == {"ssd": "true", "cpu_allocation_ratio": "8"}
    operator.live.type(f"aggregate remove host rack1 {NODE}", cloud=ADMIN)
    operator.live.type("aggregate delete rack1", cloud=ADMIN)


def test_a_host_is_taken_out_of_use(operator: Operator) -> None:
    operator.types(HOSTS, "Take a host out of use")
    found = operator.service()
    assert (found["Status"], found["Disabled Reason"]) == ("disabled", "new disk")


def test_a_host_is_drained_and_used_again(operator: Operator) -> None:
    told = operator.types(HOSTS, "Empty a host: drain")
    assert f"host {NODE} gets no more servers" in told and "is empty" in told
    assert operator.service()["Status"] == "enabled"


def test_a_dead_host_is_evacuated(operator: Operator) -> None:
    """A host that answers is not; one that an admin calls dead is."""
    refused = operator.live.kilonova("host", "evacuate", NODE)
    assert refused.returncode != 0
    operator.live.type(f"compute service set --down {NODE} nova-compute", cloud=ADMIN)
    operator.types(HOST_FAILURE, "A dead host: evacuate")
    operator.types(HOST_FAILURE, "Remove the leftovers at external services", status=0)


def test_what_is_set_by_hand(operator: Operator) -> None:
    provider = next(
        one["uuid"] for one in operator.asks("resource provider list") if one["name"] == NODE
    )
    flavor = f"by-hand-{ids.new()[:8]}"
    operator.live.type(f"flavor create --ram 64 --disk 1 --vcpus 1 {flavor}", cloud=ADMIN)
    operator.words |= {"ID": str(provider), "FLAVOR": flavor}
    operator.types(AGGREGATES, "Change inventories and traits")
    inventory = {
        one["resource_class"]: one
        for one in operator.asks(f"resource provider inventory list {provider}")
    }
    assert inventory["VCPU"]["reserved"] == 1 and inventory["CUSTOM_GPU"]["total"] == 2
    command = f"--os-placement-api-version 1.6 resource provider trait list {provider} -f value"
    assert "CUSTOM_FAST" in operator.openstack(command).split()
    operator.live.type(
        f"resource provider inventory set --amend --resource VCPU:reserved=0 {provider}",
        f"resource provider inventory delete {provider} --resource-class CUSTOM_GPU",
        cloud=ADMIN,
    )
    await_true(lambda: operator.live.doctor().returncode == 0, 60, "the doctor finds something")
