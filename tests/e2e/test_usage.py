# SPDX-License-Identifier: Apache-2.0
"""Usage and hosts with the ``openstack`` command."""

from __future__ import annotations

from tests.e2e.live import SETTLE, Live, documents

JSON, ADMIN = " -f json", "kilonova-admin"


def test_openstack_commands_show_usage_hosts_and_empty_volume_list(in_memory: Live) -> None:
    rest, admin = in_memory.rest(), in_memory.rest(ADMIN)
    server = rest.create(
        image=in_memory.image("empty"), flavor=in_memory.flavor("m1.nano"), name="used"
    )
    rest.await_status(server, "ACTIVE", SETTLE)
    [own] = in_memory.openstack("usage show" + JSON)
    assert len(own["Servers"]) >= 1 and own["CPU Hours"] >= 0
    usages, volumes = in_memory.openstack(
        "usage list" + JSON, f"server volume list {server}" + JSON, cloud=ADMIN
    )
    assert own["CPU Hours"] <= max(row["CPU Hours"] for row in usages) and volumes == []
    output, complaints = in_memory.type("host list" + JSON, "host show one" + JSON, cloud=ADMIN)
    assert complaints.count("API has been deprecated") == 2
    hosts, host = documents(output)
    assert {("one", "compute"), ("two", "compute")} <= {
        (row["Host Name"], row["Service"]) for row in hosts
    }
    assert "(total)" in [part["Project"] for part in host]
    topology = admin.call("GET", f"/servers/{server}/topology", version="2.78").body
    assert topology == {"nodes": [], "pagesize_kb": None}
    rest.insist("DELETE", f"/servers/{server}", expected=(204,))
    rest.await_gone(server)
