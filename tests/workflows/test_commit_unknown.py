# SPDX-License-Identifier: Apache-2.0
"""Tests of conductors that lose the connection to the database at COMMIT.

The database carries out one COMMIT of a create or a delete, but the conductor receives no answer.
The next round continues from the state of the database.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import schema
from tests.faults import lose_commit_answer
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


def settle_after_failure(cloud: Cloud) -> None:
    """Run rounds until no work is left. Continue after a failed round, as the services do."""
    try:
        cloud.settle()
    except errors.Unavailable:
        cloud.settle()


@pytest.mark.parametrize(
    ("losing", "after"),
    [
        *(("create", number) for number in range(6)),
        *(("delete", number) for number in range(7)),
    ],
)
def test_create_and_delete_steps_succeed_once_when_commit_is_unanswered(
    cloud: Cloud, losing: str, after: int
) -> None:
    register(cloud)
    server = cloud.create()[0]
    for workflow in ("create", "delete"):
        if workflow == "delete":
            assert (cloud.show(server).vm_state, len(cloud.networks.held)) == (states.ACTIVE, 1)
            cloud.ask(server, workflow)
        with lose_commit_answer(cloud.store, after=after if workflow == losing else 1000) as lost:
            settle_after_failure(cloud)
        assert bool(lost) == (workflow == losing)
    events = cloud.store.read(lambda tx: tx.execute(sa.select(schema.events)).all())
    succeeded = Counter(
        (row.action_id, row.step, row.attempt) for row in events if row.event == "succeeded"
    )
    assert set(succeeded.values()) == {1}
    assert cloud.show(server).deleted == 1
    assert cloud.findings() == []


def test_guest_is_rebooted_once_after_host_boot_when_commit_is_unanswered(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    cloud.settle()
    host = cloud.hosts[cloud.show(server).host]
    host.driver.host.power_off(server)
    host.restart()
    host.agent.boot_id = "another"
    with lose_commit_answer(cloud.store) as lost, suppress(errors.Unsure):
        cloud.sync(host)
    cloud.settle()
    reboots = cloud.store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions).where(schema.actions.c.name == "reboot")
        ).all()
    )
    assert (len(lost), len(reboots), cloud.show(server).vm_state) == (1, 1, states.ACTIVE)
