# SPDX-License-Identifier: Apache-2.0
"""What is planted is found and mended on SQLite, PostgreSQL and MariaDB: the remedies that write
rows, one after the other, of one server. With KILONOVA_PLANTED set: every kind, each in a cloud of
its own."""

from __future__ import annotations

import os

import pytest

from common.store.engine import Store
from deploy.operator import doctor
from deploy.operator.doctor import kinds as table
from deploy.operator.doctor import remedies
from deploy.operator.doctor.kinds import Mender
from tests.contract.test_store import Realtime
from tests.workflows.planted import PLANTS
from tests.workflows.planted_for_operators import FOR_OPERATORS
from tests.workflows.scenarios import prepare
from tests.workflows.simulator import Cloud
from tests.workflows.test_doctor import Doctor

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


@pytest.mark.parametrize(
    "kind", [*PLANTS, *FOR_OPERATORS] if "KILONOVA_PLANTED" in os.environ else []
)
def test_every_kind_is_found_on_every_database(store: Store, kind: str) -> None:
    """And its remedy, where it has one that writes rows, is carried out once."""
    cloud = Cloud(store, Realtime())
    operator, plant = Doctor(cloud), {**PLANTS, **FOR_OPERATORS}[kind]
    plant.plant(cloud, prepare(cloud, plant.base).server if plant.base else "")
    [finding] = [one for one in operator.found() if one.kind == kind]
    if table.KINDS[kind].way in (Mender.OPERATOR, Mender.GUEST):
        return
    for is_there in (True, False):
        done = cloud.store.write(lambda tx: remedies.mend(tx, finding, operator.look))
        assert done is is_there
        if kind == "host-without-provider":
            return  # it is found until its host has registered anew
