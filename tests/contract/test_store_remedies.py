# SPDX-License-Identifier: Apache-2.0
"""What is planted is found and mended on SQLite, PostgreSQL and MariaDB: the remedies that write
rows, one after the other, of one server."""

from __future__ import annotations

import pytest

from common.store import doctor
from common.store.doctor import remedies
from common.store.engine import Store
from tests.contract.test_store import Realtime
from tests.workflows.planted import PLANTS
from tests.workflows.simulator import Cloud

#: What leaves its server as it was.
KINDS = (
    "cleanup",
    "task-state",
    "lock",
    "held-by-ended",
    "counted",
    "shares",
    "shares-of-gone",
    "share-in-transit",
    "allocation-of-nothing",
    "guest-without-allocation",
    "allocation-exact",
    "consumer-of-nothing",
    "no-consumer",
    "assignment-not-asked-for",
    "group-member",
    "disabled-trait",
    "aggregate-host",
    "provider-without-host",
    "heartbeat",
    "host-action-lease",
    "duty",
    "due",
    "fence-of-action",
    "lease-of-action",
    "holds-nothing",
    "resized-without-move",
    "building-idle",
    "guest-elsewhere",
)


@pytest.fixture
def cloud(store: Store) -> Cloud:
    cloud = Cloud(store, Realtime())
    cloud.round()
    return cloud


def test_remedies_write_the_same_on_every_database(cloud: Cloud) -> None:
    [server] = cloud.create()
    cloud.settle()
    for kind in KINDS:
        assert cloud.store.read(doctor.check) == [], f"before {kind}"
        PLANTS[kind].plant(cloud, server)
        found = [one for one in cloud.store.read(doctor.check) if one.kind == kind]
        assert len(found) == 1, kind
        for is_there in (True, False):
            [finding] = found
            done = cloud.store.write(
                lambda tx, finding=finding: remedies.mend(tx, finding, doctor.check)  # type: ignore[misc]
            )
            assert done is is_there, kind
        if kind in ("due", "fence-of-action", "lease-of-action"):
            cloud.settle()
            cloud.ask(server, "os-start")
            cloud.settle()
