# SPDX-License-Identifier: Apache-2.0
"""The notifications in a store's outbox, and changes that notify of objects other than servers."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from common.domain import ids
from common.domain.models import HostInventory, ImageRef
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.engine import Store
from common.store.hosts import aggregates, cached_images, host_images, hosts, services
from common.store.tenants import flavors, keypairs, server_groups


def read_outbox(store: Store) -> list[Any]:
    """Return all rows of the outbox, oldest first."""
    table = schema.notifications
    return store.read(lambda tx: list(tx.execute(sa.select(table).order_by(table.c.id))))


def read_server_events(store: Store, key: str) -> list[str]:
    """Return the events of a server without the prefix "instance."."""
    return [row.event.removeprefix("instance.") for row in read_outbox(store) if row.key == key]


# fmt: off
def change_all_but_servers(store: Store) -> list[str]:
    """Change each kind of object except servers once and return the expected events, in order."""
    def do(work: Any, *arguments: Any, **named: Any) -> Any:
        return store.write(lambda tx: work(tx, *arguments, **named))
    flavor = {"flavorid": "f1", "name": "big", "vcpus": 1, "memory_mb": 64, "root_gb": 1, "ephemeral_gb": 0,
              "swap_mb": 0, "rxtx_factor": 1.0, "description": None, "is_public": False}
    key = {"user_id": "u", "name": "k", "type": "ssh", "fingerprint": "1e:2c", "public_key": "ssh-ed25519 AAAA"}
    do(hosts.register, "h1", "boot", HostInventory("memory", 1, "h1", 10, 10240, 1000))
    service = store.read(lambda tx: services.list_all(tx, "h1", Binary.COMPUTE))[0]
    do(services.set_state, service.uuid, disabled=True, disabled_reason="r")
    do(services.fence, "h1")
    do(services.record_return, "h1")
    # This repetition causes no notification.
    do(services.record_return, "h1")
    number = do(aggregates.create, "a", "z").id
    do(aggregates.add_host, number, "h1", "nova")
    do(aggregates.update, number, "nova", name="b")
    do(aggregates.update, number, "nova", meta={"ssd": "true"}, what="metadata of aggregate")
    do(lambda tx: cached_images.ask(tx, *aggregates.show(tx, number), [ImageRef("i1")]))
    do(host_images.record, "h1", {"i1": ""})
    do(cached_images.settle)
    do(aggregates.remove_host, number, "h1", "nova")
    do(aggregates.delete, number)
    row = do(flavors.create, flavor)
    do(flavors.describe, "f1", "d")
    do(flavors.set_extra_specs, "f1", {"hw:cpu_policy": "shared"})
    do(flavors.grant, row, "p")
    do(flavors.revoke, row, "p")
    do(flavors.delete, "f1")
    do(keypairs.create, key, imported=False)
    do(keypairs.delete, "u", "k")
    do(keypairs.create, key)
    group = do(server_groups.create, {"project_id": "p", "user_id": "u", "name": "g", "policy": "anti-affinity",
                                      "rules": {"max_server_per_host": 3}}).id
    do(server_groups.join, [{"group_id": group, "server_id": ids.new()}])
    do(server_groups.delete, group)
    do(services.remove, service)
    return ["service.create", "service.update", "service.update", "service.update",
            *(f"aggregate.{verb}.{phase}" for verb in ("create", "add_host", "update_prop", "update_metadata")
              for phase in ("start", "end")),
            *(f"aggregate.cache_images.{phase}" for phase in ("start", "progress", "end")),
            *(f"aggregate.{verb}.{phase}" for verb in ("remove_host", "delete") for phase in ("start", "end")),
            "flavor.create", *["flavor.update"] * 4, "flavor.delete",
            *(f"keypair.{verb}.{phase}" for verb in ("create", "delete", "import") for phase in ("start", "end")),
            "server_group.create", "server_group.add_member", "server_group.delete", "service.delete"]
# fmt: on
