# SPDX-License-Identifier: Apache-2.0
"""The commands of the operator's pages in docs, run on a cloud with memory hypervisors.

tests/unit/test_runbooks.py requires that every command of these pages is run here, or listed there
with its test.
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
#: The host in place of node7 of the pages.
NODE = "one"


class Operator:
    """Runs the commands of a page with the names of the cloud instead of the names in the page."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.words = {"node7": NODE, "HOST": NODE, "[node7]": NODE}

    def run_commands(self, page: str, heading: str, *, status: int = 0) -> str:
        """Run all commands below a heading, and return the output of ``kilonova``.

        ``status`` is the expected exit status of each ``kilonova`` command.
        """
        output = ""
        for command in commands_of(page, heading):
            text = re.sub(
                r"\[?\b[\w-]+\b\]?", lambda match: self.words.get(match[0], match[0]), command
            )
            if text.startswith("openstack --") or '"' in text:
                self.openstack(text.removeprefix("openstack "))
            elif text.startswith("openstack "):
                answer, complaints = self.live.type(text.removeprefix("openstack "), cloud=ADMIN)
                assert complaints == "", f"{text}\n{answer}\n{complaints}"
            else:
                result = self.live.kilonova(*text.split()[1:])
                assert result.returncode == status, f"{text}\n{result.stdout}\n{result.stderr}"
                output += result.stdout
        return output

    def openstack(self, text: str) -> str:
        """Run ``openstack`` as a new process and return the output.

        The interactive client accepts neither options before a command nor quotes.
        """
        result = self.live.run(PROGRAMS / "openstack", *shlex.split(text), **self.live._as(ADMIN))
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def read_json(self, command: str) -> list[dict[str, object]]:
        [rows] = self.live.openstack(command + JSON, cloud=ADMIN)
        return list(rows)

    def read_service(self) -> dict[str, object]:
        """Return the compute service of the host from the API."""
        services = self.read_json("compute service list --service nova-compute --long")
        return next(service for service in services if service["Host"] == NODE)


@pytest.fixture
def operator(in_memory: Live) -> Iterator[Operator]:
    yield Operator(in_memory)
    in_memory.type(f"compute service set --up {NODE} nova-compute", cloud=ADMIN)
    in_memory.type(f"compute service set --enable {NODE} nova-compute", cloud=ADMIN)


def test_runbook_read_only_commands_are_accepted(operator: Operator) -> None:
    """These commands of the page change no state."""
    rest = operator.live.rest()
    server = rest.create(
        image=operator.live.image("empty"), flavor=operator.live.flavor(), name="asked"
    )
    rest.await_status(server, "ACTIVE")
    operator.words |= {"SERVER": server, "RULE": "os_compute_api:servers:show", "ROLE": "reader"}
    output = operator.run_commands(OPERATE, "Commands")
    for text in ("the options are fine", "OPTION", "already", NODE, server, "all is well"):
        assert text in output
    rest.call("DELETE", f"/servers/{server}")
    rest.await_gone(server)


def test_runbook_aggregate_and_prefetch_commands_set_zone_and_properties(
    operator: Operator,
) -> None:
    operator.words |= {"debian-12": "empty"}
    operator.run_commands(AGGREGATES, "Aggregates")
    [zone] = [
        row
        for row in operator.read_json("availability zone list --compute")
        if row["Zone Name"] == "az1"
    ]
    assert zone["Zone Status"] == "available"
    operator.run_commands(AGGREGATES, "Images fetched ahead")
    [shown] = operator.live.openstack(f"aggregate show rack1{JSON}", cloud=ADMIN)
    assert shown["hosts"] == [NODE]
    assert shown["properties"] == {"ssd": "true", "cpu_allocation_ratio": "8"}
    operator.live.type(f"aggregate remove host rack1 {NODE}", cloud=ADMIN)
    operator.live.type("aggregate delete rack1", cloud=ADMIN)


def test_runbook_take_host_out_of_use_disables_service(operator: Operator) -> None:
    operator.run_commands(HOSTS, "Take a host out of use")
    service = operator.read_service()
    assert (service["Status"], service["Disabled Reason"]) == ("disabled", "new disk")


def test_runbook_drain_empties_host_and_enables_it_again(operator: Operator) -> None:
    output = operator.run_commands(HOSTS, "Empty a host: drain")
    assert f"host {NODE} gets no more servers" in output and "is empty" in output
    assert operator.read_service()["Status"] == "enabled"


def test_runbook_evacuate_is_accepted_after_forced_down(operator: Operator) -> None:
    """A host that answers is not evacuated. A host that an admin forced down is."""
    refused = operator.live.kilonova("host", "evacuate", NODE)
    assert refused.returncode != 0
    operator.live.type(f"compute service set --down {NODE} nova-compute", cloud=ADMIN)
    operator.run_commands(HOST_FAILURE, "A dead host: evacuate")
    operator.run_commands(HOST_FAILURE, "Remove the leftovers at external services", status=0)


def test_runbook_inventories_and_traits_are_changed_by_operator(operator: Operator) -> None:
    provider = next(
        row["uuid"] for row in operator.read_json("resource provider list") if row["name"] == NODE
    )
    flavor = f"by-hand-{ids.new()[:8]}"
    operator.live.type(f"flavor create --ram 64 --disk 1 --vcpus 1 {flavor}", cloud=ADMIN)
    operator.words |= {"ID": str(provider), "FLAVOR": flavor}
    operator.run_commands(AGGREGATES, "Change inventories and traits")
    inventory = {
        row["resource_class"]: row
        for row in operator.read_json(f"resource provider inventory list {provider}")
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
