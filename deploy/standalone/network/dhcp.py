# SPDX-License-Identifier: Apache-2.0
"""The port of a network's DHCP: one a network, with an address in each subnet that wants DHCP, the same on all hosts.

`serve_dhcp` makes it be as the subnets want it, in whatever state it is; whoever changes subnets calls it.
"""

from typing import Any

from sqlalchemy import Row, delete, select

from deploy.standalone.network import schema
from deploy.standalone.network.addresses import chosen, free_mac, is_from_mac, store, subnets_of
from deploy.standalone.network.fabric import Change

OWNER = "network:dhcp"
PORTS, HELD = schema.ports, schema.addresses


def serve_dhcp(change: Change, network: Row[Any]) -> None:
    """Give the network's DHCP port an address in each subnet that wants DHCP; no port when none does."""
    connection = change.connection
    wanted = {subnet.id for subnet in subnets_of(connection, network.id)
              if subnet.enable_dhcp and not is_from_mac(subnet)}
    port = connection.execute(select(PORTS).where(
        PORTS.c.network_id == network.id, PORTS.c.device_owner == OWNER)).first()
    if port is None and not wanted:
        return
    if not wanted:
        assert port is not None
        change.remove(PORTS, port.id)
        return
    mac = free_mac(connection, network.id) if port is None else port.mac_address
    key = port.id if port is not None else change.add(PORTS, {
        "project_id": network.project_id, "network_id": network.id, "mac_address": mac, "device_owner": OWNER,
        "device_id": f"dhcp-{network.id}", "status": "ACTIVE", "port_security_enabled": False})
    held = set(connection.execute(select(HELD.c.subnet_id).where(HELD.c.port_id == key)).scalars())
    connection.execute(delete(HELD).where(HELD.c.port_id == key, HELD.c.subnet_id.in_(held - wanted)))
    missing = [{"subnet_id": subnet} for subnet in sorted(wanted - held)]
    store(connection, key, chosen(connection, network.id, mac, missing, router=True))
