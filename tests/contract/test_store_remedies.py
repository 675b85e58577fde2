# SPDX-License-Identifier: Apache-2.0
"""The doctor's remedies that write rows, on SQLite, PostgreSQL and MariaDB.

One test plants these findings in the same server, one after the other. With KILONOVA_PLANTED set,
another test plants each kind in a new cloud.
"""

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

#: Kinds with a remedy that restores the server's former state.
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


def test_doctor_remedy_called_twice_changes_rows_only_once(cloud: Cloud) -> None:
    [server] = cloud.create()
    cloud.settle()
    for kind in KINDS:
        assert cloud.store.read(doctor.check) == [], f"before {kind}"
        PLANTS[kind].plant(cloud, server)
        findings = [row for row in cloud.store.read(doctor.check) if row.kind == kind]
        assert len(findings) == 1, kind
        for must_change in (True, False):
            [finding] = findings
            changed = cloud.store.write(
                lambda tx, finding=finding: remedies.mend(tx, finding, doctor.check)  # type: ignore[misc]
            )
            assert changed is must_change, kind
        if kind in ("due", "fence-of-action", "lease-of-action"):
            cloud.settle()
            cloud.ask(server, "os-start")
            cloud.settle()


@pytest.mark.parametrize(
    "kind", [*PLANTS, *FOR_OPERATORS] if "KILONOVA_PLANTED" in os.environ else []
)
def test_doctor_reports_each_planted_fault_and_remedy_changes_rows_once(
    store: Store, kind: str
) -> None:
    """If the kind has a remedy that writes rows, the remedy changes rows once."""
    cloud = Cloud(store, Realtime())
    operator, plant = Doctor(cloud), {**PLANTS, **FOR_OPERATORS}[kind]
    plant.plant(cloud, prepare(cloud, plant.base).server if plant.base else "")
    [finding] = [candidate for candidate in operator.read_findings() if candidate.kind == kind]
    if table.KINDS[kind].way in (Mender.OPERATOR, Mender.GUEST):
        return
    for must_change in (True, False):
        changed = cloud.store.write(lambda tx: remedies.mend(tx, finding, operator.look))
        assert changed is must_change
        if kind == "host-without-provider":
            # The doctor reports this until the host registers again.
            return
