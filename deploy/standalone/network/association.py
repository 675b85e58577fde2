# SPDX-License-Identifier: Apache-2.0
"""Which floating address leads to which port: letting go of it, for whoever takes the port or its address away."""

from sqlalchemy import select

from deploy.standalone.network import schema
from deploy.standalone.network.fabric import Change

FLOATING, ROUTERS = schema.floating_ips, schema.routers


def let_go(change: Change, port_id: str, address: str | None = None) -> None:
    """Nothing floats to this port (or to this address of it) any more; its routers' hosts learn of it."""
    query = select(FLOATING.c.id, ROUTERS.c.host).outerjoin(ROUTERS, ROUTERS.c.id == FLOATING.c.router_id).where(
        FLOATING.c.port_id == port_id)
    if address is not None:
        query = query.where(FLOATING.c.fixed_ip_address == address)
    for row in change.connection.execute(query).all():
        change.set(FLOATING, row.id, {"port_id": None, "fixed_ip_address": None, "router_id": None})
        change.touch(hosts=[row.host or ""])
