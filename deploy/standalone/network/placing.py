# SPDX-License-Identifier: Apache-2.0
"""Which host carries a router: one that is alive, an external gateway before the others; it stays until it is dead.

The ports of a router are bound to the host that carries it, so that all hosts of its networks learn of a move.
"""

from sqlalchemy import select, update

from deploy.standalone.network import schema
from deploy.standalone.network.bindings import bind
from deploy.standalone.network.fabric import Change, Fabric

ROUTERS, PORTS, HOSTS = schema.routers, schema.ports, schema.hosts
OWNERS = ("network:router_interface", "network:router_gateway")


def carrier(change: Change) -> str:
    """The host for a new router; "" while none is alive."""
    return change.connection.execute(select(HOSTS.c.name).where(HOSTS.c.name.in_(change.fabric.hosts.alive())).order_by(
        HOSTS.c.external_gateway.desc(), HOSTS.c.name).limit(1)).scalar() or ""


def place(change: Change, router_id: str, before: str, host: str) -> None:
    """Let `host` carry the router from now on."""
    mine = [PORTS.c.device_id == router_id, PORTS.c.device_owner.in_(OWNERS)]
    change.connection.execute(update(ROUTERS).where(ROUTERS.c.id == router_id).values(host=host))
    change.connection.execute(update(PORTS).where(*mine).values(**bind(change, host)))
    networks = change.connection.execute(select(PORTS.c.network_id).where(*mine)).scalars().all()
    change.touch(networks=networks, hosts=[before, host])


def place_routers(fabric: Fabric) -> None:
    """Give every router without a living host another one, if there is any."""
    alive = fabric.hosts.alive()
    if not fabric.settings.has_hosts or not alive:
        return
    lost = select(ROUTERS.c.id, ROUTERS.c.host).where(ROUTERS.c.host.not_in(alive))
    with fabric.database.read() as connection:
        if connection.execute(lost).first() is None:
            return
    with fabric.change() as change:
        host = carrier(change)
        for row in change.connection.execute(lost).all() if host else ():
            place(change, row.id, row.host, host)
